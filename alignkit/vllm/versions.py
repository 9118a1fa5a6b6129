"""Versions of vLLM: the facts that its names give, and the versions with which all tests passed.

No other module compares versions; code that differs between versions reads a field of `Version`, or tests for a name.
docs/vllm.md lists the versions.
"""

from __future__ import annotations

import functools
import pkgutil
from dataclasses import dataclass
from pathlib import Path

from alignkit.engines.hook_points import HookPoint
from alignkit.engines.versions import Names, Versions
from alignkit.models import FAMILIES
from alignkit.runtime.families import CPU, SM90, Family
from alignkit.runtime.machine import engine_device, engine_family, version


@dataclass(frozen=True)
class Version:
    """Facts of a version on this machine's devices. Classes are given as ``module:name``.

    family: the device family. worker: the stock worker class. attention: the entry of `AttentionBackendEnum` that
    alignkit's backend replaces. client_error: the error class whose message vLLM's server returns to the client.
    graphs: whether alignkit supports the V2 runner, torch.compile and CUDA graphs. replicas: whether it supports data
    parallelism inside vLLM, which is untested on GPUs before 0.26. scores: the name of the V2 runner's function for
    logprobs of token ids.
    """

    family: Family
    worker: str
    attention: str
    client_error: str
    graphs: bool
    replicas: bool
    scores: str = "compute_topk_scores"


OPTIONAL = (
    "opt_in_passes",
    "backend_per_kind",
    "cuda_all_gather",
    "deferred_sum",
    "imported_scores",
    "sharded_logits",
    "watermarks",
)
"""Features whose names a version may lack:

- "opt_in_passes": compiler passes that move communication
- "backend_per_kind": an attention backend for each kind of layer
- "cuda_all_gather": the communicator all-gathers with its own NCCL binding
- "deferred_sum": an MoE layer may defer its all-reduce
- "imported_scores": prompt logprobs import the V2 runner's function for logprobs by name
- "sharded_logits": logits can stay sharded up to the sampler
- "watermarks": requests can be watermarked

The others are "cuda" and "cpu", the device; "topk_scores" or "topk_logprobs", the V2 runner's function for logprobs of
token ids; "kv_cache_layouts" or "kv_cache_shape", what the backend tells of the KV cache; "client_error", a class.
"""


def runs_elsewhere() -> bool:
    """Return whether vLLM is built for GPUs and this process sees none: it may start workers that do, as Ray's does.

    vLLM recognizes a build for CPUs in the same way, by its metadata.
    """
    cpu = CPU.device_type
    return engine_device().type == cpu and cpu not in (version("vllm") or cpu)


def derive(names: Names, family: Family | None = None) -> Version:
    """Return the facts that the names of vLLM give on devices of `family`, by default those on which its engines run.

    For engines that run elsewhere, the family stands for all families of GPUs.
    """
    family = family or (SM90 if runs_elsewhere() else engine_family())
    mine, other = ("cuda", "cpu") if family.on_gpu else ("cpu", "cuda")
    names.require("", mine)
    names.leave_out(other)
    names.optional(*OPTIONAL)
    scores = names.either("topk_scores", "topk_logprobs")
    names.either("kv_cache_layouts", "kv_cache_shape")
    errors = names.has("client_error")
    return Version(
        family=family,
        worker="vllm.v1.worker.gpu_worker:Worker" if family.on_gpu else "vllm.v1.worker.cpu_worker:CPUWorker",
        attention="CUSTOM" if family.on_gpu else "CPU_ATTN",
        client_error="vllm.exceptions:VLLMClientError" if errors else "builtins:ValueError",
        graphs=family.on_gpu,
        replicas=not family.on_gpu or scores == "topk_scores",
        scores=f"compute_{scores}",
    )


VALIDATED = {
    "0.24.0 on cuda": "a81f358ffc0a8e10c5384186",
    "0.25.1 on cuda": "57398fbc397828a9cc7c1252",
    "0.26.0 on cuda": "11fbcb50a446620207cfb799",
    "0.32.0 on cpu": "87ee788e921204fb4ec8156e",
}
"""Versions with which all tests passed -> hash of their files with hook points (tests/vllm/test_hook_points.py)."""

_SAMPLING = tuple(f"v1/worker/gpu/sample/{file}.py" for file in ("sampler", "prompt_logprob", "logprob"))
_SPECULATIVE = ("v1/worker/gpu/spec_decode/rejection_sampler.py", "model_executor/models/diffusion_gemma.py")
"""Speculative and diffusion decoding, which are rejected."""

VERSIONS: Versions[Version] = Versions(
    "vLLM",
    "vllm",
    "vllm",
    Path(__file__).parent,
    derive,
    VALIDATED,
    users={
        "compute_logprobs": ("v1/sample/sampler.py", "v1/sample/rejection_sampler.py", "v1/worker/gpu_model_runner.py"),
        # From 0.31 on also for prompt logprobs of given token ids, which `policy.REQUEST` rejects.
        "compute_token_logprobs": _SAMPLING,
        "compute_topk_scores": (*_SAMPLING, *_SPECULATIVE),
        "compute_topk_logprobs": (*_SAMPLING, *_SPECULATIVE),
        "compute_prompt_logprobs_with_chunking": _SAMPLING,
        "PromptLogprobsWorker": (*_SAMPLING, "v1/worker/gpu/model_runner.py"),
    },
    # Supported model classes, which consist of the parts that the adapter replaces.
    more=tuple(HookPoint(f"model_executor/models/{family.file}", family.architecture) for family in FAMILIES.values()),
    elsewhere=runs_elsewhere,
)


@functools.cache
def installed(*checks: str) -> Version:
    """Return the facts of the installed vLLM; raise UnsupportedError if it is not accepted.

    checks: names of the checks that its certificate must have if it is not validated.
    """
    return VERSIONS.installed(*checks)


def resolve(path: str) -> type:
    """Return the class with the name ``module:name``."""
    return pkgutil.resolve_name(path)
