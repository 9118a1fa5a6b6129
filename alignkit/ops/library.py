"""Forward ops of a decoder as PyTorch custom ops, ``torch.ops.alignkit.*``, for engines that compile.

A compiler sees one opaque node with a known output shape and cannot change its arithmetic. The ops are forward only and
their outputs never alias inputs. Most compute the op of the same name in `alignkit.ops`. The others:

- `linear_fp32`: `linear` with an fp32 result.
- `add_rms_norm`: `rms_norm` with a residual.
- `rope_qk`: `rope` of queries and keys in one launch.
- `add`: the rounded sum of two tensors.

Engines call these ops many times per step and are host-bound between them. On a GPU most ops therefore compare only
shapes and dtypes, and run the full checks only if these do not match. The MoE ops, `sigmoid_mul` and
`row_parallel_linear` with a group always run the full checks.

vLLM's compiled graphs, which it caches on disk, contain the names and schemas of the ops and the names of groups.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from ..contract import k_leaves
from ..dist import TP
from ..errors import InputError, UnsupportedError
from ..runtime import dispatch
from ._calls import in_default_mode
from ._common import WITH_FP16, as_rows, check_like, check_weight, checks_values, require, unit
from .linear import matmul
from .linear import row_parallel_linear as _parallel
from .moe_experts import moe_experts as _experts
from .moe_router import check as _check_router
from .moe_router import route as _route
from .qk_norm_rope import check as _check_qk
from .qk_norm_rope import forward as _forward_qk
from .rms_norm import check as _check_norm
from .rms_norm import forward as _norm
from .rope import check as _check_rope
from .sigmoid_mul import check as _check_sigmoid
from .sigmoid_mul import forward as _sigmoid
from .silu_mul import check as _check_silu

_groups: dict[str, TP] = {}
_library = torch.library.Library("alignkit", "DEF")


def register_group(name: str, tp: TP) -> None:
    """Register `tp` under `name` in this process, for the `group`, `tp`, `ep` and `rows` arguments of the ops.

    A compiled graph can hold a string but not a process group. Registering a name again replaces the group.
    """
    _groups[name] = tp


def _group(name: str, argument: str = "group") -> TP | None:
    if not name:
        return None
    if name not in _groups:
        raise InputError(
            f"{argument}: must be the name of a registered group, got {name!r}. Call "
            "alignkit.ops.library.register_group() in this process first"
        )
    return _groups[name]


def _define(schema: str, run, fake):
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, in_default_mode(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"alignkit::{name}", fake, lib=_library)

    def backward(*_):
        raise UnsupportedError(
            f"alignkit::{name}: unsupported in a backward pass. Call the differentiable op of alignkit.ops instead"
        )

    torch.library.register_autograd(f"alignkit::{name}", backward, lib=_library)
    return getattr(torch.ops.alignkit, name).default


def _fake_linear(x, weight, *_):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_like(x, *_):
    return x.new_empty(x.shape)


def _matmul(x, weight, bias, leaves, out_dtype=None):
    if x is None or weight is None:
        _raise_none(x=x, weight=weight)
    if (
        x.is_cpu
        or x.shape[-1] != weight.shape[1]
        or x.dtype != weight.dtype
        or (bias is not None and (bias.shape[0] != weight.shape[0] or bias.dtype != weight.dtype))
    ):
        check_weight(x, weight, bias, dtypes=WITH_FP16)
    out_dtype = out_dtype or x.dtype
    if x.ndim == 2:
        return matmul(x, weight, leaves=leaves, bias=bias, out_dtype=out_dtype)
    y = matmul(x.reshape(-1, x.shape[-1]), weight, leaves=leaves, bias=bias, out_dtype=out_dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


def _linear(x, weight, bias):
    return _matmul(x, weight, bias, 1)


def _linear_fp32(x, weight, bias):
    return _matmul(x, weight, bias, 1, torch.float32)


def _row_parallel_linear(x, weight, bias, group):
    if group:
        return _parallel(x, weight, bias, tp=_group(group))
    if x is None or weight is None:
        _raise_none(x=x, weight=weight)
    return _matmul(x, weight, bias, k_leaves(x.shape[-1]))


def _add_rms_norm(x, residual, weight, eps):
    if x is None or weight is None:
        _raise_none(x=x, weight=weight)
    if (
        x.is_cpu
        or x.shape[-1] != weight.shape[0]
        or x.dtype != weight.dtype
        or (residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype))
    ):
        _check_norm(x, weight, eps, residual)
    total, y, _ = _norm(x, weight.contiguous(), eps, residual)
    return y, total


def _add_rms_norm_with_residual(x, residual, weight, eps):
    if residual is None:
        _raise_none(residual=residual)
    return _add_rms_norm(x, residual, weight, eps)


def _raise_none(**tensors) -> NoReturn:
    """Raise InputError for the first tensor that is None; torch's dispatcher accepts None for any tensor."""
    name = next(name for name, t in tensors.items() if t is None)
    raise InputError(f"{name}: expected a tensor, got None")


