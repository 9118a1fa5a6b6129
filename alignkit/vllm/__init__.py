"""The vLLM adapter: vLLM computes its logprobs with alignkit's ops. Importing it does not import vLLM.

Names are imported on first use. vLLM ignores a plugin whose module fails to import, but propagates the errors of
`plugin.register`. So `plugin.register` does every import that can fail, and this file none.
docs/api/vllm.md documents `__all__`.
"""

from importlib import import_module

__all__ = ["Patch", "patch_vllm", "status", "token_epochs", "worker_status"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("alignkit.vllm.patch"), name)
