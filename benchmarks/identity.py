"""Cost of the identity of weights in vLLM engines (docs/identity.md): ``make gpu-identity``; options in IDENTITY_ARGS.

One engine per model, in a process of its own, with random weights. The result file is
benchmarks/results/h200/identity.jsonl (``lib/results.py``). The fields of a row, which ``tables.py`` reads:

``case``, ``model``
    "fingerprint" or "steps of N requests", and the name of a size (``lib/models.py``).
``gb``, ``ms``, ``read_ms``
    Fingerprint: gigabytes (10^9) of weights; median time of the worker's sums and of a `torch.sum` that reads the same
    tensors once, interleaved, in milliseconds.
``step_ms``, ``us``, ``share``
    Steps: time of a decode step; time in it that epochs take, in microseconds; median of their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lib.models import MOE_SIZES, SIZES
from lib.options import parser as options_parser
from lib.results import H200, merge, read, run_info, run_name, stale, write

from alignkit.jobs.model import make_checkpoint

KEY = ("case", "model")
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")
BATCHES = (1, 32, 256)
STEP_MODEL = "qwen3-0.6b"
"""Small model, whose steps are short."""
TOKENS = 200
ROUNDS = 15
RESULT = "identity row: "
"""Start of a line with a row, among an engine's output."""


def start(model: str, folder: Path):
    """Return an aligned engine with random weights."""
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    patch_vllm()
    path = make_checkpoint(folder, weights=False, **(SIZES | MOE_SIZES)[model])
    return LLM(
        str(path),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=model != STEP_MODEL,
        max_model_len=512,
        max_num_seqs=max(BATCHES),
        kv_cache_memory_bytes=(20 << 30) if model == STEP_MODEL else (1 << 30),
        enable_prefix_caching=False,
    )


def fingerprint(llm) -> dict:
    """Return the times of the sums of all weights and of reading them."""
    from alignkit.vllm.fingerprint import shards

    worker = llm.llm_engine.model_executor.driver_worker.worker
    model, device = worker.model_runner.get_model(), worker.device
    tensors = {shard.tensor.data_ptr(): shard.tensor for shard in shards(model, worker._arch)}

    def read_once() -> None:
        total = torch.zeros((), dtype=torch.int64, device=device)
        for tensor in tensors.values():
            total += tensor.view(torch.int32).sum()
        total.item()

    times: dict[Callable, list[float]] = {worker.alignkit_weights: [], read_once: []}
    for number in range(ROUNDS + 1):  # the first round compiles
        for run, seconds in times.items():
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            run()
            torch.cuda.synchronize(device)
            if number:
                seconds.append(time.perf_counter() - began)
    ms, read_ms = (1e3 * statistics.median(seconds) for seconds in times.values())
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {"case": "fingerprint", "gb": round(size / 1e9, 1), "ms": round(ms, 2), "read_ms": round(read_ms, 2)}


class Timed:
    """Time spent in functions that are replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def replace(self, owner, name: str) -> None:
        function = getattr(owner, name)

        def timed(*args):
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def steps(llm) -> list[dict]:
    """Return the time of decode steps and the share of it that epochs take, front end and worker in one process."""
    from vllm import SamplingParams

    from alignkit.vllm import client, epochs, updates

    timed = Timed()
    timed.replace(epochs.Epochs, "arrived")
    timed.replace(epochs, "holder")
    timed.replace(updates.Updates, "step")
    timed.replace(client.AlignedClient, "_add")
    timed.replace(client.AlignedClient, "_tell")
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
    rows = []
    for batch in BATCHES:
        found = []
        for number in range(ROUNDS // 3 + 1):
            prompts = [{"prompt_token_ids": [number, i % 100, 7]} for i in range(batch)]
            timed.seconds, began = 0.0, time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if number:
                found.append((time.perf_counter() - began, timed.seconds))
        step, own = (statistics.median(seconds) / TOKENS for seconds in zip(*found, strict=True))
        share = statistics.median(own / seconds for seconds, own in found)
        rows.append(
            {
                "case": f"steps of {batch} requests",
                "step_ms": round(1e3 * step, 3),
                "us": round(1e6 * own, 2),
                "share": round(share, 6),
            }
        )
    return rows


def measure(model: str) -> None:
    """Print the rows of one model."""
    with tempfile.TemporaryDirectory() as folder:
        llm = start(model, Path(folder) / "model")
        for row in [fingerprint(llm), *(steps(llm) if model == STEP_MODEL else [])]:
            print(RESULT + json.dumps({**row, "model": model}), flush=True)


def planned(options: argparse.Namespace, contents: dict, sources: str) -> list[str]:
    """Return the models to measure."""
    if not options.only_stale:
        return options.models
    old = {row["model"] for row in stale(contents, sources, KEY)}
    return [model for model in options.models if model in old]


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser(__doc__, H200 / "identity.jsonl")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to measure")
    parser.add_argument("--one", choices=MODELS, help="print the rows of one model and store nothing")
    options = parser.parse_args(arguments)
    if options.one:
        measure(options.one)
        return 0
    contents = read(options.json)
    name, info = run_name(), run_info(packages=("vllm",))
    rows: list[dict] = []
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    for model in planned(options, contents, info["sources"]):
        command = [sys.executable, __file__, "--one", model]
        done = subprocess.run(command, env=environment | os.environ, stdout=subprocess.PIPE, text=True, check=False)
        found = [json.loads(line.removeprefix(RESULT)) for line in done.stdout.splitlines() if line.startswith(RESULT)]
        if done.returncode or not found:
            print(f"{model}: exit status {done.returncode}\n{done.stdout[-2000:]}")
            return 1
        rows += found
        print("\n".join(map(str, found)), flush=True)
        write(options.json, merge(contents, name, info, rows, KEY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
