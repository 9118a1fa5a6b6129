"""The forward ops of a decoder's trunk as PyTorch custom ops, ``torch.ops.alignkit.*``, for engines that compile.

A compiler sees one opaque node with a known output shape and can neither look inside nor change the arithmetic. Each
computes what the op of its name in `alignkit.ops` does, forward only; outputs never share memory with inputs.
"""
from __future__ import annotations

import torch

from ..errors import InputError
from ..tp import TP
from .linear import linear as _linear
from .linear import row_parallel_linear as _row_parallel_linear
from .rms_norm import rms_norm as _rms_norm
from .rope import rope as _rope
from .silu_mul import silu_mul as _silu_mul

_groups: dict[str, TP] = {}
_library = torch.library.Library("alignkit", "DEF")


def name_group(name: str, tp: TP) -> None:
    """From now on `row_parallel_linear(..., group=name)` is shared by the ranks of `tp` in this process. A name, because
    a compiled graph can hold a string but no process group; named again, it is replaced."""
    _groups[name] = tp


def _group(name: str) -> TP | None:
    if not name:
        return None
    if name not in _groups:
        raise InputError(f"group: no ranks are named {name!r} in this process")
    return _groups[name]


def _define(schema: str, run, fake):
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"alignkit::{name}", fake, lib=_library)
    return getattr(torch.ops.alignkit, name).default


def _rows(x, weight, *_):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _like(x, *_):
    return x.new_empty(x.shape)


linear = _define(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _rows)
row_parallel_linear = _define(
    "row_parallel_linear(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor",
    lambda x, weight, bias, group: _row_parallel_linear(x, weight, bias, tp=_group(group)), _rows)
rms_norm = _define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _like)
add_rms_norm = _define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, residual, weight, eps: _rms_norm(x, weight, eps, residual),
    lambda x, residual, weight, eps: (_like(x), _like(x)))
rope = _define(
    "rope(Tensor x, Tensor positions, Tensor table) -> Tensor", _rope, _like)
silu_mul = _define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor", _silu_mul, _like)
