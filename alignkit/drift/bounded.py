"""Safe opening of untrusted safetensors files: the header size is checked before the header is read.

Readers of logprob files, replays and recordings use it. They check the tensors' sizes themselves before they read one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import InputError


@contextmanager
def opened(path: Path, kind: str, max_header: int) -> Iterator[tuple[safe_open, dict[str, str]]]:
    """Yield the open file and its metadata; no tensor is read.

    Args:
        path: File to open.
        kind: Expected kind of file with its article, for error messages, such as "a replay".
        max_header: Maximum size of the safetensors header in bytes.

    Raises:
        InputError: The file is missing or truncated, its header is too large, or it is not a safetensors file. Names
            the file and the problem. Read errors inside the with block raise it too.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a directory, expected {kind}")
    if not path.is_file():
        raise InputError(f"{path}: no such file, expected {kind}")
    try:
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if max_header < header <= path.stat().st_size:
            raise InputError(
                f"{path}: the safetensors header of {kind} must have at most {max_header} bytes, got {header}"
            )
        with safe_open(path, framework="pt") as file:
            yield file, file.metadata() or {}
    except (SafetensorError, OSError) as e:
        raise InputError(f"{path}: cannot be read as a safetensors file ({e!s:.200}), expected {kind}") from None


def check_format(path: Path, metadata: dict[str, str], kind: str, name: str, version: str) -> None:
    """Raise InputError unless the metadata has ``format=name`` and ``format_version=version``."""
    if metadata.get("format") != name:
        raise InputError(
            f"{path}: expected {kind} with the metadata format = {name!r}, got {_shown(metadata, 'format')}"
        )
    if metadata.get("format_version") != version:
        raise InputError(
            f"{path}: format_version: must be {version!r} for this version of alignkit, "
            f"got {_shown(metadata, 'format_version')}. Write the file again with this version."
        )


def _shown(metadata: dict[str, str], key: str) -> str:
    """Return a metadata value for a message."""
    return f"{metadata[key]!r:.50}" if key in metadata else "none"
