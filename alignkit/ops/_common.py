"""Argument checks shared by the ops, and the exact arithmetic of the reference implementations.

`fma`, `exp`, `tree` and `lane_sum` define bits of the CPU contract (docs/contract.md): every operation is significant.
A change of a message also changes the tests that quote it, mainly tests/ops/test_bad_input.py.
"""

from __future__ import annotations

import math
import numbers

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from ..contract import SUM_LANES
from ..dist import SINGLE, TP, strict
from ..errors import BackendError, InputError
from ..runtime import dispatch, families, native

DTYPES = (torch.float32, torch.bfloat16)
WITH_FP16 = (*DTYPES, torch.float16)


def require(condition: bool, message: str) -> None:
    """Raise InputError(message) unless `condition`."""
    if not condition:
        raise InputError(message)


def require_tensors(**tensors) -> None:
    """Require that no tensor is None; torch's dispatcher accepts None for any tensor of a custom op."""
    for name, t in tensors.items():
        if t is None:
            raise InputError(f"{name}: expected a tensor, got None")


def checks_values(device: torch.device) -> bool:
    """Return whether the host validates tensor values on `device`; on a GPU, only in strict mode (synchronizes)."""
    return families.on_host(device) or strict()


_PLAIN = torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]


def _kind(value) -> str:
    """Return the name of a value's type in errors; "None" for None."""
    return "None" if value is None else type(value).__name__


def check_plain(name: str, t) -> None:
    """Require a plain strided tensor whose values are in memory, as kernels read them."""
    if not isinstance(t, torch.Tensor):
        raise InputError(f"{name}: expected a tensor, got {_kind(t)}")
    if isinstance(t, UninitializedTensorMixin):
        raise InputError(f"{name}: expected an initialized tensor, got an uninitialized parameter")
    if type(t).__torch_dispatch__ is not _PLAIN:  # pyright: ignore[reportAttributeAccessIssue]
        raise InputError(f"{name}: expected a plain torch.Tensor, got the subclass {type(t).__name__}")
    if t.layout != torch.strided:
        raise InputError(f"{name}: expected a dense tensor, got layout {t.layout}")
    if t.is_nested:
        raise InputError(f"{name}: expected a dense tensor, got a nested tensor")
    if t.is_neg():
        raise InputError(f"{name}: expected a tensor without a pending negation. Pass {name}.resolve_neg()")
    try:
        memory = t.data_ptr()
    except RuntimeError:
        raise InputError(f"{name}: expected a plain tensor, got one of a torch.func transform such as vmap") from None
    if torch._is_functional_tensor(t) or (not memory and t.numel() and t.device.type != "meta"):
        raise InputError(f"{name}: expected a tensor with memory, got {t.numel()} elements without memory")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        raise InputError(f"{name}: expected a tensor without a tangent; forward-mode differentiation is unsupported")


def rows_shape(t) -> torch.Size:
    """Return all but the last dimension of t, or () if t is not a valid tensor (rejected by a later check)."""
    try:
        check_plain("", t)
    except InputError:
        return torch.Size()
    return t.shape[:-1]


def check_tensor(name: str, t, ndim: int | None = None, dtypes=DTYPES) -> None:
    """Require a dense tensor of one of `dtypes`, with `ndim` dimensions (at least one if None)."""
    check_plain(name, t)
    if t.dtype not in dtypes:
        raise InputError(f"{name}: dtype must be one of {', '.join(map(str, dtypes))}, got {t.dtype}")
    if ndim is None and t.ndim == 0:
        raise InputError(f"{name}: expected at least one dimension, got shape ()")
    if ndim is not None and t.ndim != ndim:
        raise InputError(f"{name}: expected {ndim} dimensions, got shape {tuple(t.shape)}")


def check_constant(name: str, t) -> None:
    """Require a value without a gradient, for an argument that the op computes no gradient of."""
    if isinstance(t, torch.Tensor) and t.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name}: must not require a gradient, because the op computes none for it, got requires_grad = True. "
            f"Pass {name}.detach()"
        )


