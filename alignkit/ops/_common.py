"""Checks that several ops share, and the exact arithmetic that references are written in."""

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


def looks(device: torch.device) -> bool:
    """Whether values on `device` are looked at on the host before they are used: on a GPU that waits for it, so only if
    `tp.strict()`."""
    return families.on_host(device) or strict()


_PLAIN = torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]


def check_plain(name: str, t) -> None:
    """`t` is a tensor whose values lie in memory as its strides say: what kernels read."""
    if not isinstance(t, torch.Tensor):
        raise InputError(f"{name}: expected a tensor, got {type(t).__name__}")
    if isinstance(t, UninitializedTensorMixin):
        raise InputError(f"{name}: a parameter that is not initialized yet")
    if type(t).__torch_dispatch__ is not _PLAIN:  # pyright: ignore[reportAttributeAccessIssue]
        raise InputError(f"{name}: expected a plain tensor, got {type(t).__name__}")
    if t.layout != torch.strided:
        raise InputError(f"{name}: expected a dense tensor, got layout {t.layout}")
    if t.is_nested:
        raise InputError(f"{name}: expected a dense tensor, got a nested one")
    if t.is_neg():
        raise InputError(f"{name}: a view whose sign torch keeps for later; give {name}.resolve_neg()")
    try:
        memory = t.data_ptr()
    except RuntimeError:
        raise InputError(f"{name}: a tensor of torch.func or vmap, which alignkit's ops cannot transform") from None
    if torch._is_functional_tensor(t) or (not memory and t.numel() and t.device.type != "meta"):
        raise InputError(f"{name}: its {t.numel()} elements have no memory")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        raise InputError(f"{name}: has a tangent; forward-mode differentiation is not supported")


def rows_shape(t) -> torch.Size:
    """All but the last dimension of what `check_tensor` may yet find to be no argument."""
    try:
        check_plain("", t)
    except InputError:
        return torch.Size()
    return t.shape[:-1]


def check_tensor(name: str, t, ndim: int | None = None, dtypes=DTYPES) -> None:
    """`t` is a dense tensor of one of `dtypes`, with `ndim` dimensions (at least one if None)."""
    check_plain(name, t)
    if t.dtype not in dtypes:
        raise InputError(f"{name}: dtype {t.dtype} is none of {', '.join(map(str, dtypes))}")
    if ndim is None and t.ndim == 0:
        raise InputError(f"{name}: expected at least one dimension")
    if ndim is not None and t.ndim != ndim:
        raise InputError(f"{name}: expected {ndim} dimensions, got shape {tuple(t.shape)}")


def check_device(name: str, t: torch.Tensor) -> None:
    """There is a backend for the device of `t`, on which the other tensors are too."""
    try:
        dispatch.name(t.device)
    except BackendError as e:
        if families.of_type(t.device) is not None:  # of the machine, not of the argument
            raise
        raise BackendError(f"{name}: {e}") from None


def check_number(name: str, value, positive: bool = True) -> float:
    """A number of Python or numpy, finite in fp32, and positive there unless `positive` is false; as a float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise InputError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise InputError(f"{name}: {value} is not finite" + " in fp32" * math.isfinite(number))
    if positive and not number > 0:
        raise InputError(f"{name}: {value} is not positive")
    if positive and number < 2.0**-149:
        raise InputError(f"{name}: {value} is 0 in fp32")
    return number


def check_int(name: str, value, least: int = -(2**63)) -> int:
    """An integer of Python or numpy, of 64 bits, and `least` or more."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise InputError(
            f"{name}: expected an integer, got {type(value).__name__}"
            + (f" {value}" if isinstance(value, numbers.Real) else "")
        )
    number = int(value)
    if number < least:
        raise InputError(f"{name}: {number} is " + {0: "negative", 1: "not positive"}.get(least, f"below {least}"))
    if number >= 2**63:
        raise InputError(f"{name}: {number} does not fit 64 bits")
    return number


