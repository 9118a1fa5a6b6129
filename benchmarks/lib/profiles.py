"""GPU time by kernel, from torch's profiler, including kernels in replayed CUDA graphs.

The categories are stored in profile.jsonl as ``families``; ``tables.py`` prints them.
"""

from __future__ import annotations

import re

import torch
from torch.profiler import ProfilerActivity, profile

FAMILIES = {
    "communication": r"nccl|all_?reduce|all_?gather|reduce_scatter|multimem|tree_sum",
    "attention": r"attention|attn|flash(?!_kernel)|softmax_(warp|block)|SoftMax(Forward|Backward)|"
    r"^_(tiles|decode|merge_leaves|delta|grad_q|grad_kv)$",
    "head, logprobs and sampling": r"logp|log_softmax|logits|gumbel|topk|sampl|argmax|ranks?_kernel|nll_|cross_entropy|"
    r"^_check_rows$|gemm<.*(Statistics|Gradient)>",
    "matrix products": r"gemm|nvjet|cutlass|cublas|matmul|splitK|gemv|_linear|narrow_chains|reduce_parts|^_join$",
    "norm, rope, activation": r"norm|rope|rotary|rotate|silu|swiglu|^_sum_partials$|^triton_(poi|red|per)_fused",
    "copies and fills": r"memcpy|memset|copy|fill|CatArray|index|gather|scatter|reshape_and_cache|transpose",
}
"""Categories of kernels; the first pattern found in a kernel's name decides, no match is "other".

alignkit's Triton kernels are matched by their whole name. Kernels fused by torch.compile are mostly norms and
activations.
"""


def start() -> profile:
    """Start and return a profile of this process's GPU, or of the CPU if it has none."""
    running = profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])
    running.start()
    return running


def stop(running: profile) -> list[dict]:
    """Stop the profile and return ``{"name", "calls", "ms"}`` per kernel, largest total time first."""
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
    """Return the category of a kernel."""
    return next((f for f, pattern in FAMILIES.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def summary(kernels: list[dict], wall_ms: float, top: int = 12) -> dict:
    """Return a row of profile.jsonl: GPU time in total, by category, and of the `top` kernels with shortened names."""
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
    """Return a kernel's name without return type, parameters and casts of template arguments, cut to `length`."""
    name = re.sub(r"^(void|static) ", "", name.replace("(anonymous namespace)::", ""))
    name = re.sub(r"\([\w:]+\)(?=-?\d)", "", name)  # casts of template arguments
    name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= length else name[: length - 3] + "..."
