"""Megatron-core's TransformerEngine layer spec: the bits of the local one, and nothing of a module but its arithmetic changed.

The modules of `te_on_cpu` stand in for TransformerEngine's own, which need a GPU (`test_te_cuda.py`), below
Megatron-core's own wrappers of them.
"""

from functools import partial

import pytest
import torch

from alignkit.convert import Checkpoint
from alignkit.testing import assert_bitwise_equal
from tests.megatron import mixtures, te_workers, workers
from tests.megatron.test_recompute import RECOMPUTED, same

MODELS = {
    "qwen2": ("qwen2", torch.bfloat16, False),
    "qwen3": ("qwen3", torch.bfloat16, False),
    "llama-tied": ("llama", torch.float32, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_the_bits_of_the_local_spec(name, checkpoint, rows, te, world):
    path, dtype = checkpoint(*MODELS[name]), MODELS[name][1]
    expected = workers.every_way(world, path, dtype, False, rows)
    for size, sequence_parallel in ((1, False), (2, False), (2, True)):
        for spec in (True, False):  # the local one has TransformerEngine's final norm where it is installed
            run = partial(workers.every_way, transformer_engine=spec)
            for rank, result in enumerate(te(size, run, path, dtype, sequence_parallel, rows)):
                assert result.keys() == expected.keys()
                for way, value in result.items():
                    how = f"{way}, TP {size}, SP {sequence_parallel}, its spec {spec}, rank {rank}"
                    assert_bitwise_equal(value, expected[way], how)


@pytest.mark.parametrize(
    "arch, grouped", [("qwen3_moe", False), ("qwen2_moe", True)], ids=["one by one", "grouped, and a shared one"]
)
def test_mixtures_of_experts(arch, grouped, checkpoint, rows, te, world):
    """Of both kinds of experts, and after a layer without them: the bits, the gradients, and a model that is stock again."""
    dense = {"layers": 3, "dense_layers": (0,)} if grouped else {}
    path = checkpoint(arch, torch.bfloat16, intermediate=128, experts=8, top_k=2, **dense)
    config = {"transformer_engine": True, "moe_grouped_gemm": grouped}
    alone, _ = mixtures.every_way(None, path, torch.bfloat16, rows, {})
    grads, _ = mixtures.step(None, path, torch.bfloat16, rows, {})
    for how, sequence_parallel in (({}, False), ({"tp": 2}, True), ({"tp": 2, "ep": 2, "etp": 1}, True)):
        size = how.get("tp", 1)
        run = partial(mixtures.every_way, **config)
        for result, _ in te(size, run, path, torch.bfloat16, rows, how, sequence_parallel):
            for way, value in result.items():
                assert_bitwise_equal(value, alone[way], f"{way}, {how}")
        if size == 1:
            ((got, _),) = te(1, partial(mixtures.step, **config), path, torch.bfloat16, rows, how)
            assert got.keys() == grads.keys()
            for name, gradient in got.items():
                assert_bitwise_equal(gradient, grads[name], name)
    back = partial(te_workers.taken_over_and_back, moe_grouped_gemm=grouped)
    ((report, before, aligned, after),) = te(1, back, path, False, rows)
    below = "linear_fc1" if grouped else "local_experts.3.linear_fc1"
    assert report["aligned"][f"decoder.layers.1.mlp.experts.{below}"] == "moe_experts" and not report["stock"]
    assert torch.equal(before, after) and not torch.equal(before, aligned)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_local_spec(name, checkpoint, rows, te, world, pair):
    path, dtype = checkpoint(*MODELS[name]), MODELS[name][1]
    for size, sequence_parallel in ((1, False), (2, False), (2, True)):
        given = path, dtype, sequence_parallel, rows
        expected = workers.step(world, *given) if size == 1 else pair.run(2, workers.step, *given)[0]
        for loss, grads in te(size, partial(workers.step, transformer_engine=True), *given):
            assert loss == expected[0] and grads.keys() == expected[1].keys()
            for weight, gradient in grads.items():
                assert_bitwise_equal(gradient, expected[1][weight], f"{weight}, TP {size}, SP {sequence_parallel}")


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_taken_over_and_back(name, checkpoint, rows, te):
    path = checkpoint(*MODELS[name])
    ops = {
        "self_attention.linear_qkv": "rms_norm, linear",
        "self_attention.core_attention": "attention",
        "self_attention.linear_proj": "row_parallel_linear",
        "mlp.linear_fc1": "rms_norm, linear",
        "mlp.linear_fc2": "row_parallel_linear",
        **({"self_attention.q_layernorm": "rms_norm"} if name == "qwen3" else {}),
    }
    for size, sequence_parallel in ((1, False), (2, True)):
        for report, before, aligned, after in te(size, te_workers.taken_over_and_back, path, sequence_parallel, rows):
            assert not report["stock"]
            assert report["classes"]["TELayerNormColumnParallelLinear"] == "rms_norm, linear"
            assert report["aligned"]["decoder.final_layernorm"] == "rms_norm"
            for module, op in ops.items():
                assert report["aligned"][f"decoder.layers.1.{module}"] == op
            assert_bitwise_equal(after, before, "after undo")
            assert not torch.equal(aligned, before)


def test_copies(checkpoint, rows, te):
    te(1, te_workers.copies, checkpoint(), rows)


def test_distributed_checkpoints(checkpoint, rows, te, tmp_path):
    """Saved stock, loaded aligned, and the other way round. Both layer specs have the same keys but for `_extra_state`."""
    for folder in ("stock", "aligned"):
        (tmp_path / folder).mkdir()
    for stock, local in te(2, te_workers.checkpointed, checkpoint(), tmp_path, rows):
        assert stock == local


@pytest.mark.parametrize("name", MODELS)
def test_weights_under_their_hf_names(name, checkpoint, te):
    path = checkpoint(*MODELS[name])
    expected = Checkpoint(path)
    for weights in te(2, te_workers.sent, path):
        assert set(weights) == set(expected) - ({"lm_head.weight"} if MODELS[name][2] else set())
        for weight, value in weights.items():
            assert torch.equal(value, expected[weight].to(value.dtype)), weight


def test_gradient_accumulation_fusion_changes_nothing(checkpoint, rows, te):
    """`main_grad` holds the same bytes: DDP adds the gradients to it, and overlaps its reductions with the backward pass."""
    for size, sequence_parallel in ((1, False), (2, True)):
        for plain, fused in te(size, te_workers.fused, checkpoint(*MODELS["qwen3"]), rows, sequence_parallel):
            same(fused, plain, f"TP {size}")


def test_recomputation(checkpoint, rows, te):
    given = checkpoint(*MODELS["qwen2"]), torch.bfloat16, False, rows
    configs = {name: c | {"transformer_engine": True} for name, c in RECOMPUTED.items()}
    configs["stored"] = {"transformer_engine": True}
    for result in te(2, workers.recomputed, *given, configs):
        for name, actual in result.items():
            same(actual, result["stored"], name)


def test_what_one_rank_has_is_refused_on_both(checkpoint, te):
    for names, raised in te(2, te_workers.refused, checkpoint()):
        for name in names:
            assert name in raised, f"{name} is not refused"
            kind, message = raised[name]
            assert kind == "UnsupportedError" and name in message, message


def test_attention_dropout_in_training(checkpoint, te):
    with pytest.raises(RuntimeError, match="core_attention: dropout of 0.1 in training is not supported"):
        te(1, te_workers.attention_dropout, checkpoint())
