"""vLLM computes its logprobs with alignkit's ops. Importing this does not import vLLM.

Nothing is imported until it is used: vLLM goes on without a plugin whose module cannot be imported, so what can fail is
left to `plugin.register`, whose errors vLLM does not swallow.
"""

from importlib import import_module

__all__ = ["Patch", "patch_vllm", "status", "worker_status"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("alignkit.vllm.patch"), name)
