"""Replacements for Megatron's model methods and schedules: the checks around a forward, and its loss. No numerics.

`patch.Patch.install` lists which function replaces which method. This file orders the checks and makes them collective;
the checks themselves are in `patch_model` (model), `calls` (arguments) and `facts` (facts equal on all ranks).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from alignkit.dist import TP, check_same_across
from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import InputError, UnsupportedError

from . import calls, facts, head, hooks, models, modules, state

if TYPE_CHECKING:
    from .patch import Patch

BUILDING = ("__init__", "__new__")
"""Constructors, which other code may wrap: the models they build are checked anyway."""


@replaces("models/gpt/gpt_model.py:GPTModel.__init__", "config vocab_size")
def init(patch: Patch, stock):
    """Return GPTModel.__init__ that also patches the model it has built."""

    @functools.wraps(stock)
    def aligned(model, *args, **kwargs):
        stock(model, *args, **kwargs)
        patch.models.patch_model(model)

    return aligned


@replaces(
    "models/hybrid/hybrid_model.py:HybridModel.__init__", "config hybrid_layer_pattern rotary_base", when="hybrid"
)
def init_hybrid(patch: Patch, stock):
    """Return HybridModel.__init__ that also checks and patches the model.

    Unsupported layers are rejected before they are built, as they may need packages that are not installed. HybridModel
    does not store its rotary base, so `rotary_base` is compared with the base derived from the frequencies.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def aligned(model, *args, **kwargs):
        given = signature.bind(model, *args, **kwargs)
        given.apply_defaults()
        if (why := models.unsupported_layers(given.arguments["hybrid_layer_pattern"])) is not None:
            raise UnsupportedError(why)
        stock(model, *args, **kwargs)
        patch.models.patch_model(model)
        base, derived = given.arguments["rotary_base"], state.of_model(model).rotations.base
        if base != derived:
            raise UnsupportedError(
                "rotary_base: must have at most six significant digits with HybridModel, because alignkit derives it "
                f"from the model's frequencies (here {derived}), got {base}"
            )

    return aligned


def _begin(patch: Patch, model, call: dict[str, Any]) -> None:
    """Check the model and its inputs on all ranks together, before the forward computes anything."""
    name, record = type(model).__name__, state.of_model(model)
    model_facts: dict = {}

    def checks() -> dict:
        record.check_hooks()
        model_facts.update(patch.models.patch_model(model, for_forward=True))
        return model_facts | calls.check_input(model, record.vocab_size, **call)

    record.checked = True
    tp, cp = modules.parallel_groups(model)
    experts = modules.expert_ranks(model)
    check_same_across([tp, cp], name, checks, outer=experts, shared=model_facts)
    if model.pre_process and call.get("decoder_input") is None:

        def same_values() -> dict:
            tp.check_same_values(name, input_ids=call.get("input_ids"))
            return {}

        check_same_across([cp], name, same_values, outer=experts)
    record.packed_seq_params = (call.get("packed_seq_params"),)


def _end(patch: Patch, model, hidden_states, call: dict[str, Any], stock: Callable[[], Any]) -> Any:
    """Return a forward's result for the decoder's hidden states. stock: computes Megatron's result without labels."""
    record = state.of_model(model)
    labels, hook, requested = call.get("labels"), call.get("output_processor"), record.request
    context = call.get("output_processor_context") if hook is not None else requested

    def checks() -> dict:
        record.check_hooks()
        if hook is not None and hook is not head.output_processor:
            raise UnsupportedError(f"output_processor: must be alignkit.megatron.output_processor, got {hook!r:.200}")
        if not model.post_process:
            return {}
        why = record.stock_head
        if why and (hook is not None or requested is not None or labels is not None):
            name = "labels" if hook is None else "output_processor"
            raise UnsupportedError(f"{name}: must be None for this model, because its output layer {why}")
        if hook is None and requested is None and labels is None:
            gather = call.get("runtime_gather_output")
            return {"labels": None, "runtime_gather_output": None if gather is None else bool(gather)}
        return calls.check_request(model, record.vocab_size, hidden_states, labels, head.request_from(context))

    check_same_across(
        modules.parallel_groups(model), f"the end of {type(model).__name__}", checks, outer=modules.expert_ranks(model)
    )
    if not model.post_process or (hook is None and labels is None and requested is None):
        result = stock()
        if record.stock_head and result.shape[-1] != 1:
            raise UnsupportedError(
                f"output_layer: last dimension of the result must be 1, one number for each token, got shape "
                f"{tuple(result.shape)}"
            )
    else:
        tied = model.share_embeddings_and_output_weights
        result = head.output_processor(
            hidden_states=hidden_states,
            output_layer=model.output_layer,
            labels=labels,  # pyright: ignore[reportArgumentType] - None is rejected by the checks above
            output_weight=model.shared_embedding_or_output_weight() if tied else None,
            context=context,
        )
        result = result if hook is not None or requested is not None else -result.log_probs
    record.check_hooks()  # hooks of the output layer; no collective follows, so this rank may fail alone
    return result


