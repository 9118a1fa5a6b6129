"""vLLM computes its logprobs with alignkit's ops. Importing this does not import vLLM."""
from alignkit.vllm.patch import Patch, patch_vllm, status, worker_status

__all__ = ["Patch", "patch_vllm", "status", "worker_status"]
