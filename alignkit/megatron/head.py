"""The end of a GPTModel: hidden states to losses and logprobs, through ``ops.linear_logp``."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from alignkit import ops
from alignkit.dist import TP
from alignkit.errors import AlignkitError, InputError, UnsupportedError

from . import calls, modules


@dataclass(frozen=True)
class LogProbsRequest:
    """What `output_processor` is asked for. Any object with a `temperature` will do; one without
    `return_entropy` gets the entropy too.

    temperature: positive, a number or fp32 ``[b, s]``.
    ignore_index: labels with this value give logprob 0, entropy 0 and no gradient.
    """

    temperature: float | torch.Tensor = 1.0
    return_entropy: bool = False
    ignore_index: int = -100


@dataclass
class LogProbs:
    """fp32 ``[b, s]`` in nats; entropy is None if it was not asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None


request: contextvars.ContextVar[LogProbsRequest | None] = contextvars.ContextVar("request", default=None)
"""What `logprobs` asks of the forward it runs, on versions without `output_processor`."""


def logprobs(
    model,
    tokens,
    position_ids,
    attention_mask,
    labels,
    *,
    temperature: float | torch.Tensor = 1.0,
    return_entropy: bool = False,
    ignore_index: int = -100,
    packed_seq_params=None,
) -> LogProbs:
    """Logprobs of `labels` under `model`, a GPTModel or a wrapper of one (Float16Module, DDP, ...).

    tokens, labels: int64 ``[b, s]``; labels are already shifted. With context parallelism those of this rank's chunks.
    position_ids, attention_mask: as for the model.

    Differentiable. A pipeline stage but the last returns what the model does, the hidden states for the next one.
    Raises UnsupportedError if `patch_megatron` is not in force, and what the model's forward
    and ``ops.linear_logp`` raise; on all tensor-parallel ranks together.
    """
    from . import patch

    asked = LogProbsRequest(temperature, return_entropy, ignore_index)
    arguments: dict[str, Any] = {"labels": labels, "packed_seq_params": packed_seq_params}
    if patch.active().has_hook:
        return model(
            tokens,
            position_ids,
            attention_mask,
            **arguments,
            output_processor=output_processor,
            output_processor_context=asked,
        )
    token = request.set(asked)
    try:
        return model(tokens, position_ids, attention_mask, **arguments)
    finally:
        request.reset(token)


def output_processor(
    *,
    hidden_states: torch.Tensor,
    output_layer,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor,
    context: Any = None,
    **_,
) -> LogProbs:
    """For ``GPTModel.forward(output_processor=, output_processor_context=)`` of Megatron-core 0.18 and later.

    context: a `LogProbsRequest`, None for its defaults, or any object with a `temperature`.
    Returns `LogProbs` of the labels. Raises UnsupportedError for a model that is not patched.
    """
    return label_logprobs(hidden_states, output_layer, output_weight, labels, asked_for(context))


def asked_for(context: Any) -> LogProbsRequest:
    """What `output_processor`'s `context` asks for. Raises InputError if it has no temperature."""
    if context is None:
        return LogProbsRequest()
    try:
        temperature = context.temperature
    except AttributeError:
        raise InputError(f"output_processor_context: a {type(context).__name__} has no temperature") from None
    return LogProbsRequest(
        temperature, getattr(context, "return_entropy", True), getattr(context, "ignore_index", -100)
    )


