"""Rollout worker: ``python -m alignkit.jobs.rollout JOB.json`` runs one vLLM engine and writes logprob files.

Fields of a job:

- ``model``: HF directory; ``dtype``: "bfloat16" or "float32"; ``patched``: bool.
- ``tp``: int; ``dp`` (default 1): replicas of ``tp`` ranks each, which receive the prompts round-robin.
- ``expert_parallel`` (default false): give each rank whole experts.
- ``eager`` (default true): false is vLLM's default with torch.compile and CUDA graphs.
- ``runner`` (default "v1"): vLLM's model runner, "v1" or "v2".
- ``max_num_batched_tokens``: int, which makes longer prompts prefill in chunks, or null.
- ``prompts``: token ids; ``max_tokens``, ``temperature``, ``seed``.
- ``tokens_from``: logprob file with the tokens of mode "prompt_logprobs".
- ``runs``: list of ``{"mode", "out"}``. For MoE models also ``"routing": true``, which saves the router scores (needs
  eager, "v1" and a mode other than "prefix").

Modes:

- ``batch``: all prompts at once.
- ``one``: one request at a time.
- ``prefix``: all prompts a second time, with their blocks in the prefix cache.
- ``prompt_logprobs``: prompt and sampled tokens of ``tokens_from`` sent as a prompt.

Every mode starts with an empty prefix cache. Logprobs are raw: computed from the logits before temperature. `plan`
writes the jobs; `alignkit.bisect.vllm_side` also calls `prepare` and `engine`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from alignkit.config import config
from alignkit.convert import read_architecture
from alignkit.drift import Logprobs, load, save
from alignkit.errors import InputError
from alignkit.jobs.replicas import PATIENCE, Replicas
from alignkit.jobs.routing import file_of
from alignkit.runtime.machine import gpu_of, gpus
from alignkit.vllm import patch_vllm, worker_status
from alignkit.vllm.fingerprint import fingerprint
from alignkit.vllm.patch import ENV

MODES = ("batch", "one", "prefix", "prompt_logprobs")
BLOCK_SIZE = 32
"""KV cache block size in tokens; small, so that short prompts fill blocks and can hit the prefix cache."""
GPU_SHARE = 0.3
"""Fraction of GPU memory that must be free for vLLM to start, divided among ranks that share a GPU.

Actual use is the weights plus `cache_bytes`.
"""
RUNNERS = {"v1": "0", "v2": "1"}
"""Values of VLLM_USE_V2_MODEL_RUNNER by the job's ``runner``."""
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # the same sampler for every row
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment defaults of the engine process; variables set by the user take precedence."""
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Additional environment defaults of eager engines; disables Dynamo to save compile time."""


def run(job: dict) -> None:
    """Start the engine, execute the job's runs in order and write their files.

    Raises InputError naming the invalid job field, or UnsupportedError if a patched engine does not support the model.
    """
    job = {"eager": True, "runner": "v1", "dp": 1, "expert_parallel": False} | job
    _check(job)
    prepare(job)
    routing = any(spec.get("routing") for spec in job["runs"])
    llm = engine(job, **({"worker_extension_cls": "alignkit.jobs.routing.Recording"} if routing else {}))
    for spec in job["runs"]:
        llm.reset_prefix_cache()
        mode = spec["mode"]
        if spec.get("routing"):
            longest = max(map(len, job["prompts"])) + job["max_tokens"] + 1
            sequences = _full_sequences(job) if mode == "prompt_logprobs" else job["prompts"]
            llm.collective_rpc("alignkit_watch_routers", args=(sequences, longest))
        logprobs = _evaluate(llm, job) if mode == "prompt_logprobs" else _sample(llm, job, mode)
        logprobs.meta["mode"] = mode
        if spec.get("routing"):
            lengths = [len(p) + len(t) for p, t in zip(logprobs.prompts, logprobs.tokens, strict=True)]
            llm.collective_rpc("alignkit_save_routing", args=(lengths, str(file_of(spec["out"]))))
        save(spec["out"], logprobs)
    shut_down(llm)


def shut_down(llm) -> None:
    """Stop the processes of an `engine`."""
    if isinstance(llm, Replicas):
        llm.shutdown()
    else:
        llm.llm_engine.engine_core.shutdown(timeout=PATIENCE)


def prepare(job: dict) -> None:
    """Set the process environment and apply the patch, before vLLM is imported."""
    for name, value in (ENVIRON | (EAGER if job["eager"] else {})).items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = RUNNERS[job["runner"]]
    if job["tp"] * job["dp"] == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.pop(ENV, None)  # only the job decides whether the engine is patched
    if job["patched"]:
        patch_vllm()


def _check(job: dict) -> None:
    if job["runner"] not in RUNNERS:
        raise InputError(f"runner: expected one of {', '.join(RUNNERS)}, got {job['runner']!r}")
    for i, spec in enumerate(job["runs"]):
        if spec["mode"] not in MODES:
            raise InputError(f"runs[{i}].mode: expected one of {', '.join(MODES)}, got {spec['mode']!r:.80}")
        if spec["mode"] == "prompt_logprobs" and not job.get("tokens_from"):
            raise InputError("tokens_from: must be a logprob file for mode prompt_logprobs, got none")
    if not job["prompts"]:
        raise InputError("prompts: must have at least one prompt, got none")
    if not all(job["prompts"]):
        raise InputError(f"prompts[{job['prompts'].index([])}]: must have at least one token id, got none")


