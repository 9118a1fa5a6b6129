"""verl's GRPO with and without the external_lib setting: ``make gpu-verl``, or ``python benchmarks/verl_grpo.py``.

The benchmark runs `examples/verl/grpo.sh` on a random-weight model with Qwen3-0.6B's sizes and a toy task. Both are
generated, so nothing is downloaded. verl's metrics of each step, from its file logger, are rows of
benchmarks/results/h200/verl.jsonl (``lib/results.py``), which ``tables.py`` reads. A run has ``aligned``,
``rollout_tp``, ``training`` (the parallel layout, such as "PP 2"), the environment, the model's sizes, verl's
overrides, the ranks per GPU and the duration. verl.svg plots training/rollout_probs_diff_max. The example has what any
run needs; `command` adds the settings of this toy task.

Ranks share GPUs if there are fewer GPUs than ranks; see "Fewer GPUs than ranks" in docs/gpu.md. A run that fails or
times out leaves its log and metrics beside the results, and the next run starts. Ray's own logs are in
/tmp/ray/session_latest/logs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from lib.options import add_only_stale
from lib.results import H200, ROOT, distinct, read, run_info, sources, stale, write

from alignkit.jobs.model import make_checkpoint
from alignkit.jobs.terminal import interrupted_by_sigterm
from alignkit.runtime.machine import gpus, no_room

MODEL = dict(
    hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936, tied=True, std=0.03
)
SMALL = MODEL | dict(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=2048)
PAD, END = "<pad>", "<end>"
SPECIAL = ("\n", "<|im_end|>", PAD, END)
"""Last words of the vocabulary; verl requires the first two, which end a turn of Qwen."""
KEY = ("run", "step")
METRICS = (
    "training/rollout",
    "rollout_corr/",
    "critic/rewards/mean",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/old_log_prob",
    "timing_s/update_",
)
"""Prefixes of the recorded metrics."""
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"
METRICS_PATH = "VERL_FILE_LOGGER_PATH"
PROMPTS = 256


@dataclass(frozen=True)
class Layout:
    """Number of ranks, parallel sizes of training, and vLLM's tensor-parallel size."""

    gpus: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    rollout_tp: int = 1

    @property
    def training(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "CP": self.cp}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "TP 1"

    @property
    def ranks_per_gpu(self) -> int:
        return math.ceil(self.gpus / (len(gpus()) or self.gpus))


