"""Output layer and loss of a model: hidden states to logprobs and losses, through ``ops.linear_logp``.

Public: `logprobs`, `output_processor`, `LogProbs` and `LogProbsRequest` are documented in docs/api/megatron.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from alignkit import ops
from alignkit.dist import TP
from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import AlignkitError, InputError, UnsupportedError

from . import calls, models, modules, state


@dataclass(frozen=True)
class LogProbsRequest:
    """Options of `output_processor`.

    Any object with a `temperature` can replace it. Without a `return_entropy` attribute the entropy is returned too.

    Attributes:
        temperature: Positive number, or fp32 ``[b, s]`` that requires no gradient.
        return_entropy: Return the entropy too.
        ignore_index: Labels with this value get logprob 0, entropy 0 and no gradient.
    """

    temperature: float | torch.Tensor = 1.0
    return_entropy: bool = False
    ignore_index: int = -100


@dataclass
class LogProbs:
    """Logprobs of labels, and the entropies of their distributions.

    Attributes:
        log_probs: fp32 ``[b, s]``, in nats.
        entropy: fp32 ``[b, s]``, in nats, or None if it was not requested.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None


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
    """Compute the logprobs of `labels`, differentiably.

    Args:
        model: A GPTModel or HybridModel, or a wrapper of one (Float16Module, DDP, ...).
        tokens: int64 ``[b, s]``. With context parallelism, tokens and labels are this rank's chunks.
        position_ids: As for the model.
        attention_mask: As for the model.
        labels: int64 ``[b, s]``, already shifted.
        temperature: Positive number, or fp32 ``[b, s]`` that requires no gradient.
        return_entropy: Return the entropy too.
        ignore_index: Labels with this value get logprob 0, entropy 0 and no gradient.
        packed_seq_params: Megatron's PackedSeqParams, or None.

    Returns:
        `LogProbs` on the last pipeline stage; on the others the hidden states for the next stage, like the model.

    Raises:
        UnsupportedError: If `patch_megatron` is not active, or the model or an argument is not supported.
        InputError: If an argument is invalid. Errors are raised on all tensor-parallel ranks together.
    """
    from . import patch

    requested = LogProbsRequest(temperature, return_entropy, ignore_index)
    arguments: dict[str, Any] = {"labels": labels, "packed_seq_params": packed_seq_params}
    if patch.active().has_hook:
        return model(
            tokens,
            position_ids,
            attention_mask,
            **arguments,
            output_processor=output_processor,
            output_processor_context=requested,
        )
    record = state.of_model(models.contained(model)[0])
    record.request = requested
    try:
        return model(tokens, position_ids, attention_mask, **arguments)
    finally:
        record.request = None


@relies_on(
    "models/gpt/gpt_model.py:GPTModel.forward", "output_processor output_processor_context", when="output_processor"
)
@relies_on(
    "models/gpt/gpt_model.py:GPTModel._postprocess",
    "output_processor output_processor_context",
    when="output_processor",
)
def output_processor(
    *,
    hidden_states: torch.Tensor,
    output_layer,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor,
    context: Any = None,
    **_,
) -> LogProbs:
    """Return the logprobs of labels, as ``GPTModel.forward``'s output processor in Megatron-core 0.18 and later.

    Pass it as ``output_processor=``; Megatron calls it.

    Args:
        hidden_states: Decoder output ``[s, b, h]``; with sequence parallelism ``[s / tp, b, h]``.
        output_layer: The model's output layer.
        output_weight: The embedding's weight if it is tied, else None.
        labels: int64 ``[b, s]``.
        context: The forward's ``output_processor_context``: a `LogProbsRequest`, None for its defaults, or any object
            with a `temperature`.

    Raises:
        UnsupportedError: If the model is not patched.
        InputError: If `context` has no temperature, or an argument is invalid.
    """
    return label_logprobs(hidden_states, output_layer, output_weight, labels, request_from(context))


def request_from(context: Any) -> LogProbsRequest:
    """Return the request in an `output_processor_context`. Raises InputError if it has no temperature."""
    if context is None:
        return LogProbsRequest()
    try:
        temperature = context.temperature
    except AttributeError:
        raise InputError(
            f"output_processor_context: must have an attribute temperature, got a {type(context).__name__}. Pass a "
            "LogProbsRequest"
        ) from None
    return LogProbsRequest(
        temperature, getattr(context, "return_entropy", True), getattr(context, "ignore_index", -100)
    )