def check_flag(name: str, value) -> bool:
    """True or False, of Python or numpy."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name}: expected True or False, got {type(value).__name__}")
    return bool(value)


def check_tp(tp, name: str = "tp") -> TP:
    """A group of ranks, or None for this process alone."""
    if tp is not None and not isinstance(tp, TP):
        raise InputError(f"{name}: expected an alignkit.dist.TP or None, got {type(tp).__name__}")
    return tp or SINGLE


def check_apart(name: str, t: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    """`t`, which is written to, shares no memory with tensors that are read meanwhile. Their views count whole."""

    def memory(t: torch.Tensor) -> tuple[int, int]:
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    for other_name, other in others.items():
        if isinstance(other, torch.Tensor) and other.device == t.device and other.numel() and t.numel():
            (begin, end), (other_begin, other_end) = memory(t), memory(other)
            if begin < other_end and other_begin < end:
                raise InputError(f"{name}: shares memory with {other_name}")


def check_like(name: str, t, like_name: str, like: torch.Tensor) -> None:
    """`t` has the type and device of `like`."""
    if t.dtype != like.dtype:
        raise InputError(f"{name}: dtype {t.dtype} differs from {like_name}'s {like.dtype}")
    if t.device != like.device:
        raise InputError(f"{name}: device {t.device} differs from {like_name}'s {like.device}")


def check_weight(x: torch.Tensor, weight, bias, name: str = "x", dtypes=DTYPES) -> None:
    """weight [N, K] and bias [N] or None fit x [..., K], of one of `dtypes`; `name` is what the caller calls x."""
    check_tensor(name, x, dtypes=dtypes)
    check_device(name, x)
    check_tensor("weight", weight, 2, dtypes)
    check_like("weight", weight, name, x)
    if weight.shape[1] != x.shape[-1]:
        raise InputError(f"weight: shape {tuple(weight.shape)} does not fit {name} of shape {tuple(x.shape)}")
    if min(weight.shape) == 0:
        raise InputError(f"weight: empty, shape {tuple(weight.shape)}")
    if bias is not None:
        check_tensor("bias", bias, dtypes=dtypes)
        if tuple(bias.shape) != (weight.shape[0],):
            raise InputError(f"bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}")
        check_like("bias", bias, "weight", weight)


def unit(t: torch.Tensor) -> torch.Tensor:
    """t with unit stride in the last dim."""
    return t if t.stride(-1) == 1 else t.contiguous()


def rows(t: torch.Tensor) -> torch.Tensor:
    """t [..., N] as [rows, N] with unit stride in the last dim; copied only where no view is that."""
    return unit(t.reshape(math.prod(t.shape[:-1]), t.shape[-1]))


def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 t in `dtype`, rounded to nearest."""
    if t.dtype == dtype:
        return t
    out = torch.empty(t.shape, dtype=dtype, device=t.device)
    round_into(out, t)
    return out


def round_into(out: torch.Tensor, t: torch.Tensor) -> None:
    """Contiguous out <- fp32 t, rounded to nearest. On a CPU not by torch, whose threads may be in another mode."""
    if t.dtype == out.dtype or dispatch.name(t.device) != families.NATIVE:
        out.copy_(t)
    elif t.numel():
        native.round(rows(t), out.view(-1, out.shape[-1]))


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in fp32 with one rounding, exactly.

    The product is exact in float64. The sum is rounded to odd there (its last bit records that something was
    lost), after which rounding to fp32 is the rounding of the exact value.
    """
    p, c = a.double() * b.double(), c.double()
    s = p + c
    t = s - p
    lost = (p - (s - t)) + (c - t)
    bits = s.contiguous().view(torch.int64)
    nudge = torch.where((lost > 0) == (s > 0), 1, -1)
    change = (lost != 0) & lost.isfinite() & (bits % 2 == 0)
    return torch.where(change, bits + nudge, bits).view(torch.float64).float()


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp of fp32 as the contract computes it: x = n ln2 + r, a Taylor polynomial of degree 7 in r, times 2^n."""

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
    """Sum over the last dim (a power of two) by halving: lane i takes lane i + half."""
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts[..., 0]


def lane_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum over the last dim of a * b: lane j % 16 is a chain of fma over ascending j; the lanes join by `tree`."""
    pad = -a.shape[-1] % SUM_LANES
    a, b = (torch.nn.functional.pad(t, (0, pad)).unflatten(-1, (-1, SUM_LANES)) for t in (a, b))
    s = torch.zeros_like(a[..., 0, :])
    for j in range(a.shape[-2]):
        s = fma(a[..., j, :], b[..., j, :], s)
    return tree(s)
