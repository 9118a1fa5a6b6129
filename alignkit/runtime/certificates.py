"""Certificates: records of the checks that `alignkit prove` ran on this machine, and that all passed.

A certificate holds its subject ("ops", or an engine), a key and the checks with their counts. The key has everything
that the bits may depend on: hardware, driver, versions, alignkit's files, an engine's files. A certificate is used only
if its key equals the current one in every field and its checks include all required ones, which the code states anew.
Certificates lie in $ALIGNKIT_CERTIFICATES, by default in alignkit's cache folder. The stored hash detects accidents,
such as a partly written or edited file; anyone who can write the folder can forge a certificate.

docs/proof.md states the fields of the file. Another key format only requires another run of `alignkit prove`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..config import config
from ..errors import InputError, UnsupportedError

FORMAT_VERSION = "1"
"""Version of the file format; a certificate of another format is rejected."""
COMMAND = "alignkit prove"
OPS, SELF_TEST = "ops", "self-test"
"""Subject of the certificate of the ops, and the check that it must have."""
RUNNING = "running"
"""Content of the file ALIGNKIT_PROOF while `alignkit prove` runs."""


@dataclass(frozen=True)
class Certificate:
    """A proof of one subject under one key.

    checks: name of each check that passed -> number of its comparisons.
    """

    subject: str
    key: Mapping[str, str]
    checks: Mapping[str, int]
    made: str = ""

    @property
    def digest(self) -> str:
        """Hash of the subject, key and checks, without the date."""
        return _hash([FORMAT_VERSION, self.subject, dict(self.key), dict(self.checks)])

    @property
    def file(self) -> Path:
        return _file(self.subject, self.key)

    def write(self) -> Path:
        """Write the file atomically and return its path; raise InputError if the folder cannot be written."""
        made = self.made or datetime.now(UTC).isoformat(timespec="seconds")
        record: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "subject": self.subject,
            "key": dict(self.key),
            "checks": dict(self.checks),
            "made": made,
        }
        text = json.dumps(record | {"sha256": _hash(record)}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        try:
            replace_file(self.file, text)
        except OSError as e:
            raise InputError(f"ALIGNKIT_CERTIFICATES: must be a writable folder, got {folder()}: {e}") from None
        return self.file


def replace_file(file: Path, text: str) -> None:
    """Write a file, atomically for other processes; create its folder. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as temporary:
        temporary.write(text)
    os.replace(temporary.name, file)


def folder() -> Path:
    """Return the folder of the certificates."""
    return Path(config.certificates or Path(config.cache) / "alignkit" / "certificates").expanduser()


def read(file: Path) -> Certificate:
    """Return the certificate in a file.

    Raises:
        InputError: the file is unreadable, has another format, or was changed after it was written.
    """
    try:
        record = json.loads(file.read_text())
        stored = record.pop("sha256")
        if record["format"] != FORMAT_VERSION:
            raise InputError(f"{file}: format must be {FORMAT_VERSION}, got {record['format']!r}")
        if stored != _hash(record):
            raise InputError(f"{file}: was changed after `{COMMAND}` wrote it, because its sha256 differs")
        return Certificate(record["subject"], record["key"], record["checks"], record["made"])
    except OSError as e:
        raise InputError(f"{file}: cannot be read: {e}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{file}: must be a certificate, but is incomplete ({type(e).__name__}: {e})") from None


def rejection(subject: str, key: Mapping[str, str], required: Iterable[str]) -> str | None:
    """Return why no certificate proves `subject` under `key` with all the `required` checks; None if one does."""
    file = _file(subject, key)
    if not file.is_file():
        return _other(subject, key)
    try:
        found = read(file)
    except InputError as e:
        return str(e)
    if found.subject != subject or dict(found.key) != dict(key):
        return f"{file}: must be of {subject} on this machine, but is of {found.subject}: {_difference(found.key, key)}"
    lacking = [name for name in dict.fromkeys(required) if not found.checks.get(name)]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return f"{file}: lacks the check {lacking[0]!r}{more}"
    return None


def require(subject: str, key: Mapping[str, str], required: Iterable[str], command: str = COMMAND) -> Certificate:
    """Return the certificate of `subject` under `key`.

    Args:
        subject: what must be proved.
        key: the current key.
        required: names of the checks that the certificate must have.
        command: command that makes the certificate, for the error.

    Raises:
        UnsupportedError: no certificate, or one that is damaged, partial, or of another key. Names the command.
    """
    if (reason := rejection(subject, key, required)) is not None:
        raise UnsupportedError(f"{subject}: is not proved on this machine ({reason}). Run `{command}`")
    return read(_file(subject, key))


def proving() -> bool:
    """Return whether this process belongs to a run of `alignkit prove`, which runs what is not proved yet."""
    try:
        return bool(config.proof) and Path(config.proof).read_text() == RUNNING
    except OSError:
        return False


def _other(subject: str, key: Mapping[str, str]) -> str:
    """Return why the certificates of `subject` in the folder do not fit `key`; the newest one is named."""
    files = [file for file in folder().glob(f"{_plain(subject)}-*.json") if file.is_file()]
    for file in sorted(files, key=lambda each: each.stat().st_mtime, reverse=True):
        try:
            found = read(file)
        except InputError:
            continue
        if found.subject == subject:
            return f"{file}: is of another installation: {_difference(found.key, key)}"
    return f"{folder()}: holds no certificate of {subject}"


def _difference(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return the first field in which two keys differ."""
    for field in {**wanted, **found}:
        if found.get(field) != wanted.get(field):
            return f"{field} must be {wanted.get(field)!r}, got {found.get(field)!r}"
    return "equal keys"


def _file(subject: str, key: Mapping[str, str]) -> Path:
    return folder() / f"{_plain(subject)}-{_hash(dict(key))[:32]}.json"


def _plain(subject: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in subject)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def files_digest(root: Path, files: tuple[str, ...]) -> str:
    """Return the hash of these files below `root`: their paths and contents; a missing file counts as absent."""
    total = hashlib.sha256()
    for name in sorted(set(files)):
        path = root / name
        content = path.read_bytes() if path.is_file() else None
        total.update(f"{name} {'absent' if content is None else len(content)} ".encode() + (content or b""))
    return total.hexdigest()
