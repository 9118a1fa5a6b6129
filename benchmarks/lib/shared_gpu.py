"""A verl platform for ranks that share GPUs; verl imports it in every process through VERL_USE_EXTERNAL_MODULES.

CUDA_VISIBLE_DEVICES names a GPU once per rank, so Ray counts as many GPUs as ranks. Ray assigns one name to a training
worker, which needs no change. A rollout server gets the names of all its ranks, but CUDA treats a list with duplicates
as empty. The server therefore sees each GPU once, and vLLM's ``device_ids`` option maps its ranks to GPUs.

``verl_grpo.py`` sets the variables and the option.
"""

from __future__ import annotations

import os

from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

GPUS = "SHARED_GPUS"
"""Environment variable that lists each GPU once."""


class SharedGPUPlatform(PlatformCUDA):
    def visible_devices_envvar(self) -> str:
        return "SHARED_GPUS_OF_RANKS"  # receives the GPU names that Ray assigns to a server

    def rollout_env_vars(self) -> dict[str, str]:
        return super().rollout_env_vars() | {"CUDA_VISIBLE_DEVICES": os.environ[GPUS]}


set_platform(SharedGPUPlatform())
