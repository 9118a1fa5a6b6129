"""Options that the commands share."""

from __future__ import annotations

import argparse
import time
from pathlib import Path


def parser(
    doc: str,
    results: Path | None,
    *,
    json: str = "the file of the results",
    seconds: float | None = None,
    resume: bool = False,
) -> argparse.ArgumentParser:
    """For a measurement whose docstring is `doc`; `results`, `json`: the default of --json, and what it is;
    `seconds`: the default of --seconds, with which comes --minutes."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("--json", type=Path, default=results, help=json)
    if seconds is not None:
        made.add_argument("--seconds", type=float, default=seconds, help="of each measurement")
        made.add_argument("--minutes", type=float, help="after which no measurement is begun")
    if resume:
        made.add_argument(
            "--resume", action="store_true", help="only rows that the file does not have of these sources yet"
        )
    return made


def time_is_up(options: argparse.Namespace, started: float) -> bool:
    """Whether --minutes have passed since `started`."""
    return options.minutes is not None and time.monotonic() - started > 60 * options.minutes


def told(error: Exception, most: int = 300) -> str:
    """Why a peer, which may raise whatever it likes, is left out."""
    return f"{type(error).__name__}: {str(error)[:most]}"
