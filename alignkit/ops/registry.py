"""The records of all ops: the `OP` of each op.py in a folder of alignkit/ops."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from .record import Op

RECORDS: tuple[Op, ...] = tuple(
    import_module(f"{__package__}.{file.parent.name}.op").OP for file in sorted(Path(__file__).parent.glob("*/op.py"))
)
