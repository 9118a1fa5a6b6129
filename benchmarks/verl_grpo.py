"""verl's GRPO with and without the line that aligns it: ``make gpu-verl``, or ``python benchmarks/verl_grpo.py``.

Runs `examples/verl/grpo.sh` on a random-weight model of Qwen3-0.6B's shapes and a toy task, both made here: nothing is
downloaded. verl's own metrics of every step, as its file logger writes them, go to verl.json:

    {"runs": [{"aligned", "rollout_tp", "training", "made_on", "steps": [{metric: value}]}]}

and verl.svg draws training/rollout_probs_diff_max of them. ``training``: how the ranks are laid out, such as "PP 2".
``made_on`` also has the sizes of the model, what was overridden, how many ranks shared a GPU, and the seconds of the run.
Ranks of a layout share GPUs where there are fewer, as in docs/gpu.md: "Fewer GPUs than ranks".
A run that fails, or takes longer than it may, leaves its log and the metrics of its steps beside the results, and the others
go on. What its Ray processes wrote themselves is under /tmp/ray/session_latest/logs.
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
from lib.results import H200, ROOT, made_on, read, write

from alignkit.check.machine import gpus, no_room
from alignkit.check.model import make_checkpoint

MODEL = dict(
    hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936, tied=True, std=0.03
)
SMALL = MODEL | dict(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=2048)
PAD, END = "<pad>", "<end>"
SPECIAL = ("\n", "<|im_end|>", PAD, END)
"""The last words. verl looks the first two up, which Qwen writes after a turn."""
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
"""How the names of the metrics that are kept begin."""
LINE = "actor_rollout_ref.model.external_lib"
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"
ROWS = "VERL_FILE_LOGGER_PATH"
PROMPTS = 256


@dataclass(frozen=True)
class Layout:
    """gpus of one host; tensor-, pipeline- and context-parallel sizes of training; rollout_tp: vLLM's."""

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
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["one"])
    parser.add_argument("--only", choices=("aligned", "stock"), help="one of the two runs of each layout")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a model of two layers, all of it smaller")
    parser.add_argument("--layers", type=int, help="of the model; default: 28, as Qwen3-0.6B, or those of --small")
    parser.add_argument("--out", type=Path, default=H200 / "verl.json")
    parser.add_argument("--timeout", type=float, default=1500, help="seconds that a run may take")
    parser.add_argument("overrides", nargs="*", help="of verl's configuration")
    args = parser.parse_args()
    if problem := no_room(max(LAYOUTS[name].gpus for name in args.layouts)):
        parser.error(f"--layouts: {problem}")
    sizes = (SMALL if args.small else MODEL) | ({"layers": args.layers} if args.layers else {})
    with tempfile.TemporaryDirectory() as folder:
        made = toy(Path(folder), sizes)
        failed = [
            name
            for name in args.layouts
            for aligned in (True, False)
            if args.only in (None, "aligned" if aligned else "stock")
            and not run(args, LAYOUTS[name], aligned, sizes, *made)
        ]
    plot(args.out)
    sys.exit(f"failed: {', '.join(dict.fromkeys(failed))}" if failed else 0)


def toy(folder: Path, sizes: dict) -> tuple[Path, Path, Path]:
    """A model with a tokenizer, prompts, and a reward: the share of even words in what was sampled."""
    model = make_checkpoint(folder / "model", dtype=torch.bfloat16, **sizes)
    write_tokenizer(model, sizes["vocab"] - 267)  # as Qwen3, whose tokenizer has fewer ids than its config.json says
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
    """A tokenizer of `size` words, w0, w1, ..., the last of them special ones."""
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
    """The example's script, with what this measurement adds."""
    more = [
        f"reward.custom_reward_function.path={reward}",
        "trainer.logger=[console,file]",
        # verl's newer trainer moves its data by a package of its own.
        f"trainer.use_v1={importlib.util.find_spec('transfer_queue') is not None}",
        # verl's defaults ask for Apex's product of weight gradients and for flash-attn; both runs do without.
        f"+{TRANSFORMER}.gradient_accumulation_fusion=False",
        f"{TRANSFORMER}.attention_backend=auto",
        # Sampled until the longest length: random weights end a sample anywhere.
        "actor_rollout_ref.rollout.ignore_eos=True",
        # So large that every step changes weights in bf16, and the rollout's with them.
        "actor_rollout_ref.actor.optim.lr=1e-4",
        # A toy task keeps one process of each kind busy, and vLLM at most 64 samples: the rest would only take time to start.
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,8,16,32,64]",
        *([] if aligned else [f"{LINE}=null"]),
        *shared(layout)[0],
    ]
    return ["bash", str(ROOT / "examples/verl/grpo.sh"), *more, *overrides]


