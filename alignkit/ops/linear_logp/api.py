"""The differentiable ops: from hidden states, and from logits."""

from __future__ import annotations

import torch

from ...dist import TP
from .._calls import op
from .._common import (
    check_apart,
    check_device,
    check_flag,
    check_int,
    check_plain,
    check_tensor,
    check_tp,
    check_weight,
    looks,
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
    """``log_softmax(logits / temperature)[target]`` with ``logits = logit_scale * cap(hidden @ weight.T + bias)``,
    ``cap(x) = soft_cap * tanh(x / soft_cap)``; the logits are fp32, not rounded, and not stored unless `keep_logits`.

    Args:
        hidden: [..., D], fp32 or bf16; finite (on a GPU this is not looked at: a NaN spreads as the formula says). The
            same on every rank of `tp`.
        weight: [V_local, D], hidden's type; this rank's rows of the vocabulary.
        target: int64 [...], global ids in [0, vocab_size), or `ignore_index`. On a GPU another id, like a temperature
            that is not positive and finite, stops the device with a message (see `ALIGNKIT_STRICT`).
        bias: [V_local] or None, weight's type.
        temperature: positive, a number or fp32 [...]; divides the logits.
        soft_cap: positive and finite, or None for no cap.
        logit_scale: factor of the logits.
        ignore_index: rows with this target give logp 0 and entropy 0 and have no gradient.
        vocab_size: the true global size; padded rows at or beyond it never count. Default: all rows.
        vocab_start: global id of this rank's first row. Shards follow each other in rank order; they may differ in
            size, but may not overlap, leave a hole, or be empty.
        tp: the ranks that hold the other rows.
        return_entropy: also return the entropy of the distribution, in nats.
        keep_logits: store the products hidden @ weight.T, 4 bytes each, for a backward pass that does not compute them
            again. The same bits; without it no more than some bytes per row and 128 ids are stored.
        main_grad: fp32 [V_local, D], contiguous, memory that is no other argument's, or None. The gradient of weight is added to it, unrounded, in each backward
            pass, and weight.grad stays as it is.
        workspace: limit, in bytes, of the logits alive at a time, and of their gradients, at least a few rows or ids; None:
            8 MiB on a CPU, 132 MiB on a GPU. A small one takes more time; it changes no bit. Beyond it the backward pass
            holds hidden's gradient in fp32.

    Returns:
        logp, fp32 [...], in nats; or (logp, entropy). Differentiable in hidden (summed over ranks), weight and bias
        (this rank's rows).

    Raises:
        InputError: an argument is outside the above; on all ranks of `tp` together, before anything is computed.
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
            require(
                main_grad.shape == weight.shape and main_grad.device == weight.device and main_grad.is_contiguous(),
                f"main_grad: {tuple(main_grad.shape)} on {main_grad.device}, strides {main_grad.stride()}, does not fit "
                f"weight: {tuple(weight.shape)} on {weight.device}",
            )
            read = {"hidden": hidden, "weight": weight, "bias": bias}
            check_plain("target", target)
            if isinstance(temperature, torch.Tensor):
                check_plain("temperature", temperature)
            check_apart(
                "main_grad",
                main_grad,
                read
                | {"target": target, "temperature": temperature}
                | {f"{name}.grad": t.grad for name, t in read.items() if t is not None and t.is_leaf},
            )
        require(not looks(hidden.device) or bool(hidden.isfinite().all()), "hidden: has NaN or infinite values")
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
    """`linear_logp` from logits that exist already: given `head_logits`, the same bits.

    Args:
        logits: [..., V_local], fp32 or bf16; -inf masks an id, NaN or +inf make their row NaN.
        target, temperature, ignore_index, vocab_size, vocab_start, tp, return_entropy: as for `linear_logp`.

    Returns:
        logp, fp32 [...], in nats; or (logp, entropy). Differentiable in logits.

    Raises:
        InputError: an argument is outside the above; on all ranks of `tp` together, before anything is computed.
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
