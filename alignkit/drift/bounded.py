"""Safetensors files that anyone may have written: none is read before its header is known to be small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import InputError


@contextmanager
def opened(path: Path, kind: str, most: int) -> Iterator[tuple[safe_open, dict[str, str]]]:
    """The file and its metadata; nothing else is read yet. kind: what it should be, for errors, such as "a replay".

    Raises InputError, naming the file and what is wrong with it: absent, a header of more than `most` bytes, truncated
    or not safetensors, the latter two also for what is read within the block.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file, it should be {kind}")
    try:
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if most < header <= path.stat().st_size:
            raise InputError(f"{path}: its header takes {header} bytes, more than the {most} of {kind}")
        with safe_open(path, framework="pt") as file:
            yield file, file.metadata() or {}
    except (SafetensorError, OSError) as e:
        raise InputError(f"{path}: truncated, or not a safetensors file ({e})") from None


def check_format(path: Path, metadata: dict[str, str], kind: str, name: str, version: str) -> None:
    """Raise InputError unless the metadata say ``format=name`` and ``format_version=version``."""
    if metadata.get("format") != name:
        raise InputError(f"{path}: a safetensors file, but not {kind} (its metadata has no format={name!r})")
    if metadata.get("format_version") != version:
        raise InputError(
            f"{path}: format version {metadata.get('format_version')!r:.50}; this alignkit reads version {version!r}"
        )
