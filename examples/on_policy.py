"""On-policy policy gradient: sample with vLLM, train with Megatron-core, send the weights back, repeat.

    python examples/on_policy.py            # aligned: the importance ratio is exactly 1 for every token
    python examples/on_policy.py --stock    # the engines as they come; one step, for stock vLLM on a CPU packs its
                                            # weights away and takes no new ones

A random-weight model, a toy reward (the share of even token ids), advantages relative to the group as in GRPO. One
process, on the CPU. What a real trainer does between the engines is here in full: sample, recompute, step, refit.
"""
from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "TORCHDYNAMO_DISABLE": "1",
               "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

import torch  # noqa: E402

import alignkit  # noqa: E402
from alignkit.check.model import make_checkpoint  # noqa: E402
from alignkit.check.train import recompute  # noqa: E402
from alignkit.convert import read_architecture  # noqa: E402
from alignkit.drift import Logprobs, compare  # noqa: E402

PROMPTS, GROUP, MAX_TOKENS = 4, 4, 24


def rollout(llm, prompts: list[list[int]], contract: str) -> Logprobs:
    """GROUP samples of every prompt, with the logprobs that vLLM sampled them with."""
    from vllm import SamplingParams

    params = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    samples = [(p, c) for p, o in zip(prompts, outputs) for c in o.outputs]
    return Logprobs([p for p, _ in samples], [list(c.token_ids) for _, c in samples],
                    [torch.tensor([step[t].logprob for t, step in zip(c.token_ids, c.logprobs)]) for _, c in samples],
                    contract)


def advantages(tokens: list[list[int]]) -> torch.Tensor:
    """Per sample: the reward relative to its group's mean and spread."""
    reward = torch.tensor([sum(t % 2 == 0 for t in row) / len(row) for row in tokens]).view(-1, GROUP)
    return ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="leave the engines as they come")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--json", type=Path, help="write a line per step to this file")
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype)
    steps = 1 if args.stock else args.steps
    directory = make_checkpoint(Path(tempfile.mkdtemp()) / "model", dtype=dtype, layers=2)
    arch = read_architecture(directory)
    if not args.stock:
        alignkit.patch_vllm()
        alignkit.patch_megatron(arch.vocab)

    from megatron.core import parallel_state
    from vllm import LLM

    from alignkit.megatron import build, cpu

    llm = LLM(str(directory), dtype=args.dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, seed=0,
              kv_cache_memory_bytes=64 << 20)  # also starts torch.distributed, which Megatron joins
    torch.manual_seed(0)
    prompts = [torch.randint(0, arch.vocab, (n,)).tolist() for n in (3, 17, 64, 150)[:PROMPTS]]
    history = []
    with cpu.cpu_host():
        parallel_state.initialize_model_parallel()
        model = build.gpt_model(directory, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        for step in range(steps):
            old = rollout(llm, prompts, "stock" if args.stock else alignkit.contract_id())
            new = recompute(model, old, "padded", patched=not args.stock)
            detached = Logprobs(old.prompts, old.tokens, [row.detach() for row in new], old.contract)
            report = compare(old, detached)
            weight = advantages(old.tokens)
            ratios = [(n - o).exp() for n, o in zip(new, old.logprobs)]
            loss = -torch.stack([(a * r).mean() for a, r in zip(weight, ratios)]).mean()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            moved = sum(int((p != b).sum()) for p, b in zip(model.parameters(), before))
            if not args.stock:
                weights = list(build.hf_weights(model, arch))
                llm.apply_model(lambda m: m.load_weights(weights) and None)  # in place, in the running engine
                llm.reset_prefix_cache()  # what it cached belongs to the old weights
            history.append({"step": step, "tokens": report.tokens, "bit_equal": report.bit_equal,
                            "ratio_min": report.rollout_is_min, "ratio_max": report.rollout_is_max, "kl": report.kl,
                            "weights_moved": moved})
            print(f"step {step}: {report.bit_equal} of {report.tokens} logprobs bit-equal, ratio in "
                  f"[{report.rollout_is_min:.6f}, {report.rollout_is_max:.6f}], KL {report.kl:.2e}; {moved} weights moved")
    if args.json:
        args.json.write_text("".join(json.dumps(h) + "\n" for h in history))


if __name__ == "__main__":
    main()
