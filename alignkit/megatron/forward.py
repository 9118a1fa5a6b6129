"""What the names that `patch_megatron` replaces do: a forward of a model, from its checks to its loss. No numerics."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from alignkit.dist import TP, check_same_across
from alignkit.errors import InputError, UnsupportedError
from alignkit.runtime import dispatch

from . import calls, fingerprint, head, hooks, models, modules, supported
from .look import device_of

if TYPE_CHECKING:
    from .patch import Patch

BUILDING = ("__init__", "__new__")
"""What builds models may be wrapped by others: what it has built is looked at anyway."""


def init(patch: Patch, stock):
    @functools.wraps(stock)
    def aligned(model, *args, **kwargs):
        stock(model, *args, **kwargs)
        patch.models.adopt(model)

    return aligned


def init_hybrid(patch: Patch, stock):
    """HybridModel's: layers that alignkit does not know are refused before they are built, which may take what is not
    installed, and a base that the model does not keep is compared with what is read off its frequencies."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def aligned(model, *args, **kwargs):
        given = signature.bind(model, *args, **kwargs)
        given.apply_defaults()
        if (why := models.refused_layers(given.arguments["hybrid_layer_pattern"])) is not None:
            raise UnsupportedError(why)
        stock(model, *args, **kwargs)
        patch.models.adopt(model)
        base, read = given.arguments["rotary_base"], modules.rotations[model.rotary_pos_emb].base
        if base != read:
            raise UnsupportedError(
                f"rotary_base: {base} has more digits than can be read off a model, which gives {read}"
            )

    return aligned


def _begin(patch: Patch, model, call: dict[str, Any]) -> None:
    """What comes before anything of a forward is computed: all ranks check the model and what it is called with."""
    name = type(model).__name__

    of_model: dict = {}

    def checks() -> dict:
        hooks.check_hooks()
        of_model.update(patch.models.adopt(model, runs=True) | _of_patch(patch, model))
        return of_model | calls.check_input(model, patch.models.vocabulary_of(model), **call)

    patch.met.add(model)
    tp, cp = modules.sharing(model)
    experts = modules.expert_ranks(model)
    check_same_across([tp, cp], name, checks, apart=experts, alike=of_model)
    if model.pre_process and call.get("decoder_input") is None:

        def same_values() -> dict:
            tp.check_same_values(name, input_ids=call.get("input_ids"))
            return {}

        check_same_across([cp], name, same_values, apart=experts)
    modules.begun[model.decoder] = call.get("packed_seq_params")


def _end(patch: Patch, model, hidden_states, call: dict[str, Any], stock: Callable[[], Any]) -> Any:
    """From the trunk's hidden states to what a forward gives. stock: gives what Megatron makes of them, without labels."""
    labels, hook, asked = call.get("labels"), call.get("output_processor"), head.request.get()
    context = call.get("output_processor_context") if hook is not None else asked

    def checks() -> dict:
        hooks.check_hooks()
        if hook is not None and hook is not head.output_processor:
            raise UnsupportedError(f"output_processor: {hook!r} is not alignkit's")
        if not model.post_process:
            return {}
        why = supported.left_stock(model)
        if why and (hook is not None or asked is not None or labels is not None):
            raise UnsupportedError(f"labels / output_processor: {why}")
        if hook is None and asked is None and labels is None:
            gather = call.get("runtime_gather_output")
            return {"labels": None, "runtime_gather_output": None if gather is None else bool(gather)}
        vocab_size = patch.models.vocabulary_of(model)
        return calls.check_request(model, vocab_size, hidden_states, labels, head.asked_for(context))

    check_same_across(
        modules.sharing(model), f"the end of {type(model).__name__}", checks, apart=modules.expert_ranks(model)
    )
    if not model.post_process or (hook is None and labels is None and asked is None):
        result = stock()
        if supported.left_stock(model) and result.shape[-1] != 1:
            raise UnsupportedError(f"output_layer: a linear layer to one number that gave {tuple(result.shape)}")
    else:
        tied = model.share_embeddings_and_output_weights
        result = head.output_processor(
            hidden_states=hidden_states,
            output_layer=model.output_layer,
            labels=labels,  # pyright: ignore[reportArgumentType] - none only if `context` has its own
            output_weight=model.shared_embedding_or_output_weight() if tied else None,
            context=context,
        )
        result = result if hook is not None or asked is not None else -result.log_probs
    hooks.check_hooks()  # those of the output layer; no rank waits for this one any more
    return result


def preprocess(patch: Patch, stock):
    """The first thing that GPTModel.forward calls, in every version and in frameworks' own forwards."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def aligned(model, *args, **kwargs):
        call = signature.bind(model, *args, **kwargs).arguments
        _begin(patch, model, call)
        return stock(model, *args, **kwargs)

    return aligned


def postprocess(patch: Patch, stock):
    """The last thing that it calls."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def aligned(model, *args, **kwargs):
        call = signature.bind(model, *args, **kwargs).arguments
        return _end(patch, model, call["hidden_states"], call, lambda: stock(model, *args, **kwargs))

    return aligned


