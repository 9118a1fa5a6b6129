"""Ops for rollout engines, forward only: logits of the head, and logprobs of given logits.

Public: docs/api/ops.md. Every op has the bits of `linear_logp`.
"""

from __future__ import annotations

import torch

from ...contract import VOCAB_TILE
from ...dist import SINGLE
from ...errors import InputError
from ...runtime import dispatch
from .._calls import op
from .._common import check_device, check_same_device, check_tensor, check_weight, checks_values, require
from ..linear import matmul
from .blocks import cuts, part_of
from .checks import check_temperature, check_transform, flat_rows, temperatures
from .source import GivenLogits, head_logits_of
from .statistics import row_sums
from .vocab import Shards


@op
def head_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """Compute the logits of `linear_logp` before temperature, for sampling.

    Args:
        hidden: [..., D], fp32 or bf16.
        weight: [V_local, D], hidden's dtype; this rank's rows of the vocabulary.
        bias: [V_local] of weight's dtype, or None.
        soft_cap: Positive finite number, or None for no cap.
        logit_scale: Finite factor of the logits.

    Returns:
        fp32 [..., V_local], unrounded. Not differentiable; no communication.

    Raises:
        InputError: shapes, dtypes or devices do not match, or a number is out of range.
        UnsupportedError: a torch mode or transform without real tensors is active.
        BackendError: no backend for the device.
    """
    check_transform(soft_cap, logit_scale)
    check_weight(hidden, weight, bias, "hidden")
    if bias is None and soft_cap is None and logit_scale == 1.0:
        z = matmul(hidden.reshape(-1, hidden.shape[-1]), weight)
        return z if hidden.ndim == 2 else z.view(*hidden.shape[:-1], len(weight))
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    head = head_logits_of(
        flat,
        weight.detach(),
        bias,
        None if soft_cap is None else float(soft_cap),
        None if logit_scale == 1.0 else float(logit_scale),
    )
    return head.logits(slice(0, len(flat)), slice(0, len(weight))).reshape(*hidden.shape[:-1], len(weight))


@op
def log_softmax(
    logits: torch.Tensor, *, temperature: float | torch.Tensor = 1.0, vocab_size: int | None = None
) -> torch.Tensor:
    """Compute the logprobs of all ids, with the bits of `linear_logp`.

    Args:
        logits: [..., V], fp32 or bf16, the whole vocabulary; -inf masks an id.
        temperature: Positive number, or fp32 [...].
        vocab_size: True vocabulary size; columns at or beyond it get -inf. Default: V.

    Returns:
        fp32 [..., V], in nats. Not differentiable.

    Raises:
        InputError: an argument is outside of its documented range. On a GPU without ``ALIGNKIT_STRICT=1``, an invalid
            temperature value triggers a device-side assertion instead.
        UnsupportedError: a torch mode or transform without real tensors is active.
        BackendError: no backend for the device.
    """
    flat, t, shards = _whole(logits, temperature, vocab_size)
    out = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
    source, backend = GivenLogits(flat), dispatch.select("linear_logp", flat.device)
    for rows, m, sums in row_sums(source, flat.device, len(flat), None, t, shards, SINGLE, False):
        backend.all_logp(source.products(rows, slice(0, shards.vocab_size)), part_of(t, rows), m, sums, out[rows])
    return out.reshape(logits.shape)


@op
def token_logp(
    logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Compute the logprobs of K ids per row: `log_softmax` gathered at `token_ids`, without computing all ids.

    Args:
        logits: [..., V], fp32 or bf16, the whole vocabulary; -inf masks an id.
        token_ids: int64 or int32 [..., K], in [0, V).
        temperature: Positive number, or fp32 [...].

    Returns:
        fp32 [..., K], in nats, with the bits of `log_softmax`. Not differentiable.

    Raises:
        InputError: an argument is outside of its documented range. On a GPU without ``ALIGNKIT_STRICT=1``, an id
            outside [0, V) gives NaN, and an invalid temperature value triggers a device-side assertion instead.
        UnsupportedError: a torch mode or transform without real tensors is active.
        BackendError: no backend for the device.
    """
    check_tensor("logits", logits)
    check_device("logits", logits)
    check_tensor("token_ids", token_ids, logits.ndim, (torch.int64, torch.int32))
    rows, (vocab, k), device = logits.shape[:-1], (logits.shape[-1], token_ids.shape[-1]), logits.device
    require(vocab > 0, f"logits: last dimension must be at least 1, got shape {tuple(logits.shape)}")
    if token_ids.shape[:-1] != rows:
        raise InputError(
            f"token_ids: shape must be [{', '.join(map(str, rows))}, K] to match logits, got {list(token_ids.shape)}"
        )
    check_same_device("token_ids", token_ids, "logits", logits)
    check_temperature(temperature, rows, device)
    backend, t = dispatch.select("linear_logp", device), temperatures(temperature, rows, device)
    if checks_values(device):
        if len(outside := ((token_ids < 0) | (token_ids >= vocab)).nonzero()):
            at = tuple(outside[0].tolist())
            raise InputError(f"token_ids: must be in [0, {vocab}), got {int(token_ids[at])} at {at}")
    elif t is not None:
        backend.check_rows(None, t, vocab, -1)
    source, ids = GivenLogits(logits.detach().reshape(-1, vocab)), token_ids.reshape(rows.numel(), k).contiguous()
    out = torch.empty(ids.shape, dtype=torch.float32, device=device)
    tiles = -(-vocab // VOCAB_TILE)
    for part in cuts(0, len(ids), source.blocks(len(ids), vocab)[0]):
        z, part_t, n = source.given[part], part_of(t, part), part.stop - part.start
        m, q = (torch.empty(n, tiles, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
        backend.statistics(z, source.transform, part_t, None, 0, m, q, None, None)
        backend.selected_logp(z, part_t, ids[part], m, q, out[part])
    return out if logits.ndim == 2 else out.reshape(token_ids.shape)


def _whole(logits, temperature, vocab_size: int | None):
    """Check the arguments; return logits [N, V], temperature [N] or None, and the (single) vocabulary shard."""
    check_tensor("logits", logits)
    check_device("logits", logits)
    rows = logits.shape[:-1]
    check_temperature(temperature, rows, logits.device)
    shards = Shards.agree(
        SINGLE, "log_softmax", lambda: (Shards.describe(0, logits.shape[-1], vocab_size), {}, (-1, ()))
    )
    _, t = flat_rows(None, temperature, rows, logits.device, -1, shards.vocab_size)
    return logits.detach().reshape(-1, logits.shape[-1]), t, shards
