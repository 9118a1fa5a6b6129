"""Golden bits: hashes of the ops' results, forward and backward, for fixed inputs.

golden_cpu.json and golden_sm90.json hold the hashes under the current contract id. The tests, `alignkit doctor`, and
`alignkit.runtime.validated` (for versions that are not validated) compare against them.

After a change of the contract and its id, rewrite them on a CPU and on a GPU of the family:
``python -m alignkit.ops.golden cpu`` and ``python -m alignkit.ops.golden cuda``. Under the same id this adds new cases
only.
Names of cases are keys of these files. A change of a case's inputs needs a new name, or a new contract id.
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

from .. import ops
from ..contract.rope import Llama3, Yarn, yarn_attention_factor
from ..errors import BackendError
from ..runtime import dispatch, families, validated
from ..runtime.families import Family
from .gated_delta_rule import chunk_gated_delta_rule_bwd_dhu

DTYPES = (torch.float32, torch.bfloat16)


class Inputs:
    """Generator of a case's inputs on a device, identical on every machine and with every version of torch."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype):
        self.device, self.dtype = torch.device(device), dtype

    def integers(self, *shape: int, seed: int, below: int) -> torch.Tensor:
        """Return pseudorandom int64 in [0, below)."""
        v = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            v = (v ^ (v >> np.uint64(shift))) * np.uint64(factor)
        v = torch.from_numpy(((v >> np.uint64(32)) % np.uint64(below)).astype(np.int64)).reshape(shape)
        return v.to(self.device)

    def values(self, *shape: int, seed: int, scale: float = 2.0**-6, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return multiples of `scale`, -100 to 100 times; exact in bf16 if `scale` is a power of two."""
        return ((self.integers(*shape, seed=seed, below=201) - 100).double() * scale).to(dtype or self.dtype)

    def tensor(self, data: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device=self.device)

    def run(self, function: Callable, *leaves: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of `function` and the gradients of its leaves, for fixed gradients of the outputs."""
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
    """Compute attention of sequences that end at a leaf border, after it, and after two; paged too."""
    family = families.of_type(given.device)
    assert family is not None
    leaf, heads = family.kv_leaf, 2
    lens = (leaf, leaf + 1, 2 * leaf + 70)
    starts = given.tensor([0, *np.cumsum(lens).tolist()])
    q, k, v = (given.values(sum(lens), h, 32, seed=h + i, scale=2.0**-5) for i, h in enumerate((heads, 1, 1)))
    pages = -(-lens[-1] // 16)
    blocks = given.tensor([(11 * i + 3) % pages for i in range(pages)])  # a permutation: 11 does not divide pages
    cache = [given.values(pages, 16, 1, 32, seed=seed, scale=2.0**-5) for seed in (5, 6)]
    chunk, decode = (
        ops.paged_attention(
            q[:n], *cache, blocks[None].int(), given.tensor([0, n], torch.int32), given.tensor([lens[-1]], torch.int32)
        )
        for n in (90, 1)
    )
    return [*given.run(lambda q, k, v: ops.attention(q, k, v, starts), q, k, v), chunk, decode]


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
    """Compute a head with more rows and ids than one gradient chain covers on any device family."""
    h, w = given.values(8300, 16, seed=1, scale=2.0**-5), given.values(4300, 16, seed=2)
    target = given.integers(8300, seed=4, below=4300)
    return given.run(lambda h, w: ops.linear_logp(h, w, target), h, w)


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


def mixtures(given: Inputs) -> list[torch.Tensor]:
    """Compute MoE routers of each kind, with tied logits, and experts, some of them without rows."""
    z = given.values(40, 60, seed=1, dtype=torch.float32, scale=2.0**-4)
    z[:8] = z[:8].round()
    bias = given.values(60, seed=2, dtype=torch.float32)
    limited = {"score": "sigmoid", "bias": bias, "groups": 5, "top_groups": 2, "scale": 2.5}
    found = []
    for options in ({}, {"normalize": False}, limited, limited | {"normalize": False}):
        found += given.run(lambda z, options=options: ops.moe_router(z, 4, **options)[0], z)
        found.append(ops.moe_router(z, 4, **options)[1])
    weights, ids = (t.detach() for t in ops.moe_router(z, 4))
    ids[ids == 7], ids[5] = -1, -1
    x, gate_up, down = given.values(40, 48, seed=3), given.values(60, 128, 48, seed=4), given.values(60, 48, 64, seed=5)
    found += given.run(lambda x, w, g, d: ops.moe_experts(x, ids, w, g, d), x, weights, gate_up, down)
    gate = given.values(40, 1, seed=6, dtype=torch.float32)
    return found + given.run(ops.sigmoid_mul, gate, x)


def normed_rotations(given: Inputs) -> list[torch.Tensor]:
    """Compute qk_norm_rope of odd integers times a power of two.

    Their sum of squares is exact in any order, and no product is zero. All device families give the same bits, and so
    do the separate ops.
    """

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
    """Return the file of a family's golden hashes."""
    return Path(__file__).with_name(f"golden_{family.name}.json")


def load(family: Family) -> dict[str, list[str]]:
    """Return the hashes of each case's tensors; raise BackendError if the file belongs to another contract id."""
    stored = json.loads(path(family).read_text())
    if stored["contract"] != family.contract_id:
        raise BackendError(
            f"{path(family)}: contract must be {family.contract_id}, got {stored['contract']}. Reinstall alignkit, "
            f"or run `python -m alignkit.ops.golden {family.device_type}` after a change of the contract"
        )
    return stored["sha256"]


def hashes(case: str, device: torch.device | str) -> list[str]:
    """Return the hashes of a case's tensors on `device`, computed by the selected backend."""
    function, dtype = CASES[case]
    return [
        hashlib.sha256(t.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for t in function(Inputs(device, dtype))
    ]


def difference(device: torch.device, backend: str) -> str | None:
    """Return the first golden mismatch on `device`, or None; `backend` must be the selected one."""
    family = families.of_type(device)
    assert family is not None  # a device with a backend has a family
    stored = load(family)
    for case in CASES:
        if backend == families.REFERENCE and CASES[case][0] in (large_head, long_attention):
            continue  # takes minutes; head and attention cover the same arithmetic
        if case not in stored:
            return f"{case}: hashes must be stored in {path(family).name}, got none"
        try:
            computed = hashes(case, device)
        except Exception as e:  # e.g. a compiler failure
            return f"{case}: {type(e).__name__}: {e}"
        wrong = [i for i, (a, b) in enumerate(zip(computed, stored[case], strict=True)) if a != b]
        if wrong:
            return f"{case}: tensor {wrong[0] + 1} of {len(computed)} differs from its golden hash"
    return None


def write(device: torch.device | str) -> None:
    """Write the golden hashes of the family of `device`.

    Under a new contract id, all hashes are replaced. Under the id of the file, new cases are added.

    Raises:
        BackendError: under the id of the file, a stored hash differs.
    """
    with validated.unchecked():  # the stored hashes may not match
        family = dispatch.family(device)
        computed = {case: hashes(case, device) for case in CASES}
    before = json.loads(path(family).read_text())
    if before["contract"] == family.contract_id:
        for case, stored in before["sha256"].items():
            if computed[case] != stored:
                raise BackendError(
                    f"{case}: hashes must equal those in {path(family).name} under {family.contract_id}, but differ. "
                    "Restore the bits, or change the contract id first"
                )
    path(family).write_text(json.dumps({"contract": family.contract_id, "sha256": computed}, indent=1) + "\n")


if __name__ == "__main__":
    assert len(sys.argv) == 2, __doc__
    write(sys.argv[1])
