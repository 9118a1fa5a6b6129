"""Description of a gated delta rule backward problem, the input of kernel selection.

The rules in cuda_backend.py read the fields; alignkit/explain.py fills them from words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Delta(NamedTuple):
    """A gated delta rule backward problem: backend and dtype."""

    backend: str
    """The fastest eligible backend."""
    dtype: torch.dtype
