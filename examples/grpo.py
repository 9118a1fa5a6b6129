"""On-policy GRPO: sample with vLLM, train with Megatron-core, load the new weights into the running engine, repeat.

    python examples/grpo.py                   # aligned: each token's importance ratio is exactly 1, the KL exactly 0
    python examples/grpo.py --stock           # unpatched engines; one step on a CPU, where stock vLLM repacks its
                                              # weights and cannot load new ones
    python examples/grpo.py --size large      # 8 layers, hidden size 1024, 151936 token ids, on one GPU
    python examples/grpo.py --model-family qwen3-moe    # an MoE model, without routing replay
    python examples/grpo.py --rows aligned.jsonl stock.jsonl --plot drift.png    # plot runs that --json wrote

The model is a Qwen3 or Qwen3-MoE with random weights; the reward is the share of even token ids. One process holds
both engines and a full training step: groups of samples, recomputed logprobs, clipped loss with a KL term, fp32 main
gradients and master weights (Megatron's DDP, AdamW), weight update. Each update is verified: the fingerprints of both
engines' weights must be equal. No importance-sampling correction is applied.
tests/e2e/test_grpo.py runs this file, and benchmarks/results holds rows that --json wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import alignkit
from alignkit.convert import read_architecture
from alignkit.drift import compare_tensors
from alignkit.jobs.model import make_checkpoint

IGNORE = -100
CLIP, KL_FACTOR = 0.2, 0.05
FAMILIES = ("qwen3", "qwen3-moe")
GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a training step.

    Attributes:
        model: Arguments of `make_checkpoint`.
        experts: Arguments that replace some of `model` for an MoE model.
        prompts: Number of prompts per step.
        longest: Length of the longest prompt, in tokens.
        group: Samples per prompt.
        sampled: Tokens per sample.
        rows: Samples per micro-batch.
        lr: Learning rate of AdamW.
    """

    model: dict
    experts: dict
    prompts: int
    longest: int
    group: int
    sampled: int
    rows: int
    lr: float


SIZES = {
    "small": Size(
        {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 512, "vocab": 2000},
        {"intermediate": 128, "experts": 16, "top_k": 4},
        prompts=4,
        longest=64,
        group=8,
        sampled=24,
        rows=16,
        lr=1e-3,
    ),
    "large": Size(
        {
            "layers": 8,
            "hidden": 1024,
            "heads": 16,
            "kv_heads": 8,
            "head_dim": 128,
            "intermediate": 3072,
            "vocab": 151936,
            "logit_std": 4.5,
        },
        {"intermediate": 768, "experts": 64, "top_k": 8},
        prompts=8,
        longest=256,
        group=8,
        sampled=64,
        rows=16,
        lr=1e-3,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="leave the engines unpatched")
    parser.add_argument("--model-family", choices=FAMILIES, default=FAMILIES[0], help="architecture of the model")
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the model and of a step")
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: %(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--lr", type=float, help="learning rate of AdamW (default: depends on --size)")
    parser.add_argument("--eager", action="store_true", help="run vLLM without torch.compile and CUDA graphs")
    parser.add_argument("--runner", choices=["v1", "v2"], help="vLLM's model runner (default: vLLM's; v1 on a CPU)")
    parser.add_argument("--json", type=Path, help="write one JSON row per step to this file")
    parser.add_argument("--plot", type=Path, help="plot the rows to this file (needs matplotlib)")
    parser.add_argument("--rows", type=Path, nargs="+", help="train nothing; plot files that --json wrote")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: must be at least 1, got {args.steps}")
    if args.rows and not args.plot:
        parser.error("--rows: requires --plot FILE")
    for file in args.rows or ():
        if not file.is_file():
            parser.error(f"--rows: must name existing files, got {file}")

    runs = [[json.loads(line) for line in file.read_text().splitlines()] for file in args.rows or ()] or [run(args)]
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in runs[0]))
    if args.plot:
        plot(runs, args.plot)


