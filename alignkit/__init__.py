"""alignkit: the same weights and the same tokens give the same logprob bits, in vLLM and in Megatron-core.

`patch_vllm()` and `patch_megatron()` put both engines on the ops of `alignkit.ops`; `alignkit.drift` and
`alignkit check` show that they agree. Importing alignkit imports neither engine.
"""

from .contract import contract_id
from .errors import AlignkitError, BackendError, DriftError, InputError, UnsupportedError

__version__ = "0.1.0"


def patch_vllm(*args, **kwargs):
    """Align vLLM in this process and in the workers it starts: see `alignkit.vllm.patch_vllm`."""
    from .vllm import patch_vllm

    return patch_vllm(*args, **kwargs)


def patch_megatron(*args, **kwargs):
    """Align Megatron-core in this process: see `alignkit.megatron.patch_megatron`."""
    from .megatron import patch_megatron

    return patch_megatron(*args, **kwargs)


__all__ = [
    "AlignkitError",
    "BackendError",
    "DriftError",
    "InputError",
    "UnsupportedError",
    "contract_id",
    "patch_megatron",
    "patch_vllm",
]
