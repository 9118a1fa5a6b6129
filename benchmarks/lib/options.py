"""Command-line options shared by the benchmark scripts."""

from __future__ import annotations

import argparse
import time
from pathlib import Path


def parser(
    doc: str, results: Path | None, *, json: str = "result file", seconds: float | None = None, resume: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of a benchmark script.

    Args:
        doc: the script's docstring, whose first line is the description.
        results: default of --json.
        json: help text of --json.
        seconds: default of --seconds; None adds neither --seconds nor --minutes.
        resume: add --resume.
    """
    result = argparse.ArgumentParser(description=doc.partition("\n")[0])
    result.add_argument("--json", type=Path, default=results, help=json)
    add_only_stale(result)
    if seconds is not None:
        result.add_argument("--seconds", type=float, default=seconds, help="duration of each measurement, in seconds")
        result.add_argument("--minutes", type=float, help="time limit in minutes, after which no measurement starts")
    if resume:
        result.add_argument(
            "--resume", action="store_true", help="skip rows that the file already has for these sources"
        )
    return result


def add_only_stale(parser: argparse.ArgumentParser) -> None:
    """Add --only-stale, by which ``run.py renew`` selects the cases of a script."""
    parser.add_argument(
        "--only-stale", action="store_true", help="measure only the cases whose rows in the file have other sources"
    )


def time_is_up(options: argparse.Namespace, started: float) -> bool:
    """Return whether --minutes have passed since `started`."""
    return options.minutes is not None and time.monotonic() - started > 60 * options.minutes


def error_text(error: Exception, limit: int = 300) -> str:
    """Return the type and the first `limit` characters of an error."""
    return f"{type(error).__name__}: {str(error)[:limit]}"
