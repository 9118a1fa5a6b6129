"""Kernels of each op of attention, fastest first.

`ORDER` maps an op name of `runtime.dispatch.OPS` to its kernels, in the order in which `dispatch.choose` tries them.
Another order changes no bit. `alignkit explain` prints the kernels' names.

Each module implements the function of its op:

- "attention": ``forward(q, k, v, starts, scale)`` returns the output and the statistics for the backward pass. All
  backends of a device family return the same statistics, so any of them can compute the backward pass.
- "attention_backward": ``backward(q, k, v, starts, out, *statistics, d_out, scale)`` returns dq, dk and dv.
- "paged_attention": ``paged(q, k, v, block_table, starts, seq_lens, page, scale, out)`` writes out; on a GPU it returns
  a `problem.Relaunch`.
"""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND, Kernel
from ...runtime.families import CUDA

ORDER = {
    "attention": (Kernel("cuda", CUDA, "cuda", rule="rejects"), *ONE_PER_BACKEND),
    "attention_backward": (Kernel("cuda", CUDA, "cuda", rule="rejects"), *ONE_PER_BACKEND),
    "paged_attention": (Kernel("cuda", CUDA, "cuda", rule="paged_rejects"), *ONE_PER_BACKEND),
}