def shared(layout: Layout) -> tuple[list[str], dict[str, str]]:
    """For ranks that share GPUs, overrides of verl's configuration and environment variables; nothing where none do.

    The environment must also hold what docs/gpu.md says of such ranks.
    """
    if layout.ranks_per_gpu == 1:
        return [], {}
    names = gpus()
    ranks = range(layout.gpus)
    # vLLM's option takes no name twice. It takes numbers as int() does, so +0 and +00 are names of the same GPU.
    ids = ",".join("+" + "0" * (rank // len(names)) + names[rank % len(names)] for rank in ranks)
    vllm = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    overrides = [
        f"+ray_kwargs.ray_init.num_gpus={layout.gpus}",
        f"+{vllm}.device_ids='{ids}'",
        # What vLLM has of its own for sums reads the other GPU's memory.
        f"+{vllm}.disable_custom_all_reduce=True",
        # A rank would measure what others allocate meanwhile.
        f"+{vllm}.kv_cache_memory_bytes={4 << 30}",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={0.4 / layout.ranks_per_gpu}",
    ]
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(names[rank % len(names)] for rank in ranks),
        "SHARED_GPUS": ",".join(names),
        "VERL_USE_EXTERNAL_MODULES": "lib.shared_gpu",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")])),
        "RAY_LD_PRELOAD_ON_WORKERS": "1",  # NCCL
        "NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "1"),  # NCCL's default, which verl changes in servers
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    }
    return overrides, environment


def run(
    args: argparse.Namespace, layout: Layout, aligned: bool, model_sizes: dict, model: Path, data: Path, reward: Path
) -> bool:
    name = f"{'aligned' if aligned else 'stock'}-{layout.training.replace(' ', '').replace(',', '-')}"
    rows, log = (args.out.absolute().with_name(f"verl-{name}.{kind}") for kind in ("jsonl", "log"))
    sizes = {"GPUS": layout.gpus, "TRAIN_TP": layout.tp, "TRAIN_PP": layout.pp, "TRAIN_CP": layout.cp}
    environment = os.environ | shared(layout)[1] | {key: str(value) for key, value in sizes.items()}
    environment |= {"MODEL_PATH": str(model), "TRAIN": str(data), "STEPS": str(args.steps)}
    environment |= {"ROLLOUT_TP": str(layout.rollout_tp), ROWS: str(rows), "HF_HUB_OFFLINE": "1"}
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.unlink(missing_ok=True)
    print(f"{name}: log in {log}", flush=True)
    started = time.monotonic()
    done = launch(command(layout, aligned, reward, args.overrides), environment, log, args.timeout)
    steps = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    kept = [
        {"step": row["step"]} | {key: value for key, value in row["data"].items() if key.startswith(METRICS)}
        for row in steps
        if any(key.startswith("training/rollout") for key in row["data"])
    ]
    seconds = time.monotonic() - started
    worst = max((row["training/rollout_probs_diff_max"] for row in kept), default=None)
    print(
        f"{name}: status {done}, {len(kept)} steps, training/rollout_probs_diff_max {worst}, {seconds:.0f} s",
        flush=True,
    )
    if done or len(kept) < args.steps:
        print(reasons(log.read_text(errors="replace")), flush=True)
        return False
    log.unlink()
    rows.unlink()
    key = {"aligned": aligned, "rollout_tp": layout.rollout_tp, "training": layout.training}
    more = {"model": model_sizes, "overrides": args.overrides, "seconds": round(seconds)}
    record(args.out, key, kept, ranks_per_gpu=layout.ranks_per_gpu, **more)
    return True


def launch(arguments: list[str], environment: dict[str, str], log: Path, timeout: float) -> int:
    """The exit status of a run, 124 if it took too long; nothing that it started is left. Its folder is that of the model."""
    family: set[psutil.Process] = set()
    ends = time.monotonic() + timeout
    with log.open("w") as output:
        process = psutil.Popen(
            arguments,
            env=environment | {"PYTHONFAULTHANDLER": "1"},  # a Python that is aborted says where it stood
            cwd=Path(environment["MODEL_PATH"]).parent,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while time.monotonic() < ends:
                with contextlib.suppress(psutil.NoSuchProcess):
                    family.update(process.children(recursive=True))
                with contextlib.suppress(psutil.TimeoutExpired):
                    return process.wait(0.5)
            signal_all([*family, process], signal.SIGABRT)
            return 124
        finally:  # vLLM's processes may outlive Ray's, and Ray's the one that started them
            _, alive = psutil.wait_procs(family, timeout=10)
            signal_all([*alive, process], signal.SIGKILL)
            psutil.wait_procs([*alive, process], timeout=10)


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def reasons(log: str, lines: int = 25) -> str:
    """The last lines of a log in which something raised, each once, and its last lines of all."""
    plain = [re.sub(r"\x1b\[\d+m|\(\w+ pid=\d+\)", "", line).strip()[:500] for line in log.splitlines()]
    raised = dict.fromkeys(line for line in reversed(plain) if re.search(r"\w(Error|Exception)\b.*:|\brefused\b", line))
    return "\n".join([*reversed(list(raised)[:lines]), "...", *plain[-lines:]])


def record(out: Path, key: dict, steps: list[dict], **more) -> None:
    """Puts a run in the place of the one with the same `key`, if there is one. more: what else it was made on."""
    others = [run for run in read(out).get("runs", []) if {name: run[name] for name in key} != key]
    info = made_on(packages=("verl", "ray", "transformer-engine", "megatron-bridge"), **more)
    write(out, {"runs": [*others, key | {"made_on": info, "steps": steps}]})


def plot(out: Path) -> None:
    """Draws the runs of a result file beside it."""
    runs = read(out).get("runs", [])
    if not runs:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for each in runs:
        label = (
            f"{'aligned' if each['aligned'] else 'stock'}: rollout TP {each['rollout_tp']}, training {each['training']}"
        )
        if (shared_by := each["made_on"]["ranks_per_gpu"]) > 1:
            label += f" ({shared_by} ranks on each GPU)"
        values = [step["training/rollout_probs_diff_max"] for step in each["steps"]]
        axes.plot(
            [step["step"] for step in each["steps"]], values, label=label, marker="." if each["aligned"] else None
        )
    axes.set(xlabel="step", ylabel="training/rollout_probs_diff_max", ylim=(-0.02, None))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