def hybrid(patch: Patch, stock):
    """HybridModel.forward, which calls nothing of its own before its trunk or after it. As GPTModel's it takes an
    `output_processor`."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def aligned(model, *args, output_processor=None, output_processor_context=None, **kwargs):
        call = signature.bind(model, *args, **kwargs).arguments
        if (inferring := call.pop("inference_params", None)) is not None:  # its older name
            call["inference_context"] = inferring
        _begin(patch, model, call)
        hidden_states = _trunk(model, call)
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


def _trunk(model, call: dict[str, Any]) -> Any:
    """Embedding, rotations and layers, as HybridModel.forward calls them."""
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
        else table,  # YaRN's factor, which is in the table, is beside it
        packed_seq_params=packed,
        padding_mask=call.get("padding_mask"),
    )


SCHEDULES = ("forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving")


def schedule(patch: Patch, stock):
    """A pass of micro-batches through a pipeline. All its stages meet before it, as a stage that was refused in the middle
    would leave the others waiting for what it was to send."""
    from megatron.core import parallel_state

    @functools.wraps(stock)
    def aligned(*args, **kwargs):
        given, groups, through = (kwargs.get(name) for name in ("model", "pg_collection", "p2p_communicator"))
        if groups is not None and not hasattr(groups, "tp"):  # several models, each with groups of its own
            return stock(*args, **kwargs)
        tp = parallel_state.get_tensor_model_parallel_group() if groups is None else groups.tp
        cp = parallel_state.get_context_parallel_group() if groups is None else groups.cp
        pp = parallel_state.get_pipeline_model_parallel_group() if through is None else through.pp_group
        chunks = [_unwrapped(model) for model in (given if isinstance(given, list) else [given])]
        chunks = [model for model in chunks if isinstance(model, models.MODELS)]  # others are not computed by alignkit

        def checks() -> dict:
            patch.check_in_force(but=BUILDING)
            for model in chunks:
                patch.models.adopt(model, runs=True)
            facts = [fingerprint.settings(model) | _of_patch(patch, model) for model in chunks]
            names = facts[0] if facts else ()
            return {name: ", ".join(dict.fromkeys(str(one[name]) for one in facts)) for name in names}

        stages = TP(pp, called="pipeline-parallel")
        experts = next(filter(None, map(modules.expert_ranks, chunks)), ())
        check_same_across([TP(tp), TP(cp, called="context-parallel"), stages], "the pipeline", checks, apart=experts)
        layers = stages.check("the pipeline", lambda: tuple(tuple(fingerprint.layers(model)) for model in chunks))
        # A rank's first chunk comes before any rank's second.
        order = [number for chunk in itertools.zip_longest(*layers, fillvalue=()) for own in chunk for number in own]
        if chunks and order != list(range(1, models.depth(chunks[0]) + 1)):
            raise InputError(f"pipeline: its stages have the layers {order}, of {models.depth(chunks[0])}")
        return stock(*args, **kwargs)

    return aligned


def _unwrapped(model):
    while not isinstance(model, models.MODELS) and hasattr(model, "module"):
        model = model.module
    return model


def _of_patch(patch: Patch, model) -> dict:
    return {"vocab_size": patch.models.vocabulary_of(model), "contract": dispatch.family(device_of(model)).contract_id}


def only_known(patch: Patch, base):
    def call(model, *args, **kwargs):
        if not isinstance(model, models.MODELS):
            raise UnsupportedError(f"{type(model).__name__}: not one of {models.NAMES}, which are supported")

        def checks() -> None:
            patch.check_in_force(but=BUILDING)
            hooks.watch_hooks("", model)
            hooks.watch_global_hooks()
            if kwargs.get("extra_block_kwargs"):
                raise UnsupportedError(f"extra_block_kwargs: {kwargs['extra_block_kwargs']!r} is not supported")

        patch.met.discard(model)
        try:
            checks()
            result = super(base, model).__call__(*args, **kwargs)
        except Exception as e:
            if model not in patch.met:  # the other ranks are about to meet in `_begin`, and must hear of it there
                check_same_across(
                    modules.sharing(model),
                    type(model).__name__,
                    functools.partial(_raise, e),
                    apart=modules.expert_ranks(model),
                )
            raise
        hooks.check_hooks()  # those of the model itself
        return result

    return call


def only_aligned(stock):
    @functools.wraps(stock)
    def forward(block, *args, **kwargs):
        if not isinstance(block, modules.Trunk):
            raise UnsupportedError(f"{type(block).__name__}: outside of an aligned model it is not supported")
        return stock(block, *args, **kwargs)

    return forward


def _raise(error: Exception) -> NoReturn:
    raise error
