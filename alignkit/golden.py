"""The golden bits: what the ops give, forward and backward, for fixed inputs; golden_cpu.json and golden_sm90.json hold
their hashes, as they were when the contract's id was last changed. The tests compare them, `alignkit doctor`, and
`alignkit.runtime.shown` where versions are installed that the bits were not shown with.

After a change of the contract, and of its id, they are written anew, on the CPU and on a GPU of the family:
``python -m alignkit.golden cpu`` and ``python -m alignkit.golden cuda``. Under the same id this adds new cases alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import torch

from . import ops
from .contract.rope import Llama3, Yarn, yarn_attention_factor
from .errors import BackendError
from .ops.gated_delta_rule import chunk_gated_delta_rule_bwd_dhu
from .runtime import dispatch, families, shown
from .runtime.families import Family

DTYPES = (torch.float32, torch.bfloat16)


class Inputs:
    """Makes a case's inputs on a device, the same on every machine and with every version of torch."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype):
        self.device, self.dtype = torch.device(device), dtype

    def integers(self, *shape: int, seed: int, below: int) -> torch.Tensor:
        """int64 in [0, below)."""
        v = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            v = (v ^ (v >> np.uint64(shift))) * np.uint64(factor)
        v = torch.from_numpy(((v >> np.uint64(32)) % np.uint64(below)).astype(np.int64)).reshape(shape)
        return v.to(self.device)

    def values(self, *shape: int, seed: int, scale: float = 2.0**-6, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Multiples of `scale` in [-100, 100] times it: exact in bf16 for a power of two. Of the case's type unless
        another is given."""
        return ((self.integers(*shape, seed=seed, below=201) - 100).double() * scale).to(dtype or self.dtype)

    def tensor(self, data: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device=self.device)

    def run(self, function: Callable, *leaves: torch.Tensor) -> list[torch.Tensor]:
        """Outputs of `function` and the gradients of its leaves, for fixed gradients of the outputs."""
        leaves = tuple(t.clone().requires_grad_() for t in leaves)
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        grads = [self.values(*o.shape, dtype=o.dtype, seed=90 + i) for i, o in enumerate(out)]
        torch.autograd.backward(out, grads)
        return [*(o.detach() for o in out), *(cast(torch.Tensor, t.grad) for t in leaves)]


def linears(given: Inputs) -> list[torch.Tensor]:
    x, w, b = given.values(70, 384, seed=1), given.values(200, 384, seed=2), given.values(200, seed=3)
    return given.run(ops.linear, x, w, b) + given.run(ops.row_parallel_linear, x, w, b)


def norms(given: Inputs) -> list[torch.Tensor]:
    x, r, w = given.values(70, 200, seed=1), given.values(70, 200, seed=3), given.values(200, seed=2)
    return given.run(lambda x, w: ops.rms_norm(x, w, 1e-6), x, w) + given.run(
        lambda *t: ops.rms_norm(*t[:2], 1e-6, t[2]), x, w, r
    )


def elementwise(given: Inputs) -> list[torch.Tensor]:
    x, gate = given.values(70, 3, 64, seed=1), given.values(70, 300, seed=2, scale=2.0**-3)
    positions = given.integers(70, seed=3, below=500)
    return given.run(lambda x: ops.rope(x, positions, ops.rope_table(64, 500, 1e6, x.device)), x) + given.run(
        lambda g: ops.silu_mul(g[:, :150], g[:, 150:]), gate
    )


def scaled_tables(given: Inputs) -> list[torch.Tensor]:
    llama3 = Llama3(8.0, 1.0, 4.0, 8192)
    yarns = (Yarn(4.0, 1024, 32.0, 1.0, yarn_attention_factor(4.0), truncate) for truncate in (True, False))
    return [ops.rope_table(64, 3000, 1e4, given.device, scaling) for scaling in (llama3, *yarns)]


def attention(given: Inputs) -> list[torch.Tensor]:
    lens = (1, 31, 64, 150)
    starts = given.tensor([0, *np.cumsum(lens).tolist()])
    q, k, v = (given.values(sum(lens), h, 64, seed=h + i) for i, h in enumerate((4, 2, 2)))
    cache = given.values(20, 16, 2, 64, seed=5), given.values(20, 16, 2, 64, seed=6)
    paged = ops.paged_attention(
        q[:7],
        *cache,
        given.integers(2, 9, seed=7, below=20).int(),
        given.tensor([0, 3, 7], torch.int32),
        given.tensor([130, 77], torch.int32),
    )
    return [*given.run(lambda q, k, v: ops.attention(q, k, v, starts), q, k, v), paged]


def long_attention(given: Inputs) -> list[torch.Tensor]:
    """Sequences that end at the border of a leaf of the family, after it and after two; the last queries from a cache too."""
    family = families.of_type(given.device)
    assert family is not None
    leaf, heads = family.kv_leaf, 2
    lens = (leaf, leaf + 1, 2 * leaf + 70)
    starts = given.tensor([0, *np.cumsum(lens).tolist()])
    q, k, v = (given.values(sum(lens), h, 32, seed=h + i, scale=2.0**-5) for i, h in enumerate((heads, 1, 1)))
    pages = -(-lens[-1] // 16)
    blocks = given.tensor([(11 * i + 3) % pages for i in range(pages)])  # all of them: 11 divides no such number
    cache = [given.values(pages, 16, 1, 32, seed=seed, scale=2.0**-5) for seed in (5, 6)]
    many, few = (
        ops.paged_attention(
            q[:n], *cache, blocks[None].int(), given.tensor([0, n], torch.int32), given.tensor([lens[-1]], torch.int32)
        )
        for n in (90, 1)
    )
    return [*given.run(lambda q, k, v: ops.attention(q, k, v, starts), q, k, v), many, few]


def head(given: Inputs) -> list[torch.Tensor]:
    h, w, b = given.values(150, 64, seed=1), given.values(700, 64, seed=2), given.values(700, seed=3)
    target = given.integers(150, seed=4, below=690)
    target[::7] = -100
    kwargs = {"temperature": 0.7, "vocab_size": 690, "return_entropy": True}
    logits = ops.head_logits(h, w, b, soft_cap=8.0)
    logp = given.run(
        lambda h, w, b: ops.linear_logp(h, w, target, bias=b, soft_cap=8.0, logit_scale=0.5, **kwargs), h, w, b
    )
    return (
        logp
        + given.run(lambda z: ops.logp_from_logits(z, target, **kwargs), logits.to(given.dtype))
        + [logits, ops.log_softmax(logits, temperature=0.7)]
    )


def large_head(given: Inputs) -> list[torch.Tensor]:
    """More rows and ids than one chain of the gradients takes on any device family."""
    h, w = given.values(8300, 16, seed=1, scale=2.0**-5), given.values(4300, 16, seed=2)
    target = given.integers(8300, seed=4, below=4300)
    return given.run(lambda h, w: ops.linear_logp(h, w, target), h, w)


def gated_delta_rule(given: Inputs) -> list[torch.Tensor]:
    """The CPU leaves the order of a sum to torch: there, only inputs for which all of the arithmetic is exact. On a GPU others
    too, packed and dense."""
    rows, heads, starts = 150, 2, given.tensor([0, 22, 22, 150])

    def few(*shape: int, seed: int) -> torch.Tensor:
        """-1, 0 or 1, most of them 0."""
        v = given.integers(*shape, seed=seed, below=24)
        return (v == 1).to(given.dtype) - (v == 2).to(given.dtype)

    def halves(*shape: int, seed: int) -> torch.Tensor:
        return (given.integers(*shape, seed=seed, below=5) - 2).to(given.dtype) / 2

    def decays(t: torch.Tensor) -> torch.Tensor:
        """Sums of the logarithms to base 2 of powers of it: -2, -1 or 0, in every row."""
        return -(t % 3).float()

    q, k, w = (few(1, rows, heads, 64, seed=seed) for seed in (1, 2, 3))
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


def mixtures(given: Inputs) -> list[torch.Tensor]:
    """Mixture of experts: routers of each kind, with equal logits among others, and experts of which some have no rows."""
    z = given.values(40, 60, seed=1, dtype=torch.float32, scale=2.0**-4)
    z[:8] = z[:8].round()
    bias = given.values(60, seed=2, dtype=torch.float32)
    limited = {"score": "sigmoid", "bias": bias, "groups": 5, "top_groups": 2, "scale": 2.5}
    found = []
    for how in ({}, {"normalize": False}, limited, limited | {"normalize": False}):
        found += given.run(lambda z, how=how: ops.moe_router(z, 4, **how)[0], z)
        found.append(ops.moe_router(z, 4, **how)[1])
    weights, ids = (t.detach() for t in ops.moe_router(z, 4))
    ids[ids == 7], ids[5] = -1, -1
    x, gate_up, down = given.values(40, 48, seed=3), given.values(60, 128, 48, seed=4), given.values(60, 48, 64, seed=5)
    found += given.run(lambda x, w, g, d: ops.moe_experts(x, ids, w, g, d), x, weights, gate_up, down)
    gate = given.values(40, 1, seed=6, dtype=torch.float32)
    return found + given.run(ops.sigmoid_mul, gate, x)


def normed_rotations(given: Inputs) -> list[torch.Tensor]:
    """Norms of queries and keys and their rotation in one op, of odd numbers: the sum of their squares is exact in any
    order and no product is zero. So all device families give these bits, and the two ops one after the other do."""

    def odd(*shape: int, seed: int) -> torch.Tensor:
        return ((2 * given.integers(*shape, seed=seed, below=200) - 199).double() * 2.0**-7).to(given.dtype)

    positions, found = 1 + given.integers(70, seed=1, below=499), []
    for dim, rotary, zero_centered in ((64, 64, False), (96, 96, True), (64, 24, False)):
        q, k, *weights = (odd(*shape, dim, seed=seed) for seed, shape in enumerate(((70, 4), (70, 2), (), ()), 2))
        table = ops.rope_table(rotary, 500, 1e6, given.device)
        found += ops.qk_norm_rope(
            q, k, *weights, 1e-6, positions, table, rotary_dim=rotary, zero_centered=zero_centered
        )
    return found


CASES = {
    f"{f.__name__} {str(dtype).removeprefix('torch.')}": (f, dtype)
    for f in (
        linears,
        norms,
        elementwise,
        scaled_tables,
        attention,
        long_attention,
        head,
        large_head,
        gated_delta_rule,
        mixtures,
        normed_rotations,
    )
    for dtype in DTYPES
}


def path(family: Family) -> Path:
    return family.golden


def load(family: Family) -> dict[str, list[str]]:
    """The hashes of each case's tensors. Raises BackendError where they are not those of this contract."""
    kept = json.loads(path(family).read_text())
    if kept["contract"] != family.contract_id:
        raise BackendError(
            f"{path(family).name} holds the bits of {kept['contract']}, but this is {family.contract_id}"
        )
    return kept["sha256"]


def hashes(case: str, device: torch.device | str) -> list[str]:
    """What a case gives on `device`, by the backend that is chosen."""
    function, dtype = CASES[case]
    return [
        hashlib.sha256(t.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for t in function(Inputs(device, dtype))
    ]


def difference(device: torch.device, backend: str) -> str | None:
    """The first golden that `device` gives otherwise, by `backend`, which must be the chosen one; None if all hold."""
    family = families.of_type(device)
    assert family is not None  # it has a backend
    kept = load(family)
    for case in CASES:
        if backend == families.REFERENCE and CASES[case][0] in (large_head, long_attention):
            continue  # minutes, for the arithmetic that head and attention have too
        if case not in kept:
            return f"{case}: no bits are kept"
        try:
            seen = hashes(case, device)
        except Exception as e:  # a compiler that fails on a kernel is a finding too
            return f"{case}: {type(e).__name__}: {e}"
        wrong = [i for i, (a, b) in enumerate(zip(seen, kept[case], strict=True)) if a != b]
        if wrong:
            return f"{case}: tensor {wrong[0]} of {len(seen)} has other bits"
    return None


def write(device: torch.device | str) -> None:
    """Writes the hashes of the family of `device`: all of them if the contract's id is another than the file's, and else those
    that are not in it. Raises BackendError where one that is there does not hold."""
    with shown.unchecked():  # the old ones need not hold
        family = dispatch.family(device)
        seen = {case: hashes(case, device) for case in CASES}
    before = json.loads(path(family).read_text())
    if before["contract"] == family.contract_id:
        for case, kept in before["sha256"].items():
            if seen[case] != kept:
                raise BackendError(f"{case}: has other bits, under the same {family.contract_id}")
    path(family).write_text(json.dumps({"contract": family.contract_id, "sha256": seen}, indent=1) + "\n")


if __name__ == "__main__":
    assert len(sys.argv) == 2, __doc__
    write(sys.argv[1])