@relies_on("models/gpt/gpt_model.py:GPTModel.forward", mentions="_preprocess _postprocess")
@replaces("models/gpt/gpt_model.py:GPTModel._preprocess", "input_ids position_ids inference_context packed_seq_params")
def preprocess(patch: Patch, stock):
    """Return GPTModel._preprocess that begins with the checks of a forward.

    GPTModel.forward calls it first, in every version and in the frameworks' own forwards.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def aligned(model, *args, **kwargs):
        call = signature.bind(model, *args, **kwargs).arguments
        _begin(patch, model, call)
        return stock(model, *args, **kwargs)

    return aligned


@replaces("models/gpt/gpt_model.py:GPTModel._postprocess", "hidden_states labels")
def postprocess(patch: Patch, stock):
    """Return GPTModel._postprocess, the last call of GPTModel.forward, with alignkit's loss and logprobs."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def aligned(model, *args, **kwargs):
        call = signature.bind(model, *args, **kwargs).arguments
        return _end(patch, model, call["hidden_states"], call, lambda: stock(model, *args, **kwargs))

    return aligned


@replaces(
    "models/hybrid/hybrid_model.py:HybridModel.forward",
    """
    input_ids position_ids attention_mask decoder_input labels inference_context inference_params
    runtime_gather_output packed_seq_params padding_mask
    """,
    mentions="embedding get_rotary_seq_len decoder output_layer shared_embedding_or_output_weight",
    when="hybrid",
)
def hybrid(patch: Patch, stock):
    """Return HybridModel.forward with the checks of a forward and alignkit's loss and logprobs.

    HybridModel has no _preprocess and _postprocess to replace. Unlike stock, this forward accepts `output_processor`.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def aligned(model, *args, output_processor=None, output_processor_context=None, **kwargs):
        call = signature.bind(model, *args, **kwargs).arguments
        if (inferring := call.pop("inference_params", None)) is not None:  # older name of inference_context
            call["inference_context"] = inferring
        _begin(patch, model, call)
        hidden_states = _decoder(model, call)
        call |= {"output_processor": output_processor, "output_processor_context": output_processor_context}

        def logits():
            if not model.post_process:
                return hidden_states
            weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
            gather = call.get("runtime_gather_output")
            return (
                model.output_layer(hidden_states, weight, runtime_gather_output=gather)[0].transpose(0, 1).contiguous()
            )

        return _end(patch, model, hidden_states, call, logits)

    return aligned


def _decoder(model, call: dict[str, Any]) -> Any:
    """Run embedding, rotary table and layers, like HybridModel.forward."""
    given, packed = call.get("decoder_input"), call.get("packed_seq_params")
    if given is None and model.pre_process:
        given = model.embedding(input_ids=call["input_ids"], position_ids=call.get("position_ids"))
    rotary = model.rotary_pos_emb
    table = rotary(rotary.get_rotary_seq_len(None, model.decoder, given, model.config, packed))
    return model.decoder(
        hidden_states=given,
        attention_mask=call.get("attention_mask"),
        rotary_pos_emb=table[0]
        if isinstance(table, tuple)
        else table,  # YaRN returns (table, factor); alignkit's table includes the factor
        packed_seq_params=packed,
        padding_mask=call.get("padding_mask"),
    )


SCHEDULES = ("forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving")
"""Megatron's pipeline schedules."""


