"""The fused query/key norm and RoPE in real Megatron-core: one op, with the bits of the separate ops.

A hook that observes a norm's output must see it, so the separate ops run instead. Calls of the ops are counted.
"""

import contextlib
from unittest import mock

import pytest
import torch

from alignkit import ops
from alignkit.jobs.train import recompute
from alignkit.megatron import patch_megatron
from alignkit.testing import assert_bitwise_equal
from tests.megatron import workers
from tests.ropes import ROPES

NAMES = ("qk_norm_rope", "rms_norm", "rope")


@contextlib.contextmanager
def counted():
    """Yield a function that returns the number of calls of each op of `NAMES`."""
    with contextlib.ExitStack() as stack:
        calls = {name: stack.enter_context(mock.patch.object(ops, name, wraps=getattr(ops, name))) for name in NAMES}
        yield lambda: tuple(calls[name].call_count for name in NAMES)


def backward(model, rows):
    model.zero_grad()
    loss = workers.mean_loss(model, rows, 1)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


HOOKS = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "forward of all modules": lambda _: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    "backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "backward, before": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("dtype, rope", [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, "yarn")])
def test_fused_op_has_the_bits_of_the_separate_ops(dtype, rope, checkpoint, rows, world):
    """The model has five other norms: two in each of its two layers, and the final one."""
    scaling = {} if rope is None else {"rope_scaling": ROPES[rope]}
    with patch_megatron(300):
        model = workers.build(checkpoint("qwen3", dtype, **scaling), dtype).train()
        norm = model.decoder.layers[1].self_attention.k_layernorm
        with counted() as calls:
            loss, gradients = backward(model, rows)
            assert calls() == (2, 5, 0)
        for name, register in HOOKS.items():
            handle = register(norm)
            try:
                with counted() as calls:
                    again, found = backward(model, rows)
                    assert calls() == ((0, 9, 4) if name == "forward of all modules" else (1, 7, 2)), name
            finally:
                handle.remove()
            assert_bitwise_equal(again, loss, name)
            for parameter, gradient in found.items():
                assert_bitwise_equal(gradient, gradients[parameter], f"{name}: {parameter}")
        norm.register_forward_pre_hook(lambda *_: None)  # a pre-hook does not observe the output
        with counted() as calls:
            backward(model, rows)
            assert calls() == (2, 5, 0)


def test_hook_observes_the_normalized_output(checkpoint, rows, world):
    with patch_megatron(300):
        model = workers.build(checkpoint("qwen3"), torch.bfloat16)
        norm, seen = model.decoder.layers[0].self_attention.q_layernorm, []
        norm.register_forward_hook(lambda _, given, output: seen.append((given[0], output)))
        with torch.no_grad():
            workers.mean_loss(model, rows, 1)
        ((x, y),) = seen
        assert_bitwise_equal(y, ops.rms_norm(x, norm.weight, norm.eps))


@pytest.mark.parametrize("mode", ["one", "padded", "packed"])
def test_fused_op_has_the_bits_of_the_separate_ops_in_every_micro_batch_layout(mode, checkpoint, rows, world):
    given = workers.as_logprobs(rows)
    with patch_megatron(300), torch.no_grad():
        model = workers.build(checkpoint("qwen3"), torch.bfloat16)
        with counted() as calls:
            found = recompute(model, given, mode)
            fused, _, separate = calls()
            assert fused and not separate
        model.decoder.layers[0].self_attention.q_layernorm.register_forward_hook(lambda *_: None)
        with counted() as calls:
            for a, b in zip(recompute(model, given, mode), found, strict=True):
                assert_bitwise_equal(a, b)
            assert calls()[2] == calls()[0] * 2 == fused


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_fused_op_is_unused_without_query_key_norms(arch, checkpoint, rows, world):
    with patch_megatron(300):
        model = workers.build(checkpoint(arch), torch.bfloat16).train()
        with counted() as calls:
            backward(model, rows)
            assert calls() == (0, 5, 4)


def restore(parameter, value):
    parameter.copy_(value)


def test_pre_hooks_of_a_norm_run_before_its_weight_is_read(checkpoint, rows, world):
    """In such a hook Megatron's DDP waits for parameters that are being gathered."""
    with patch_megatron(300), torch.no_grad():
        model = workers.build(checkpoint("qwen3"), torch.bfloat16)
        expected = workers.mean_loss(model, rows, 1)
        norm = model.decoder.layers[0].self_attention.k_layernorm
        weight = norm.weight.clone()
        norm.weight.zero_()
        norm.register_forward_pre_hook(lambda module, args: restore(module.weight, weight))
        with counted() as calls:
            assert_bitwise_equal(workers.mean_loss(model, rows, 1), expected)
            assert calls() == (2, 5, 0)
