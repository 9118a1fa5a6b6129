"""The handle: what it changes, shows and restores."""
import subprocess
import sys

import pytest
import torch

from alignkit.contract import contract_id
from alignkit.errors import InputError, UnsupportedError
from alignkit.megatron import logprobs, output_processor, patch_megatron, seams, status
from alignkit.testing import assert_bitwise_equal
from tests.megatron import workers


def stock_names():
    """Everything that the patch may replace, as it is now."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import cross_entropy
    from megatron.core.transformer import attention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlock

    return [dict(vars(x)) for x in (GPTModel, LanguageModule, TransformerBlock, WrappedTorchNorm)] + [
        attention.apply_rotary_pos_emb, cross_entropy._VocabParallelCrossEntropy]


def test_undo_restores_everything(checkpoint, rows, world):
    path = checkpoint()
    before, model = stock_names(), workers.build(path, torch.bfloat16)
    tokens, positions, labels, _ = workers.batch(rows)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    classes = {name: type(module) for name, module in model.named_modules()}
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    with torch.no_grad():
        stock = model(tokens, positions, mask, labels=labels)
        with patch_megatron(300) as handle:
            aligned = model(tokens, positions, mask, labels=labels)
            built_after = workers.build(path, torch.bfloat16)
            assert_bitwise_equal(built_after(tokens, positions, None, labels=labels), aligned, "built after")
        assert not torch.equal(aligned, stock)
        assert stock_names() == before
        assert {name: type(module) for name, module in model.named_modules()} == classes
        assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
        for again in (model, built_after):
            assert_bitwise_equal(again(tokens, positions, mask, labels=labels), stock, "after undo")
    handle.undo()
    assert status() == {"patched": False}


def test_twice_is_once(world):
    with patch_megatron(300) as first:
        assert patch_megatron(300) is first
        with pytest.raises(InputError, match="vocab_size: 301"):
            patch_megatron(301)
    assert not status()["patched"]


@pytest.mark.parametrize("vocab_size", [0, -1, 2.0, None])
def test_vocab_size_is_checked(vocab_size):
    with pytest.raises(InputError, match="vocab_size"):
        patch_megatron(vocab_size)


def test_vocab_size_beyond_the_model(checkpoint, world):
    with patch_megatron(400), pytest.raises(InputError, match="vocab_size: 400"):
        workers.build(checkpoint(), torch.bfloat16)


def test_status_tells_aligned_from_stock(checkpoint, world):
    model = workers.build(checkpoint(), torch.bfloat16)
    with patch_megatron(300):
        assert not {"contract", "backend"} & set(status())  # without a model nothing says what computes
        report = status(model)
        assert report["contract"] == contract_id("cpu") and report["backend"] == "cpu"
        assert report["patched"] and report["vocab_size"] == 300 and not report["aligned"]
        assert report["classes"]["DotProductAttention"] == "attention"
        assert "output_layer" in report["stock"] and "decoder.final_layernorm" in report["stock"]
        model(torch.tensor([[1, 2]]), None, None)
        report = status(model)
        assert not report["stock"]
        assert report["aligned"]["output_layer"] == "linear_logp"
        assert report["aligned"]["decoder.layers.0.self_attention.core_attention"] == "attention"
        assert any(name.endswith("GPTModel._postprocess") for name in report["seams"])
        assert report["symmetric_memory"] is False


def test_state_dict_and_class_names_stay(checkpoint, world):
    """Weight converters tell column from row parallel by class name, checkpoints by the keys."""
    model = workers.build(checkpoint(), torch.bfloat16)
    keys, names = list(model.state_dict()), [type(m).__name__ for m in model.modules()]
    with patch_megatron(300):
        model(torch.tensor([[1, 2]]), None, None)
        assert list(model.state_dict()) == keys
        assert [type(m).__name__ for m in model.modules() if m is not model.output_layer] == [
            n for m, n in zip(model.modules(), names) if m is not model.output_layer]


def test_an_unknown_version_is_refused(monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.20.0")
    with pytest.raises(UnsupportedError, match="0.20.0"):
        patch_megatron(300)
    assert not status()["patched"]


def test_importing_alignkit_megatron_imports_no_engine():
    code = ("import sys, alignkit.megatron, alignkit.convert, alignkit.megatron.seams, alignkit.check.train;"
            "assert not any(m.split('.')[0] in ('megatron', 'vllm') for m in sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_logprobs_need_the_patch(checkpoint, world):
    model = workers.build(checkpoint(), torch.bfloat16)
    tokens = torch.tensor([[1, 2]])
    with pytest.raises(UnsupportedError, match="patch_megatron"):
        logprobs(model, tokens, None, None, tokens)


def test_ignored_labels_and_float16_module(checkpoint, rows, world):
    """Through Megatron's wrapper; ignored labels give exact zeros and change nothing else."""
    from megatron.core.transformer.module import Float16Module

    with patch_megatron(300), torch.no_grad():
        model = workers.build(checkpoint(), torch.bfloat16)
        wrapped = Float16Module(model.config, model)
        tokens, positions, labels, _ = workers.batch(rows[1:2])
        every = logprobs(wrapped, tokens, positions, None, labels).log_probs
        assert every.dtype == torch.float32
        labels[0, ::3] = 7777
        some = logprobs(wrapped, tokens, positions, None, labels, return_entropy=True, ignore_index=7777)
    assert not some.log_probs[0, ::3].any() and not some.entropy[0, ::3].any()
    assert_bitwise_equal(some.log_probs[0, 1::3], every[0, 1::3])


