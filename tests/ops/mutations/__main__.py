"""Command line of the mutations; see the package."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from . import build, cuda_kernels, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.ops.mutations")
    commands = parser.add_subparsers(dest="command", required=True)
    for device in ("cpu", "cuda"):
        command = commands.add_parser(device, help=f"print the table of the {device} mutations")
        command.add_argument(
            "--only", nargs="+", default=(), metavar="TEXT", help="run mutations whose 'backend: name' has a TEXT"
        )
        jobs = len(os.sched_getaffinity(0)) if device == "cuda" else 1
        command.add_argument("--jobs", type=int, default=jobs, help="processes at a time (default: %(default)s)")
        command.add_argument("--libraries", type=Path, metavar="FILE", help="archive of `build`")
    command = commands.add_parser("build", help="build the mutated CUDA libraries, without a GPU")
    command.add_argument("file", type=Path, help="archive to write, FILE.tar.xz")
    given = parser.parse_args()
    if given.command == "build":
        build.write_archive(given.file, cuda_kernels.MUTATIONS)
        return 0
    if given.libraries is None:
        return run.table(given.command, None, given.only, given.jobs)
    with tempfile.TemporaryDirectory() as folder:
        build.read_archive(given.libraries, Path(folder))
        return run.table(given.command, Path(folder), given.only, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