def engine(job: dict, **overrides):
    """Return the job's engine, a ``vllm.LLM`` or `Replicas`; `overrides` are passed to ``vllm.LLM``."""
    from vllm import LLM

    longest = max(len(p) for p in job["prompts"]) + job["max_tokens"] + 1
    arguments: dict[str, Any] = (
        dict(
            dtype=job["dtype"],
            tensor_parallel_size=job["tp"],
            enable_expert_parallel=job.get("expert_parallel", False),
            seed=job["seed"],
            skip_tokenizer_init=True,
            enforce_eager=job["eager"],
            max_model_len=longest,
            max_num_seqs=len(job["prompts"]),
            max_num_batched_tokens=job["max_num_batched_tokens"] or max(2048, longest),
            enable_chunked_prefill=True,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=cache_bytes(job["model"], job["dtype"], len(job["prompts"]), longest),
            gpu_memory_utilization=GPU_SHARE / config.ranks_per_gpu,
        )
        | overrides
    )
    arguments = shared_gpus(job["tp"] * job["dp"]) | arguments
    if job["dp"] > 1:
        return Replicas(job["model"], data_parallel_size=job["dp"], **arguments)
    return LLM(job["model"], **arguments)


def shared_gpus(ranks: int) -> dict[str, Any]:
    """Return arguments of ``vllm.LLM`` for ranks that share GPUs (`most_ranks`); {} if no GPU is shared.

    vLLM's option ``device_ids`` rejects duplicates, so its resolved value is patched instead.
    """
    if not 0 < torch.cuda.device_count() < ranks:
        return {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    ids = [current_platform.device_control_id_to_physical_device_id(name) for name in gpus()]
    EngineArgs._resolve_device_ids = lambda self: [ids[gpu_of(rank).index] for rank in range(ranks)]
    # vLLM's custom all-reduce maps peer GPU memory, so it needs one GPU per rank.
    return {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}


def cache_bytes(model: str | os.PathLike, dtype: str, sequences: int, longest: int) -> int:
    """Return the size of a KV cache that prevents preemption and eviction: twice `sequences` of `longest` tokens.

    model: HF directory. dtype: as in the job.
    """
    arch = read_architecture(model)
    token_bytes = 2 * arch.layers * arch.kv_heads * arch.head_dim * getattr(torch, dtype).itemsize
    return max(64 << 20, 2 * sequences * (longest + BLOCK_SIZE) * token_bytes)


def _sample(llm, job: dict, mode: str) -> Logprobs:
    from vllm import SamplingParams

    # The engine has the seed: per-request seeds make vLLM 0.32 fail on the CPU with chunked prefill.
    params = SamplingParams(
        max_tokens=job["max_tokens"], temperature=job["temperature"], ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
    if mode == "one":
        outputs = [llm.generate([p], params, use_tqdm=False)[0] for p in prompts]
    else:
        if mode == "prefix":
            llm.generate(prompts, params, use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    if mode == "prefix":
        missed = [
            i
            for i, (prompt, o) in enumerate(zip(job["prompts"], outputs, strict=True))
            if len(prompt) > BLOCK_SIZE and not o.num_cached_tokens
        ]
        if missed:
            raise RuntimeError(
                f"mode prefix: every prompt of more than {BLOCK_SIZE} tokens must hit vLLM's prefix cache in its "
                f"second run, but {len(missed)} did not, first prompts[{missed[0]}]"
            )
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    steps = [o.outputs[0].logprobs for o in outputs]
    return _logprobs(llm, job, job["prompts"], tokens, steps)


def _full_sequences(job: dict) -> list[list[int]]:
    """Return prompt plus sampled tokens of each sequence of `tokens_from`."""
    sampled = load(job["tokens_from"])
    return [p + t for p, t in zip(sampled.prompts, sampled.tokens, strict=True)]


def _evaluate(llm, job: dict) -> Logprobs:
    from vllm import SamplingParams

    sampled = load(job["tokens_from"])
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": sequence} for sequence in _full_sequences(job)], params, use_tqdm=False
    )
    steps = [o.prompt_logprobs[len(prompt) :] for prompt, o in zip(sampled.prompts, outputs, strict=True)]
    return _logprobs(llm, job, sampled.prompts, sampled.tokens, steps)


def _logprobs(llm, job: dict, prompts: list[list[int]], tokens: list[list[int]], steps: list[list[dict]]) -> Logprobs:
    """Build the logprobs of `tokens`; `steps` holds, per sequence and token, vLLM's logprobs by token id."""
    import vllm

    values = [
        [step[t].logprob for t, step in zip(*sequence, strict=True)] for sequence in zip(tokens, steps, strict=True)
    ]
    meta = {
        "engine": f"vllm {vllm.__version__}",
        **{
            k: str(job[k])
            for k in ("dtype", "tp", "dp", "expert_parallel", "eager", "runner", "max_num_batched_tokens")
        },
    }
    status = worker_status(llm)[0]
    known = status["patched"] and job["dp"] == 1  # replicas are engines of their own
    # vLLM returns Python floats converted from fp32, so the conversion back is exact.
    return Logprobs(
        prompts,
        tokens,
        [torch.tensor(row, dtype=torch.float32) for row in values],
        status.get("contract", "stock"),
        meta,
        weights=str(fingerprint(llm)) if known else None,
        epochs=[torch.full((len(row),), status["epoch"]) for row in values] if known else None,
        temperature=1.0,  # raw logprobs
    )


def main(arguments: list[str]) -> None:
    run(json.loads(Path(arguments[0]).read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
