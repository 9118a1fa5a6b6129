"""Checks that several ops share, and the exact arithmetic that references are written in."""
from __future__ import annotations

import contextlib

import torch

from ..contract import SUM_LANES
from ..errors import InputError
from ..tp import strict

DTYPES = (torch.float32, torch.bfloat16)
WITH_FP16 = (*DTYPES, torch.float16)


def require(condition: bool, message: str) -> None:
    """Raise InputError(message) unless `condition`."""
    if not condition:
        raise InputError(message)


def looks(device: torch.device) -> bool:
    """Whether values on `device` are looked at on the host before they are used: on a GPU that waits for it, so only if
    `tp.strict()`."""
    return device.type == "cpu" or strict()


def check_tensor(name: str, t, ndim: int | None = None, dtypes=DTYPES) -> None:
    """`t` is a dense tensor of one of `dtypes`, with `ndim` dimensions (at least one if None)."""
    if not isinstance(t, torch.Tensor):
        raise InputError(f"{name}: expected a tensor, got {type(t).__name__}")
    if t.layout != torch.strided:
        raise InputError(f"{name}: expected a dense tensor, got layout {t.layout}")
    if t.dtype not in dtypes:
        raise InputError(f"{name}: dtype {t.dtype} is none of {', '.join(map(str, dtypes))}")
    if ndim is None and t.ndim == 0:
        raise InputError(f"{name}: expected at least one dimension")
    if ndim is not None and t.ndim != ndim:
        raise InputError(f"{name}: expected {ndim} dimensions, got shape {tuple(t.shape)}")


def check_like(name: str, t, like_name: str, like: torch.Tensor) -> None:
    """`t` has the type and device of `like`."""
    if t.dtype != like.dtype:
        raise InputError(f"{name}: dtype {t.dtype} differs from {like_name}'s {like.dtype}")
    if t.device != like.device:
        raise InputError(f"{name}: device {t.device} differs from {like_name}'s {like.device}")


def check_weight(x: torch.Tensor, weight, bias, name: str = "x", dtypes=DTYPES) -> None:
    """weight [N, K] and bias [N] or None fit x [..., K], of one of `dtypes`; `name` is what the caller calls x."""
    check_tensor(name, x, dtypes=dtypes)
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
    return unit(t.reshape(-1, t.shape[-1]))


@contextlib.contextmanager
def in_fp32(out: torch.Tensor, bias: torch.Tensor | None):
    """An fp32 tensor to compute `out` in; on leaving, bias is added to it and it is rounded into `out`."""
    acc = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    yield acc
    if bias is not None:
        acc += bias.float()
    if acc is not out:
        out.copy_(acc)


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