def run(args: argparse.Namespace) -> list[dict]:
    """Train and return one row per step."""
    size, dtype = SIZES[args.size], getattr(torch, args.dtype)
    steps = 1 if args.stock and not GPU else args.steps
    shape = size.model | (size.experts if args.model_family == "qwen3-moe" else {})
    family = args.model_family.replace("-", "_")
    directory = make_checkpoint(Path(tempfile.mkdtemp()) / "model", family, dtype, **shape)
    arch = read_architecture(directory)
    llm = engine(args, directory, size)  # also initializes torch.distributed for Megatron

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from alignkit.megatron import build, cpu

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, size.longest + 1, (size.prompts,), generator=generator).tolist()
    prompts = [torch.randint(0, arch.vocab, (n,), generator=generator).tolist() for n in lengths]
    rows = []
    with cpu.cpu_host():
        parallel_state.initialize_model_parallel()
        if GPU:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        if not args.stock:
            alignkit.patch_megatron(arch.vocab)
        model = build.gpt_model(directory, dtype)
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        optimizer = MasterAdamW(model, size.lr if args.lr is None else args.lr)
        for step in range(steps):
            samples = sample(llm, prompts, size)
            reward = torch.tensor([sum(t % 2 == 0 for t in s.tokens) / len(s.tokens) for s in samples])
            advantage = advantages(reward, size.group)
            ddp.train()
            ddp.zero_grad_buffer()
            sampled, trained = [], []
            for first in range(0, len(samples), size.rows):
                part = slice(first, first + size.rows)
                last = part.stop >= len(samples)
                with contextlib.nullcontext() if last else ddp.no_sync():  # reduce gradients once per step
                    tokens, labels, old = batch(samples[part])
                    new = recompute(ddp, tokens, labels, args.stock)
                    counted = labels != IGNORE
                    loss(new, old, counted, advantage[part].to(new.device)).div(len(samples)).backward()
                sampled.append(old[counted])
                trained.append(new.detach()[counted])
            finalize_model_grads([ddp])
            moved = optimizer.step()
            if not (args.stock and not GPU):
                weights = list(build.hf_weights(model, arch))
                llm.apply_model(
                    lambda m, weights=weights: m.load_weights(weights) and None
                )  # in place, in the running engine
                if args.stock:
                    llm.reset_prefix_cache()  # aligned engines tell prefixes of different weights apart
                elif problem := alignkit.fingerprint(model, directory).difference(alignkit.fingerprint(llm)):
                    raise alignkit.AlignkitError(f"weight update: {problem}")
            drift = compare_tensors(torch.cat(sampled)[None], torch.cat(trained)[None])
            rows.append(
                {
                    "step": step,
                    "model_family": args.model_family,
                    "engines": "stock" if args.stock else "aligned",
                    "tokens": drift.tokens,
                    "bit_equal": drift.bit_equal,
                    "ratio_min": drift.rollout_is_min,
                    "ratio_max": drift.rollout_is_max,
                    "kl": drift.k3_kl,
                    "reward": reward.mean().item(),
                    "weights_moved": moved,
                }
            )
            print(
                f"step {step}: reward {reward.mean():.4f}; {drift.bit_equal} of {drift.tokens} logprobs bit-equal, "
                f"ratio in [{drift.rollout_is_min:.6f}, {drift.rollout_is_max:.6f}], KL {drift.k3_kl:.2e}; "
                f"{moved} weights moved",
                flush=True,
            )
    return rows


def engine(args: argparse.Namespace, directory: Path, size: Size):
    """Start vLLM in this process, patched unless `args.stock`."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if not GPU:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if args.runner or not GPU:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(args.runner == "v2"))
    if not args.stock:
        alignkit.patch_vllm()
    from vllm import LLM

    together = size.prompts * size.group
    return LLM(
        str(directory),
        dtype=args.dtype,
        skip_tokenizer_init=True,
        enforce_eager=args.eager or not GPU,
        seed=0,
        max_model_len=size.longest + size.sampled,
        max_num_seqs=together,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=(4 << 30) if GPU else (64 << 20),
    )


@dataclass(frozen=True)
class Sample:
    """A prompt, its sampled tokens and their rollout logprobs."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def sample(llm, prompts: list[list[int]], size: Size) -> list[Sample]:
    """Sample a group per prompt; the groups follow each other in the result."""
    from vllm import SamplingParams

    params = SamplingParams(
        n=size.group, max_tokens=size.sampled, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        Sample(p, list(c.token_ids), [step[t].logprob for t, step in zip(c.token_ids, c.logprobs, strict=True)])
        for p, o in zip(prompts, outputs, strict=True)
        for c in o.outputs
    ]


