"""The record of moe_experts: kernels, custom ops, golden cases, self-test (../record.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ...runtime.dispatch import Kernel, one_per_backend
from ...runtime.families import CUDA, NATIVE, REFERENCE, TRITON
from .._common import require_tensors
from ..groups import group_of
from ..inputs import Inputs, Normal
from ..record import EXPERTS, ROWS, WIDTH, Custom, Golden, Op, Rows, Trial, fake_like
from ..words import Words, dense
from . import _gated, cpu, moe_experts, reference
from .problem import Grouped, Ids, Matrices, Pairs
from .problem import Rows as RowsProblem


def _triton():
    from . import triton_backend

    return triton_backend


def _cuda():
    from . import cuda_backend

    return cuda_backend


def _few():
    from . import few

    return few


def _grouped():
    from . import grouped

    return grouped


def _each():
    from . import each

    return each


def _ranked():
    from . import ranked

    return ranked


def _pairs():
    from . import pairs

    return pairs


def _moe_experts(x, ids, weights, gate_up, down, num_experts, first_expert, tp, ep, row_group_name):
    require_tensors(x=x, ids=ids, weights=weights, gate_up=gate_up, down=down)
    expert_groups = {"tp": group_of(tp, "tp"), "ep": group_of(ep, "ep")}
    options = {"num_experts": num_experts, "first_expert": first_expert, **expert_groups}
    row_group = group_of(row_group_name, "rows")
    with torch.no_grad():
        if row_group is None:
            return moe_experts(x, ids, weights, gate_up, down, **options)
        count, padded = x.shape[0], row_group.padded_rows(x.shape[0])
        batch = [_pad_rows(t, padded, fill) for t, fill in ((x, 0.0), (ids, -1), (weights, 0.0))]
        if row_group.size == math.prod(group.size for group in expert_groups.values() if group is not None):
            return moe_experts(*batch, gate_up, down, gather=True, **options)[:count]
        out = moe_experts(*(row_group.gather(t) for t in batch), gate_up, down, **options)
        return row_group.shard(out)[:count]


def _pad_rows(t: torch.Tensor, count: int, fill: float) -> torch.Tensor:
    """Pad t with rows of `fill` to `count` rows."""
    return t if len(t) == count else torch.cat((t, t.new_full((count - len(t), *t.shape[1:]), fill)))


def _products(op: str) -> Callable[[str, Words], Grouped]:
    gradients = op == "moe_gradients"

    def described(backend: str, given: Words) -> Grouped:
        pairs, k, n, experts = (given.size(name) for name in ("rows", "k", "n", "experts"))
        dtype, leaves = given.dtype("dtype"), 1 if gradients else given.size("leaves", 1)
        matrix = dense(dtype, n, k)
        if gradients:
            sides = dense(dtype, pairs, n), dense(dtype, pairs, k), dense(dtype, experts, n, k)
        else:
            sides = dense(dtype, pairs, k), None if given.flag("scattered") else matrix, dense(dtype, pairs, n)
        gathered = given.flag("gathered", "no" if op == "moe_products" else "yes")
        return Grouped(backend, -1, *sides, experts, leaves, pairs, gathered)

    return described


def _ids(backend: str, given: Words) -> Ids:
    rows, top_k, experts = (given.size(name) for name in ("rows", "top_k", "experts"))
    return Ids(backend, rows * top_k, experts)


def _combine(backend: str, given: Words) -> RowsProblem:
    rows, h, top_k = (given.size(name) for name in ("rows", "h", "top_k"))
    dtype = given.dtype("dtype")
    out_dtype = given.dtype("out_dtype", given.used["dtype"])
    return RowsProblem(backend, dense(dtype, rows * top_k, h), dense(out_dtype, rows, h), top_k)


def mixtures(given: Inputs) -> list[torch.Tensor]:
    """Compute MoE routers of each kind, with tied logits, and experts, some of them without rows."""
    from .. import moe_router, sigmoid_mul  # deferred: see rope/op.py

    z = given.values(40, 60, seed=1, dtype=torch.float32, scale=2.0**-4)
    z[:8] = z[:8].round()
    bias = given.values(60, seed=2, dtype=torch.float32)
    limited = {"score": "sigmoid", "bias": bias, "groups": 5, "top_groups": 2, "scale": 2.5}
    found = []
    for options in ({}, {"normalize": False}, limited, limited | {"normalize": False}):
        found += given.run(lambda z, options=options: moe_router(z, 4, **options)[0], z)
        found.append(moe_router(z, 4, **options)[1])
    weights, ids = (t.detach() for t in moe_router(z, 4))
    ids[ids == 7], ids[5] = -1, -1
    x, gate_up, down = given.values(40, 48, seed=3), given.values(60, 128, 48, seed=4), given.values(60, 48, 64, seed=5)
    found += given.run(lambda x, w, g, d: moe_experts(x, ids, w, g, d), x, weights, gate_up, down)
    gate = given.values(40, 1, seed=6, dtype=torch.float32)
    return found + given.run(sigmoid_mul, gate, x)


def rounding_mixtures(given: Inputs) -> list[torch.Tensor]:
    """Compute MoE routers and experts whose sums round; two experts have most rows, some have none."""
    from .. import moe_router, sigmoid_mul  # deferred: see rope/op.py

    z = given.rough(40, 12, seed=1, dtype=torch.float32, low=-3, high=1)
    z[:, :2] = given.rough(40, 2, seed=2, dtype=torch.float32, low=1, high=2).abs()
    found = []
    for options in ({}, {"normalize": False}, {"score": "sigmoid", "scale": 2.5}):
        found += given.run(lambda z, options=options: moe_router(z, 4, **options)[0], z, rough=True)
    weights, ids = (t.detach() for t in moe_router(z, 4))
    ids[ids == 7] = -1
    x, gate_up = given.rough(40, 48, seed=3, low=-4), given.rough(12, 256, 48, seed=4, low=-4)
    down = given.rough(12, 48, 128, seed=5, low=-4)
    found += given.run(lambda x, w, g, d: moe_experts(x, ids, w, g, d), x, weights, gate_up, down, rough=True)
    gate = given.rough(40, 1, seed=6, dtype=torch.float32, high=2)
    x[:5] = given.rough(5, 48, seed=7, low=-140, high=-120)
    return found + given.run(sigmoid_mul, gate, x, rough=True)


def experts(normal: Normal) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of the self-test's experts, gate_up and down."""
    return normal(15, EXPERTS, 64, WIDTH), normal(16, EXPERTS, WIDTH, 32)


