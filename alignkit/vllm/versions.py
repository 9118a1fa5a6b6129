"""The table of vLLM versions, one row per minor version.

No other module compares versions; code that differs between versions reads a field of `Version`, or tests for a name.
CONTRIBUTING.md, "Adding a vLLM minor", lists the other places that a new row needs.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from alignkit.engines.versions import Row, Versions
from alignkit.runtime import families
from alignkit.runtime.families import Family
from alignkit.vllm.hook_points import (
    COMMON,
    CPU,
    CUDA,
    FROM_0_24_TO_0_25,
    FROM_0_24_TO_0_26,
    FROM_0_25,
    FROM_0_26,
    FROM_0_32,
)


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

VERSIONS: Versions[Version] = Versions(
    "vLLM",
    {
        "0.24": Row(COMMON + CUDA + FROM_0_24_TO_0_25 + FROM_0_24_TO_0_26, _BEFORE_0_26),
        "0.25": Row(COMMON + CUDA + FROM_0_24_TO_0_25 + FROM_0_24_TO_0_26 + FROM_0_25, _BEFORE_0_26),
        "0.26": Row(COMMON + CUDA + FROM_0_24_TO_0_26 + FROM_0_25 + FROM_0_26, _CUDA),
        "0.32": Row(
            COMMON + CPU + FROM_0_25 + FROM_0_26 + FROM_0_32,
            Version(
                family=families.CPU,
                worker="vllm.v1.worker.cpu_worker:CPUWorker",
                attention="CPU_ATTN",
                client_error="vllm.exceptions:VLLMClientError",
                graphs=False,
                replicas=True,
            ),
        ),
        "0.33": Row(COMMON + CPU + FROM_0_25 + FROM_0_26 + FROM_0_32),
    },
)


@functools.cache
def installed() -> Version:
    """Return the row of the installed vLLM; raise UnsupportedError if the adapter does not support it."""
    import vllm

    return VERSIONS.require(vllm.__version__)


def resolve(path: str) -> type:
    """Return the class with the name ``module:name``."""
    return pkgutil.resolve_name(path)
