"""The entry point of `vllm.general_plugins`, which vLLM loads in every process that it starts.

pyproject.toml names `register`, so installed packages refer to it by this name.
"""

from __future__ import annotations

import os

from alignkit.config import Config, config
from alignkit.engines.hook_points import relies_on

ENV = Config.vllm.name


@relies_on("plugins/__init__.py:load_general_plugins")
def register() -> None:
    """Patch vLLM if ALIGNKIT_VLLM is set, by the user or by `patch_vllm()` in a parent process.

    vLLM calls this function once per process. If the patch fails, the exception propagates. From then on, creating an
    engine in this process raises UnsupportedError too, in case the caller catches the exception and continues.
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
            f"{ENV}={os.environ.get(ENV, '')}: alignkit's plugin failed to patch vLLM: {cause}"
        ) from cause

    EngineArgs.create_engine_config = create_engine_config