LAYOUTS = {
    "one": Layout(1),
    "pp2": Layout(2, pp=2, rollout_tp=2),
    "cp2": Layout(2, cp=2, rollout_tp=2),
    "tp2": Layout(2, tp=2, rollout_tp=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="parallel layouts to run; default: one")
    parser.add_argument("--only", choices=("aligned", "stock"), help="run one of the two variants of each layout")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run")
    parser.add_argument("--small", action="store_true", help="use a small model with two layers")
    parser.add_argument("--layers", type=int, help="layers of the model; default: 28, or 2 with --small")
    parser.add_argument("--out", type=Path, default=H200 / "verl.jsonl")
    parser.add_argument("--timeout", type=float, default=1500, help="time limit of a run, in seconds")
    add_only_stale(parser)
    parser.add_argument("overrides", nargs="*", help="overrides of verl's configuration")
    args = parser.parse_args()
    if not args.layouts:
        args.layouts = [name for name in LAYOUTS if not no_room(LAYOUTS[name].gpus)] if args.only_stale else ["one"]
    if problem := no_room(max(LAYOUTS[name].gpus for name in args.layouts)):
        parser.error(f"--layouts: {problem}")
    sizes = (SMALL if args.small else MODEL) | ({"layers": args.layers} if args.layers else {})
    variants = [
        (name, aligned)
        for name in args.layouts
        for aligned in (True, False)
        if args.only in (None, "aligned" if aligned else "stock")
    ]
    if args.only_stale:
        found = distinct(stale(read(args.out), sources(), KEY), "run")
        variants = [each for each in variants if (title(variant(LAYOUTS[each[0]], each[1])),) in found]
    with interrupted_by_sigterm(), tempfile.TemporaryDirectory() as folder:
        files = write_task(Path(folder), sizes)
        failed = [name for name, aligned in variants if not run(args, LAYOUTS[name], aligned, sizes, *files)]
    plot(args.out)
    sys.exit(f"failed: {', '.join(dict.fromkeys(failed))}" if failed else 0)


def write_task(folder: Path, sizes: dict) -> tuple[Path, Path, Path]:
    """Write a model with tokenizer, prompts, and a reward function: the share of even words in the sample."""
    model = make_checkpoint(folder / "model", dtype=torch.bfloat16, **sizes)
    write_tokenizer(model, sizes["vocab"] - 267)  # like Qwen3's, the tokenizer is smaller than the padded vocab
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for index in range(PROMPTS):
        length = int(torch.randint(8, 200, (), generator=generator))
        words = torch.randint(0, sizes["vocab"] - 300, (length,), generator=generator).tolist()
        prompts.append(
            {
                "data_source": "even",
                "prompt": [{"role": "user", "content": " ".join(f"w{word}" for word in words)}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
        )
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    reward = folder / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n"
        "    words = [w for w in solution_str.split() if w[1:].isdigit()]\n"
        "    return sum(int(w[1:]) % 2 == 0 for w in words) / max(len(words), 1)\n"
    )
    return model, data, reward


def write_tokenizer(model: Path, size: int) -> None:
    """Write a tokenizer of `size` words: w0, w1, ..., and at the end `SPECIAL`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(size - len(SPECIAL))}
    words |= {word: len(words) + i for i, word in enumerate(SPECIAL)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Split(" ", "removed")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token="w0")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(model)


def command(layout: Layout, aligned: bool, reward: Path, overrides: list[str]) -> list[str]:
    """Return the command line of the example script with this benchmark's overrides."""
    added = [
        f"reward.custom_reward_function.path={reward}",
        "trainer.logger=[console,file]",
        # verl's v1 trainer requires the package transfer_queue.
        f"trainer.use_v1={importlib.util.find_spec('transfer_queue') is not None}",
        # verl's defaults require Apex's wgrad GEMM and flash-attn; both runs disable them.
        f"+{TRANSFORMER}.gradient_accumulation_fusion=False",
        f"{TRANSFORMER}.attention_backend=auto",
        # With random weights, the end token would occur at random.
        "actor_rollout_ref.rollout.ignore_eos=True",
        # Large enough that each step changes the bf16 weights.
        "actor_rollout_ref.actor.optim.lr=1e-4",
        # More processes and CUDA graphs would lengthen the startup without a benefit for this task.
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,8,16,32,64]",
        *([] if aligned else [f"{EXTERNAL_LIB}=null"]),
        *shared_gpu_settings(layout)[0],
    ]
    return ["bash", str(ROOT / "examples/verl/grpo.sh"), *added, *overrides]


def shared_gpu_settings(layout: Layout) -> tuple[list[str], dict[str, str]]:
    """Return overrides of verl's configuration and environment variables for ranks that share GPUs; else both empty.

    The variables described in docs/gpu.md ("Fewer GPUs than ranks") must be set in addition.
    """
    if layout.ranks_per_gpu == 1:
        return [], {}
    names = gpus()
    ranks = range(layout.gpus)
    # vLLM rejects duplicate device ids, but parses them with int(): +0 and +00 are the same GPU.
    ids = ",".join("+" + "0" * (rank // len(names)) + names[rank % len(names)] for rank in ranks)
    vllm = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    overrides = [
        f"+ray_kwargs.ray_init.num_gpus={layout.gpus}",
        f"+{vllm}.device_ids='{ids}'",
        # vLLM's custom all-reduce reads the memory of other GPUs.
        f"+{vllm}.disable_custom_all_reduce=True",
        # vLLM's memory profiling would count other ranks' allocations.
        f"+{vllm}.kv_cache_memory_bytes={4 << 30}",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={0.4 / layout.ranks_per_gpu}",
    ]
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(names[rank % len(names)] for rank in ranks),
        "SHARED_GPUS": ",".join(names),
        "VERL_USE_EXTERNAL_MODULES": "lib.shared_gpu",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")])),
        "RAY_LD_PRELOAD_ON_WORKERS": "1",  # for a preloaded NCCL
        "NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "1"),  # NCCL's default; verl's servers set 0 otherwise
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    }
    return overrides, environment


def run(
    args: argparse.Namespace, layout: Layout, aligned: bool, model_sizes: dict, model: Path, data: Path, reward: Path
) -> bool:
    name = f"{'aligned' if aligned else 'stock'}-{layout.training.replace(' ', '').replace(',', '-')}"
    metrics, log = (args.out.absolute().with_name(f"verl-{name}.{kind}") for kind in ("jsonl", "log"))
    sizes = {"GPUS": layout.gpus, "TRAIN_TP": layout.tp, "TRAIN_PP": layout.pp, "TRAIN_CP": layout.cp}
    environment = os.environ | shared_gpu_settings(layout)[1] | {key: str(value) for key, value in sizes.items()}
    environment |= {"MODEL_PATH": str(model), "TRAIN": str(data), "STEPS": str(args.steps)}
    environment |= {"ROLLOUT_TP": str(layout.rollout_tp), METRICS_PATH: str(metrics), "HF_HUB_OFFLINE": "1"}
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.unlink(missing_ok=True)
    print(f"{name}: log in {log}", flush=True)
    started = time.monotonic()
    status = launch(command(layout, aligned, reward, args.overrides), environment, log, args.timeout)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    recorded = [
        {"step": row["step"]} | {key: value for key, value in row["data"].items() if key.startswith(METRICS)}
        for row in steps
        if any(key.startswith("training/rollout") for key in row["data"])
    ]
    seconds = time.monotonic() - started
    worst = max((row["training/rollout_probs_diff_max"] for row in recorded), default=None)
    print(
        f"{name}: status {status}, {len(recorded)} steps, training/rollout_probs_diff_max {worst}, {seconds:.0f} s",
        flush=True,
    )
    if status or len(recorded) < args.steps:
        print(reasons(log.read_text(errors="replace")), flush=True)
        return False
    log.unlink()
    metrics.unlink()
    more = {"model": model_sizes, "overrides": args.overrides, "seconds": round(seconds)}
    record(args.out, variant(layout, aligned), recorded, ranks_per_gpu=layout.ranks_per_gpu, **more)
    return True


def launch(arguments: list[str], environment: dict[str, str], log: Path, timeout: float) -> int:
    """Run a command in the model's folder and return its exit status, 124 on timeout; kill all its descendants."""
    descendants: set[psutil.Process] = set()
    deadline = time.monotonic() + timeout
    with log.open("w") as output:
        process = psutil.Popen(
            arguments,
            env=environment | {"PYTHONFAULTHANDLER": "1"},  # SIGABRT prints Python tracebacks
            cwd=Path(environment["MODEL_PATH"]).parent,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendants.update(process.children(recursive=True))
                with contextlib.suppress(psutil.TimeoutExpired):
                    return process.wait(0.5)
            signal_all([*descendants, process], signal.SIGABRT)
            return 124
        finally:  # vLLM's processes may outlive Ray's, and Ray's may outlive the script
            _, alive = psutil.wait_procs(descendants, timeout=10)
            signal_all([*alive, process], signal.SIGKILL)
            psutil.wait_procs([*alive, process], timeout=10)


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def reasons(log: str, lines: int = 25) -> str:
    """Return the last distinct lines of a log that name an exception, and its last lines."""
    plain = [re.sub(r"\x1b\[\d+m|\(\w+ pid=\d+\)", "", line).strip()[:500] for line in log.splitlines()]
    raised = dict.fromkeys(line for line in reversed(plain) if re.search(r"\w(Error|Exception)\b.*:|\brefused\b", line))
    return "\n".join([*reversed(list(raised)[:lines]), "...", *plain[-lines:]])


def record(out: Path, variant: dict, steps: list[dict], **more) -> None:
    """Write a run, which replaces the run of the same `variant`; `more` are further fields of the run."""
    name, old = title(variant), read(out)
    info = variant | run_info(packages=("verl", "ray", "transformer-engine", "megatron-bridge"), **more)
    others = [row for row in old.get("rows", []) if row["run"] != name]
    rows = [*others, *(step | {"run": name} for step in steps)]
    write(out, {"runs": old.get("runs", {}) | {name: info}, "rows": rows})


def variant(layout: Layout, aligned: bool) -> dict:
    """Return the fields of a run that `title` names."""
    return {"aligned": aligned, "rollout_tp": layout.rollout_tp, "training": layout.training}


def title(variant: dict) -> str:
    """Return the name of a run: the variant of training and rollout, without the environment."""
    kind = "aligned" if variant["aligned"] else "stock"
    return f"{kind}: rollout TP {variant['rollout_tp']}, training {variant['training']}"


def plot(out: Path) -> None:
    """Plot the runs of a result file to an SVG file beside it."""
    contents = read(out)
    if not contents:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for name, run_of in contents["runs"].items():
        label = name + (f" ({ranks} ranks per GPU)" if (ranks := run_of["ranks_per_gpu"]) > 1 else "")
        steps = [row for row in contents["rows"] if row["run"] == name]
        values = [step["training/rollout_probs_diff_max"] for step in steps]
        axes.plot([step["step"] for step in steps], values, label=label, marker="." if run_of["aligned"] else None)
    axes.set(xlabel="step", ylabel="training/rollout_probs_diff_max", ylim=(-0.02, None))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
