"""Differentiable logprob ops: `linear_logp` from hidden states, and `logp_from_logits`.

Public: docs/api/ops.md. This file checks arguments; autograd.py computes.
"""

from __future__ import annotations

import torch

from ...dist import TP
from .._calls import op
from .._common import (
    check_constant,
    check_device,
    check_finite,
    check_flag,
    check_int,
    check_no_overlap,
    check_plain,
    check_same_device,
    check_tensor,
    check_tp,
    check_weight,
    require,
    rows_shape,
)
from .autograd import LinearLogp, LogitsLogp
from .checks import check_per_row, check_transform, described, flat_rows, per_row_of
from .vocab import Shards


@op
def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    tp: TP | None = None,
    return_entropy: bool = False,
    keep_logits: bool = False,
    main_grad: torch.Tensor | None = None,
    workspace: int | None = None,
):
    """Compute logprobs of target tokens from hidden states: ``log_softmax(logits / temperature)[target]``.

    ``logits = logit_scale * cap(hidden @ weight.T + bias)`` with ``cap(x) = soft_cap * tanh(x / soft_cap)``. The logits
    are fp32, never rounded to the model dtype, and not stored unless `keep_logits` is set. The result has the same
    bits for every sharding of the vocabulary, batch composition and `workspace`.

    Args:
        hidden: [..., D], fp32 or bf16, finite, the same on every rank of `tp`. Finiteness is checked on a CPU and in
            strict mode; otherwise NaNs propagate to their rows.
        weight: [V_local, D], hidden's dtype; this rank's rows of the vocabulary.
        target: int64 [...], global ids in [0, vocab_size), or `ignore_index`.
        bias: [V_local] of weight's dtype, or None.
        temperature: Positive number, or fp32 [...] that requires no gradient; divides the logits.
        soft_cap: Positive finite number, or None for no cap.
        logit_scale: Finite factor of the logits.
        ignore_index: Rows with this target have logp 0, entropy 0 and no gradient.
        vocab_size: True global vocabulary size; padded ids at or beyond it are excluded. Default: all rows.
        vocab_start: Global id of this rank's first row. Shards are consecutive in rank order, without overlaps or
            gaps, nonempty, and may differ in size.
        tp: Ranks that hold the other rows. They exchange a few bytes per row in the forward pass; the backward pass
            sums hidden's gradient over them (fp32, balanced tree of rank order).
        return_entropy: Also return the entropy of the distribution.
        keep_logits: Store the fp32 products hidden @ weight.T (4 N V_local bytes) for the backward pass instead of
            recomputing them; the same bits.
        main_grad: Contiguous fp32 [V_local, D] that shares no memory with other arguments, or None. Each backward pass
            adds the weight's gradient to it, unrounded, and leaves weight.grad alone.
        workspace: Approximate limit in bytes of the logits, and of their gradients, alive at a time. Default: 8 MiB on
            a CPU, 132 MiB on a GPU. Small values cost time, not bits. The backward pass also allocates hidden's
            gradient in fp32.

    Returns:
        logp, fp32 [...], in nats; or the tuple (logp, entropy), both fp32 [...] in nats. Differentiable once in hidden,
        weight and bias (this rank's rows), with gradients of their dtypes. Both results and the gradients of weight
        and bias have the same bits at every size of `tp`.

    Raises:
        InputError: an argument is outside of its documented range, or differs between the ranks; on all ranks of `tp`,
            before anything is computed. On a GPU without ``ALIGNKIT_STRICT=1``, an invalid target or temperature value
            triggers a device-side assertion instead.
        UnsupportedError: a torch mode or transform without real tensors is active; double backward.
        BackendError: no backend for the device, or another rank of `tp` died.
    """
    tp = check_tp(tp)
    rows = rows_shape(hidden)

    def checks():
        check_transform(soft_cap, logit_scale)
        check_int("ignore_index", ignore_index)
        check_flag("return_entropy", return_entropy)
        check_flag("keep_logits", keep_logits)
        if workspace is not None:
            check_int("workspace", workspace, 1)
        check_weight(hidden, weight, bias, "hidden")
        if main_grad is not None:
            check_tensor("main_grad", main_grad, 2, (torch.float32,))
            check_constant("main_grad", main_grad)
            require(
                main_grad.shape == weight.shape,
                f"main_grad: shape must equal weight's {tuple(weight.shape)}, got {tuple(main_grad.shape)}",
            )
            check_same_device("main_grad", main_grad, "weight", weight)
            require(main_grad.is_contiguous(), f"main_grad: must be contiguous, got strides {main_grad.stride()}")
            inputs = {"hidden": hidden, "weight": weight, "bias": bias}
            check_plain("target", target)
            if isinstance(temperature, torch.Tensor):
                check_plain("temperature", temperature)
            check_no_overlap(
                "main_grad",
                main_grad,
                inputs
                | {"target": target, "temperature": temperature}
                | {f"{name}.grad": t.grad for name, t in inputs.items() if t is not None and t.is_leaf},
            )
        check_finite("hidden", hidden)
        largest = check_per_row(target, temperature, rows, hidden.device, ignore_index)
        return (
            Shards.describe(vocab_start, weight.shape[0], vocab_size),
            {
                "hidden": (tuple(hidden.shape), str(hidden.dtype)),
                "bias": bias is not None,
                "temperature": described(temperature),
                "soft_cap": None if soft_cap is None else float(soft_cap),
                "logit_scale": float(logit_scale),
                "ignore_index": int(ignore_index),
                "return_entropy": bool(return_entropy),
                "workspace": None if workspace is None else int(workspace),
                "requires_grad": torch.is_grad_enabled() and hidden.requires_grad,
            },
            largest,
        )

    shards, ignore_index = Shards.agree(tp, "linear_logp", checks), int(ignore_index)
    tp.check_same_values("linear_logp", target=target, temperature=per_row_of(temperature))
    flat, t = flat_rows(target, temperature, rows, hidden.device, ignore_index, shards.vocab_size)
    logp, entropy = LinearLogp.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        flat,
        t,
        ignore_index,
        None if soft_cap is None else float(soft_cap),
        None if logit_scale == 1.0 else float(logit_scale),
        shards,
        tp,
        bool(return_entropy),
        bool(keep_logits) and torch.is_grad_enabled(),
        main_grad,
        None if workspace is None else int(workspace),
        rows,
    )
    return (logp, entropy) if return_entropy else logp


