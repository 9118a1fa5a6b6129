"""The record of chunk_gated_delta_rule_bwd_dhu: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime import families
from ...runtime.dispatch import Kernel
from ...runtime.families import CUDA, REFERENCE, TRITON
from ..inputs import Inputs, Normal
from ..record import Check, Golden, Op, Trial
from ..self_test import difference
from ..words import Words
from . import chunk_gated_delta_rule_bwd_dhu, reference
from .problem import Delta


def _triton():
    from . import triton_backend

    return triton_backend


def _cuda():
    from . import cuda_backend

    return cuda_backend


def _described(backend: str, given: Words) -> Delta:
    return Delta(backend, given.dtype("dtype"))


def gated_delta_rule(given: Inputs) -> list[torch.Tensor]:
    """Compute the gated delta rule's backward pass, packed and dense.

    On the CPU the order of sums is torch's, so these inputs make all arithmetic exact. A GPU gets inexact inputs too.
    """
    rows, heads, starts = 150, 2, given.tensor([0, 22, 22, 150])

    def sparse(*shape: int, seed: int) -> torch.Tensor:
        """Return -1, 0 or 1, mostly 0."""
        v = given.integers(*shape, seed=seed, below=24)
        return (v == 1).to(given.dtype) - (v == 2).to(given.dtype)

    def halves(*shape: int, seed: int) -> torch.Tensor:
        return (given.integers(*shape, seed=seed, below=5) - 2).to(given.dtype) / 2

    def decays(t: torch.Tensor) -> torch.Tensor:
        """Return base-2 logarithms of decays: 0, -1 or -2."""
        return -(t % 3).float()

    q, k, w = (sparse(1, rows, heads, 64, seed=seed) for seed in (1, 2, 3))
    do, dv = (halves(1, rows, heads, 64, seed=seed) for seed in (4, 5))
    g, gk = (decays(given.integers(*q.shape[:n], seed=n, below=30)) for n in (3, 4))
    dht = halves(3, heads, 64, 64, seed=6).float()
    packed = {"cu_seqlens": starts, "base2": True, "need_dh0": True, "scale": 0.5}
    found = [
        *chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, g, gk, dht=dht, **packed),
        *chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, g, dht=dht, state_v_first=True, **packed),
        *chunk_gated_delta_rule_bwd_dhu(q[:, :, :1], k[:, :, :1], w, do, dv, scale=0.5)[::2],
    ]
    if not families.on_host(given.device):
        q, k, w, do, dv = (given.values(1, rows, heads, 64, seed=seed, scale=2.0**-9) for seed in (11, 12, 13, 14, 15))
        g = -given.integers(1, rows, heads, seed=16, below=100).float() / 64
        for more in ({"cu_seqlens": starts, "dht": dht, "need_dh0": True}, {}):
            found += [t for t in chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, g, **more) if t is not None]
    return found


def _sequences(normal: Normal) -> str | None:
    """Return the first difference of a sequence or head between packed and separate calls."""
    device = normal.device
    lengths, heads, dim = (5, 130, 64), 2, 64
    starts = torch.tensor([0, *lengths]).cumsum(0)
    q, k, w, do, dv = (normal(seed, 1, sum(lengths), heads, dim) * dim**-0.5 for seed in range(15, 20))
    g = -torch.cat([torch.arange(n) % 64 + 1 for n in lengths]).to(device)[None, :, None].expand(-1, -1, heads) / 50
    dh, dh0, dv2 = chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, g, cu_seqlens=starts.to(device), need_dh0=True)
    chunk = 0
    for i, n in enumerate(lengths):
        rows, chunks = slice(int(starts[i]), int(starts[i + 1])), slice(chunk, chunk + -(-n // 64))
        chunk = chunks.stop
        for head in (slice(0, heads), slice(1, 2)):
            alone = chunk_gated_delta_rule_bwd_dhu(*(t[:, rows, head] for t in (q, k, w, do, dv, g)), need_dh0=True)
            problem = difference(
                "a sequence alone", alone, (dh[:, chunks, head], dh0[i : i + 1, head], dv2[:, rows, head])
            )
            if problem:
                return problem
    return None


def _self_test(normal):
    yield Check("gated_delta_rule", "sequences and heads alone, packed, dense", lambda: _sequences(normal))


def _samples():
    from .samples import SAMPLES

    return SAMPLES


OP = Op(
    "gated_delta_rule",
    kernels={
        "gated_delta_rule": (
            Kernel("cuda", CUDA, _cuda, rule=lambda p: _cuda().rejects(p)),
            Kernel("triton", TRITON, _triton),
            Kernel("reference", REFERENCE, lambda: reference),
        )
    },
    described={"gated_delta_rule": _described},
    golden=(Golden(gated_delta_rule),),
    self_test=_self_test,
    samples=_samples,
    trials={"gated_delta_rule": Trial(lambda given, _: gated_delta_rule(given), {"cuda": ("dtype=bf16",)})},
)
