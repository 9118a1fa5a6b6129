"""CUDA (csrc/sm90/experts): gate and up with their activation of rows that are gathered, of many an expert; chains or k-trees of
rows that lie in the order of experts; the gradients of matrices; the order of experts itself, of many ids; and the sum over a
row's experts. What it leaves to Triton gets the same bits."""

from __future__ import annotations

import ctypes

import torch

from ...contract.experts import ExpertTree
from ...errors import BackendError
from ...runtime import cuda
from ...runtime.operands import Operand, copied
from .problem import Grouped, Ids, Matrices, Pairs, Rows, on_device

FEW_GATED = 64
"""Up to so many rows an expert on average, gate and up are Triton's: tiles of 128 would be mostly empty."""
FEW = 16
"""Up to so many, down's products are few.py's, whose tiles are of so many rows that a matrix is read as fast as it can be."""
FEW_IDS = 2048
"""Up to so many ids are compared with each other in one launch (ranked.py) sooner than they are counted in two."""
MOST_EXPERTS = 1024
"""Their tiles are counted in shared memory."""
BLOCK = 2048
"""Ids whose pairs are counted together."""
MOST_IDS = 16
"""Of a row: those of its pairs that are added are in registers together."""
MAP = 128
"""Bytes of a matrix's map, by which the copy engine knows it."""


def pairs_refuses(p: Ids) -> str | None:
    if p.count <= FEW_IDS:
        return f"{p.count} ids, no more than {FEW_IDS}"
    if p.experts > MOST_EXPERTS:
        return f"there are more than {MOST_EXPERTS} experts"
    return None if p.count < 2**31 else "2^31 ids or more"


