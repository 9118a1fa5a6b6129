"""One vLLM engine in this process: ``python -m alignkit.check.rollout JOB.json`` writes logprob files.

JOB: ``model`` (HF directory), ``dtype`` ("bfloat16" | "float32"), ``patched`` (bool), ``tp`` (int),
``dp`` (optional: 1; replicas, of ``tp`` ranks each, to which the prompts go in turn), ``expert_parallel`` (optional: false;
true gives each rank whole experts),
``eager`` (optional: true; false is vLLM's default, torch.compile and CUDA graphs), ``runner`` (optional: "v1",
or "v2"; vLLM's model runner), ``max_num_batched_tokens`` (int, so that longer prompts are prefilled in chunks, or
null), ``prompts`` (token ids), ``max_tokens``, ``temperature``, ``seed``, ``tokens_from`` (a logprob file, for
"prompt_logprobs") and ``runs``, a list of ``{"mode", "out"}``, in a model with experts also ``"routing": true``, to
save what its routers say (eager, "v1", and not for "prefix"). The modes:

- ``batch``: all prompts at once.
- ``one``: one request at a time.
- ``prefix``: all prompts a second time, their cached blocks still warm.
- ``prompt_logprobs``: prompt and sampled tokens of ``tokens_from`` sent as a prompt.

Every mode starts from an empty prefix cache. The logprobs are raw: of the logits before temperature.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from alignkit.check.machine import gpu_of, gpus
from alignkit.check.replicas import PATIENCE, Replicas
from alignkit.check.routing import file_of
from alignkit.config import config
from alignkit.convert import read_architecture
from alignkit.drift import Logprobs, load, save
from alignkit.errors import InputError
from alignkit.vllm import patch_vllm, worker_status
from alignkit.vllm.patch import ENV

MODES = ("batch", "one", "prefix", "prompt_logprobs")
BLOCK_SIZE = 32
"""Of the KV cache; small, so that short prompts fill blocks and can hit the prefix cache."""
GPU_SHARE = 0.3
"""Of the memory of a GPU, vLLM starts only if this much is free; of a GPU that ranks share, each a part. What it takes is weights and
the cache below."""
RUNNERS = {"v1": "0", "v2": "1"}
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # one sampler for every row of the table
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Where the user's environment does not say otherwise."""
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""The same of eager engines: nothing in them is worth seconds of compilation."""


def run(job: dict) -> None:
    """Starts the engine, runs each of the job's runs in order, and writes their files.

    Raises InputError naming the job's field, UnsupportedError for a model that alignkit refuses (patched).
    """
    job = {"eager": True, "runner": "v1", "dp": 1, "expert_parallel": False} | job
    _check(job)
    prepare(job)
    routing = any(spec.get("routing") for spec in job["runs"])
    llm = engine(job, **({"worker_extension_cls": "alignkit.check.routing.Recording"} if routing else {}))
    for spec in job["runs"]:
        llm.reset_prefix_cache()
        mode = spec["mode"]
        if spec.get("routing"):
            longest = max(map(len, job["prompts"])) + job["max_tokens"] + 1
            asked = _whole(job) if mode == "prompt_logprobs" else job["prompts"]
            llm.collective_rpc("alignkit_watch_routers", args=(asked, longest))
        logprobs = _evaluate(llm, job) if mode == "prompt_logprobs" else _sample(llm, job, mode)
        logprobs.meta["mode"] = mode
        if spec.get("routing"):
            lengths = [len(p) + len(t) for p, t in zip(logprobs.prompts, logprobs.tokens, strict=True)]
            llm.collective_rpc("alignkit_save_routing", args=(lengths, str(file_of(spec["out"]))))
        save(spec["out"], logprobs)
    shut_down(llm)


def shut_down(llm) -> None:
    """Ends the processes of an `engine`."""
    if isinstance(llm, Replicas):
        llm.shutdown()
    else:
        llm.llm_engine.engine_core.shutdown(timeout=PATIENCE)


def prepare(job: dict) -> None:
    """The process's environment and the patch, before vLLM is imported."""
    for name, value in (ENVIRON | (EAGER if job["eager"] else {})).items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = RUNNERS[job["runner"]]
    if job["tp"] * job["dp"] == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.pop(ENV, None)  # a stock row stays stock whatever the user's environment asks for
    if job["patched"]:
        patch_vllm()


