"""CUDA backend of the experts (csrc/sm90/experts).

- `pairs`: sort many ids by expert.
- `gated`: gate and up GEMMs with fused activation, of gathered rows, for many rows per expert.
- `products`: chains or k-trees of rows sorted by expert.
- `gradients`: weight gradients.
- `combine`: the sum over each row's experts.

few.py adds down GEMMs with few rows per expert. grouped.py, ranked.py and triton_backend.py (all Triton) compute the
problems that these kernels reject, and `weigh`. All give the contract's bits (docs/contract.md, "Mixture of experts").
each.py documents the GEMM functions. FEW, FEW_GATED and FEW_IDS affect speed alone; MAX_EXPERTS and MAX_TOP_K are
limits that the kernels check.
"""

from __future__ import annotations

import ctypes

import torch

from ...contract.experts import ExpertTree
from ...errors import BackendError
from ...runtime import cuda
from ...runtime.operands import Operand, dtype_name, tma_rejects
from ...runtime.shared import KERNELS
from .problem import UNEQUAL_MATRICES, Grouped, Ids, Matrices, Pairs, Rows, on_device

FEW_GATED = 64
"""schedule: average rows per expert up to which Triton computes gate and up; tiles of 128 would be mostly empty."""
FEW = 16
"""schedule: average rows per expert up to which few.py computes down, with a narrow tile at weight-read speed."""
FEW_IDS = 2048
"""schedule: number of ids up to which comparing all in one launch (ranked.py) is faster than counting in two."""
MAX_EXPERTS, MAX_TOP_K = KERNELS["kMaxExperts"], KERNELS["kMaxTopK"]
"""Maximum experts per rank; grouped.py has a larger one. Maximum top_k of `combine`."""
MAP = 128
"""hardware: bytes of a TMA descriptor (CUtensorMap)."""


def pairs_rejects(p: Ids) -> str | None:
    """Return why `pairs` is not used for a problem, or None."""
    if p.count <= FEW_IDS:
        return f"rows * top_k: must be more than {FEW_IDS}, got {p.count}"
    if p.experts > MAX_EXPERTS:
        return f"experts: must be at most {MAX_EXPERTS}, got {p.experts}"
    return None if p.count < 2**31 else f"rows * top_k: must be less than 2^31, got {p.count}"