def _samples():
    from .samples import SAMPLES

    return SAMPLES


def _trial(given: Inputs, p: Grouped | Ids | RowsProblem | None) -> list[torch.Tensor]:
    tokens, top_k, count, h, features = 12, 2, 4, 32, 32  # sizes for moe_weigh
    if isinstance(p, Ids):
        tokens, count = p.count // 2, p.experts
    elif isinstance(p, RowsProblem):
        (tokens, h), top_k = p.out[0], p.top_k
    elif p is not None:
        tokens, top_k, count, matrix = p.pairs, 1, p.experts, p.b if p.out is None or len(p.out[0]) < 3 else None
        n, k = p.out[0][1:] if matrix is None else matrix[0]  # pyright: ignore[reportOptionalSubscript]
        h, features = (k, n // 2) if p.gathered else (n, k)
    x, gate_up = given.rough(tokens, h, seed=1, low=-4), given.rough(count, 2 * features, h, seed=2, low=-4)
    down, weights = (
        given.rough(count, h, features, seed=3, low=-4),
        given.rough(tokens, top_k, seed=4, dtype=torch.float32),
    )
    ids = (given.integers(tokens, 1, seed=5, below=count) + given.tensor(list(range(top_k)))) % count
    return given.run(lambda x, w, g, d: moe_experts(x, ids, w, g, d), x, weights, gate_up, down, rough=True)


def _gated_trial(given: Inputs, p: Grouped | None) -> list[torch.Tensor]:
    """Compute experts, and silu_mul alone for all gates of bf16 in (-64, -32] with all ups of bf16 in [1, 2).

    An exponential that is one ulp off changes few of its results, and those of no other gates.
    """
    features, k = 256, 64
    pair = given.tensor(list(range(features * k))).reshape(features, k)
    gate_up = torch.cat((-32 - (pair // 128) / 4, 1 + (pair % 128) / 128))[None].to(given.dtype)
    rows = given.tensor(list(range(p.pairs if p is not None else k)))
    x = (rows[:, None] % k == given.tensor(list(range(k)))).to(given.dtype)  # each product is one gate or up
    pairs = Pairs(rows, rows, rows[:, None], given.tensor([0, len(rows)]))
    return [*_trial(given, p), _gated(x, Matrices(gate_up), pairs, keep=False)[1]]


def _self_test(normal):
    from .. import moe_router

    weights, ids = moe_router(normal(17, ROWS, EXPERTS, dtype=torch.float32), 2)
    matrices = experts(normal)
    yield Rows("moe_experts", lambda x, w, i: moe_experts(x, i, w, *matrices), [normal(0, ROWS, WIDTH), weights, ids])


_EACH = one_per_backend(_triton, cpu, reference)
_ALL = (TRITON, NATIVE, REFERENCE)
_PRODUCTS = (
    Kernel("grouped", TRITON, _grouped, rule=lambda p: _grouped().rejects(p)),
    *(Kernel("each", backend, _each) for backend in _ALL),
)
OP = Op(
    "moe_experts",
    kernels={
        "moe_products": (
            Kernel("many", CUDA, _cuda, rule=lambda p: _cuda().products_rejects(p)),
            Kernel("few", CUDA, _few, rule=lambda p: _few().rejects(p)),
            *_PRODUCTS,
        ),
        "moe_gated": (Kernel("many", CUDA, _cuda, rule=lambda p: _cuda().gated_rejects(p)), *_PRODUCTS),
        "moe_gradients": (Kernel("many", CUDA, _cuda, rule=lambda p: _cuda().gradients_rejects(p)), *_PRODUCTS),
        "moe_pairs": (
            Kernel("many", CUDA, _cuda, rule=lambda p: _cuda().pairs_rejects(p)),
            Kernel("triton", TRITON, _ranked, rule=lambda p: _ranked().rejects(p)),
            *(Kernel("torch", backend, _pairs) for backend in _ALL),
        ),
        "moe_combine": (Kernel("vectors", CUDA, _cuda, rule=lambda p: _cuda().combine_rejects(p)), *_EACH),
        "moe_weigh": _EACH,
    },
    described={
        "moe_pairs": _ids,
        "moe_combine": _combine,
        **{op: _products(op) for op in ("moe_products", "moe_gated", "moe_gradients")},
    },
    custom=(
        # `rows` names the group of ranks with distinct rows: either all ranks that share the experts, or one rank of
        # each set with the same rows. "" means that all ranks have the same rows. Row counts may differ.
        Custom(
            "moe_experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, int? num_experts, "
            "int first_expert, str tp, str ep, str rows) -> Tensor",
            _moe_experts,
            fake_like,
        ),
    ),
    golden=(Golden(mixtures), Golden(rounding_mixtures)),
    self_test=_self_test,
    samples=_samples,
    trials={
        "moe_products": Trial(
            _trial,
            {
                "": ("rows=9 k=32 n=16 experts=3 leaves=2",),
                "many": ("rows=1000 k=128 n=256 experts=2 leaves=8",),
                "few": ("rows=20 k=128 n=2048 experts=4 leaves=8",),
                "grouped": ("rows=40 k=128 n=64 experts=4 leaves=8",),
            },
        ),
        "moe_gated": Trial(
            _gated_trial,
            {
                "": ("rows=9 k=16 n=32 experts=3",),
                "many": ("rows=16000 k=64 n=1024 experts=2",),
                "grouped": ("rows=40 k=64 n=64 experts=4",),
            },
        ),
        "moe_gradients": Trial(
            _trial,
            {
                "": ("rows=9 k=16 n=32 experts=3",),
                "many": ("rows=300 k=64 n=256 experts=2",),
                "grouped": ("rows=40 k=64 n=64 experts=4",),
            },
        ),
        "moe_pairs": Trial(_trial, {"": ("rows=12 top_k=2 experts=5",), "many": ("rows=1100 top_k=2 experts=8",)}),
        "moe_combine": Trial(_trial, {"": ("rows=12 h=64 top_k=2", "rows=12 h=64 top_k=2 dtype=fp32")}),
        "moe_weigh": Trial(_trial),
    },
)
