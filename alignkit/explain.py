"""`alignkit explain`: the kernel that computes a problem, and the reasons against the others.

The answer comes from `runtime.dispatch`, as for a call, but the problem is described in words instead of by tensors.
This requires neither a GPU nor the device family's library. `DESCRIBED` lists the ops; a new field of an op's
problem.py needs its name here. docs/architecture.md shows the output, and tests/cli/test_explain.py reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .config import NO, YES
from .errors import BackendError, InputError
from .ops.attention.problem import Attention
from .ops.gated_delta_rule.problem import Delta
from .ops.linear.problem import Product
from .ops.linear_logp.problem import Head, HeadGradient, HeadProducts
from .ops.moe_experts.problem import Grouped, Ids, Rows
from .ops.rms_norm.problem import Norm
from .runtime import dispatch, families
from .runtime.operands import Operand

MEANINGS = {
    "rows": "tokens, the M of a GEMM; for moe_products, moe_gated and moe_gradients, pairs of a token and an expert",
    "k": "length of the dot products; for head_products, the width of the hidden states",
    "n": "outputs of a row",
    "h": "width of a row",
    "ids": "size of the vocabulary shard",
    "heads": "query heads",
    "kv_heads": "KV heads (default: as many as heads)",
    "head_dim": "width of a head",
    "seqs": "sequences of the batch",
    "page": "rows per page of the KV cache (vLLM's block_size)",
    "pages": "width of the block table",
    "top_k": "experts of a token",
    "experts": "experts of this rank",
    "leaves": "parts of the k-tree, 1 for a chain (docs/contract.md)",
    "dtype": "of the inputs: bf16, fp16 or fp32",
    "out_dtype": "of the result (default: that of the inputs)",
    "bias": "yes with a bias",
    "accumulate": "yes if the result is added to",
    "aligned": "no if an address is not a multiple of 16 bytes",
    "gathered": "yes if rows are in the order of tokens, no if sorted by expert",
    "scattered": "yes if the experts' matrices are not one tensor",
    "keep_logits": "yes if the products are kept for the backward pass",
    "family": "device family (default: sm90, Hopper GPUs)",
    "backend": "language of the kernels (default: the fastest of the family)",
}
"""Meanings of the names in NAME=VALUE, as `alignkit explain list` prints them."""
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Words:
    """Arguments in the form ``name=value``.

    An op reads the names that it takes. A name without a default is required. `used` collects the names that were read,
    with their values; `missing` collects the required names that were absent.
    """

    def __init__(self, words: Sequence[str]):
        self._given: dict[str, str] = {}
        for word in words:
            name, separator, value = word.partition("=")
            if not separator:
                raise InputError(f"{name}: expected {name}=VALUE, got {word!r}")
            if not value:
                raise InputError(f"{name}: value is missing, got {word!r}")
            if name in self._given:
                raise InputError(f"{name}: given more than once, as {self._given[name]} and {value}")
            self._given[name] = value
        self.used: dict[str, str] = {}
        self.missing: list[str] = []

    def _take(self, name: str, default: str | None) -> str:
        value = self._given.pop(name, default)
        if value is None:  # continue with a placeholder, to report all missing names at once
            self.missing.append(name)
            value = "64"
        self.used[name] = value
        return value

    def one_of(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self._take(name, default)
        if value not in allowed:
            raise InputError(f"{name}: must be one of {', '.join(allowed)}, got {value!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self._take(name, None if default is None else str(default))
        if not value.isdecimal():
            raise InputError(f"{name}: must be an integer >= 0, got {value!r}")
        if len(value) > 10:
            raise InputError(f"{name}: must have at most 10 digits, got {value}")
        return int(value)

    def flag(self, name: str, default: str = "no") -> bool:
        return self.one_of(name, (*YES, *NO), default) in YES

    def dtype(self, name: str, default: str = "bf16") -> torch.dtype:
        return TYPES[self.one_of(name, tuple(TYPES), default)]

    def reject_unused(self, op: str) -> None:
        for name in self._given:
            raise InputError(f"{name}: must be one of the names that {op} takes ({', '.join(self.used)})")


def _dense(dtype: torch.dtype, *shape: int, aligned: bool = True) -> Operand:
    return torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype, aligned


def _linear(backend: str, given: Words) -> Product:
    m, k, n = (given.size(name) for name in ("rows", "k", "n"))
    dtype, leaves = given.dtype("dtype"), given.size("leaves", 1)
    out_dtype = given.dtype("out_dtype", given.used["dtype"])
    bias = _dense(dtype, n) if given.flag("bias") else None
    aligned, accumulate = given.flag("aligned", "yes"), given.flag("accumulate")
    if not leaves or k % leaves:
        raise InputError(f"leaves: must divide k = {k}, got {leaves}")
    a, b, out = _dense(dtype, m, k, aligned=aligned), _dense(dtype, n, k), _dense(out_dtype, m, n)
    return Product(backend, None, a, b, bias, out, leaves, accumulate)


def _attention(paged: bool) -> Callable[[str, Words], Attention]:
    def described(backend: str, given: Words) -> Attention:
        rows, heads, dim = (given.size(name) for name in ("rows", "heads", "head_dim"))
        kv_heads, dtype = given.size("kv_heads", heads), given.dtype("dtype")
        if not kv_heads or heads % kv_heads:
            raise InputError(f"kv_heads: must divide heads = {heads}, got {kv_heads}")
        seqs, aligned = given.size("seqs", 1), given.flag("aligned", "yes")
        q = _dense(dtype, rows, heads, dim, aligned=aligned)
        page, pages = (given.size("page", 16), given.size("pages")) if paged else (0, 0)
        k = _dense(dtype, seqs * page * pages if paged else rows, kv_heads, dim)
        return Attention(backend, q, k, k, seqs, page, pages)

    return described


def _norm(others: int) -> Callable[[str, Words], Norm]:
    def described(backend: str, given: Words) -> Norm:
        shape, dtype = (given.size("rows"), given.size("h")), given.dtype("dtype")
        x = _dense(dtype, *shape, aligned=given.flag("aligned", "yes"))
        return Norm(backend, (x, *[_dense(dtype, *shape)] * others, _dense(dtype, shape[1])))

    return described


def _head(given: Words) -> tuple[int, int, torch.dtype, Operand, Operand]:
    n, ids, k = (given.size(name) for name in ("rows", "ids", "k"))
    dtype = given.dtype("dtype")
    return n, ids, dtype, _dense(dtype, n, k, aligned=given.flag("aligned", "yes")), _dense(dtype, ids, k)


def _padded(dtype: torch.dtype, rows: int, columns: int, to: int) -> Operand:
    return torch.Size((rows, columns)), (columns + -columns % to, 1), dtype, True


def _statistics(backend: str, given: Words) -> Head:
    n, ids, _, hidden, weight = _head(given)
    return Head(backend, hidden, weight, _padded(torch.float32, n, ids, 4) if given.flag("keep_logits") else None)


def _gradient(backend: str, given: Words) -> HeadGradient:
    n, ids, dtype, hidden, weight = _head(given)
    return HeadGradient(backend, hidden, weight, _padded(dtype, n, ids, 8))


def _products(backend: str, given: Words) -> HeadProducts:
    n, ids, dtype, hidden, weight = _head(given)
    results = _dense(torch.float32, *hidden[0]), _dense(dtype, *weight[0])
    return HeadProducts(backend, _padded(dtype, n, ids, 8), hidden, weight, *results)


def _delta(backend: str, given: Words) -> Delta:
    return Delta(backend, given.dtype("dtype"))


def _experts(op: str) -> Callable[[str, Words], Grouped]:
    gradients = op == "moe_gradients"

    def described(backend: str, given: Words) -> Grouped:
        pairs, k, n, experts = (given.size(name) for name in ("rows", "k", "n", "experts"))
        dtype, leaves = given.dtype("dtype"), 1 if gradients else given.size("leaves", 1)
        matrix = _dense(dtype, n, k)
        if gradients:
            sides = _dense(dtype, pairs, n), _dense(dtype, pairs, k), _dense(dtype, experts, n, k)
        else:
            sides = _dense(dtype, pairs, k), None if given.flag("scattered") else matrix, _dense(dtype, pairs, n)
        gathered = given.flag("gathered", "no" if op == "moe_products" else "yes")
        return Grouped(backend, -1, *sides, experts, leaves, pairs, gathered)

    return described


def _ids(backend: str, given: Words) -> Ids:
    rows, top_k, experts = (given.size(name) for name in ("rows", "top_k", "experts"))
    return Ids(backend, rows * top_k, experts)


def _combine(backend: str, given: Words) -> Rows:
    rows, h, top_k = (given.size(name) for name in ("rows", "h", "top_k"))
    dtype = given.dtype("dtype")
    out_dtype = given.dtype("out_dtype", given.used["dtype"])
    return Rows(backend, _dense(dtype, rows * top_k, h), _dense(out_dtype, rows, h), top_k)


DESCRIBED: dict[str, Callable[[str, Words], Any]] = {
    "attention": _attention(paged=False),
    "attention_backward": _attention(paged=False),
    "paged_attention": _attention(paged=True),
    "linear": _linear,
    "rms_norm": _norm(0),
    "rms_norm_backward": _norm(1),
    "head_statistics": _statistics,
    "head_gradient": _gradient,
    "head_products": _products,
    "gated_delta_rule": _delta,
    "moe_pairs": _ids,
    "moe_combine": _combine,
    **{op: _experts(op) for op in ("moe_products", "moe_gated", "moe_gradients")},
}
"""Op -> function that builds the problem; ops whose kernel depends on the problem."""


def explain(op: str, words: Sequence[str]) -> Iterator[str]:
    """Yield lines of text that explain the choice of a kernel.

    Args:
        op: A key of `dispatch.OPS`, or "list" for the names that each op takes.
        words: The problem, as ``name=value`` words such as ``rows=64``.

    Raises:
        InputError: If the op is unknown, or the words are not the ones that the op takes.
        BackendError: If the kernels of the device family cannot be imported.
    """
    if op == "list":
        for name in dispatch.OPS:
            required, optional = _names(name)
            yield f"{name:<20} {', '.join(required) or '-'}; optional: {', '.join(optional)}"
        yield ""
        yield from (f"{name:<12} {meaning}" for name, meaning in MEANINGS.items())
        return
    parts = [name for name, folder in dispatch.OPS.items() if folder == dispatch.OPS.get(op, op) and name in DESCRIBED]
    if op not in dispatch.OPS and parts:
        raise InputError(f"op: must be one of the parts of {op} ({', '.join(parts)}), got {op!r}")
    given = Words(words)
    family = families.BY_NAME[given.one_of("family", tuple(families.BY_NAME), families.SM90.name)]
    backend = given.one_of("backend", family.backends, family.backends[0])
    dispatch.order(op)  # raises InputError for an unknown op
    problem = _described(op, backend, given) if op in DESCRIBED else None
    given.reject_unused(op)
    yield f"{op}: " + " ".join(f"{name}={value}" for name, value in given.used.items())
    try:
        refusals = [(kernel, kernel.rejects(problem)) for kernel in dispatch.kernels(op, backend)]
    except ImportError as e:
        raise BackendError(f"family: the kernels of {family.name} cannot be imported: {e}") from e
    chosen = None
    for kernel, why in refusals:
        name = f"{kernel.name:<10}"
        if why is not None:
            yield f"  skipped     {name} {why}"
        elif chosen is None:
            yield f"  selected    {name} alignkit.ops.{kernel.folder}.{kernel.file}" + (
                f", unless {kernel.declines}" if kernel.declines else ""
            )
        else:
            yield f"  also valid  {name} " + (
                f"used if {chosen.name}'s trial fails" if chosen.declines else f"slower than {chosen.name}"
            )
        if why is None and (chosen is None or chosen.declines):
            chosen = kernel
    if problem is None and parts:
        yield f"  the kernels of these parts depend on the problem: {', '.join(parts)}"


def _described(op: str, backend: str, given: Words) -> Any:
    try:
        problem = DESCRIBED[op](backend, given)
    except InputError:
        if not given.missing:
            raise
    except RuntimeError as e:  # torch rejects the shape
        raise InputError(f"{op}: the sizes must be those of a possible tensor: {str(e).splitlines()[0]}") from None
    else:
        if not given.missing:
            return problem
    required, optional = _names(op)
    raise InputError(
        f"{', '.join(given.missing)}: required, for example {given.missing[0]}=64. {op} requires "
        f"{', '.join(required)}; optional names: {', '.join(optional)}"
    )


def _names(op: str) -> tuple[list[str], list[str]]:
    """Return the names that an op requires, and the names that have a default."""
    words = Words([])  # all values are placeholders or defaults
    if op in DESCRIBED:
        DESCRIBED[op](families.SM90.backends[0], words)
    return words.missing, [*(name for name in words.used if name not in words.missing), "family", "backend"]