def pairs(ids: torch.Tensor, first: int, experts: int) -> Pairs:
    """Return the pairs of ids [rows, k]; see pairs.py."""
    n, device = ids.numel(), ids.device
    row, choice = (torch.empty(n, dtype=torch.int64, device=device) for _ in range(2))
    place = torch.empty(ids.shape, dtype=torch.int64, device=device)
    offsets = torch.empty(experts + 1, dtype=torch.int64, device=device)
    counts = torch.empty(-(-n // KERNELS["kIdsPerCta"]), experts + 1, dtype=torch.int32, device=device)
    cuda.call(
        "alignkit_experts_pairs",
        device,
        ids.contiguous(),
        ids.dtype == torch.int32,
        n,
        ids.shape[1],
        first,
        experts,
        counts,
        row,
        choice,
        place,
        offsets,
    )
    return Pairs(row, choice, place, offsets)


def too_few_rows(p: Grouped, rows: int) -> str | None:
    """Return a reason if there are at most `rows` rows per expert on average, or None."""
    if p.pairs > rows * p.experts:
        return None
    return f"rows / experts: must be more than {rows}, got {p.pairs} / {p.experts} = {p.pairs / p.experts:.4g}"


def unsupported(p: Grouped) -> str | None:
    """Return why none of the GEMM kernels can compute a problem, or None."""
    if p.b is None:
        return UNEQUAL_MATRICES
    for t in (p.a, p.b):
        if t[2] != torch.bfloat16:
            return f"dtype: must be bf16, got {dtype_name(t[2])}"
    if p.experts > MAX_EXPERTS:
        return f"experts: must be at most {MAX_EXPERTS}, got {p.experts}"
    if p.pairs >= 2**31:
        return f"rows: must be less than 2^31, got {p.pairs}"
    is_gradient = p.out is not None and len(p.out[0]) == 3
    names = ("output gradients", "inputs") if is_gradient else ("inputs", "expert matrices")
    return tma_rejects(names[0], p.a) or tma_rejects(names[1], p.b)


def _vector_rows_reject(name: str, t: Operand) -> str | None:
    """Return why the rows of `name` cannot be accessed 16 bytes at a time, or None if they can."""
    if (why := tma_rejects(name, t)) is not None:
        return why
    size = t[0][1] * t[2].itemsize
    return f"{name}: rows must be multiples of 16 bytes, got {size} bytes" if size % 16 else None


def gated_rejects(p: Grouped) -> str | None:
    """Return why `gated` is not used for a problem, or None."""
    if not p.gathered:
        return "gathered: must be yes (rows in the order of tokens), got no (rows sorted by expert)"
    if (why := too_few_rows(p, FEW_GATED) or unsupported(p)) is not None:
        return why
    if p.b[0][0] % 16:  # pyright: ignore[reportOptionalSubscript] - checked by `unsupported`
        return f"n: must be a multiple of 16 (the rows of gate and up), got {p.b[0][0]}"  # pyright: ignore[reportOptionalSubscript]
    if p.out is not None and p.out[1][0] != p.out[0][1]:
        return f"out: row stride must equal its {p.out[0][1]} columns, got {p.out[1][0]}"
    return None


def products_unsupported(p: Grouped) -> str | None:
    """Return why `products` cannot compute a problem, or None."""
    if p.gathered:
        return "gathered: must be no (rows sorted by expert), got yes (rows in the order of tokens)"
    if p.leaves not in (1, 2, 4, 8):
        return f"leaves: must be 1, 2, 4 or 8, got {p.leaves}"
    if p.leaves > 1 and p.a[0][1] % (16 * p.leaves):
        return f"k: must be a multiple of 16 * leaves = {16 * p.leaves}, got {p.a[0][1]}"
    return unsupported(p)


def products_rejects(p: Grouped) -> str | None:
    """Return why `products` is not used for a problem, or None."""
    if (why := too_few_rows(p, FEW) or products_unsupported(p)) is not None:
        return why
    return "out: must be given, got None" if p.out is None else _vector_rows_reject("out", p.out)


def gradients_rejects(p: Grouped) -> str | None:
    """Return why `gradients` is not used for a problem, or None."""
    if (why := unsupported(p)) is not None:
        return why
    if p.pairs == 0:
        return "rows: must be at least 1, got 0"
    if p.out is None:
        return "out: must be given, got None"
    for name, size in zip(("n", "k"), p.out[0][1:], strict=True):
        if size % 8:
            return f"{name}: must be a multiple of 8, got {size}"
    return None if p.out[3] else "out: address must be a multiple of 16 bytes"


def _maps(b: Matrices, function: str) -> torch.Tensor:
    """Return the TMA descriptors of all matrices on the GPU, encoded by `function` of the library."""
    (rows, k), pitch = b.shape, b[0].stride(0)
    addresses = tuple(w.data_ptr() for w in b.given)

    def encode() -> torch.Tensor:
        maps = bytearray(MAP * len(addresses))
        buffer = (ctypes.c_char * len(maps)).from_buffer(maps)
        encode_map = getattr(cuda.library(), function)
        for i, address in enumerate(addresses):
            target = ctypes.byref(buffer, MAP * i)
            cuda.check(encode_map(target, ctypes.c_void_p(address), pitch, rows, k), function)
        return torch.frombuffer(maps, dtype=torch.uint8)

    return on_device(b[0].device, (function, rows, k, pitch, addresses), encode)


def _matrices(b: Matrices, maps: str) -> tuple[torch.Tensor | None, int, torch.Tensor | None]:
    """Return (tensor, pitch, None) for contiguous matrices, or else (None, pitch, TMA descriptors by `maps`)."""
    pitch = b[0].stride(0)
    if isinstance(b.given, torch.Tensor) and b.given.stride(0) == b.shape[0] * pitch:
        return b.given, pitch, None
    return None, pitch, _maps(b, maps)


def gated(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, h: torch.Tensor | None
) -> torch.Tensor:
    """Compute gate and up with their activation; see each.py."""
    if row is None:
        raise BackendError("moe_gated: the CUDA kernel needs gathered rows: `row` must be a tensor, got None")
    features, k = b.shape[0] // 2, a.shape[1]
    out = torch.empty(len(row), features, dtype=a.dtype, device=a.device)
    cuda.call(
        "alignkit_experts_gate_up",
        a.device,
        a,
        a.stride(0),
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
    """Compute the GEMMs by `function` of the library; `maps` encodes the descriptors of separate matrices."""
    if row is not None:
        raise BackendError(
            "moe_products: the CUDA kernel needs rows sorted by expert: `row` must be None, got a tensor"
        )
    cuda.call(
        function,
        a.device,
        a,
        a.stride(0),
        *_matrices(b, maps),
        offsets,
        len(b),
        out,
        out.stride(0),
        out.dtype == torch.bfloat16,
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
    """Compute weight gradients; see each.py."""
    if a_row is not None and b_row is not None:
        raise BackendError(
            "moe_gradients: the CUDA kernel needs one of `a_row` and `b_row` to be None, got two tensors"
        )
    experts, n, k = out.shape
    cuda.call(
        "alignkit_experts_gradients",
        a.device,
        a,
        a.stride(0),
        b,
        b.stride(0),
        a_row is not None,
        b_row if a_row is None else a_row,
        offsets,
        experts,
        out,
        len(b if a_row is not None else a),
        n,
        k,
    )


def combine_rejects(p: Rows) -> str | None:
    """Return why `combine` is not used for a problem, or None."""
    if p.top_k > MAX_TOP_K:
        return f"top_k: must be at most {MAX_TOP_K}, got {p.top_k}"
    if (p.y[2], p.out[2]) == (torch.float32, torch.bfloat16):
        return "out_dtype: must be fp32 if dtype is fp32, got bf16"
    for name, t in (("expert outputs", p.y), ("out", p.out)):
        if (why := _vector_rows_reject(name, t)) is not None:
            return why
        if t[1][0] != t[0][1]:
            return f"{name}: row stride must equal the {t[0][1]} columns, got {t[1][0]}"
    return None


def combine(
    y: torch.Tensor,
    place: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
    out: torch.Tensor,
) -> None:
    """Sum over each row's experts; see reference.py."""
    tree = ExpertTree.of(experts)
    cuda.call(
        "alignkit_experts_combine",
        y.device,
        y,
        y.dtype == torch.bfloat16,
        place,
        ids.contiguous(),
        ids.dtype == torch.int32,
        weights if weights is None else weights.contiguous(),
        out,
        out.dtype == torch.bfloat16,
        len(out),
        ids.shape[1],
        out.shape[1],
        tree.run,
        tree.width,
    )
