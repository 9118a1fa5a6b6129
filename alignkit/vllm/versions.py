"""The table of vLLM versions, one row per minor version.

No other module compares versions; code that differs between versions reads a field of `Version`, or tests for a name.
CONTRIBUTING.md, "Adding a vLLM minor", lists the other places that a new row needs.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from alignkit.engines.hook_points import HookPoint
from alignkit.engines.versions import Row, Versions
from alignkit.models import FAMILIES
from alignkit.runtime import families
from alignkit.runtime.families import Family


@dataclass(frozen=True)
class Version:
    """Properties of a supported version. Classes are given as ``module:name``.

    family: the device family. worker: the stock worker class. attention: the entry of `AttentionBackendEnum` that
    alignkit's backend replaces. client_error: the error class whose message vLLM's server returns to the client.
    graphs: whether alignkit supports the V2 runner, torch.compile and CUDA graphs. replicas: whether it supports data
    parallelism inside vLLM. scores: the name of the V2 runner's function for logprobs of token ids. without: model
    architectures that alignkit does not support in this version -> the reason.
    """

    family: Family
    worker: str
    attention: str
    client_error: str
    graphs: bool
    replicas: bool
    scores: str = "compute_topk_scores"
    without: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the text that error messages append to a minor version, as in "0.26.x on cuda"."""
        return f".x on {self.family.device_type}"


_CUDA = Version(
    family=families.SM90,
    worker="vllm.v1.worker.gpu_worker:Worker",
    attention="CUSTOM",
    client_error="builtins:ValueError",
    graphs=True,
    replicas=True,
    without={
        "Glm4MoeForCausalLM": "is supported only with vLLM 0.32 on a CPU; in this version, the routers are plain "
        "torch.nn.Linear modules"
    },
)

_BEFORE_0_26 = replace(_CUDA, scores="compute_topk_logprobs", replicas=False)
"""Versions whose data parallelism is untested on GPUs."""

_CUDA_UNTIL_0_26 = "cuda opt_in_passes kv_cache_shape"
_FROM_0_26 = "topk_scores backend_per_kind cuda_all_gather deferred_sum"
_CPU_FROM_0_32 = f"{_FROM_0_26} cpu client_error imported_scores sharded_logits kv_cache_layouts watermarks"

VERSIONS: Versions[Version] = Versions(
    "vLLM",
    "vllm",
    Path(__file__).parent,
    {
        "0.24": Row(f"{_CUDA_UNTIL_0_26} topk_logprobs", _BEFORE_0_26),
        "0.25": Row(f"{_CUDA_UNTIL_0_26} topk_logprobs cuda_all_gather deferred_sum", _BEFORE_0_26),
        "0.26": Row(f"{_CUDA_UNTIL_0_26} {_FROM_0_26}", _CUDA),
        "0.32": Row(
            _CPU_FROM_0_32,
            Version(
                family=families.CPU,
                worker="vllm.v1.worker.cpu_worker:CPUWorker",
                attention="CPU_ATTN",
                client_error="vllm.exceptions:VLLMClientError",
                graphs=False,
                replicas=True,
            ),
        ),
        "0.33": Row(_CPU_FROM_0_32),
    },
    # Supported model classes, which consist of the parts that the adapter replaces.
    tuple(HookPoint(f"model_executor/models/{family.file}", family.architecture) for family in FAMILIES.values()),
)
"""Features of a row select hook points:

- "cuda", "cpu": the device; "opt_in_passes": compiler passes that move communication
- "topk_logprobs", "topk_scores": the V2 runner's function for logprobs of token ids; "imported_scores": prompt logprobs
  import it by name; "sharded_logits": logits can stay sharded up to the sampler
- "kv_cache_shape", "kv_cache_layouts": the backend gives the shape and stride order of the KV cache, or its layouts
- "cuda_all_gather": the communicator all-gathers with its own NCCL binding; "deferred_sum": an MoE layer may defer its
  all-reduce
- "backend_per_kind": an attention backend for each kind of layer; "watermarks": of requests; "client_error": errors
  have classes
"""


@functools.cache
def installed() -> Version:
    """Return the row of the installed vLLM; raise UnsupportedError if the adapter does not support it."""
    import vllm

    return VERSIONS.require(vllm.__version__)


def resolve(path: str) -> type:
    """Return the class with the name ``module:name``."""
    return pkgutil.resolve_name(path)
