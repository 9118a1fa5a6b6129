"""The tests of `test_te.py` with the real TransformerEngine, on one or two Hopper GPUs.

Part of `make gpu-test` where TransformerEngine is installed. te_workers.py holds the functions that run on the ranks.
"""

import importlib.util
from functools import partial

import pytest
import torch

from alignkit.convert import Checkpoint
from alignkit.identity import of_checkpoint
from alignkit.runtime.machine import most_ranks
from alignkit.testing import assert_bitwise_equal
from tests.megatron import te_workers, workers
from tests.megatron.gpus import GPUs
from tests.megatron.test_recompute import RECOMPUTE_CONFIGS, same

COUNT = most_ranks()
WORLD = max((n for n in (1, 2) if n <= COUNT), default=0)
LAYOUTS = [(tp, sp) for tp in range(1, WORLD + 1) for sp in ((False, True) if tp > 1 else (False,))]
BIG = dict(hidden=512, layers=4, heads=8, kv_heads=4, intermediate=1536)
MODELS = {
    "qwen3": ("qwen3", torch.bfloat16, False, 2000),
    "qwen2": ("qwen2", torch.bfloat16, False, 2000),
    "llama-tied": ("llama", torch.bfloat16, True, 100),
}

pytestmark = [
    pytest.mark.skipif(not WORLD, reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
    ),
]


@pytest.fixture(scope="module")
def gpus():
    with GPUs(WORLD) as ranks:
        yield ranks


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_have_the_bits_of_the_local_spec(name, checkpoint, gpus, long_rows):
    """With TransformerEngine installed, the local spec uses its final norm."""
    path, dtype = checkpoint(*MODELS[name], **BIG), MODELS[name][1]
    expected = gpus.with_tp(1, workers.all_calls, path, dtype, False, long_rows)[0]
    for tp, sp in LAYOUTS:
        for spec in (True, False):
            given = path, dtype, sp, long_rows
            for rank, result in enumerate(gpus.with_tp(tp, workers.all_calls, *given, transformer_engine=spec)):
                assert result.keys() == expected.keys()
                for call, value in result.items():
                    assert_bitwise_equal(
                        value, expected[call], f"{call}, TP {tp}, SP {sp}, its spec {spec}, rank {rank}"
                    )


@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_bits_of_the_local_spec(name, checkpoint, gpus, long_rows):
    """Covers activation recomputation, under DDP."""
    path, dtype = checkpoint(*MODELS[name], **BIG), MODELS[name][1]
    for tp, sp in LAYOUTS:
        given = path, dtype, sp, long_rows
        expected = gpus.with_tp(tp, workers.step, *given)[0]
        for rank, actual in enumerate(gpus.with_tp(tp, workers.step, *given, transformer_engine=True)):
            same(actual, expected, f"TP {tp}, SP {sp}, rank {rank}")
        for config, fields in RECOMPUTE_CONFIGS.items():
            actual = gpus.with_tp(tp, workers.step, *given, transformer_engine=True, **fields)[0]
            same(actual, expected, f"TP {tp}, SP {sp}, {config}")


def test_gradient_accumulation_fusion_changes_no_gradient(checkpoint, gpus, long_rows):
    path = checkpoint(*MODELS["qwen3"], **BIG)
    for tp, sp in LAYOUTS:
        for plain, fused in gpus.with_tp(tp, te_workers.steps_without_and_with_fusion, path, long_rows, sp):
            same(fused, plain, f"TP {tp}, SP {sp}")


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_undo_restores_the_te_model(name, checkpoint, gpus, long_rows):
    """State dict, `_extra_state` and parameter marks do not change; `undo` restores the stock bits."""
    path = checkpoint(*MODELS[name], **BIG)
    for tp, sp in LAYOUTS:
        for report, before, aligned, after in gpus.with_tp(tp, te_workers.patch_and_undo, path, sp, long_rows):
            assert not report["stock"]
            assert report["aligned"]["decoder.layers.1.self_attention.linear_qkv"] == "rms_norm, linear"
            assert report["aligned"]["decoder.layers.1.self_attention.core_attention"] == "attention"
            assert report["aligned"]["decoder.final_layernorm"] == "rms_norm"
            assert_bitwise_equal(after, before, "after undo")
            assert not torch.equal(aligned, before)
            assert (aligned - before).abs().max() < 0.3


def test_undo_restores_copies(checkpoint, gpus, long_rows):
    gpus.with_tp(1, te_workers.check_copies, checkpoint(*MODELS["qwen3"], **BIG), long_rows)


def test_distributed_checkpoints_load_stock_and_aligned(checkpoint, gpus, long_rows, tmp_path):
    for folder in ("stock", "aligned"):
        (tmp_path / folder).mkdir()
    path = checkpoint(*MODELS["qwen3"], **BIG)
    for stock, local in gpus.with_tp(WORLD, te_workers.cross_load_checkpoints, path, tmp_path, long_rows):
        assert stock == local


def test_exported_weights_equal_the_checkpoint(checkpoint, gpus):
    path = checkpoint(*MODELS["qwen2"], **BIG)
    expected = Checkpoint(path)
    for weights, sums in gpus.with_tp(WORLD, te_workers.exported_weights, path):
        assert sums == of_checkpoint(path).tensors
        assert set(weights) == set(expected)
        for weight, value in weights.items():
            assert torch.equal(value, expected[weight]), weight


def test_unsupported_state_on_one_rank_raises_on_all_ranks(checkpoint, gpus):
    for names, raised in gpus.with_tp(WORLD, te_workers.errors_by_change, checkpoint(*MODELS["qwen3"], **BIG)):
        for name in names:
            assert name in raised, f"{name}: the rank raised no error"
            kind, message = raised[name]
            assert kind == "UnsupportedError" and name in message, message


def test_forward_and_backward_do_not_synchronize(checkpoint, gpus, long_rows):
    path = checkpoint(*MODELS["qwen3"], **BIG)
    for tp, sp in LAYOUTS:
        run = partial(workers.run_without_synchronization, transformer_engine=True)
        gpus.with_tp(tp, run, path, torch.bfloat16, sp, long_rows)
