"""Cost of the identity of weights in vLLM engines (docs/identity.md): ``make gpu-identity``; options in IDENTITY_ARGS.

One engine per model, in a process of its own, with random weights. The result file is
benchmarks/results/h200/identity.jsonl (``lib/results.py``). The fields of a row, which ``tables.py`` reads:

``case``, ``model``
    "fingerprint" or "steps of N requests", and the name of a size (``lib/models.py``).
``gb``, ``ms``, ``read_ms``
    Fingerprint: gigabytes (10^9) of weights; median time of the worker's sums, and time of reading the weights at the
    speed of a copy, in milliseconds.
``step_ms``, ``worker_us``, ``front_end_us``, ``share``
    Steps: time of a decode step; time that epochs take of it in the worker and in the front end, in microseconds; and
    their share of the step, if both run in one process. In two processes, vLLM's default, the front end runs beside the
    next step.
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
from pathlib import Path

from lib.models import MOE_SIZES, SIZES
from lib.options import parser as options_parser
from lib.results import H200, merge, read, run_info, run_name, stale, write
from lib.stopwatch import Stopwatch, copy_speed

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
    """Return the times of the sums of all weights, and of reading them at the speed of a copy."""
    from alignkit.vllm.fingerprint import shards

    worker = llm.llm_engine.model_executor.driver_worker.worker
    found = (shard.tensor for _, shard in shards(worker.model_runner.get_model(), worker._arch))
    tensors = {tensor.data_ptr(): tensor for tensor in found}
    size = sum(tensor.nbytes for tensor in tensors.values())
    times = []
    for _ in range(ROUNDS + 1):  # the first round compiles
        began = time.perf_counter()
        worker.alignkit_weights()  # ends with a copy to the host
        times.append(time.perf_counter() - began)
    speed = copy_speed(Stopwatch(worker.device))
    return {
        "case": "fingerprint",
        "gb": round(size / 1e9, 1),
        "ms": round(1e3 * statistics.median(times[1:]), 2),
        "read_ms": round(1e3 * size / speed, 2),
    }


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
    """Return the time of decode steps, and of what epochs add to it in the worker and in the front end."""
    from vllm import SamplingParams

    from alignkit.vllm import client, epochs, updates

    worker, front_end = Timed(), Timed()
    worker.replace(updates.Updates, "step")
    for owner, name in (
        (epochs.Epochs, "arrived"),
        (epochs, "holder"),
        (client.AlignedClient, "_add"),
        (client.AlignedClient, "_tell"),
    ):
        front_end.replace(owner, name)
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
    rows = []
    for batch in BATCHES:
        found = []
        for number in range(ROUNDS // 3 + 1):
            prompts = [{"prompt_token_ids": [number, i % 100, 7]} for i in range(batch)]
            worker.seconds = front_end.seconds = 0.0
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if number:
                found.append((time.perf_counter() - began, worker.seconds, front_end.seconds))
        step, in_worker, in_front_end = (1e6 * statistics.median(each) / TOKENS for each in zip(*found, strict=True))
        rows.append(
            {
                "case": f"steps of {batch} requests",
                "step_ms": round(step / 1e3, 3),
                "worker_us": round(in_worker, 2),
                "front_end_us": round(in_front_end, 2),
                "share": round(statistics.median((a + b) / whole for whole, a, b in found), 6),
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
