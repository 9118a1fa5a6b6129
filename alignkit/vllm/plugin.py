"""vLLM loads this entry point (`vllm.general_plugins`) in every process it starts."""

from __future__ import annotations

import os

from alignkit.config import Config, config

ENV = Config.vllm.name


def register() -> None:
    """Does nothing unless asked: by `patch_vllm()` in a parent process, or by the user's ALIGNKIT_VLLM.

    vLLM calls it once in a process. If it fails, vLLM stops there; whoever catches that and tries again finds that
    no engine can be made.
    """
    try:
        if config.vllm:
            from alignkit.vllm.patch import patch_vllm

            patch_vllm()
    except Exception as error:
        _refuse_engines(error)
        raise


def _refuse_engines(cause: Exception) -> None:
    from vllm.engine.arg_utils import EngineArgs

    def create_engine_config(self, *args, **kwargs):
        from alignkit.errors import UnsupportedError

        raise UnsupportedError(
            f"{ENV}={os.environ.get(ENV, '')}: vLLM could not be aligned when it loaded alignkit's plugin: {cause}"
        ) from cause

    EngineArgs.create_engine_config = create_engine_config
