"""Record files of the monitor: one append-only JSON Lines file per rank.

A process killed during a write leaves an incomplete last line. Readers skip incomplete lines, and the next process of
that rank starts a new line. `Monitor.log` builds a record, except for its tokens (`token_json`). `alignkit watch` and
users' programs read the files. A renamed or removed key, or another type, needs another `VERSION` and a change of
`_is_record`; a new key does not. docs/monitor.md lists the contents.
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
"""Value of a record's key "version"; readers skip records of other versions."""
MAX_RANK = 99999
"""Maximum of `Monitor`'s `rank`: file names have five digits, as in `RECORDS` and `REPLAY`."""
MAX_LINE = 2**20
"""Maximum length of a line in bytes; a longer line is not the monitor's and is skipped."""
RECORDS = re.compile(r"monitor-rank(\d{5})\.jsonl", re.ASCII)
REPLAY = re.compile(r"replay-rank(\d{5})-step(\d{1,19})\.safetensors", re.ASCII)


def records_name(rank: int) -> str:
    return f"monitor-rank{rank:05d}.jsonl"


def replay_name(rank: int, step: int) -> str:
    return f"replay-rank{rank:05d}-step{step}.safetensors"


def token_json(token: TokenDifference) -> dict:
    """Return the token with both values and their fp32 bits (exact for bf16 too), since JSON cannot hold a NaN."""

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
    """Writer of one rank's file: each line is one write, so a killed process leaves at most one incomplete line."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file; raise InputError if another process writes it (both have the same `rank`)."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InputError(
                f"rank: must differ between the open Monitors of a directory, but {path} is open in another Monitor. "
                "Pass another rank, or close that Monitor."
            ) from None
        except OSError as e:
            # Some shared file systems have no locks; distinct ranks are then the only protection.
            if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                self.close()
                raise
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._write(b"\n")  # terminate an incomplete line

    def append(self, record: dict) -> None:
        self._write(json.dumps(finite_or_none(record), separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]


class Lines:
    """Reader of a growing file in bounded memory; each `read` continues at the end of the previous one."""

    def __init__(self) -> None:
        self.offset = 0
        self._skipping = False  # inside an overlong line

    def read(self, file: BinaryIO, limit: int) -> Iterator[bytes | None]:
        """Yield complete lines, about `limit` bytes of them, from `offset`; None stands for an overlong line."""
        file.seek(self.offset)
        end = self.offset + limit
        while self.offset < end:
            piece = file.readline(MAX_LINE)
            whole = piece.endswith(b"\n")
            if not piece or (not whole and not self._skipping and len(piece) < MAX_LINE):
                return  # end of file, or an incomplete last line
            self.offset += len(piece)
            if not whole:
                self._skipping = True
            elif self._skipping:
                self._skipping = False
                yield None
            else:
                yield piece


def parse(line: bytes | None) -> dict | None:
    """Return the record in a line; None if it is incomplete or not a record of this version."""
    if line is None:
        return None
    try:
        record = json.loads(line, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return None
    return record if _is_record(record) else None


def read_records(path: str | os.PathLike) -> Iterator[dict]:
    """Yield the complete records of a rank's file in file order."""
    with open(path, "rb") as file:
        for line in Lines().read(file, os.fstat(file.fileno()).st_size):
            record = parse(line)
            if record is not None:
                yield record


@contextlib.contextmanager
def opened(folder: int, name: str) -> Iterator[BinaryIO]:
    """Open the regular file `name` of the open directory `folder`.

    Raises OSError for any other kind of file, without following links or blocking on pipes.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        yield file


def _not_json(name: str) -> None:
    raise ValueError(name)


def _is_record(record) -> bool:
    """Return True if all fields that readers use exist and have the right type."""
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
        and isinstance(record.get("causes", []), list)  # absent in records of version 0.2
        and all(isinstance(cause, str) for cause in record.get("causes", []))
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