def _rms_norm(x, weight, eps):
    return _add_rms_norm(x, None, weight, eps)[0]


def _check_rotation(name, x, positions, table, rotary_dim):
    if (
        checks_values(x.device)
        or x.ndim != 3
        or x.shape[0] != positions.shape[0]
        or x.shape[2] != table.shape[1]
        or rotary_dim not in (None, table.shape[1])
    ):
        _check_rope(x, positions, table, name, rotary_dim)


def _rope_qk(q, k, positions, table, rotary_dim=None):
    if q is None or k is None or positions is None or table is None:
        _raise_none(q=q, k=k, positions=positions, table=table)
    _check_rotation("q", q, positions, table, rotary_dim)
    _check_rotation("k", k, positions, table, rotary_dim)
    require(k.shape[2] == q.shape[2], f"k: head_dim must equal q's {q.shape[2]}, got {k.shape[2]}")
    return dispatch.select("rope", q.device).apply_qk(unit(q), unit(k), positions.contiguous(), table.contiguous())


def _qk_norm_rope(q, k, q_weight, k_weight, eps, positions, table, rotary_dim=None):
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "positions": positions, "table": table}
    if any(t is None for t in tensors.values()):
        _raise_none(**tensors)
    if (
        checks_values(q.device)
        or q.ndim != 3
        or k.ndim != 3
        or not q.shape[0] == k.shape[0] == positions.shape[0]
        or not q.shape[2] == k.shape[2] == q_weight.shape[0] == k_weight.shape[0] == table.shape[1]
        or not q.dtype == k.dtype == q_weight.dtype == k_weight.dtype
        or rotary_dim not in (None, table.shape[1])
    ):
        _check_qk(q, k, q_weight, k_weight, eps, positions, table, rotary_dim)
    return _forward_qk(q, k, q_weight, k_weight, eps, positions, table)


def _silu_mul(gate, up):
    if gate is None or up is None:
        _raise_none(gate=gate, up=up)
    if gate.is_cpu or gate.shape != up.shape or gate.dtype != up.dtype:
        _check_silu(gate, up)
    return dispatch.select("silu_mul", gate.device).forward(as_rows(gate), as_rows(up)).view(gate.shape)


def _moe_router(logits, top_k, score, normalize, bias, groups, top_groups, scale):
    if logits is None:
        _raise_none(logits=logits)
    options = _check_router(logits, top_k, score, normalize, bias, groups, top_groups, scale)
    return _route(logits, bias, options)


