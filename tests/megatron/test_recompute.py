"""Activation recomputation of real Megatron-core changes no bit of a gradient, for each setting of RECOMPUTE_CONFIGS.

Other tests of recomputation import the settings. Settings that would discard an aligned module's output are rejected.
"""

import pytest
import torch

from alignkit.errors import UnsupportedError
from alignkit.megatron import patch_megatron
from alignkit.testing import assert_bitwise_equal
from tests.megatron import workers

RECOMPUTE_CONFIGS = {
    "full uniform": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    "full block": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    "attention": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "mlp": dict(recompute_granularity="selective", recompute_modules=["mlp", "core_attn"]),
}
DISTRIBUTED = RECOMPUTE_CONFIGS["full uniform"] | {"distribute_saved_activations": True}


def same(actual, expected, what):
    assert actual[0] == expected[0], what
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in actual[1].items():
        assert gradient.any(), name
        assert_bitwise_equal(gradient, expected[1][name], f"{what}: {name}")


@pytest.mark.parametrize(
    "model", [("qwen3", torch.bfloat16, False), ("qwen2", torch.float32, True)], ids=["qwen3-bf16", "qwen2-fp32-tied"]
)
def test_recomputation_changes_no_gradient(model, checkpoint, rows, world, pair):
    arch, dtype, tied = model
    path = checkpoint(arch, dtype, tied)
    alone = workers.step(world, path, dtype, False, rows)
    for name, config in RECOMPUTE_CONFIGS.items():
        same(workers.step(world, path, dtype, False, rows, **config), alone, name)
    for sequence_parallel in (False, True):
        results = pair.run(
            2,
            workers.steps_by_config,
            path,
            dtype,
            sequence_parallel,
            rows,
            {"stored": {}, **RECOMPUTE_CONFIGS, **({} if sequence_parallel else {"distributed": DISTRIBUTED})},
        )
        for rank, result in enumerate(results):
            for name, actual in result.items():
                same(actual, results[0]["stored"], f"{name}, SP {sequence_parallel}, rank {rank}")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_keep_logits_changes_no_gradient(tied, checkpoint, rows, world, pair):
    path = checkpoint("llama", torch.bfloat16, tied)
    alone = workers.step(world, path, torch.bfloat16, False, rows)
    same(workers.step(world, path, torch.bfloat16, False, rows, keep_logits=True), alone, "keep_logits")
    kept = {"stored": {}, "kept": {"keep_logits": True}}
    for result in pair.run(2, workers.steps_by_config, path, torch.bfloat16, True, rows, kept):
        same(result["kept"], result["stored"], "keep_logits, on two ranks")


@pytest.mark.parametrize("keep", [False, True])
def test_keep_logits_saves_fp32_logits_for_the_backward_pass(keep, checkpoint, rows, world):
    saved = set()
    with patch_megatron(300, keep_logits=keep):
        model = workers.build(checkpoint(), torch.bfloat16).train()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.add((t.dtype, *t.shape)) or t, lambda t: t):
            workers.mean_loss(model, rows, 1).backward()
    assert any(kind == torch.float32 and shape[1:] == [300] for kind, *shape in saved) is keep


def test_recomputation_that_discards_outputs_is_rejected(checkpoint, world):
    with patch_megatron(300), pytest.raises(UnsupportedError, match="recompute_modules.*layernorm"):
        workers.build(
            checkpoint(),
            torch.bfloat16,
            recompute_granularity="selective",
            recompute_modules=["core_attn", "layernorm"],
        )


@pytest.mark.parametrize("config", RECOMPUTE_CONFIGS.values(), ids=RECOMPUTE_CONFIGS)
def test_attention_runs_again_in_the_backward_pass(config, checkpoint, rows, world):
    calls = []
    with patch_megatron(300):
        model = workers.build(checkpoint(), torch.bfloat16, **config).train()
        attention = model.decoder.layers[0].self_attention.core_attention
        attention.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        workers.mean_loss(model, rows, 1).backward()
    assert calls == [False, True]