@replaces("pipeline_parallel/schedules.py:forward_backward_pipelining_with_interleaving", "model pg_collection")
@replaces("pipeline_parallel/schedules.py:forward_backward_pipelining_without_interleaving", "model pg_collection")
@relies_on(
    "pipeline_parallel/schedules.py:get_forward_backward_func", mentions="forward_backward_pipelining_with_interleaving"
)
def schedule(patch: Patch, stock):
    """Return a pipeline schedule that begins with a collective check of all stages.

    A stage that failed in the middle of a schedule would leave the other stages waiting for its activations.
    """
    from megatron.core import parallel_state

    @functools.wraps(stock)
    def aligned(*args, **kwargs):
        given, groups, communicator = (kwargs.get(name) for name in ("model", "pg_collection", "p2p_communicator"))
        if groups is not None and not hasattr(groups, "tp"):  # several models, each with its own groups
            return stock(*args, **kwargs)
        tp = parallel_state.get_tensor_model_parallel_group() if groups is None else groups.tp
        cp = parallel_state.get_context_parallel_group() if groups is None else groups.cp
        pp = parallel_state.get_pipeline_model_parallel_group() if communicator is None else communicator.pp_group
        chunks = [unwrapped(model) for model in (given if isinstance(given, list) else [given])]
        chunks = [model for model in chunks if isinstance(model, models.MODELS)]  # other models are not aligned

        def checks() -> dict:
            patch.check_in_force(but=BUILDING)
            found = [patch.models.patch_model(model, for_forward=True) for model in chunks]
            names = (*facts.settings(chunks[0]), "vocab_size", "contract") if chunks else ()
            return {name: ", ".join(dict.fromkeys(one[name] for one in found)) for name in names}

        stages = TP(pp, label="pipeline-parallel")
        experts = next(filter(None, map(modules.expert_ranks, chunks)), ())
        check_same_across([TP(tp), TP(cp, label="context-parallel"), stages], "the pipeline", checks, outer=experts)
        layers = stages.check("the pipeline", lambda: tuple(tuple(facts.layers(model)) for model in chunks))
        # The first chunks of all ranks precede their second chunks.
        order = [number for chunk in itertools.zip_longest(*layers, fillvalue=()) for own in chunk for number in own]
        if chunks and order != list(range(1, models.depth(chunks[0]) + 1)):
            raise InputError(
                f"pipeline: the stages must have layers 1 to {models.depth(chunks[0])} in order, got {order!s:.200}"
            )
        return stock(*args, **kwargs)

    return aligned


def unwrapped(model):
    """Return the model that wrappers such as DDP and Float16Module contain."""
    while not isinstance(model, models.MODELS) and hasattr(model, "module"):
        model = model.module
    return model


def guard_call(patch: Patch, base):
    """Return LanguageModule.__call__ that rejects other models, and raises a rank's error on all ranks."""

    def call(model, *args, **kwargs):
        if not isinstance(model, models.MODELS):
            raise UnsupportedError(f"model: must be one of {models.NAMES}, got a {type(model).__name__}")
        record = state.of_model(model)

        def checks() -> None:
            patch.check_in_force(but=BUILDING)
            state.register([model], record)
            hooks.watch_hooks("", model)
            hooks.watch_global_hooks()
            if kwargs.get("extra_block_kwargs"):
                raise UnsupportedError(
                    f"extra_block_kwargs: must be None or empty, got {kwargs['extra_block_kwargs']!r:.200}"
                )

        record.checked = False
        try:
            checks()
            result = super(base, model).__call__(*args, **kwargs)
        except Exception as e:
            if not record.checked:  # the other ranks wait in the collective check of `_begin`
                check_same_across(
                    modules.parallel_groups(model),
                    type(model).__name__,
                    functools.partial(_raise, e),
                    outer=modules.expert_ranks(model),
                )
            raise
        record.check_hooks()  # hooks of the model itself
        return result

    return call


def require_aligned_block(stock):
    """Return a decoder block's stock forward that rejects blocks of models that are not aligned."""

    @functools.wraps(stock)
    def forward(block, *args, **kwargs):
        if not isinstance(block, modules.DecoderBlock):
            raise UnsupportedError(
                f"{type(block).__name__}: must be the decoder of one of {models.NAMES}, and be called by the forward() "
                "of this model"
            )
        return stock(block, *args, **kwargs)

    return forward


def _raise(error: Exception) -> NoReturn:
    raise error
