"""vLLM loads this entry point (`vllm.general_plugins`) in every process it starts."""
from __future__ import annotations

import os

from alignkit.vllm.patch import ENV, patch_vllm


def register() -> None:
    """Does nothing unless asked: by `patch_vllm()` in a parent process, or by the user's ALIGNKIT_VLLM=1."""
    if os.environ.get(ENV) == "1":
        patch_vllm()
