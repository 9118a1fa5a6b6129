"""TransformerEngine itself on Hopper GPUs, one or two: ``python -m pytest tests/megatron/test_te_cuda.py``.

What `test_te.py` shows of modules with its interface, of its own: the bits of the local layer spec, and nothing of a module
but its arithmetic changed.
"""

import importlib.util
from functools import partial

import pytest
import torch

from alignkit.check.machine import most_ranks
from alignkit.convert import Checkpoint
from alignkit.testing import assert_bitwise_equal
from tests.megatron import te_workers, workers
from tests.megatron.gpus import GPUs
from tests.megatron.test_recompute import RECOMPUTED, same

COUNT = most_ranks()
WORLD = max((n for n in (1, 2) if n <= COUNT), default=0)
CUTS = [(tp, sp) for tp in range(1, WORLD + 1) for sp in ((False, True) if tp > 1 else (False,))]
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
def test_every_way_gives_the_bits_of_the_local_spec(name, checkpoint, gpus, long_rows):
    """The local one has TransformerEngine's final norm where that is installed."""
    path, dtype = checkpoint(*MODELS[name], **BIG), MODELS[name][1]
    expected = gpus.with_tp(1, workers.every_way, path, dtype, False, long_rows)[0]
    for tp, sp in CUTS:
        for spec in (True, False):
            given = path, dtype, sp, long_rows
            for rank, result in enumerate(gpus.with_tp(tp, workers.every_way, *given, transformer_engine=spec)):
                assert result.keys() == expected.keys()
                for way, value in result.items():
                    assert_bitwise_equal(value, expected[way], f"{way}, TP {tp}, SP {sp}, its spec {spec}, rank {rank}")


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_local_spec(name, checkpoint, gpus, long_rows):
    """Under DDP; also with activation recomputation."""
    path, dtype = checkpoint(*MODELS[name], **BIG), MODELS[name][1]
    for tp, sp in CUTS:
        given = path, dtype, sp, long_rows
        expected = gpus.with_tp(tp, workers.step, *given)[0]
        for rank, actual in enumerate(gpus.with_tp(tp, workers.step, *given, transformer_engine=True)):
            same(actual, expected, f"TP {tp}, SP {sp}, rank {rank}")
        for config, fields in RECOMPUTED.items():
            actual = gpus.with_tp(tp, workers.step, *given, transformer_engine=True, **fields)[0]
            same(actual, expected, f"TP {tp}, SP {sp}, {config}")


def test_gradient_accumulation_fusion_changes_nothing(checkpoint, gpus, long_rows):
    path = checkpoint(*MODELS["qwen3"], **BIG)
    for tp, sp in CUTS:
        for plain, fused in gpus.with_tp(tp, te_workers.fused, path, long_rows, sp):
            same(fused, plain, f"TP {tp}, SP {sp}")


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_taken_over_and_back(name, checkpoint, gpus, long_rows):
    """State dict, `_extra_state` and marks stay; after `undo` the model has stock's bits again."""
    path = checkpoint(*MODELS[name], **BIG)
    for tp, sp in CUTS:
        for report, before, aligned, after in gpus.with_tp(tp, te_workers.taken_over_and_back, path, sp, long_rows):
            assert not report["stock"]
            assert report["aligned"]["decoder.layers.1.self_attention.linear_qkv"] == "rms_norm, linear"
            assert report["aligned"]["decoder.layers.1.self_attention.core_attention"] == "attention"
            assert report["aligned"]["decoder.final_layernorm"] == "rms_norm"
            assert_bitwise_equal(after, before, "after undo")
            assert not torch.equal(aligned, before)
            assert (aligned - before).abs().max() < 0.3


def test_copies(checkpoint, gpus, long_rows):
    gpus.with_tp(1, te_workers.copies, checkpoint(*MODELS["qwen3"], **BIG), long_rows)


def test_distributed_checkpoints(checkpoint, gpus, long_rows, tmp_path):
    for folder in ("stock", "aligned"):
        (tmp_path / folder).mkdir()
    path = checkpoint(*MODELS["qwen3"], **BIG)
    for stock, local in gpus.with_tp(WORLD, te_workers.checkpointed, path, tmp_path, long_rows):
        assert stock == local


def test_weights_under_their_hf_names(checkpoint, gpus):
    path = checkpoint(*MODELS["qwen2"], **BIG)
    expected = Checkpoint(path)
    for weights in gpus.with_tp(WORLD, te_workers.sent, path):
        assert set(weights) == set(expected)
        for weight, value in weights.items():
            assert torch.equal(value, expected[weight]), weight


def test_what_one_rank_has_is_refused_on_all(checkpoint, gpus):
    for names, raised in gpus.with_tp(WORLD, te_workers.refused, checkpoint(*MODELS["qwen3"], **BIG)):
        for name in names:
            assert name in raised, f"{name} is not refused"
            kind, message = raised[name]
            assert kind == "UnsupportedError" and name in message, message


def test_nothing_waits_for_the_device(checkpoint, gpus, long_rows):
    path = checkpoint(*MODELS["qwen3"], **BIG)
    for tp, sp in CUTS:
        run = partial(workers.without_waiting, transformer_engine=True)
        gpus.with_tp(tp, run, path, torch.bfloat16, sp, long_rows)