def batch(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, labels (sampled tokens only) and rollout logprobs, each ``[b, s]``, padded on the right."""
    s = max(len(x.prompt) + len(x.tokens) for x in samples) - 1
    tokens = torch.zeros(len(samples), s, dtype=torch.int64)
    labels, old = torch.full_like(tokens, IGNORE), torch.zeros(tokens.shape)
    for i, x in enumerate(samples):
        first, end = len(x.prompt) - 1, len(x.prompt) + len(x.tokens) - 1
        tokens[i, :end] = torch.tensor(x.prompt + x.tokens[:-1])
        labels[i, first:end], old[i, first:end] = torch.tensor(x.tokens), torch.tensor(x.logprobs)
    device = "cuda" if GPU else "cpu"
    return tokens.to(device), labels.to(device), old.to(device)


def recompute(model, tokens: torch.Tensor, labels: torch.Tensor, stock: bool) -> torch.Tensor:
    """Return the training logprobs of `labels`, fp32 ``[b, s]``, differentiable."""
    s = tokens.shape[1]
    positions = torch.arange(s, device=tokens.device).expand_as(tokens)
    if stock:  # stock Megatron-core builds its causal mask on a GPU only
        mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=tokens.device).triu(1)
        return -model(tokens, positions, mask, labels=labels).float()
    from alignkit.megatron import logprobs

    return logprobs(model, tokens, positions, None, labels, ignore_index=IGNORE).log_probs


def advantages(reward: torch.Tensor, group: int) -> torch.Tensor:
    """Return each sample's reward, normalized by its group's mean and standard deviation."""
    reward = reward.view(-1, group)
    return ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).flatten()


def loss(new: torch.Tensor, old: torch.Tensor, counted: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Return GRPO's clipped objective plus the k3 KL term, averaged over tokens and summed over samples.

    Args:
        new: Training logprobs, ``[b, s]``.
        old: Rollout logprobs, ``[b, s]``.
        counted: True at sampled tokens, ``[b, s]``.
        advantage: ``[b]``.
    """
    difference = torch.where(counted, new - old, 0.0)
    ratio, advantage = difference.exp(), advantage[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    kl = (-difference).exp() + difference - 1
    return torch.where(counted, KL_FACTOR * kl - gain, 0.0).sum(1).div(counted.sum(1)).sum()


class MasterAdamW:
    """AdamW on fp32 master weights with DDP's fp32 main gradients, like Megatron's optimizer, which needs a GPU."""

    def __init__(self, model: torch.nn.Module, lr: float):
        self.weights = list(model.parameters())
        self.masters = [w.detach().float().clone() for w in self.weights]
        self.adam = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self) -> int:
        """Update the weights and return how many of them changed in the model's dtype."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.main_grad
        self.adam.step()
        moved = 0
        for weight, master in zip(self.weights, self.masters, strict=True):
            new = master.to(weight.dtype)
            moved += int((new != weight).sum())
            weight.copy_(new)
        return moved


def plot(runs: list[list[dict]], file: Path) -> None:
    """Plot ratio, KL and reward of each run over its steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (ratio, kl, reward) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for rows in runs:

        def values(key, rows=rows):
            return [row[key] for row in rows]

        name, steps = rows[0]["engines"], values("step")
        (line,) = reward.plot(steps, values("reward"), marker="o", label=name)
        ratio.fill_between(steps, values("ratio_min"), values("ratio_max"), alpha=0.3, color=line.get_color())
        for key in ("ratio_min", "ratio_max"):
            ratio.plot(steps, values(key), marker="o", color=line.get_color())
        kl.plot(steps, values("kl"), marker="o", color=line.get_color(), label=name, clip_on=False)
    kl.set_yscale("symlog", linthresh=1e-9)
    kl.set_ylim(bottom=0)
    for axes, title in (
        (ratio, "importance ratio, lowest and highest token"),
        (kl, "KL (k3), 0 is exact"),
        (reward, "reward: share of even ids"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    reward.legend()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