def _check(job: dict) -> None:
    if job["runner"] not in RUNNERS:
        raise InputError(f"runner: {job['runner']!r} is none of {', '.join(RUNNERS)}")
    for spec in job["runs"]:
        if spec["mode"] not in MODES:
            raise InputError(f"runs: mode {spec['mode']!r} is none of {', '.join(MODES)}")
        if spec["mode"] == "prompt_logprobs" and not job.get("tokens_from"):
            raise InputError("tokens_from: prompt_logprobs needs a logprob file")
    if not job["prompts"] or not all(job["prompts"]):
        raise InputError("prompts: none, or an empty one")


def engine(job: dict, **overrides):
    """The job's engine, a ``vllm.LLM`` or `Replicas`; `overrides` are arguments of ``vllm.LLM``."""
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
    """Arguments of ``vllm.LLM`` for ranks that share GPUs (`most_ranks`); none where there are as many, or no GPU. vLLM's own option
    for which rank has which GPU (``device_ids``) takes none twice, so what it is resolved to is said instead."""
    if not 0 < torch.cuda.device_count() < ranks:
        return {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    ids = [current_platform.device_control_id_to_physical_device_id(name) for name in gpus()]
    EngineArgs._resolve_device_ids = lambda self: [ids[gpu_of(rank).index] for rank in range(ranks)]
    # What vLLM has of its own for sums reads the other GPU's memory.
    return {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}


def cache_bytes(model: str | os.PathLike, dtype: str, sequences: int, longest: int) -> int:
    """Bytes of a KV cache for twice that many sequences of the longest length, so that nothing is preempted or
    evicted; model is an HF directory, dtype as in the JOB."""
    arch = read_architecture(model)
    position = 2 * arch.layers * arch.kv_heads * arch.head_dim * getattr(torch, dtype).itemsize
    return max(64 << 20, 2 * sequences * (longest + BLOCK_SIZE) * position)


def _sample(llm, job: dict, mode: str) -> Logprobs:
    from vllm import SamplingParams

    # The seed is the engine's. A seed per request would make vLLM 0.32 fail on the CPU with chunked prefill.
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
            raise RuntimeError(f"the prefix cache was not hit by prompts {missed}")
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    steps = [o.outputs[0].logprobs for o in outputs]
    return _logprobs(llm, job, job["prompts"], tokens, steps)


def _whole(job: dict) -> list[list[int]]:
    """Prompts and sampled tokens of `tokens_from`."""
    sampled = load(job["tokens_from"])
    return [p + t for p, t in zip(sampled.prompts, sampled.tokens, strict=True)]


def _evaluate(llm, job: dict) -> Logprobs:
    from vllm import SamplingParams

    sampled = load(job["tokens_from"])
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": whole} for whole in _whole(job)], params, use_tqdm=False)
    steps = [o.prompt_logprobs[len(prompt) :] for prompt, o in zip(sampled.prompts, outputs, strict=True)]
    return _logprobs(llm, job, sampled.prompts, sampled.tokens, steps)


def _logprobs(llm, job: dict, prompts: list[list[int]], tokens: list[list[int]], steps: list[list[dict]]) -> Logprobs:
    """steps: per token of each sequence, vLLM's logprobs by token id."""
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
    # vLLM hands out Python floats that were fp32: the way back is exact. The contract is the workers' word.
    return Logprobs(
        prompts,
        tokens,
        [torch.tensor(row, dtype=torch.float32) for row in values],
        worker_status(llm)[0].get("contract", "stock"),
        meta,
    )


def main(arguments: list[str]) -> None:
    run(json.loads(Path(arguments[0]).read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
