"""Megatron-core's TransformerEngine layer spec has the bits of the local spec, on a CPU.

Megatron-core's wrappers are real; `te_on_cpu` takes the place of TransformerEngine, which needs a GPU
(`test_te_cuda.py`). Undo must restore modules, state dicts and checkpoints.
"""

from functools import partial

import pytest
import torch

from alignkit.convert import Checkpoint
from alignkit.identity import of_checkpoint
from alignkit.testing import assert_bitwise_equal
from tests.megatron import moe, te_workers, workers
from tests.megatron.test_recompute import RECOMPUTE_CONFIGS, same

MODELS = {
    "qwen2": ("qwen2", torch.bfloat16, False),
    "qwen3": ("qwen3", torch.bfloat16, False),
    "llama-tied": ("llama", torch.float32, True),
}


@pytest.mark.parametrize(
    "name", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "llama-tied"))]
)
def test_logprobs_have_the_bits_of_the_local_spec(name, checkpoint, rows, te, world):
    path, dtype = checkpoint(*MODELS[name]), MODELS[name][1]
    expected = workers.all_calls(world, path, dtype, False, rows)
    for size, sequence_parallel in ((1, False), (2, False), (2, True)):
        for spec in (True, False):  # with TE installed, the local spec uses its final norm
            run = partial(workers.all_calls, transformer_engine=spec)
            for rank, result in enumerate(te(size, run, path, dtype, sequence_parallel, rows)):
                assert result.keys() == expected.keys()
                for call, value in result.items():
                    how = f"{call}, TP {size}, SP {sequence_parallel}, its spec {spec}, rank {rank}"
                    assert_bitwise_equal(value, expected[call], how)


@pytest.mark.parametrize(
    "arch, grouped",
    [pytest.param("qwen3_moe", False, marks=pytest.mark.slow), ("qwen2_moe", True)],
    ids=["one by one", "grouped, and a shared one"],
)
def test_moe_has_the_bits_of_the_local_spec(arch, grouped, checkpoint, rows, te, world):
    """Checks logprobs, gradients and undo with sequential and grouped experts, the latter after a dense layer."""
    dense = {"layers": 3, "dense_layers": (0,)} if grouped else {}
    path = checkpoint(arch, torch.bfloat16, intermediate=128, experts=8, top_k=2, **dense)
    config = {"transformer_engine": True, "moe_grouped_gemm": grouped}
    single_rank, _ = moe.all_calls(None, path, torch.bfloat16, rows, {})
    grads, _ = moe.step(None, path, torch.bfloat16, rows, {})
    for how, sequence_parallel in (({}, False), ({"tp": 2}, True), ({"tp": 2, "ep": 2, "etp": 1}, True)):
        size = how.get("tp", 1)
        run = partial(moe.all_calls, **config)
        for result, _ in te(size, run, path, torch.bfloat16, rows, how, sequence_parallel):
            for call, value in result.items():
                assert_bitwise_equal(value, single_rank[call], f"{call}, {how}")
        if size == 1:
            ((got, _),) = te(1, partial(moe.step, **config), path, torch.bfloat16, rows, how)
            assert got.keys() == grads.keys()
            for name, gradient in got.items():
                assert_bitwise_equal(gradient, grads[name], name)
    back = partial(te_workers.patch_and_undo, moe_grouped_gemm=grouped)
    ((report, before, aligned, after),) = te(1, back, path, False, rows)
    below = "linear_fc1" if grouped else "local_experts.3.linear_fc1"
    assert report["aligned"][f"decoder.layers.1.mlp.experts.{below}"] == "moe_experts" and not report["stock"]
    assert torch.equal(before, after) and not torch.equal(before, aligned)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_bits_of_the_local_spec(name, checkpoint, rows, te, world, pair):
    path, dtype = checkpoint(*MODELS[name]), MODELS[name][1]
    for size, sequence_parallel in ((1, False), (2, False), (2, True)):
        given = path, dtype, sequence_parallel, rows
        expected = workers.step(world, *given) if size == 1 else pair.run(2, workers.step, *given)[0]
        for loss, grads in te(size, partial(workers.step, transformer_engine=True), *given):
            assert loss == expected[0] and grads.keys() == expected[1].keys()
            for weight, gradient in grads.items():
                assert_bitwise_equal(gradient, expected[1][weight], f"{weight}, TP {size}, SP {sequence_parallel}")


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_undo_restores_the_te_model(name, checkpoint, rows, te):
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
        for report, before, aligned, after in te(size, te_workers.patch_and_undo, path, sequence_parallel, rows):
            assert not report["stock"]
            assert report["classes"]["TELayerNormColumnParallelLinear"] == "rms_norm, linear"
            assert report["aligned"]["decoder.final_layernorm"] == "rms_norm"
            for module, op in ops.items():
                assert report["aligned"][f"decoder.layers.1.{module}"] == op
            assert_bitwise_equal(after, before, "after undo")
            assert not torch.equal(aligned, before)


def test_undo_restores_copies(checkpoint, rows, te):
    te(1, te_workers.check_copies, checkpoint(), rows)


def test_distributed_checkpoints_load_stock_and_aligned(checkpoint, rows, te, tmp_path):
    """Both layer specs have the same keys, except `_extra_state`."""
    for folder in ("stock", "aligned"):
        (tmp_path / folder).mkdir()
    for stock, local in te(2, te_workers.cross_load_checkpoints, checkpoint(), tmp_path, rows):
        assert stock == local


@pytest.mark.parametrize("name", MODELS)
def test_exported_weights_equal_the_checkpoint(name, checkpoint, te):
    path = checkpoint(*MODELS[name])
    expected = Checkpoint(path)
    for weights, sums in te(2, te_workers.exported_weights, path):
        assert sums == of_checkpoint(path, torch.bfloat16).tensors
        assert set(weights) == set(expected) - ({"lm_head.weight"} if MODELS[name][2] else set())
        for weight, value in weights.items():
            assert torch.equal(value, expected[weight].to(value.dtype)), weight


def test_gradient_accumulation_fusion_changes_no_gradient(checkpoint, rows, te):
    """Compares `main_grad` under DDP with overlapped reductions."""
    for size, sequence_parallel in ((1, False), (2, True)):
        for plain, fused in te(
            size, te_workers.steps_without_and_with_fusion, checkpoint(*MODELS["qwen3"]), rows, sequence_parallel
        ):
            same(fused, plain, f"TP {size}")


def test_recomputation_changes_no_gradient(checkpoint, rows, te):
    given = checkpoint(*MODELS["qwen2"]), torch.bfloat16, False, rows
    configs = {name: c | {"transformer_engine": True} for name, c in RECOMPUTE_CONFIGS.items()}
    configs["stored"] = {"transformer_engine": True}
    for result in te(2, workers.steps_by_config, *given, configs):
        for name, actual in result.items():
            same(actual, result["stored"], name)


def test_unsupported_state_on_one_rank_raises_on_both_ranks(checkpoint, te):
    for names, raised in te(2, te_workers.errors_by_change, checkpoint()):
        for name in names:
            assert name in raised, f"{name}: the rank raised no error"
            kind, message = raised[name]
            assert kind == "UnsupportedError" and name in message, message


def test_attention_dropout_in_training_is_rejected(checkpoint, te):
    with pytest.raises(RuntimeError, match="core_attention: the dropout probability must be 0 in training, got 0.1"):
        te(1, te_workers.attention_dropout, checkpoint())
