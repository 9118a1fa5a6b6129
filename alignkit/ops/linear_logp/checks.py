"""Argument checks shared by api.py and forward.py.

A change of a message also changes tests/ops/test_bad_input.py.
"""

from __future__ import annotations

import torch

from ...runtime import dispatch
from ...runtime.families import on_host
from .._common import check_constant, check_number, check_plain, check_tensor, checks_values, require


def check_transform(soft_cap, logit_scale) -> None:
    """Require a positive `soft_cap` or None, and a finite `logit_scale`."""
    if soft_cap is not None:
        check_number("soft_cap", soft_cap)
    check_number("logit_scale", logit_scale, positive=False)


def is_number(temperature) -> bool:
    """Return whether the temperature is a number that the host can read without synchronization."""
    return not isinstance(temperature, torch.Tensor) or (temperature.ndim == 0 and on_host(temperature.device))


def check_temperature(temperature, shape: torch.Size, device) -> None:
    """Require a positive finite number, or a real tensor of the rows' shape (or scalar) on `device`."""
    if not isinstance(temperature, torch.Tensor):
        check_number("temperature", temperature)
        return
    check_plain("temperature", temperature)
    check_constant("temperature", temperature)
    require(
        not temperature.is_complex() and not temperature.is_quantized and temperature.dtype != torch.bool,
        f"temperature: dtype must be a floating-point or integer type, got {temperature.dtype}",
    )
    if is_number(temperature):
        check_number("temperature", temperature.item())
        return
    if temperature.ndim:
        check_tensor("temperature", temperature, dtypes=(torch.float32,))
        require(
            temperature.shape == shape,
            f"temperature: shape must be {tuple(shape)}, one value per token, got {tuple(temperature.shape)}",
        )
    require(temperature.device == device, f"temperature: device must be {device}, got {temperature.device}")
    bad = temperature[~(temperature > 0) | temperature.isinf()].tolist() if checks_values(device) else []
    require(not bad, f"temperature: must be positive and finite, got {bad[0] if bad else None}")


def per_row_of(temperature) -> torch.Tensor | None:
    """Return the temperature if the ranks must compare it on the device, or else None."""
    return None if is_number(temperature) else temperature


def described(temperature):
    """Return the host-side description of the temperature that the ranks compare."""
    return float(temperature) if is_number(temperature) else ("per row", tuple(temperature.shape))


def check_per_row(target, temperature, shape, device, ignore_index: int) -> tuple[int, tuple[int, ...]]:
    """Check the per-row arguments; return the largest target and its index, or (-1, ()) if values are not checked."""
    check_temperature(temperature, shape, device)
    check_plain("target", target)
    require(target.dtype == torch.int64, f"target: dtype must be torch.int64, got {target.dtype}")
    require(target.shape == shape, f"target: shape must be {tuple(shape)}, one id per token, got {tuple(target.shape)}")
    require(target.device == device, f"target: device must be {device}, got {target.device}")
    if not checks_values(device) or not target.numel():
        return -1, ()
    valid = target.masked_fill(target == ignore_index, 0)
    ends = [(int(v), tuple((valid == v).nonzero()[0].tolist())) for v in (valid.min(), valid.max())]
    (least, where), largest = ends
    require(least >= 0, f"target: must be nonnegative or ignore_index ({ignore_index}), got {least} at {where}")
    return largest


def flat_rows(target, temperature, shape, device, ignore_index: int, vocab: int):
    """Return flat target, int64 [N], and temperature, fp32 [N] or None for 1.

    Values that the host did not check are checked on the device.
    """
    t = temperatures(temperature, shape, device)
    target = None if target is None else target.reshape(-1).contiguous()
    if not checks_values(device) and (target is not None or t is not None):
        dispatch.select("linear_logp", device).check_rows(target, t, vocab, ignore_index)
    return target, t


def temperatures(temperature, shape, device) -> torch.Tensor | None:
    """Return the temperature as fp32 [N], or None for 1."""
    if not is_number(temperature):
        return temperature.detach().float().expand(shape).reshape(-1).contiguous()
    return (
        None
        if temperature == 1.0
        else torch.full((shape.numel(),), float(temperature), dtype=torch.float32, device=device)
    )
