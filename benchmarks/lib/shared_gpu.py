"""verl's platform where ranks share GPUs: verl imports it in each of its processes, as VERL_USE_EXTERNAL_MODULES asks.

Ray is told of as many GPUs as there are ranks, by CUDA_VISIBLE_DEVICES that names a GPU once for each of its ranks. A training
worker is given one of the names, and is right with it. A rollout server is given the names of all its ranks, and CUDA takes a
list in which one stands twice for an empty one: so the server sees each GPU once, and vLLM is told which rank has which.
"""

from __future__ import annotations

import os

from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

GPUS = "SHARED_GPUS"
"""The environment variable that names each GPU once."""


class Shared(PlatformCUDA):
    def visible_devices_envvar(self) -> str:
        return "SHARED_GPUS_OF_RANKS"  # where a server writes the names it is given

    def rollout_env_vars(self) -> dict[str, str]:
        return super().rollout_env_vars() | {"CUDA_VISIBLE_DEVICES": os.environ[GPUS]}


set_platform(Shared())
