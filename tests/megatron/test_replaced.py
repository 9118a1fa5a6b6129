"""What will run is looked at before each forward: methods of classes and modules, hooks, weights that are computed."""

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

from alignkit.errors import UnsupportedError
from alignkit.megatron import logprobs, look, modules, patch_megatron
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
def test_a_method_of_a_module(where, name, model):
    module = model.get_submodule(where)
    if not hasattr(module, name):
        pytest.skip(f"this version has no {name}")
    stock = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: stock(*args, **kwargs))
    with pytest.raises(UnsupportedError, match=f"{where}.{name}: .*replaced"):
        model(TOKENS, None, None)
    delattr(module, name)
    model(TOKENS, None, None)


def test_a_method_bound_to_the_model_itself(model):
    model._postprocess = types.MethodType(GPTModel._postprocess, model)
    with pytest.raises(UnsupportedError, match="model._postprocess"):
        model(TOKENS, None, None)


def test_what_has_no_part_in_a_forward_may_be_replaced(model):
    model.sharded_state_dict = model.decoder.state_dict = dict
    model.forward_backup = model.forward
    model(TOKENS, None, None)


def wrapped(stock):
    """A replacement that looks like what it replaces."""

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
def test_a_method_of_a_class(owner, name, how, model, monkeypatch):
    monkeypatch.setattr(owner, name, how(getattr(owner, name)))
    try:
        with pytest.raises(UnsupportedError, match=f"{owner.__qualname__}.{name}: has been replaced"):
            model(TOKENS, None, None)
    finally:
        monkeypatch.undo()
    model(TOKENS, None, None)


def test_a_method_of_a_class_before_the_patch(world, monkeypatch):
    monkeypatch.setattr(SelfAttention, "forward", wrapped(SelfAttention.forward))
    with pytest.raises(UnsupportedError, match="SelfAttention.forward: .*by wrapped.<locals>.wrapper of .*test_rep"):
        patch_megatron(300)
    monkeypatch.undo()
    with patch_megatron(300):
        pass


def test_a_method_that_a_class_had_inherited(model, monkeypatch):
    monkeypatch.setattr(SelfAttention, "_call_impl", wrapped(SelfAttention._call_impl), raising=False)
    with pytest.raises(UnsupportedError, match="SelfAttention._call_impl: has been replaced"):
        model(TOKENS, None, None)


def test_names_that_the_patch_has_replaced(model, monkeypatch):
    monkeypatch.setattr(attention, "apply_rotary_pos_emb", lambda t, *args, **kwargs: t)
    with pytest.raises(UnsupportedError, match="attention.apply_rotary_pos_emb: has been replaced since patch"):
        model(TOKENS, None, None)


def test_a_decoder_called_on_its_own(model):
    """Around GPTModel's forward nothing would be checked."""
    hidden = model.embedding(TOKENS, None)
    with pytest.raises(UnsupportedError, match="TransformerBlock: called outside"):
        model.decoder(hidden, None)


@pytest.mark.parametrize("name", ["self_attn_bda", "mlp_bda"])
def test_a_residual_addition(name, model):
    layer = model.decoder.layers[1]
    stock = layer.__dict__[name]
    setattr(layer, name, lambda *args: stock(*args))
    with pytest.raises(UnsupportedError, match=r"layers.1.self_attn_bda / mlp_bda"):
        model(TOKENS, None, None)
    setattr(layer, name, stock)
    model(TOKENS, None, None)


def test_a_configuration_of_one_module(model):
    model.decoder.layers[0].self_attention.config = copy.copy(model.config)
    with pytest.raises(UnsupportedError, match="layers.0.self_attention.config: not the model's"):
        model(TOKENS, None, None)


def test_weights_that_are_computed(model):
    fc1 = model.decoder.layers[0].mlp.linear_fc1
    torch.nn.utils.parametrize.register_parametrization(fc1, "weight", torch.nn.Identity())
    with pytest.raises(UnsupportedError, match="linear_fc1: .*Parametrized"):
        model(TOKENS, None, None)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_are_computed_in_a_hook(model):
    torch.nn.utils.weight_norm(model.decoder.layers[0].mlp.linear_fc2)
    with pytest.raises(UnsupportedError, match="linear_fc2.weight: not a parameter"):
        model(TOKENS, None, None)


def test_a_compiled_module(model):
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
    """The three ways through a model; output_layer's hooks run in different places of them."""
    return (
        lambda: model(TOKENS, None, None),
        lambda: model(TOKENS, None, None, labels=TOKENS),
        lambda: logprobs(model, TOKENS, None, None, TOKENS).log_probs,
    )


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_a_hook_that_returns_something(where, with_kwargs, model):
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
def test_a_pre_hook_that_returns_something(where, with_kwargs, model):
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


def test_hooks_that_write(model):
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


def test_hooks_of_all_modules(model):
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
                assert isinstance(other(torch.ones(1, 2)), tuple), "modules that are not ours are left alone"
        finally:
            handle.remove()
        model(TOKENS, None, None)


def test_hooks_that_record_or_give_back_what_they_got(model):
    """They see what they saw before, and can be removed."""
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


def test_undo_gives_hooks_back(checkpoint, world):
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
            copied = workers.copied(model)
        assert list(model.decoder.final_layernorm._forward_hooks.values()) == [double]
        assert_bitwise_equal(model(TOKENS, None, mask), stock)
        assert_bitwise_equal(copied(TOKENS, None, mask), stock, "a copy")


def test_nothing_is_looked_at_twice_without_a_change(model, monkeypatch):
    """What is slow is done once, and again after a change."""
    looked = []
    stock = look.Look.__init__
    monkeypatch.setattr(look.Look, "__init__", lambda *args, **kw: looked.append(1) or stock(*args, **kw))
    for forward in forwards(model):
        forward()
    model.train()
    model(TOKENS, None, None, labels=TOKENS).sum().backward()
    model(TOKENS, None, None, labels=TOKENS)
    assert len(looked) == 1
    model.decoder.layers[0].more = 1
    model(TOKENS, None, None)
    assert len(looked) == 2