def label_logprobs(
    hidden: torch.Tensor,
    output_layer,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor,
    requested: LogProbsRequest,
) -> LogProbs:
    """Return `LogProbs` of labels ``[b, s]`` from hidden ``[s, b, h]`` (sequence-parallel: ``[s / tp, b, h]``)."""
    record = state.of(output_layer) if isinstance(output_layer, modules.OutputLayer) else None
    if record is None or not record.vocab_size:
        raise UnsupportedError(
            "output_layer: must be the output layer of a model whose forward() has begun since patch_megatron, got "
            f"another {type(output_layer).__name__}"
        )
    vocab_size, tp = record.vocab_size, TP(output_layer.tp_group)
    s, b = hidden.shape[0] * (tp.size if output_layer.sequence_parallel else 1), hidden.shape[1]
    calls.check_labels(vocab_size, (b, s), hidden.device, labels, requested)
    temperature = requested.temperature
    if isinstance(temperature, torch.Tensor) and temperature.dim():
        temperature = temperature.t()

    def logprobs_of(hidden, weight):
        if output_layer.sequence_parallel:
            # The op already sums the gradient of hidden over ranks, so backward only slices this rank's rows.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp.group)
        return ops.linear_logp(
            hidden,
            weight,
            labels.t(),
            temperature=temperature,
            ignore_index=requested.ignore_index,
            vocab_size=vocab_size,
            vocab_start=tp.rank * weight.shape[0],
            tp=tp,
            return_entropy=requested.return_entropy,
            keep_logits=record.keep_logits,
        )

    result = output_layer(hidden, output_weight, compute=logprobs_of)
    logp, entropy = result if requested.return_entropy else (result, None)
    return LogProbs(logp.t().contiguous(), None if entropy is None else entropy.t().contiguous())


class VocabParallelCrossEntropy:
    """Replacement for Megatron's autograd Function behind ``vocab_parallel_cross_entropy``.

    Replacing the Function instead of that function also covers code that imported the function before the patch.
    """

    def __init__(self, vocab_size: int | None):
        self.vocab_size = vocab_size

    def of(self, columns: int) -> int:
        """Return the vocabulary size of the models whose output layer has `columns` columns on a rank.

        Raises UnsupportedError if such models have different sizes, and InputError if no size is known.
        """
        sizes = {
            record.vocab_size
            for record in state.records
            if record.vocab_size
            and record.output_layer is not None
            and record.output_layer.output_size_per_partition == columns
        }
        if not sizes and self.vocab_size is not None:
            sizes = {self.vocab_size}
        if len(sizes) > 1:
            raise UnsupportedError(
                "vocab_size: the cross entropy cannot tell which model the logits are from; patched models with "
                f"{columns} output columns on a rank must have equal sizes, got "
                f"{' and '.join(map(str, sorted(sizes)))}. Pass labels to the model, or call alignkit.megatron.logprobs"
            )
        if not sizes:
            raise InputError(
                f"vocab_size: required, because no patched model has an output layer with {columns} columns on a rank. "
                "Pass vocab_size to patch_megatron"
            )
        return sizes.pop()

    @replaces("tensor_parallel/cross_entropy.py:vocab_parallel_cross_entropy", "tp_group", when="cross_entropy_group")
    @replaces(
        "tensor_parallel/cross_entropy.py:vocab_parallel_cross_entropy", "vocab_parallel_logits target label_smoothing"
    )
    @replaces(
        "tensor_parallel/cross_entropy.py:_VocabParallelCrossEntropy.forward",
        "vocab_parallel_logits target label_smoothing",
    )
    def apply(self, logits, target, label_smoothing=0.0, tp_group=None) -> torch.Tensor:
        """Return the loss fp32 ``[...]`` of target ``[...]`` from the output layer's fp32 logits ``[..., V / tp]``."""
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        tp = TP(tp_group if tp_group is not None else get_tensor_model_parallel_group())

        def checks() -> int:
            if label_smoothing:
                raise UnsupportedError(f"label_smoothing: must be 0, got {label_smoothing}")
            if not isinstance(logits, torch.Tensor) or not logits.dim():
                given = f"a {'0-d ' if isinstance(logits, torch.Tensor) else ''}{type(logits).__name__}"
                raise InputError(f"logits: expected fp32 [..., V / tp], got {given}")
            if logits.dtype != torch.float32:
                raise UnsupportedError(
                    f"logits: must be fp32, as the aligned output layer returns them, got {logits.dtype}"
                )
            return self.of(logits.shape[-1])

        try:
            vocab_size = checks()
        except AlignkitError:
            tp.check("logp_from_logits", checks)  # the other ranks wait in that op's collective check
            raise
        return -ops.logp_from_logits(
            logits, target, vocab_size=vocab_size, vocab_start=tp.rank * logits.shape[-1], tp=tp
        )


class FusedCrossEntropy(VocabParallelCrossEntropy):
    """Replacement behind ``fused_vocab_parallel_cross_entropy``, which has no label smoothing."""

    @replaces(
        "fusions/fused_cross_entropy.py:_VocabParallelCrossEntropy.forward", "vocab_parallel_logits target tp_group"
    )
    def apply(self, logits, target, tp_group=None) -> torch.Tensor:
        return super().apply(logits, target, tp_group=tp_group)


@replaces(
    "models/common/language_module/language_module.py:LanguageModule.compute_language_model_loss", "labels logits"
)
def language_model_loss(model, labels, logits) -> torch.Tensor:
    """Return the aligned loss ``[b, s]``, in place of ``LanguageModule.compute_language_model_loss``.

    The configured cross-entropy fusion has no effect. labels: ``[b, s]``. logits: ``[s, b, V / tp]``.
    """
    from megatron.core.tensor_parallel import cross_entropy

    loss = cross_entropy._VocabParallelCrossEntropy.apply(logits, labels.t().contiguous(), 0.0, model.pg_collection.tp)
    return loss.t().contiguous()
