"""The ways to compute attention, fastest first.

A file of "attention" has ``forward(q, k, v, starts, scale)``, which returns the result and what the backward pass needs of it:
the same of all backends of a family, so that any of them may go on. One of "attention_backward" has ``backward(q, k, v,
starts, out, *statistics, d_out, scale)``, one of "paged_attention" ``paged(q, k, v, block_table, starts, seq_lens, page,
scale, out)``, which on a GPU returns what does it again, see `problem.Again`.
"""

from __future__ import annotations

from ...runtime.dispatch import PLAIN, Kernel
from ...runtime.families import CUDA

ORDER = {
    "attention": (Kernel("cuda", CUDA, "cuda", rule="refuses"), *PLAIN),
    "attention_backward": (Kernel("cuda", CUDA, "cuda", rule="refuses"), *PLAIN),
    "paged_attention": (Kernel("cuda", CUDA, "cuda", rule="paged_refuses"), *PLAIN),
}