def test_the_frameworks_hook(checkpoint, rows, world):
    """verl passes an object with a temperature and reads log_probs and entropy; versions without the hook
    have the same bits by `logprobs`."""
    class Context:
        temperature = 0.7

    with patch_megatron(300) as handle, torch.no_grad():
        model = workers.build(checkpoint(), torch.bfloat16)
        tokens, positions, labels, _ = workers.batch(rows[1:2])
        expected = logprobs(model, tokens, positions, None, labels, temperature=0.7, return_entropy=True)
        per_token = logprobs(model, tokens, positions, None, labels,
                             temperature=torch.full(labels.shape, 0.7))
        assert_bitwise_equal(per_token.log_probs, expected.log_probs, "temperature of each token")
        if not handle.has_hook:
            assert handle.version not in seams.HOOK_VERSIONS
            return
        asked = dict(labels=labels, output_processor_context=Context())
        actual = model(tokens, positions, None, output_processor=output_processor, **asked)
        assert_bitwise_equal(actual.log_probs, expected.log_probs, "log_probs")
        assert_bitwise_equal(actual.entropy, expected.entropy, "entropy")
        with pytest.raises(UnsupportedError, match="output_processor"):
            model(tokens, positions, None, output_processor=lambda **kw: None, **asked)


def test_cross_entropy_taken_before_the_patch(checkpoint, rows, world):
    """A framework that imported the function by name is caught too; rounded logits are refused."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as early

    tokens, positions, labels, counted = workers.batch(rows)
    with patch_megatron(300), torch.no_grad():
        model = workers.build(checkpoint(), torch.bfloat16)
        loss, logits = model(tokens, positions, None, labels=labels), model(tokens, positions, None)
        assert_bitwise_equal(early(logits, labels)[counted], loss[counted])
        assert_bitwise_equal(model.compute_language_model_loss(labels, logits.transpose(0, 1))[counted],
                             loss[counted])
        with pytest.raises(UnsupportedError, match="logits: torch.bfloat16"):
            early(logits.bfloat16(), labels)
        with pytest.raises(UnsupportedError, match="label_smoothing"):
            early(logits, labels, 0.1)


@pytest.mark.parametrize("what,kind", [("vocab_size", InputError), ("input_ids", InputError), ("labels", InputError),
                                       ("MoE", UnsupportedError), ("attention_mask", UnsupportedError)])
def test_ranks_that_disagree_fail_together(what, kind, checkpoint, rows, pair):
    for outcome in pair.outcomes(2, workers.disagree, checkpoint(), rows, what):
        assert outcome.kind is kind and what in outcome.message, outcome.traceback