def check_device(name: str, t: torch.Tensor) -> None:
    """Require a backend for the device of `t`."""
    try:
        dispatch.backend_of(t.device)
    except BackendError as e:
        if t.device.type in families.DEVICE_TYPES:  # a problem of the machine, not of the argument
            raise
        raise BackendError(f"{name}: {e}") from None


def check_number(name: str, value, positive: bool = True) -> float:
    """Require a Python or numpy number, finite and (with `positive`) positive in fp32; return it as a float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise InputError(f"{name}: expected a number, got {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise InputError(f"{name}: must be finite{' in fp32' * math.isfinite(number)}, got {value}")
    if positive and not number > 0:
        raise InputError(f"{name}: must be positive, got {value}")
    if positive and number < 2.0**-149:
        raise InputError(f"{name}: must be at least 2^-149, the smallest positive fp32 number, got {value}")
    return number


def check_int(name: str, value, least: int = -(2**63)) -> int:
    """Require a Python or numpy integer in [least, 2^63); return it as an int."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise InputError(
            f"{name}: expected an integer, got {_kind(value)}"
            + (f" {value}" if isinstance(value, numbers.Real) else "")
        )
    number = int(value)
    if number < least:
        raise InputError(f"{name}: must be at least {least}, got {number}")
    if number >= 2**63:
        raise InputError(f"{name}: must be below 2^63, got {number}")
    return number


def check_flag(name: str, value) -> bool:
    """Require a Python or numpy bool; return it as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name}: expected True or False, got {_kind(value)}")
    return bool(value)


def check_tp(tp, name: str = "tp") -> TP:
    """Require a `TP` or None; return the group, `SINGLE` for None."""
    if tp is not None and not isinstance(tp, TP):
        raise InputError(f"{name}: expected an alignkit.dist.TP or None, got {type(tp).__name__}")
    return tp or SINGLE


def check_finite(name: str, t: torch.Tensor) -> None:
    """Require finite values if the host validates values on the device of `t`."""
    if checks_values(t.device) and not bool(t.isfinite().all()):
        at = tuple((~t.isfinite()).nonzero()[0].tolist())
        raise InputError(f"{name}: values must be finite, got {t[at].item()} at {at}")


def check_starts(name: str, starts: torch.Tensor) -> None:
    """Require that `starts` [B + 1] begins with 0 and does not decrease; reads the values."""
    if (first := int(starts[0])) != 0:
        raise InputError(f"{name}: must begin with 0, got {first}")
    if len(falls := (starts[1:] < starts[:-1]).nonzero()):
        i = int(falls[0])
        raise InputError(f"{name}: must not decrease, got {int(starts[i])}, then {int(starts[i + 1])} at index {i + 1}")


def check_no_overlap(name: str, t: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    """Require that the output `t` shares no memory with input tensors; strided views count with their gaps."""

    def memory(t: torch.Tensor) -> tuple[int, int]:
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    for other_name, other in others.items():
        if isinstance(other, torch.Tensor) and other.device == t.device and other.numel() and t.numel():
            (begin, end), (other_begin, other_end) = memory(t), memory(other)
            if begin and begin < other_end and other_begin < end:
                raise InputError(f"{name}: must not share memory with {other_name}")


def check_same_device(name: str, t: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    """Require that `t` is on the device of `like`."""
    if t.device != like.device:
        raise InputError(f"{name}: device must be {like_name}'s {like.device}, got {t.device}")


def check_like(name: str, t, like_name: str, like: torch.Tensor) -> None:
    """Require that `t` has the dtype and device of `like`."""
    if t.dtype != like.dtype:
        raise InputError(f"{name}: dtype must be {like_name}'s {like.dtype}, got {t.dtype}")
    check_same_device(name, t, like_name, like)


def check_weight(x: torch.Tensor, weight, bias, name: str = "x", dtypes=DTYPES) -> None:
    """Require weight [N, K] and bias [N] or None to match x [..., K], of one of `dtypes`; `name` is x's name."""
    check_tensor(name, x, dtypes=dtypes)
    check_device(name, x)
    check_tensor("weight", weight, 2, dtypes)
    check_like("weight", weight, name, x)
    if weight.shape[1] != x.shape[-1]:
        raise InputError(f"weight: shape must be (N, {x.shape[-1]}) to match {name}, got {tuple(weight.shape)}")
    if min(weight.shape) == 0:
        raise InputError(f"weight: must not be empty, got shape {tuple(weight.shape)}")
    if bias is not None:
        check_tensor("bias", bias, dtypes=dtypes)
        if tuple(bias.shape) != (weight.shape[0],):
            raise InputError(f"bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}")
        check_like("bias", bias, "weight", weight)


