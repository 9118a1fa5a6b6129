"""Logprobs of real Megatron-core on a CPU: the same bits in every batch, call form and tensor-parallel size.

Stock Megatron-core must drift in the same comparison. A new dense model family needs a line in MODELS.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignkit.convert import Checkpoint, read_architecture
from alignkit.jobs.train import recompute
from alignkit.megatron import patch_megatron
from alignkit.testing import assert_bitwise_equal
from tests.megatron import workers
from tests.ropes import ROPES

# Vocabulary 300 is padded to 384 (TP 1) or 512 (TP 2), so the last rank has padding. 100 is padded to 256 at TP 2, so
# the second rank has padding only.
MODELS = [
    ("qwen3", torch.bfloat16, False, 300),
    ("qwen3", torch.float32, True, 300),
    ("qwen2", torch.bfloat16, False, 300),
    ("qwen2", torch.float32, True, 100),
    ("llama", torch.bfloat16, True, 100),
    ("llama", torch.float32, False, 300),
    ("mistral", torch.bfloat16, False, 300),
    ("llama", torch.bfloat16, True, 300, "llama3"),
    ("qwen3", torch.bfloat16, False, 300, "yarn"),
]


def name(model):
    arch, dtype, tied, vocab, *rope = model
    return "-".join((arch, str(dtype)[6:], "tied" if tied else "untied", str(vocab), *rope))


@pytest.mark.parametrize("model", MODELS, ids=name)
def test_logprobs_are_equal_across_calls_and_layouts(model, checkpoint, rows, world, pair):
    arch, dtype, tied, vocab, *rope = model
    path = checkpoint(arch, dtype, tied, vocab, **({"rope_scaling": ROPES[rope[0]]} if rope else {}))
    single_rank = workers.all_calls(world, path, dtype, False, rows)
    for call in ("padded", "packed", "loss call", "logits", "logprobs at 1.0"):
        assert_bitwise_equal(single_rank[call], single_rank["one"], call)
    assert_bitwise_equal(single_rank["logits at 0.7"], single_rank["logprobs at 0.7"], "logits at 0.7")
    for sequence_parallel in (False, True):
        for rank, result in enumerate(pair.run(2, workers.all_calls, path, dtype, sequence_parallel, rows)):
            assert result.keys() == single_rank.keys()
            for call, value in result.items():
                assert_bitwise_equal(value, single_rank[call], f"{call}, SP {sequence_parallel}, rank {rank}")


def test_check_model_is_aligned_although_stock_megatron_drifts(checkpoint, rows, world, pair):
    """The model of `alignkit check`, on which stock Megatron differs between TP 1 and TP 2."""
    path = checkpoint("qwen3", torch.bfloat16, vocab=2000, hidden=512, layers=4, heads=8, kv_heads=4, intermediate=1536)
    stock = workers.stock(world, path, torch.bfloat16, rows)
    assert not torch.equal(pair.run(2, workers.stock, path, torch.bfloat16, rows)[0], stock)
    single_rank = workers.all_calls(world, path, torch.bfloat16, False, rows)
    for call, value in pair.run(2, workers.all_calls, path, torch.bfloat16, True, rows)[0].items():
        assert_bitwise_equal(value, single_rank[call], call)


@settings(max_examples=10)
@given(data=st.data())
def test_batch_order_and_padding_change_no_bit(data, checkpoint, world):
    path = checkpoint("qwen3", torch.bfloat16)
    lengths = data.draw(st.lists(st.integers(2, 80), min_size=1, max_size=4), "lengths")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    rows = [torch.randint(0, 300, (n,), generator=generator).tolist() for n in lengths]
    order = data.draw(st.permutations(range(len(rows))), "order")
    multiple = data.draw(st.sampled_from([1, 8, 64]), "padding")
    with patch_megatron(300), torch.no_grad():
        model = workers.build(path, torch.bfloat16)
        one_by_one = recompute(model, workers.as_logprobs(rows), "one")
        for mode in ("padded", "packed"):
            shuffled = recompute(model, workers.as_logprobs([rows[i] for i in order]), mode)
            for i, value in zip(order, shuffled, strict=True):
                assert_bitwise_equal(value, one_by_one[i], f"{mode}, row {i}")
        tokens, positions, labels, counted = workers.batch(rows, multiple)
        loss = model(tokens, positions, None, labels=labels)
        assert_bitwise_equal(-loss[counted], torch.cat(one_by_one), "padding")


def test_models_built_before_the_patch_are_aligned(checkpoint, rows, world, pair):
    path = checkpoint("qwen3", torch.bfloat16)
    expected = workers.all_calls(world, path, torch.bfloat16, False, rows)["loss call"]
    for name, value in pair.run(2, workers.built_before, path, rows)[0].items():
        assert_bitwise_equal(value, expected, name)


def test_weights_exported_after_a_step_give_the_same_logprobs_at_tp_1(checkpoint, rows, world, pair):
    path = checkpoint("qwen2", torch.bfloat16)
    results = pair.run(2, workers.train_and_send, path, torch.bfloat16, rows)
    before, after, sent = results[0]
    assert not torch.equal(before, after)
    assert all(torch.equal(a, b) for a, b in zip(sent.values(), results[1][2].values(), strict=True))
    assert_bitwise_equal(workers.load_and_compute(world, path, torch.bfloat16, rows, sent), after)


def test_build_takes_weights_for_a_directory_without_them(checkpoint, world, tmp_path):
    path = checkpoint("qwen3", torch.bfloat16)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    expected = workers.build(path, torch.bfloat16).state_dict()
    made = workers.build(tmp_path, torch.bfloat16, weights=dict(Checkpoint(path))).state_dict()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_bitwise_equal(made[key], value, key)


def test_logprobs_agree_with_float64(checkpoint, rows, world):
    """Checks the weight conversion and the order of the ops in the model."""
    from tests.megatron import reference

    for arch, tied, rope in (
        ("qwen3", False, None),
        ("qwen2", True, None),
        ("llama", False, None),
        ("mistral", True, None),
        ("llama", True, "llama3"),
        ("qwen3", True, "yarn"),
    ):
        path = checkpoint(arch, torch.float32, tied, rope_scaling=ROPES.get(rope))
        shape, weights = read_architecture(path), reference.weights64(Checkpoint(path))
        with torch.no_grad():
            expected = torch.cat([reference.logprobs(shape, weights, row) for row in rows])
        actual = workers.all_calls(world, path, torch.float32, False, rows)["one"]
        # The rounding errors of an fp32 sum of `hidden` terms grow like sqrt(hidden) * 2**-24. The factor 64 allows for
        # logits of a few units and for the sums of two layers.
        assert (actual - expected).abs().max() < 64 * shape.hidden**0.5 * 2**-24