def _fake_router(logits, top_k, *_):
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def _moe_experts(x, ids, weights, gate_up, down, num_experts, first_expert, tp, ep, row_group_name):
    if x is None or ids is None or weights is None or gate_up is None or down is None:
        _raise_none(x=x, ids=ids, weights=weights, gate_up=gate_up, down=down)
    expert_groups = {"tp": _group(tp, "tp"), "ep": _group(ep, "ep")}
    options = {"num_experts": num_experts, "first_expert": first_expert, **expert_groups}
    row_group = _group(row_group_name, "rows")
    with torch.no_grad():
        if row_group is None:
            return _experts(x, ids, weights, gate_up, down, **options)
        count, padded = x.shape[0], row_group.padded_rows(x.shape[0])
        batch = [_pad_rows(t, padded, fill) for t, fill in ((x, 0.0), (ids, -1), (weights, 0.0))]
        if row_group.size == math.prod(group.size for group in expert_groups.values() if group is not None):
            return _experts(*batch, gate_up, down, gather=True, **options)[:count]
        out = _experts(*(row_group.gather(t) for t in batch), gate_up, down, **options)
        return row_group.shard(out)[:count]


def _pad_rows(t: torch.Tensor, count: int, fill: float) -> torch.Tensor:
    """Pad t with rows of `fill` to `count` rows."""
    return t if len(t) == count else torch.cat((t, t.new_full((count - len(t), *t.shape[1:]), fill)))


def _sigmoid_mul(gate, x):
    if gate is None or x is None:
        _raise_none(gate=gate, x=x)
    _check_sigmoid(gate, x)
    return _sigmoid(gate, x)


def _add(x, y):
    if x is None or y is None:
        _raise_none(x=x, y=y)
    if x.shape != y.shape:
        raise InputError(f"y: shape must equal x's {tuple(x.shape)}, got {tuple(y.shape)}")
    check_like("y", y, "x", x)
    return x + y


linear = _define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _fake_linear)
linear_fp32 = _define(
    "linear_fp32(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _linear_fp32,
    lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32),
)
row_parallel_linear = _define(
    "row_parallel_linear(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor",
    _row_parallel_linear,
    _fake_linear,
)
rms_norm = _define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _fake_like)
add_rms_norm = _define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _add_rms_norm_with_residual,
    lambda x, residual, weight, eps: (_fake_like(x), _fake_like(x)),
)
rope_qk = _define(
    "rope_qk(Tensor q, Tensor k, Tensor positions, Tensor table, int? rotary_dim=None) -> (Tensor, Tensor)",
    _rope_qk,
    lambda q, k, *_: (_fake_like(q), _fake_like(k)),
)
qk_norm_rope = _define(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor positions, Tensor table, "
    "int? rotary_dim=None) -> (Tensor, Tensor)",
    _qk_norm_rope,
    lambda q, k, *_: (_fake_like(q), _fake_like(k)),
)
silu_mul = _define("silu_mul(Tensor gate, Tensor up) -> Tensor", _silu_mul, _fake_like)
moe_router = _define(
    "moe_router(Tensor logits, int top_k, str score, bool normalize, Tensor? bias, int groups, int top_groups, "
    "float scale) -> (Tensor, Tensor)",
    _moe_router,
    _fake_router,
)
moe_experts = _define(
    "moe_experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, int? num_experts, "
    "int first_expert, str tp, str ep, str rows) -> Tensor",
    _moe_experts,
    _fake_like,
)
"""``torch.ops.alignkit.moe_experts``.

`rows` names the group of ranks with distinct rows: either all ranks that share the experts, or one rank of each set
with the same rows. ``""`` means that all ranks have the same rows. Row counts may differ (`TP.padded_rows`).
"""
sigmoid_mul = _define("sigmoid_mul(Tensor gate, Tensor x) -> Tensor", _sigmoid_mul, lambda gate, x: _fake_like(x))
add = _define("add(Tensor x, Tensor y) -> Tensor", _add, _fake_like)
"""``torch.ops.alignkit.add``: ``T(x + y)``. As an opaque op, because a compiler could fuse the sum and round later."""