def unit(t: torch.Tensor) -> torch.Tensor:
    """Return t with unit stride in the last dim."""
    return t if t.stride(-1) == 1 else t.contiguous()


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """Return t [..., N] as [rows, N] with unit stride in the last dim; a view if possible."""
    return unit(t.reshape(math.prod(t.shape[:-1]), t.shape[-1]))


def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 t rounded to `dtype`."""
    if t.dtype == dtype:
        return t
    out = torch.empty(t.shape, dtype=dtype, device=t.device)
    round_into(out, t)
    return out


def round_into(out: torch.Tensor, t: torch.Tensor) -> None:
    """Round fp32 t into contiguous `out`; on a CPU by alignkit's kernels, since torch's threads may differ in mode."""
    if t.dtype == out.dtype or dispatch.backend_of(t.device) != families.NATIVE:
        out.copy_(t)
    elif t.numel():
        native.round(as_rows(t), out.view(-1, out.shape[-1]))


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return the fp32 fused multiply-add a * b + c, rounded once.

    The product is exact in float64. The float64 sum is rounded to odd (its last bit records inexactness), so that
    rounding it to fp32 equals rounding the exact value.
    """
    p, c = a.double() * b.double(), c.double()
    s = p + c
    t = s - p
    lost = (p - (s - t)) + (c - t)
    bits = s.contiguous().view(torch.int64)
    nudge = torch.where((lost > 0) == (s > 0), 1, -1)
    change = (lost != 0) & lost.isfinite() & (bits % 2 == 0)
    return torch.where(change, bits + nudge, bits).view(torch.float64).float()


def chain(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """Return acc [..., N] plus a[..., k] * b[..., k, N], one fma per k in ascending order."""
    for k in range(a.shape[-1]):
        acc = fma(a[..., k, None].expand_as(acc), b[..., k, :].expand_as(acc), acc)
    return acc


def exp(x: torch.Tensor) -> torch.Tensor:
    """Compute e^x in fp32 by the CPU contract: x = n ln2 + r; a degree-7 Taylor polynomial in r, times 2^n."""

    def f(v):
        return torch.full_like(x, v)

    c = x.clamp(-87.0, 88.0)
    n = (c * f(1.44269504)).round()
    r = fma(n, f(2.12194440e-4), fma(n, f(-0.693359375), c))
    p = f(1.0) / 5040
    for term in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        p = fma(p, r, f(1.0) / term)
    y = p * torch.ldexp(f(1.0), n.nan_to_num().int())
    y = torch.where(x < -87.0, f(0.0), torch.where(x > 88.0, f(float("inf")), y))
    return torch.where(x.isnan(), x, y)


def tree(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the last dim (a power of two) by halving: lane i adds lane i + half."""
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts[..., 0]


def lane_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum a * b over the last dim: lane j % 16 is a chain of fma over ascending j; `tree` adds the lanes."""
    pad = -a.shape[-1] % SUM_LANES
    a, b = (torch.nn.functional.pad(t, (0, pad)).unflatten(-1, (-1, SUM_LANES)) for t in (a, b))
    s = a.new_zeros((*a.shape[:-2], SUM_LANES))
    for j in range(a.shape[-2]):
        s = fma(a[..., j, :], b[..., j, :], s)
    return tree(s)
