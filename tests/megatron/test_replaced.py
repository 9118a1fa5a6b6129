"""Checks before each forward of a real Megatron model: replaced methods, hooks that change values, computed weights.

Each must be rejected by name, because it would bypass alignkit's ops. Hooks that only observe must be accepted.
"""

import copy
import functools
import types

import pytest
import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer import attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.modules import module as torch_module

from alignkit.engines import guards
from alignkit.errors import UnsupportedError
from alignkit.megatron import logprobs, modules, patch_megatron
from alignkit.testing import assert_bitwise_equal
from tests.megatron import workers

TOKENS = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture
def model(checkpoint, world):
    with patch_megatron(300):
        model = workers.build(checkpoint(), torch.bfloat16)
        with torch.no_grad():
            model(TOKENS, None, None)
        yield model


@pytest.mark.parametrize(
    "where, name",
    [
        ("decoder.layers.0", "_forward_mlp"),
        ("decoder.layers.1", "_forward_attention"),
        ("decoder.layers.0.self_attention", "get_query_key_value_tensors"),
        ("decoder.layers.0.self_attention", "forward"),
        ("decoder.layers.0.self_attention.core_attention", "forward"),
        ("decoder.layers.0.mlp.linear_fc1", "_forward_impl"),
        ("embedding", "forward"),
        ("embedding.word_embeddings", "_call_impl"),
        ("decoder", "_checkpointed_forward"),
        ("rotary_pos_emb", "get_rotary_seq_len"),
    ],
)
def test_replaced_method_of_a_module_is_rejected(where, name, model):
    module = model.get_submodule(where)
    if not hasattr(module, name):
        pytest.skip(f"this version has no {name}")
    stock = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: stock(*args, **kwargs))
    with pytest.raises(UnsupportedError, match=f"{where}.{name}: .*replaced"):
        model(TOKENS, None, None)
    delattr(module, name)
    model(TOKENS, None, None)


def test_method_set_on_the_model_is_rejected(model):
    model._postprocess = types.MethodType(GPTModel._postprocess, model)
    with pytest.raises(UnsupportedError, match="model._postprocess"):
        model(TOKENS, None, None)


def test_methods_that_do_not_run_in_a_forward_may_be_replaced(model):
    model.sharded_state_dict = model.decoder.state_dict = dict
    model.forward_backup = model.forward
    model(TOKENS, None, None)


