"""Random valid calls of attention (../samples.py)."""

from __future__ import annotations

import torch

from ..samples import INTS, Sample, Scalar, Source, Tensor, poked, replaced, short_length, wrong_starts
from . import attention, paged_attention


def _attention(s: Source) -> Sample:
    longest = 150 if s.chance(0.1) else 70  # longer than a CPU leaf
    dtype, t, d, kv = s.dtype(), s.rng.choice((s.size(12, 0), s.size(longest))), s.size(16), s.size(3)
    hq = kv * s.size(3)
    if t > 16:
        d, kv, hq = min(d, 4), 1, 1
    starts = torch.tensor(s.starts(t, s.size(4)), dtype=s.dtype(INTS), device="cpu")
    if t == 0 and s.chance(0.3):
        starts = starts[:1]
    given = {
        "q": Tensor(s.floats(t, hq, d, dtype=dtype), (0, 2), ndim=True, leaf=True),
        "k": Tensor(s.floats(t, kv, d, dtype=dtype), (0, 1, 2), ndim=True, leaf=True),
        "v": Tensor(s.floats(t, kv, d, dtype=dtype), (0, 1, 2), ndim=True, leaf=True),
        "cu_seqlens": Tensor(starts, (), INTS, "starts", ndim=True),
        "scale": Scalar(s.rng.choice((None, s.rng.uniform(0.01, 3))), "positive", optional=True),
    }
    faults = [
        *wrong_starts(s, "cu_seqlens", t),
        ("cu_seqlens ends early", replaced("cu_seqlens", lambda c: torch.tensor([0, t - 1])), ("cu_seqlens",)),
        ("no head_dim", lambda a: a.update({n: a[n][..., :0] for n in "qkv"}), ("q", "k", "v")),
        ("no kv heads", lambda a: a.update({n: a[n][:, :0] for n in "kv"}), ("k", "v")),
    ]
    return Sample("attention", attention, given, faults)


def _paged_attention(s: Source) -> Sample:
    dtype, d, kv, batch, block = s.dtype(), s.size(12), s.size(3), s.size(4), s.size(5)
    hq = kv * s.size(3)
    lens = [s.size(9) for _ in range(batch)]
    queries = [s.rng.choice((0, 1, s.rng.randint(0, n))) for n in lens]
    needed = [-(-n // block) for n in lens]
    width, blocks = max(needed) + s.rng.choice((0, 2)), sum(needed) + s.rng.choice((0, 2))
    order = s.rng.sample(range(blocks), blocks)
    table = torch.full((batch, width), s.rng.choice((0, -1, 10**6)), dtype=s.dtype(INTS), device="cpu")
    for row, n in enumerate(needed):
        table[row, :n] = torch.tensor([order.pop() for _ in range(n)])
    rows, used = sum(queries) + s.rng.choice((0, 0, 3)), sum(queries)
    starts = [0]
    for n in queries:
        starts.append(starts[-1] + n)
    out = torch.zeros(rows, hq, d, dtype=dtype, device="cpu") if s.chance(0.4) else None
    given = {
        "q": Tensor(s.floats(rows, hq, d, dtype=dtype), (2,), ndim=True),
        "k_cache": Tensor(s.floats(blocks, block, kv, d, dtype=dtype), (0, 1, 2, 3), ndim=True),
        "v_cache": Tensor(s.floats(blocks, block, kv, d, dtype=dtype), (0, 1, 2, 3), ndim=True),
        "block_table": Tensor(table, (0,), INTS, "table", ndim=True),
        "query_start_loc": Tensor(
            torch.tensor(starts, dtype=s.dtype(INTS), device="cpu"), (0,), INTS, "starts", ndim=True
        ),
        "seq_lens": Tensor(torch.tensor(lens, dtype=s.dtype(INTS), device="cpu"), (0,), INTS, "lens", ndim=True),
        "scale": Scalar(s.rng.choice((None, s.rng.uniform(0.01, 3))), "positive", optional=True),
        "out": Tensor(out, (0, 1, 2), ndim=True, optional=True, written=True),
    }
    at = s.rng.randrange(batch)

    def block_of(value):
        def put(args):
            args["block_table"] = args["block_table"].clone()
            args["block_table"][at, 0] = value

        return put

    faults = [
        *wrong_starts(s, "query_start_loc", rows),
        ("a block too high", block_of(blocks + s.size(9)), ("block_table",)),
        ("a negative block", block_of(-s.size(9)), ("block_table",)),
        ("a long sequence", poked("seq_lens", width * block + s.size(9), s), ("seq_lens",)),
        ("a huge sequence", poked("seq_lens", 2**31 - 1, s), ("seq_lens",)),
        ("a negative length", poked("seq_lens", -s.size(9), s), ("seq_lens",)),
    ]
    faults += short_length(s, queries)
    if used and out is not None:
        for what, alias in (
            ("q", lambda a: a["q"].detach()),
            ("k_cache", lambda a: a["k_cache"].flatten()[: out.numel()]),
        ):
            if what == "q" or given["k_cache"].value.numel() >= out.numel():
                faults.append(
                    (f"out shares memory with {what}", lambda a, f=alias: a.update(out=f(a).view(out.shape)), ("out",))
                )
        if out.numel() > 1:
            faults.append(
                (
                    "out overlaps itself",
                    lambda a: a.update(out=torch.zeros((), dtype=dtype).expand(out.shape)),
                    ("out",),
                )
            )
    return Sample("paged_attention", paged_attention, given, faults)


SAMPLES = {_attention: 10, _paged_attention: 10}
"""Weight of each generator."""
