"""The versions of vLLM: the one file that knows them. A minor is a row."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from alignkit.engines.versions import Row, Versions
from alignkit.runtime import families
from alignkit.runtime.families import Family
from alignkit.vllm.seams import COMMON, CPU, CUDA, SINCE_0_25, SINCE_0_26, SINCE_0_32, UNTIL_0_25, UNTIL_0_26


@dataclass(frozen=True)
class Version:
    """What is different about a version that the adapter runs on. Classes are ``module:name``.

    family: of the devices that it runs on. worker: the stock worker class. attention: the entry of
    `AttentionBackendEnum` that alignkit's backend takes. client_error: what a refused request must also be, for vLLM's
    server to tell the client why. graphs: whether the V2 runner, torch.compile and CUDA graphs are supported. replicas: whether
    data parallelism inside vLLM is. scores: what the V2 runner's function that gives logprobs of ids is called.
    without: supported architectures that this version builds of other layers than alignkit's, and of which.
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
        return f".x on {self.family.device_type}"


_CUDA = Version(
    family=families.SM90,
    worker="vllm.v1.worker.gpu_worker:Worker",
    attention="CUSTOM",
    client_error="builtins:ValueError",
    graphs=True,
    replicas=True,
    without={"Glm4MoeForCausalLM": "routers that are torch's own Linear"},
)

_BEFORE_0_26 = replace(_CUDA, scores="compute_topk_logprobs", replicas=False)
"""Replicas of these have not run on a GPU."""

VERSIONS: Versions[Version] = Versions(
    "vLLM",
    {
        "0.24": Row(COMMON + CUDA + UNTIL_0_25 + UNTIL_0_26, _BEFORE_0_26),
        "0.25": Row(COMMON + CUDA + SINCE_0_25 + UNTIL_0_25 + UNTIL_0_26, _BEFORE_0_26),
        "0.26": Row(COMMON + CUDA + SINCE_0_25 + SINCE_0_26 + UNTIL_0_26, _CUDA),
        "0.32": Row(
            COMMON + CPU + SINCE_0_25 + SINCE_0_26 + SINCE_0_32,
            Version(
                family=families.CPU,
                worker="vllm.v1.worker.cpu_worker:CPUWorker",
                attention="CPU_ATTN",
                client_error="vllm.exceptions:VLLMClientError",
                graphs=False,
                replicas=True,
            ),
        ),
        "0.33": Row(COMMON + CPU + SINCE_0_25 + SINCE_0_26 + SINCE_0_32),
    },
)


@functools.cache
def installed() -> Version:
    """The row of the vLLM that is installed. Raises UnsupportedError if the adapter does not run on it."""
    import vllm

    return VERSIONS.require(vllm.__version__)


def resolve(path: str) -> type:
    """The class that ``module:name`` names."""
    return pkgutil.resolve_name(path)