def label_logprobs(
    hidden: torch.Tensor, output_layer, output_weight: torch.Tensor | None, labels: torch.Tensor, asked: LogProbsRequest
) -> LogProbs:
    """hidden ``[s, b, h]``, with sequence parallelism this rank's ``[s / tp, b, h]``; labels ``[b, s]``."""
    from . import patch

    vocab_size = modules.vocabulary.get(output_layer) if isinstance(output_layer, modules.OutputLayer) else None
    if vocab_size is None:
        raise UnsupportedError("output_layer: not the output layer of an aligned GPTModel")
    tp = TP(output_layer.tp_group)
    s, b = hidden.shape[0] * (tp.size if output_layer.sequence_parallel else 1), hidden.shape[1]
    calls.check_labels(vocab_size, (b, s), hidden.device, labels, asked)
    temperature = asked.temperature
    if isinstance(temperature, torch.Tensor) and temperature.dim():
        temperature = temperature.t()

    def logprobs_of(hidden, weight):
        if output_layer.sequence_parallel:
            # The op sums the gradient of hidden over ranks, so that each rank only takes its rows of it back.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp.group)
        return ops.linear_logp(
            hidden,
            weight,
            labels.t(),
            temperature=temperature,
            ignore_index=asked.ignore_index,
            vocab_size=vocab_size,
            vocab_start=tp.rank * weight.shape[0],
            tp=tp,
            return_entropy=asked.return_entropy,
            keep_logits=patch.active().keep_logits,
        )

    result = output_layer(hidden, output_weight, into=logprobs_of)
    logp, entropy = result if asked.return_entropy else (result, None)
    return LogProbs(logp.t().contiguous(), None if entropy is None else entropy.t().contiguous())


class VocabParallelCrossEntropy:
    """Stands in for Megatron's autograd Function behind ``vocab_parallel_cross_entropy``, so that frameworks
    that took that function by name before the patch are caught too."""

    def __init__(self, vocab_size: int | None):
        self.vocab_size = vocab_size

    def of(self, columns: int) -> int:
        """The vocabulary of the model whose output layer gives a rank so many `columns`."""
        sizes = {size for layer, size in modules.vocabulary.items() if layer.output_size_per_partition == columns}
        if not sizes and self.vocab_size is not None:
            sizes = {self.vocab_size}
        if len(sizes) > 1:
            raise UnsupportedError(
                f"logits: models with vocabularies of {', '.join(map(str, sorted(sizes)))} ids all have {columns} "
                "columns, so it is not known which made these; give the model labels, or call alignkit.megatron.logprobs"
            )
        if not sizes:
            raise InputError("vocab_size: patch_megatron was given none, and these logits are of no aligned model")
        return sizes.pop()

    def apply(self, logits, target, label_smoothing=0.0, tp_group=None) -> torch.Tensor:
        """logits fp32 ``[..., V / tp]`` of the aligned output layer, target ``[...]`` -> fp32 ``[...]``."""
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        tp = TP(tp_group if tp_group is not None else get_tensor_model_parallel_group())

        def checks() -> int:
            if label_smoothing:
                raise UnsupportedError(f"label_smoothing: {label_smoothing} is not supported")
            if not isinstance(logits, torch.Tensor) or not logits.dim():
                raise InputError(f"logits: expected fp32 [..., V / tp], got {type(logits).__name__}")
            if logits.dtype != torch.float32:
                raise UnsupportedError(f"logits: {logits.dtype} has lost bits of the aligned output layer's fp32")
            return self.of(logits.shape[-1])

        try:
            vocab_size = checks()
        except AlignkitError:
            tp.check("logp_from_logits", checks)  # the other ranks are about to meet in that op
            raise
        return -ops.logp_from_logits(
            logits, target, vocab_size=vocab_size, vocab_start=tp.rank * logits.shape[-1], tp=tp
        )


class FusedCrossEntropy(VocabParallelCrossEntropy):
    """The same behind ``fused_vocab_parallel_cross_entropy``, which has no label smoothing."""

    def apply(self, logits, target, tp_group=None) -> torch.Tensor:
        return super().apply(logits, target, tp_group=tp_group)


def language_model_loss(model, labels, logits) -> torch.Tensor:
    """``LanguageModule.compute_language_model_loss`` by the one aligned loss, whichever fusion the configuration asks for.
    labels ``[b, s]``, logits ``[s, b, V / tp]`` -> ``[b, s]``."""
    from megatron.core.tensor_parallel import cross_entropy

    loss = cross_entropy._VocabParallelCrossEntropy.apply(logits, labels.t().contiguous(), 0.0, model.pg_collection.tp)
    return loss.t().contiguous()
