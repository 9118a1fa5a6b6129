"""What is checked of arguments that several of the ops have, before anything is computed."""

from __future__ import annotations

import torch

from ...runtime import dispatch
from ...runtime.families import on_host
from .._common import check_number, check_plain, check_tensor, looks, require


def check_transform(soft_cap, logit_scale) -> None:
    if soft_cap is not None:
        check_number("soft_cap", soft_cap)
    check_number("logit_scale", logit_scale, positive=False)


def is_number(temperature) -> bool:
    """Whether it can be read without waiting for a GPU."""
    return not isinstance(temperature, torch.Tensor) or (temperature.ndim == 0 and on_host(temperature.device))


def check_temperature(temperature, shape: torch.Size, device) -> None:
    if not isinstance(temperature, torch.Tensor):
        check_number("temperature", temperature)
        return
    check_plain("temperature", temperature)
    require(
        not temperature.is_complex() and not temperature.is_quantized and temperature.dtype != torch.bool,
        f"temperature: dtype {temperature.dtype} is not one of numbers",
    )
    if is_number(temperature):
        check_number("temperature", temperature.item())
        return
    if temperature.ndim:
        check_tensor("temperature", temperature, dtypes=(torch.float32,))
        require(
            temperature.shape == shape,
            f"temperature: shape {tuple(temperature.shape)} differs from the rows' {tuple(shape)}",
        )
    require(temperature.device == device, f"temperature: device {temperature.device} differs from {device}")
    bad = temperature[~(temperature > 0) | temperature.isinf()].tolist() if looks(device) else []
    require(not bad, f"temperature: {bad[:1]} is not positive and finite")


def per_row_of(temperature) -> torch.Tensor | None:
    """The temperature, if it is a tensor whose values may lie on a GPU."""
    return None if is_number(temperature) else temperature


def described(temperature):
    """What ranks compare of it before its values."""
    return float(temperature) if is_number(temperature) else ("per row", tuple(temperature.shape))


def check_per_row(target, temperature, shape, device, ignore_index: int) -> tuple[int, tuple[int, ...]]:
    """Check what is given per row; the largest target, and where, or (-1, ()) if values are not looked at."""
    check_temperature(temperature, shape, device)
    check_plain("target", target)
    require(target.dtype == torch.int64, f"target: dtype {target.dtype} is not torch.int64")
    require(target.shape == shape, f"target: shape {tuple(target.shape)} differs from the rows' {tuple(shape)}")
    require(target.device == device, f"target: device {target.device} differs from {device}")
    if not looks(device) or not target.numel():
        return -1, ()
    kept = target.masked_fill(target == ignore_index, 0)
    ends = [(int(v), tuple((kept == v).nonzero()[0].tolist())) for v in (kept.min(), kept.max())]
    (least, where), largest = ends
    require(least >= 0, f"target: id {least} at {where} is negative and not ignore_index ({ignore_index})")
    return largest


def flat_rows(target, temperature, shape, device, ignore_index: int, vocab: int):
    """What is given per row, flat: target int64 [N], and temperature fp32 [N] or None for 1. Where their values were
    not looked at, the device is to check them."""
    t = temperatures(temperature, shape, device)
    target = None if target is None else target.reshape(-1).contiguous()
    if not looks(device) and (target is not None or t is not None):
        dispatch.select("linear_logp", device).check_rows(target, t, vocab, ignore_index)
    return target, t


def temperatures(temperature, shape, device) -> torch.Tensor | None:
    """fp32 [N], or None for 1."""
    if not is_number(temperature):
        return temperature.detach().float().expand(shape).reshape(-1).contiguous()
    return (
        None
        if temperature == 1.0
        else torch.full((shape.numel(),), float(temperature), dtype=torch.float32, device=device)
    )