def pairs(ids: torch.Tensor, first: int, experts: int) -> Pairs:
    """As pairs.py's."""
    n, device = ids.numel(), ids.device
    row, choice = (torch.empty(n, dtype=torch.int64, device=device) for _ in range(2))
    place = torch.empty(ids.shape, dtype=torch.int64, device=device)
    offsets = torch.empty(experts + 1, dtype=torch.int64, device=device)
    counts = torch.empty(-(-n // BLOCK), experts + 1, dtype=torch.int32, device=device)
    cuda.call(
        "alignkit_experts_pairs",
        device,
        ids.contiguous(),
        int(ids.dtype == torch.int32),
        n,
        ids.shape[1],
        ctypes.c_int64(first),
        experts,
        counts,
        row,
        choice,
        place,
        offsets,
    )
    return Pairs(row, choice, place, offsets)


def few(p: Grouped, most: int) -> str | None:
    return f"{p.pairs} rows for {p.experts} experts, of more than {most} each" if p.pairs <= most * p.experts else None


def unfit(p: Grouped) -> str | None:
    """Why none of the kernels of products is for this problem."""
    if p.b is None:
        return "the experts' matrices differ in strides or alignment"
    if {p.a[2], p.b[2]} != {torch.bfloat16}:
        return "operands other than bf16"
    if p.experts > MOST_EXPERTS:
        return f"there are more than {MOST_EXPERTS} experts"
    if p.pairs >= 2**31:
        return "2^31 rows or more"
    if not (copied(p.a) and copied(p.b)):
        return "strides or addresses that the copy engine does not take"
    return None


def _stored(out: Operand) -> bool:
    """Whether rows of it can be written 16 bytes at a time."""
    return copied(out) and out[0][1] * out[2].itemsize % 16 == 0


def gated_refuses(p: Grouped) -> str | None:
    if not p.gathered:
        return "rows that lie in the order of experts: it gathers them"
    if (why := few(p, FEW_GATED) or unfit(p)) is not None:
        return why
    if p.b[0][0] % 16:  # pyright: ignore[reportOptionalSubscript] - `unfit` asked
        return "features that are no multiple of 8"
    return None if p.out is None or p.out[1][0] == p.out[0][1] else "a result whose rows are apart"


def products_unfit(p: Grouped) -> str | None:
    if p.gathered:
        return "rows that are gathered: it takes those that lie in the order of experts"
    if p.leaves not in (1, 2, 4, 8):
        return f"{p.leaves} leaves: it computes chains, and trees of 2, 4 or 8"
    if p.leaves > 1 and p.a[0][1] % (16 * p.leaves):
        return f"leaves of {p.a[0][1] // p.leaves} k, no multiple of 16"
    return unfit(p)


def products_refuses(p: Grouped) -> str | None:
    if (why := few(p, FEW) or products_unfit(p)) is not None:
        return why
    return None if p.out is not None and _stored(p.out) else "a result that cannot be written 16 bytes at a time"


def gradients_refuses(p: Grouped) -> str | None:
    if (why := unfit(p)) is not None:
        return why
    if p.pairs == 0:
        return "no rows"
    if p.out is None or any(columns % 8 for columns in p.out[0][1:]):
        return "a matrix that has not multiples of 8 rows and columns"
    return None if p.out[3] else "a result that cannot be written 16 bytes at a time"


def _maps(b: Matrices, function: str) -> torch.Tensor:
    (rows, k), pitch = b.shape, b[0].stride(0)
    addresses = tuple(w.data_ptr() for w in b.given)

    def made() -> torch.Tensor:
        maps = bytearray(MAP * len(addresses))
        buffer = (ctypes.c_char * len(maps)).from_buffer(maps)
        make = getattr(cuda.library(), function)
        for i, address in enumerate(addresses):
            place = ctypes.byref(buffer, MAP * i)
            cuda.check(make(place, ctypes.c_void_p(address), ctypes.c_int64(pitch), rows, k), function)
        return torch.frombuffer(maps, dtype=torch.uint8)

    return on_device(b[0].device, (function, rows, k, pitch, addresses), made)


def _matrices(b: Matrices, maps: str) -> tuple[torch.Tensor | None, ctypes.c_int64, torch.Tensor | None]:
    """The first and its pitch, if they lie one behind the other; else maps of each, by the function `maps`."""
    pitch = b[0].stride(0)
    if isinstance(b.given, torch.Tensor) and b.given.stride(0) == b.shape[0] * pitch:
        return b.given, ctypes.c_int64(pitch), None
    return None, ctypes.c_int64(pitch), _maps(b, maps)


def gated(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, h: torch.Tensor | None
) -> torch.Tensor:
    """As each.py's, and the next two."""
    if row is None:
        raise BackendError("moe_gated: rows that are not gathered are not for this kernel")
    features, k = b.shape[0] // 2, a.shape[1]
    out = torch.empty(len(row), features, dtype=a.dtype, device=a.device)
    cuda.call(
        "alignkit_experts_gate_up",
        a.device,
        a,
        ctypes.c_int64(a.stride(0)),
        row,
        *_matrices(b, "alignkit_experts_gate_up_map"),
        offsets,
        len(b),
        h,
        out,
        len(row),
        features,
        k,
    )
    return out


def products(
    a: torch.Tensor,
    row: torch.Tensor | None,
    b: Matrices,
    offsets: torch.Tensor,
    leaves: int,
    out: torch.Tensor,
    function: str = "alignkit_experts_down",
    maps: str = "alignkit_experts_down_map",
) -> None:
    """By the library's `function`, for matrices that lie apart with `maps`."""
    if row is not None:
        raise BackendError("moe_products: rows that are gathered are not for this kernel")
    cuda.call(
        function,
        a.device,
        a,
        ctypes.c_int64(a.stride(0)),
        *_matrices(b, maps),
        offsets,
        len(b),
        out,
        ctypes.c_int64(out.stride(0)),
        int(out.dtype == torch.bfloat16),
        *out.shape,
        a.shape[1],
        leaves,
    )


def gradients(
    a: torch.Tensor,
    a_row: torch.Tensor | None,
    b: torch.Tensor,
    b_row: torch.Tensor | None,
    offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if a_row is not None and b_row is not None:
        raise BackendError("moe_gradients: two operands whose rows are gathered are not for this kernel")
    experts, n, k = out.shape
    cuda.call(
        "alignkit_experts_gradients",
        a.device,
        a,
        ctypes.c_int64(a.stride(0)),
        b,
        ctypes.c_int64(b.stride(0)),
        int(a_row is not None),
        b_row if a_row is None else a_row,
        offsets,
        experts,
        out,
        len(b if a_row is not None else a),
        n,
        k,
    )


def combine_refuses(p: Rows) -> str | None:
    if p.top_k > MOST_IDS:
        return f"{p.top_k} ids a row, of up to {MOST_IDS}"
    if (p.y[2], p.out[2]) == (torch.float32, torch.bfloat16):
        return "a sum of fp32 that is rounded"
    if not all(_stored(t) and t[1][0] == t[0][1] for t in (p.y, p.out)):
        return "rows that are apart, or no multiples of 16 bytes"
    return None


def combine(
    y: torch.Tensor,
    place: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
    out: torch.Tensor,
) -> None:
    tree = ExpertTree.of(experts)
    cuda.call(
        "alignkit_experts_combine",
        y.device,
        y,
        int(y.dtype == torch.bfloat16),
        place,
        ids.contiguous(),
        int(ids.dtype == torch.int32),
        weights if weights is None else weights.contiguous(),
        out,
        int(out.dtype == torch.bfloat16),
        len(out),
        ids.shape[1],
        out.shape[1],
        tree.run,
        tree.width,
    )