def wrapped(stock):
    """Return a replacement with the metadata of the function that it replaces."""

    @functools.wraps(stock)
    def wrapper(*args, **kwargs):
        return stock(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "owner, name",
    [
        (SelfAttention, "forward"),
        (SelfAttention, "get_query_key_value_tensors"),
        (TransformerLayer, "_forward_mlp"),
        (VocabParallelEmbedding, "forward"),
        (LanguageModelEmbedding, "forward"),
        (LanguageModule, "__call__"),
        (GPTModel, "forward"),
        (GPTModel, "_preprocess"),
        (GPTModel, "_postprocess"),
        (modules.RMSNorm, "forward"),
        (modules.ColumnParallelLinear, "_forward_impl"),
        (modules.TransformerBlock, "forward"),
        (torch.nn.Module, "_call_impl"),
        (torch.nn.Module, "__call__"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.parametrize(
    "how",
    [wrapped, functools.partialmethod, torch.no_grad(), torch.compile],
    ids=["wraps", "partialmethod", "no_grad", "compile"],
)
def test_replaced_method_of_a_class_is_rejected(owner, name, how, model, monkeypatch):
    monkeypatch.setattr(owner, name, how(getattr(owner, name)))
    try:
        with pytest.raises(
            UnsupportedError, match=f"{owner.__qualname__}.{name}: (was replaced after|must be the method)"
        ):
            model(TOKENS, None, None)
    finally:
        monkeypatch.undo()
    model(TOKENS, None, None)


def test_method_replaced_before_the_patch_is_rejected(world, monkeypatch):
    monkeypatch.setattr(SelfAttention, "forward", wrapped(SelfAttention.forward))
    with pytest.raises(UnsupportedError, match="SelfAttention.forward: .*got wrapped.<locals>.wrapper of .*test_rep"):
        patch_megatron(300)
    monkeypatch.undo()
    with patch_megatron(300):
        pass


def test_override_of_an_inherited_method_is_rejected(model, monkeypatch):
    monkeypatch.setattr(SelfAttention, "_call_impl", wrapped(SelfAttention._call_impl), raising=False)
    with pytest.raises(UnsupportedError, match="SelfAttention._call_impl: must be the method that the class defines"):
        model(TOKENS, None, None)


def test_patched_name_replaced_by_others_is_rejected(model, monkeypatch):
    monkeypatch.setattr(attention, "apply_rotary_pos_emb", lambda t, *args, **kwargs: t)
    with pytest.raises(UnsupportedError, match="attention.apply_rotary_pos_emb: was replaced after patch"):
        model(TOKENS, None, None)


def test_decoder_called_outside_its_models_forward_is_rejected(model):
    """Only GPTModel's forward runs the checks."""
    hidden = model.embedding(TOKENS, None)
    with pytest.raises(UnsupportedError, match="TransformerBlock: must be called inside its model's forward"):
        model.decoder(hidden, None)


@pytest.mark.parametrize("name", ["self_attn_bda", "mlp_bda"])
def test_replaced_bias_dropout_add_is_rejected(name, model):
    layer = model.decoder.layers[1]
    stock = layer.__dict__[name]
    setattr(layer, name, lambda *args: stock(*args))
    with pytest.raises(
        UnsupportedError, match=rf"layers.1.{name}: must be Megatron's get_bias_dropout_add, got <function"
    ):
        model(TOKENS, None, None)
    setattr(layer, name, stock)
    model(TOKENS, None, None)


def test_module_with_a_copied_config_is_rejected(model):
    model.decoder.layers[0].self_attention.config = copy.copy(model.config)
    with pytest.raises(UnsupportedError, match="layers.0.self_attention.config: must be the model's"):
        model(TOKENS, None, None)


def test_parametrized_weights_are_rejected(model):
    fc1 = model.decoder.layers[0].mlp.linear_fc1
    torch.nn.utils.parametrize.register_parametrization(fc1, "weight", torch.nn.Identity())
    with pytest.raises(UnsupportedError, match="linear_fc1: .*Parametrized"):
        model(TOKENS, None, None)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_computed_in_a_hook_are_rejected(model):
    torch.nn.utils.weight_norm(model.decoder.layers[0].mlp.linear_fc2)
    with pytest.raises(UnsupportedError, match="linear_fc2.weight: must be a parameter"):
        model(TOKENS, None, None)


def test_compiled_module_is_rejected(model):
    model.decoder.layers[0].compile()
    with pytest.raises(UnsupportedError, match="layers.0._compiled_call_impl"):
        model(TOKENS, None, None)


# Hooks.

WHERE = [
    "",
    "embedding",
    "embedding.word_embeddings",
    "decoder",
    "decoder.layers.1",
    "decoder.layers.0.self_attention",
    "decoder.layers.0.mlp.linear_fc1",
    "decoder.final_layernorm",
    "output_layer",
]


def forwards(model):
    """Return the three calls of a model, which run output_layer's hooks at different points."""
    return (
        lambda: model(TOKENS, None, None),
        lambda: model(TOKENS, None, None, labels=TOKENS),
        lambda: logprobs(model, TOKENS, None, None, TOKENS).log_probs,
    )


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_hook_that_returns_another_output_is_rejected(where, with_kwargs, model):
    def other(*args):
        return [args[-1], "more"]

    handle = model.get_submodule(where).register_forward_hook(other, with_kwargs=with_kwargs)
    for forward in forwards(model):
        with pytest.raises(UnsupportedError, match=f"{where or 'model'}: the forward hook .* returned another output"):
            forward()
    handle.remove()
    for forward in forwards(model):
        forward()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_pre_hook_that_returns_another_input_is_rejected(where, with_kwargs, model):
    hook = (
        (lambda module, args, kwargs: (args, kwargs | {"more": 1}))
        if with_kwargs
        else (lambda module, args: (*args, None))
    )
    handle = model.get_submodule(where).register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    for forward in forwards(model):
        with pytest.raises(UnsupportedError, match=f"{where or 'model'}: the forward pre-hook .* returned another inp"):
            forward()
    handle.remove()
    for forward in forwards(model):
        forward()


def test_hooks_that_write_in_place_are_rejected(model):
    def write(module, args, output):
        with torch.no_grad():
            output.mul_(2)

    handle = model.decoder.final_layernorm.register_forward_hook(write)
    with pytest.raises(UnsupportedError, match="final_layernorm: the forward hook .*write.* wrote to"):
        model(TOKENS, None, None)
    handle.remove()
    handle = model.decoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: write(None, None, kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad(), pytest.raises(UnsupportedError, match="layers.0: the forward pre-hook .* wrote to"):
        model(TOKENS, None, None)
    handle.remove()
    model(TOKENS, None, None)


def test_hooks_of_all_modules_are_checked(model):
    other = torch.nn.Linear(2, 2)
    for register, hook in (
        (torch_module.register_module_forward_hook, lambda module, args, output: (output,)),
        (torch_module.register_module_forward_pre_hook, lambda module, args: (*args, *args)),
    ):
        handle = register(hook)
        try:
            with pytest.raises(UnsupportedError, match="torch.nn.Module: the forward .*hook of all modules"):
                model(TOKENS, None, None)
            if register is torch_module.register_module_forward_hook:
                assert isinstance(other(torch.ones(1, 2)), tuple), "modules of other models must run unchecked"
        finally:
            handle.remove()
        model(TOKENS, None, None)


def test_hooks_that_only_observe_are_accepted(model):
    """After undo, hooks run as before and can be removed."""
    seen = []

    class Recorder:
        def __call__(self, module, args, output):
            seen.append(output)
            return output

    with torch.no_grad():
        expected = model(TOKENS, None, None)
        handles = [
            model.decoder.layers[0].register_forward_hook(Recorder()),
            model.output_layer.register_forward_pre_hook(lambda module, args: seen.append(args)),
            model.decoder.final_layernorm.register_forward_pre_hook(lambda module, args: args[0]),
        ]
        assert_bitwise_equal(model(TOKENS, None, None), expected)
        assert len(seen) == 2
        handles.pop().remove()
        assert_bitwise_equal(model(TOKENS, None, None), expected)
        assert len(seen) == 4
    assert not model.decoder.final_layernorm._forward_pre_hooks


def test_undo_restores_hooks(checkpoint, world):
    model = workers.build(checkpoint(), torch.bfloat16)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)

    def double(module, args, output):
        return output * 2

    model.decoder.final_layernorm.register_forward_hook(double)
    with torch.no_grad():
        stock = model(TOKENS, None, mask)
        with patch_megatron(300):
            with pytest.raises(UnsupportedError, match="double"):
                model(TOKENS, None, None)
            copied = workers.deep_copy(model)
        assert list(model.decoder.final_layernorm._forward_hooks.values()) == [double]
        assert_bitwise_equal(model(TOKENS, None, mask), stock)
        assert_bitwise_equal(copied(TOKENS, None, mask), stock, "a copy")


def test_model_is_checked_again_only_after_a_change(model, monkeypatch):
    snapshots = []
    stock = guards.Snapshot.__init__
    monkeypatch.setattr(guards.Snapshot, "__init__", lambda *args, **kw: snapshots.append(1) or stock(*args, **kw))
    for forward in forwards(model):
        forward()
    model.train()
    model(TOKENS, None, None, labels=TOKENS).sum().backward()
    model(TOKENS, None, None, labels=TOKENS)
    assert len(snapshots) == 1
    model.decoder.layers[0].more = 1
    model(TOKENS, None, None)
    assert len(snapshots) == 2


def test_settings_changed_in_place_are_rejected(model):
    """The identity of the list stays the same."""
    model.config.recompute_granularity, model.config.recompute_modules = "selective", ["core_attn"]
    model(TOKENS, None, None)
    model.config.recompute_modules.append("layernorm")
    with pytest.raises(UnsupportedError, match="recompute_modules .*must contain only"):
        model(TOKENS, None, None)
    model.config.recompute_modules.pop()
    model(TOKENS, None, None)


@pytest.mark.parametrize(
    "change, restore, message",
    [
        (lambda m: setattr(m, "mtp_process", True), lambda m: setattr(m, "mtp_process", False), "mtp_num_layers"),
        (
            lambda m: setattr(m.rotary_pos_emb, "rotary_interleaved", True),
            lambda m: setattr(m.rotary_pos_emb, "rotary_interleaved", False),
            "rotary_interleaved",
        ),
        (lambda m: m.rotary_pos_emb.inv_freq.mul_(2), lambda m: m.rotary_pos_emb.inv_freq.div_(2), "inv_freq"),
        (
            lambda m: m.rotary_pos_emb.inv_freq.data.numpy().__imul__(2),
            lambda m: m.rotary_pos_emb.inv_freq.data.numpy().__itruediv__(2),
            "inv_freq",
        ),
        (lambda m: setattr(m.config, "fp8", "e4m3"), lambda m: setattr(m.config, "fp8", None), "fp8"),
        (
            lambda m: m.decoder.layers[0].mlp.linear_fc1.__dict__.update(forward=len),
            lambda m: m.decoder.layers[0].mlp.linear_fc1.__dict__.pop("forward"),
            "linear_fc1.forward",
        ),
        (
            lambda m: m.output_layer._forward_hooks.update({-1: lambda *_: torch.zeros(1)}),
            lambda m: m.output_layer._forward_hooks.clear(),
            "output_layer: the forward hook",
        ),
    ],
)
def test_changes_after_a_forward_are_rejected(change, restore, message, model):
    change(model)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=message):
        model(TOKENS, None, None)
    restore(model)
    model(TOKENS, None, None)


def test_deleted_method_is_rejected(model, monkeypatch):
    """Without it, the module would run the stock method of its base class."""
    monkeypatch.delattr(modules.RMSNorm, "forward")
    with pytest.raises(UnsupportedError, match="RMSNorm.forward: must be the method .* was deleted"):
        model(TOKENS, None, None)


def test_every_forward_inspects_the_model_in_strict_mode(model, monkeypatch):
    snapshots, stock = [], guards.Snapshot.__init__
    monkeypatch.setattr(guards.Snapshot, "__init__", lambda *args, **kw: snapshots.append(1) or stock(*args, **kw))
    model(TOKENS, None, None)
    assert not snapshots
    monkeypatch.setenv("ALIGNKIT_STRICT", "1")
    for _ in range(2):
        model(TOKENS, None, None)
    assert len(snapshots) == 2
