"""Timing of one vLLM engine in this process: ``cost.py`` and ``long.py`` run ``python -m cost_rollout JOB.json``.

JOB has ``engine`` ("stock" | "batch_invariant" | "aligned"), ``model`` (HF directory), ``load_format`` (of the
weights), ``eager`` (bool), ``tp``, ``cases``, ``repeats``, ``turns`` (arguments of `Turns`), ``runs`` (``[{"out"}]``)
and `OPTIONS`. A case is ``{"name", "lengths", "max_tokens", "profile"}``: one prompt per length, all enqueued before
the engine starts; the tokens to sample per prompt; and the phase to profile, "prefill", "decode" or null. Each repeat
has new prompts, which miss the prefix cache. With ``"cached": true`` a case reuses the prompts of the last repeat
before it, which hit the prefix cache except for their last block. ``"repeats"`` overrides the job's repeats for a case.

OUT has the seconds of each case and repeat, the profiles, and the engine's settings. It is rewritten after each case.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore

from alignkit.jobs.job import draw_prompts
from alignkit.jobs.rollout import GPU_SHARE, cache_bytes, shut_down
from alignkit.vllm import patch_vllm, worker_status

OPTIONS = {
    "warm_up": None,  # cases to run before timing; None: all of `cases`
    "prefix_caching": False,
    "captures": None,  # CUDA graph capture sizes; None: vLLM's default
}
"""Optional fields of a JOB and their defaults."""
PROFILED_TOKENS = 32
"""Tokens to decode in a profile, at most; enough that prefill is negligible."""
LARGEST_BLOCK = 128
"""Largest block size of the KV cache, in tokens: 128 on a CPU, 16 on GPUs."""
WARM_UP_SEED, PROFILE_SEED = 1 << 20, 1 << 21
"""Seeds of prompts that no repeat uses."""
_ENV = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # times of the engine's startup
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # starts the profiler in the worker
}


class Turns:
    """Interleaved turns of concurrent engines; the others idle during a turn.

    Other load on the machine varies from second to second, so interleaving exposes all engines to the same load.
    """

    def __init__(self, file: str, engine: int, engines: int, seconds: float):
        """Wait for all engines to start; a wait of more than `seconds`, here or for a turn, is an error."""
        self._store, self._next, self._engines = FileStore(file, engines), engine, engines
        self._store.set_timeout(timedelta(seconds=seconds))
        self._store.set(f"engine {engine}", "here")
        self._store.wait([f"engine {i}" for i in range(engines)])
        if engine == 0:
            self._store.set("turn 0", "")

    def __enter__(self) -> None:
        self._store.wait([f"turn {self._next}"])

    def __exit__(self, *_) -> None:
        self._store.set(f"turn {self._next + 1}", "")
        self._next += self._engines


def run(job: dict) -> None:
    """Start the engine, time all cases, and write the result."""
    job = OPTIONS | job
    for name, value in _ENV.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_BATCH_INVARIANT"] = "1" if job["engine"] == "batch_invariant" else "0"
    if job["engine"] == "aligned":
        patch_vllm()
    import vllm

    vocab = json.loads((Path(job["model"]) / "config.json").read_text())["vocab_size"]
    sequences = max(len(case["lengths"]) for case in job["cases"])
    longest = max(max(case["lengths"]) + case["max_tokens"] for case in job["cases"]) + 1
    # VLLM_BATCH_INVARIANT selects no attention backend.
    more = {"attention_backend": "FLASH_ATTN"} if job["engine"] == "batch_invariant" else {}
    if job["captures"] and not job["eager"]:
        more["compilation_config"] = {"cudagraph_capture_sizes": job["captures"]}
    # Cache room for 25% more tokens: no preemption, and repeated prompts stay cached.
    tokens = max(sum(case["lengths"]) + len(case["lengths"]) * case["max_tokens"] for case in job["cases"])
    started = time.perf_counter()
    llm = vllm.LLM(
        job["model"],
        load_format=job["load_format"],
        dtype="bfloat16",
        tensor_parallel_size=job["tp"],
        skip_tokenizer_init=True,
        enforce_eager=job["eager"],
        max_model_len=longest,
        max_num_seqs=sequences,
        enable_prefix_caching=job["prefix_caching"],
        seed=0,
        kv_cache_memory_bytes=cache_bytes(job["model"], "bfloat16", 1, tokens * 5 // 8) // job["tp"],
        gpu_memory_utilization=GPU_SHARE,
        **more,
    )
    config, out = llm.llm_engine.vllm_config, Path(job["runs"][0]["out"])
    result = {
        "engine": job["engine"],
        "start_seconds": round(time.perf_counter() - started, 1),
        "cases": [],
        "profiles": [],
        "mode": config.compilation_config.mode.name,
        "graphs": getattr(config.compilation_config.cudagraph_mode, "name", "NONE"),
        "v2_runner": config.use_v2_model_runner,
        "attention": llm.collective_rpc(_attention)[0],
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "status": worker_status(llm)[0],
    }

    def generate(case: dict, seed: int, max_tokens: int) -> float:
        """Return the seconds to process the prompts of a case."""
        params = vllm.SamplingParams(
            max_tokens=max_tokens, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False
        )
        prompts = [{"prompt_token_ids": p} for p in draw_prompts(vocab, seed, tuple(case["lengths"]))]
        # The paused scheduler makes all prompts start together; otherwise the first ones would start at random times.
        llm.sleep(level=0, mode="keep")
        llm.enqueue(prompts, params, use_tqdm=False)
        began = time.perf_counter()
        llm.wake_up(["scheduling"])
        outputs = llm.wait_for_completion(use_tqdm=False)
        seconds = time.perf_counter() - began
        count = sum(len(o.outputs[0].logprobs) for o in outputs)
        if count != len(prompts) * max_tokens:
            raise RuntimeError(
                f"logprobs: must be {len(prompts) * max_tokens}, one per prompt and sampled token, got {count}"
            )
        for o, length in zip(outputs, case["lengths"], strict=True):
            cached = o.num_cached_tokens or 0
            if case.get("cached") and cached < length - LARGEST_BLOCK:
                raise RuntimeError(
                    f"prefix cache: must hold at least {length - LARGEST_BLOCK} of {length} tokens of a repeated "
                    f"prompt, got {cached}"
                )
            if not case.get("cached") and cached > 0:
                raise RuntimeError(f"prefix cache: must hold no token of a new prompt, got {cached} of {length}")
        return seconds

    for i, case in enumerate(job["warm_up"] or job["cases"]):
        generate(case, WARM_UP_SEED + i, case["max_tokens"])  # compiles kernels
    # vLLM's servers do the same: otherwise a garbage collection of all imports would fall into an engine's turn.
    gc.collect()
    gc.freeze()
    turns = Turns(**job["turns"]) if job["turns"] else nullcontext()
    last = 0  # seed of the latest prompts
    for case in job["cases"]:
        times = []
        for _ in range(case.get("repeats", job["repeats"])):
            last += not case.get("cached")
            with turns:
                times.append(generate(case, last, case["max_tokens"]))
        if times:
            print(f"{case['name']}, {case['max_tokens']} tokens: {', '.join(f'{t:.3f}' for t in times)} s", flush=True)
            result["cases"].append(
                {
                    "name": case["name"],
                    "requests": len(case["lengths"]),
                    "prompt_tokens": sum(case["lengths"]),
                    "max_tokens": case["max_tokens"],
                    "cached": case.get("cached", False),
                    "seconds": times,
                }
            )
            out.write_text(json.dumps(result))
    for case in job["cases"]:
        if case["profile"]:
            tokens = 1 if case["profile"] == "prefill" else min(PROFILED_TOKENS, case["max_tokens"])
            with turns:
                llm.collective_rpc(_start)
                seconds = generate(case, PROFILE_SEED, tokens)
                result["profiles"].append(
                    {
                        "case": f"{case['name']}: {case['profile']}",
                        "wall_ms": seconds * 1e3,
                        "kernels": llm.collective_rpc(_stop)[0],
                    }
                )
    out.write_text(json.dumps(result))
    shut_down(llm)


# Functions that run in the worker, possibly another process.


def _start(worker) -> None:
    from lib import profiles

    worker.running_profile = profiles.start()


def _stop(worker) -> list[dict]:
    from lib import profiles

    return profiles.stop(worker.running_profile)


def _attention(worker) -> str:
    found = {type(m.impl).__name__ for m in worker.model_runner.get_model().modules() if hasattr(m, "impl")}
    return ", ".join(sorted(found))


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
