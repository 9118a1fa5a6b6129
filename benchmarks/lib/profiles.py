"""GPU time by kernel, from torch's profiler; the kernels within a replayed CUDA graph count too."""

from __future__ import annotations

import re

import torch
from torch.profiler import ProfilerActivity, profile

FAMILIES = {
    "communication": r"nccl|all_?reduce|all_?gather|reduce_scatter|multimem|tree_sum",
    "attention": r"attention|attn|flash(?!_kernel)|softmax_(warp|block)|SoftMax(Forward|Backward)|"
    r"^_(tiles|short|few|join_leaves|delta|grad_q|grad_kv)$",
    "head, logprobs and sampling": r"logp|log_softmax|logits|gumbel|topk|sampl|argmax|ranks?_kernel|nll_|cross_entropy|"
    r"^_(spread|check_rows)$|gemm<.*(Statistics|Gradient)>",
    "matrix products": r"gemm|nvjet|cutlass|cublas|matmul|splitK|gemv|_linear|narrow_chains|join_parts|^_join$",
    "norm, rope, activation": r"norm|rope|rotary|rotate|silu|swiglu|^triton_(poi|red|per)_fused",
    "copies and fills": r"memcpy|memset|copy|fill|CatArray|index|gather|scatter|reshape_and_cache|transpose",
}
"""What a kernel does, by the first pattern that its name contains, alignkit's own by their whole name; what
torch.compile fuses is mostly norms and activations; the rest is "other"."""


def start() -> profile:
    """A running profile of this process's GPU (without one, of its CPU)."""
    running = profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])
    running.start()
    return running


def stop(running: profile) -> list[dict]:
    """Ends the profile: ``{"name", "calls", "ms"}`` for each kernel, the longest in all first."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    running.stop()
    kernels: dict[str, dict] = {}
    for event in running.events():
        if event.is_user_annotation or (event.device_type.name == "CUDA") != torch.cuda.is_available():
            continue
        kernel = kernels.setdefault(event.name, {"name": event.name, "calls": 0, "ms": 0.0})
        kernel["calls"] += 1
        kernel["ms"] += event.time_range.elapsed_us() / 1e3
    return sorted(kernels.values(), key=lambda kernel: -kernel["ms"])


def family(name: str) -> str:
    """What the kernel of that name does."""
    return next((f for f, pattern in FAMILIES.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def summary(kernels: list[dict], wall_ms: float, top: int = 12) -> dict:
    """A row of profile.json: GPU time in all, by family, and of the `top` kernels; names are shortened."""
    total = sum(kernel["ms"] for kernel in kernels)
    families = dict.fromkeys([*FAMILIES, "other"], 0.0)
    for kernel in kernels:
        families[family(kernel["name"])] += kernel["ms"]
    return {
        "wall_ms": round(wall_ms, 3),
        "gpu_ms": round(total, 3),
        "families": {name: round(ms, 3) for name, ms in families.items() if ms},
        "kernels": [
            {
                "name": shorten(kernel["name"]),
                "calls": kernel["calls"],
                "ms": round(kernel["ms"], 3),
                "share": round(kernel["ms"] / total, 4),
            }
            for kernel in kernels[:top]
        ],
    }


def shorten(name: str, length: int = 72) -> str:
    """A kernel's name without its return type, its arguments and the types of its template's numbers, cut to `length`."""
    name = re.sub(r"^(void|static) ", "", name.replace("(anonymous namespace)::", ""))
    name = re.sub(r"\([\w:]+\)(?=-?\d)", "", name)  # casts among the template's arguments
    name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= length else name[: length - 3] + "..."
