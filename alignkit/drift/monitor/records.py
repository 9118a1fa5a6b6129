"""The monitor's files: one a rank, a JSON object a line, only ever appended to.

A process may be killed while it writes: its last line is then torn. Readers pass over a line that is not whole, and the
next process of that rank begins a line of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...errors import InputError
from ..compare import TokenDifference, finite_or_none

VERSION = 1
MAX_RANK = 99999
MAX_LINE = 2**20
"""Bytes of a line; a longer one is not the monitor's, and is passed over."""
RECORDS = re.compile(r"monitor-rank(\d{5})\.jsonl", re.ASCII)
REPLAY = re.compile(r"replay-rank(\d{5})-step(\d{1,19})\.safetensors", re.ASCII)


def records_name(rank: int) -> str:
    return f"monitor-rank{rank:05d}.jsonl"


def replay_name(rank: int, step: int) -> str:
    return f"replay-rank{rank:05d}-step{step}.safetensors"


def token_json(token: TokenDifference) -> dict:
    """Both values, and the bits of each as fp32 (exact for bf16 too): a NaN has bits, but no number in JSON."""

    def bits(x: float) -> str:
        return f"0x{struct.pack('>f', x).hex()}"

    return finite_or_none(
        {
            "sequence": token.sequence,
            "position": token.position,
            "token": token.token_id,
            "rollout": token.rollout,
            "training": token.training,
            "rollout_bits": bits(token.rollout),
            "training_bits": bits(token.training),
        }
    )


class Appender:
    """Appends lines to one rank's file, each by one write, so that a killed process tears at most its last."""

    def __init__(self, path: Path) -> None:
        """Raises InputError where another process writes the file: two ranks were given one number."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InputError(
                f"rank: {path} is being written by another Monitor; each rank needs a number of its own"
            ) from None
        except OSError as e:
            # Some shared file systems have no locks; the file is then only as safe as the ranks are distinct.
            if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                self.close()
                raise
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._write(b"\n")  # after a torn line

    def append(self, record: dict) -> None:
        self._write(json.dumps(finite_or_none(record), separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]


class Lines:
    """Complete lines of a file that may still grow, in bounded memory: each `read` goes on where the last one ended."""

    def __init__(self) -> None:
        self.offset = 0
        self._skipping = False  # within a line that is too long

    def read(self, file: BinaryIO, limit: int) -> Iterator[bytes | None]:
        """Lines from `offset` on, until about `limit` bytes were read or none is complete; None for one too long."""
        file.seek(self.offset)
        end = self.offset + limit
        while self.offset < end:
            piece = file.readline(MAX_LINE)
            whole = piece.endswith(b"\n")
            if not piece or (not whole and not self._skipping and len(piece) < MAX_LINE):
                return  # the end, or a last line that is being written
            self.offset += len(piece)
            if not whole:
                self._skipping = True
            elif self._skipping:
                self._skipping = False
                yield None
            else:
                yield piece


def parse(line: bytes | None) -> dict | None:
    """The record of a line; None if it is torn or not a record of this version."""
    if line is None:
        return None
    try:
        record = json.loads(line, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return None
    return record if _is_record(record) else None


def read_records(path: str | os.PathLike) -> Iterator[dict]:
    """Each whole record of a rank's file, in the order written."""
    with open(path, "rb") as file:
        for line in Lines().read(file, os.fstat(file.fileno()).st_size):
            record = parse(line)
            if record is not None:
                yield record


@contextlib.contextmanager
def opened(folder: int, name: str) -> Iterator[BinaryIO]:
    """The regular file `name` of the open directory `folder`. Raises OSError for anything else: a link is not
    followed, and a pipe not waited for."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        yield file


def _not_json(name: str) -> None:
    raise ValueError(name)


def _is_record(record) -> bool:
    """Whether what readers use is there and of its type."""
    if not isinstance(record, dict) or record.get("version") != VERSION:
        return False
    drift, worst, first = (record.get(key) for key in ("drift", "worst", "first_difference"))
    return (
        _count(record.get("step"))
        and _number(record.get("time"))
        and isinstance(record.get("contract"), str)
        and isinstance(drift, dict)
        and all(_count(drift.get(key)) for key in ("tokens", "bit_equal", "nonfinite"))
        and all(isinstance(key, str) and (value is None or _number(value)) for key, value in drift.items())
        and isinstance(record.get("metrics"), dict)
        and all(value is None or _number(value) for value in record["metrics"].values())
        and isinstance(worst, list)
        and all(map(_is_token, worst))
        and (first is None or _is_token(first))
    )


def _is_token(token) -> bool:
    return (
        isinstance(token, dict)
        and all(_count(token.get(key)) for key in ("sequence", "position"))
        and (token.get("token") is None or (type(token["token"]) is int and abs(token["token"]) < 2**63))
        and all(token.get(key) is None or _number(token[key]) for key in ("rollout", "training"))
        and all(isinstance(token.get(key), str) for key in ("rollout_bits", "training_bits"))
    )


def _count(x) -> bool:
    return type(x) is int and 0 <= x < 2**63


def _number(x) -> bool:
    return type(x) in (int, float) and abs(x) < 2.0**1023