@op
def logp_from_logits(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    tp: TP | None = None,
    return_entropy: bool = False,
):
    """Compute logprobs of target tokens from logits; the same bits as `linear_logp` if given `head_logits`.

    Args:
        logits: [..., V_local], fp32 or bf16; this rank's columns. -inf masks an id; NaN or +inf make their row NaN.
        target: int64 [...], global ids in [0, vocab_size), or `ignore_index`.
        temperature: Positive number, or fp32 [...] that requires no gradient; divides the logits.
        ignore_index: Rows with this target have logp 0, entropy 0 and no gradient.
        vocab_size: True global vocabulary size; padded ids at or beyond it are excluded. Default: all columns.
        vocab_start: Global id of this rank's first column; shards are consecutive in rank order, as for `linear_logp`.
        tp: Ranks that hold the other columns. The backward pass does not communicate.
        return_entropy: Also return the entropy of the distribution.

    Returns:
        logp, fp32 [...], in nats; or the tuple (logp, entropy). Differentiable once in logits, with a gradient of their
        dtype, rounded once.

    Raises:
        InputError: an argument is outside of its documented range, or differs between the ranks; on all ranks of `tp`,
            before anything is computed. On a GPU without ``ALIGNKIT_STRICT=1``, an invalid target or temperature value
            triggers a device-side assertion instead.
        UnsupportedError: a torch mode or transform without real tensors is active; double backward.
        BackendError: no backend for the device, or another rank of `tp` died.
    """
    tp = check_tp(tp)
    rows = rows_shape(logits)

    def checks():
        check_int("ignore_index", ignore_index)
        check_flag("return_entropy", return_entropy)
        check_tensor("logits", logits)
        check_device("logits", logits)
        largest = check_per_row(target, temperature, rows, logits.device, ignore_index)
        return (
            Shards.describe(vocab_start, logits.shape[-1], vocab_size),
            {
                "logits": (tuple(rows), str(logits.dtype)),
                "temperature": described(temperature),
                "ignore_index": int(ignore_index),
                "return_entropy": bool(return_entropy),
            },
            largest,
        )

    shards, ignore_index = Shards.agree(tp, "logp_from_logits", checks), int(ignore_index)
    tp.check_same_values("logp_from_logits", target=target, temperature=per_row_of(temperature))
    flat, t = flat_rows(target, temperature, rows, logits.device, ignore_index, shards.vocab_size)
    logp, entropy = LogitsLogp.apply(
        logits.reshape(-1, logits.shape[-1]), flat, t, ignore_index, shards, tp, bool(return_entropy), rows
    )
    return (logp, entropy) if return_entropy else logp
