"""`patch_megatron` and its handle on real Megatron-core: replaced symbols, status, and undo."""

import copy
import gc
import pickle
import subprocess
import sys
import types
import weakref

import pytest
import torch

from alignkit.errors import InputError, UnsupportedError
from alignkit.megatron import logprobs, output_processor, patch_megatron, set_vocab_size, status
from alignkit.runtime.ids import contract_id
from alignkit.testing import assert_bitwise_equal
from tests.megatron import workers


def stock_names():
    """Return the current values of all names that the patch may replace."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import cross_entropy
    from megatron.core.transformer import attention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlock

    return [dict(vars(x)) for x in (GPTModel, LanguageModule, TransformerBlock, WrappedTorchNorm)] + [
        attention.apply_rotary_pos_emb,
        cross_entropy._VocabParallelCrossEntropy,
    ]


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


FOREIGN = ("device", "base", "head_dim", "true_vocab_size", "frequencies_seen", "op", "out_dtype", "eps")


def test_foreign_attributes_survive_patch_and_undo(checkpoint, rows, world):
    model = workers.build(checkpoint(), torch.bfloat16)
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    tokens, positions, labels, _ = workers.batch(rows)
    with torch.no_grad():
        with patch_megatron(300):
            expected = model(tokens, positions, None, labels=labels)
        mine = {}
        for path, module in model.named_modules():
            for name in FOREIGN:
                if name not in attributes[path] and name not in module._parameters:
                    setattr(module, name, mine.setdefault((path, name), object()))
        for _ in range(2):
            with patch_megatron(300):
                assert_bitwise_equal(model(tokens, positions, None, labels=labels), expected)
    now = {name: dict(module.__dict__) for name, module in model.named_modules()}
    for (path, name), value in mine.items():
        assert now[path].pop(name) is value, (path, name)
    for path, values in attributes.items():
        assert now[path].keys() == values.keys()
        assert all(now[path][name] is value for name, value in values.items() if name != "training"), path


def test_patch_changes_only_the_class_of_a_module(checkpoint, world):
    model = workers.build(checkpoint(), torch.bfloat16)
    attributes = [list(module.__dict__.items()) for module in model.modules()]
    with patch_megatron(300):
        model(torch.tensor([[1, 2]]), None, None)
        for module, before in zip(model.modules(), attributes, strict=True):
            more = {"_alignkit"} if module is model else set()
            assert set(module.__dict__) == set(dict(before)) | more
            assert all(module.__dict__[name] is value for name, value in before)


def test_undo_restores_copies(checkpoint, rows, world):
    """Covers copies of a model and of a layer, in memory and pickled, made while patched."""
    model = workers.build(checkpoint(), torch.bfloat16)
    tokens, positions, labels, _ = workers.batch(rows)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        stock, attributes = model(tokens, positions, mask, labels=labels), set(vars(model.decoder))
        with patch_megatron(300):
            aligned = model(tokens, positions, mask, labels=labels)
            copied, used, norm = (
                workers.deep_copy(model),
                workers.deep_copy(model),
                copy.copy(model.decoder.final_layernorm),
            )
            layer, pickled = workers.deep_copy(model).decoder.layers[0], pickle.dumps(model.decoder.final_layernorm)
            loaded = pickle.loads(pickled)
            assert_bitwise_equal(used(tokens, positions, mask, labels=labels), aligned, "a copy")
        late = pickle.loads(pickled)
        for again in (model, copied, used):
            assert [type(m) for m in again.modules()] == [
                type(m) for m in workers.build(checkpoint(), torch.bfloat16).modules()
            ]
            assert_bitwise_equal(again(tokens, positions, mask, labels=labels), stock, "after undo")
        assert {type(norm), type(loaded), type(late)} == {torch.nn.RMSNorm}
        assert not [m for m in layer.modules() if type(m).__module__.startswith("alignkit")]
        assert all(vars(again.decoder).keys() == attributes for again in (model, copied, used))


def test_unreferenced_models_are_garbage_collected(checkpoint, world):
    """The config refers to the model, as under Megatron's schedules."""
    with patch_megatron(300):
        model = workers.build(checkpoint(), torch.bfloat16)
        model.config.no_sync_func = model.no_sync = types.MethodType(lambda self: None, model)
        model.decoder.final_layernorm.register_forward_hook(lambda *args: None)
        model(torch.tensor([[1, 2]]), None, None)
        model_ref = weakref.ref(model)
        del model
        gc.collect()
        assert model_ref() is None


def test_undo_does_not_overwrite_later_replacements(checkpoint, rows, world):
    from megatron.core.models.gpt.gpt_model import GPTModel

    before, model = stock_names(), workers.build(checkpoint(), torch.bfloat16)
    tokens, positions, labels, _ = workers.batch(rows)
    handle = patch_megatron(300)
    ours = GPTModel._preprocess

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    GPTModel._preprocess = theirs
    try:
        with pytest.raises(UnsupportedError, match="GPTModel._preprocess: .*theirs of tests.megatron.test_patch"):
            handle.undo()
        assert GPTModel._preprocess is theirs and status()["patched"], "a rejected undo must change nothing"
    finally:
        GPTModel._preprocess = ours
    with torch.no_grad():
        model(tokens, positions, None, labels=labels)
    handle.undo()
    assert stock_names() == before and not status()["patched"]


def test_failed_patch_is_undone(monkeypatch, world):
    from alignkit.megatron import patch

    before, stock = stock_names(), patch.Patch.replace

    def replace(self, owner, name, value):
        if name == "apply_rotary_pos_emb":
            raise RuntimeError("half-way")
        stock(self, owner, name, value)

    monkeypatch.setattr(patch.Patch, "replace", replace)
    with pytest.raises(RuntimeError, match="half-way"):
        patch_megatron(300)
    assert stock_names() == before and not status()["patched"]


def test_calls_without_megatron_raise_an_error_that_says_so():
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "import alignkit, alignkit.megatron\n"
        "assert alignkit.megatron.status() == {'patched': False}\n"
        "for call in (lambda: alignkit.patch_megatron(300), lambda: alignkit.megatron.logprobs,\n"
        "             lambda: alignkit.megatron.output_processor):\n"
        "    try:\n"
        "        call()\n"
        "    except alignkit.UnsupportedError as e:\n"
        "        assert 'Megatron-core is not installed' in str(e), e\n"
        "    else:\n"
        "        raise AssertionError('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_second_patch_returns_the_same_handle_or_rejects_other_arguments(world):
    with patch_megatron(300) as first:
        assert patch_megatron(300) is first
        with pytest.raises(InputError, match="vocab_size: must be 300, .* got 301"):
            patch_megatron(301)
        with pytest.raises(InputError, match="keep_logits: must be False, .* got True"):
            patch_megatron(300, keep_logits=True)
        assert status()["keep_logits"] is False
    assert not status()["patched"]


@pytest.mark.parametrize("vocab_size", [0, -1, 2.0, True, "7"])
def test_invalid_vocab_size_is_rejected(vocab_size):
    with pytest.raises(InputError, match="vocab_size"):
        patch_megatron(vocab_size)


def test_keep_logits_that_is_not_a_bool_is_rejected():
    with pytest.raises(InputError, match="keep_logits: must be True or False, got 1"):
        patch_megatron(300, keep_logits=1)


def test_vocab_size_beyond_the_padded_size_is_rejected(checkpoint, world):
    with patch_megatron(400):
        model = workers.build(checkpoint(), torch.bfloat16)
        with pytest.raises(InputError, match=r"vocab_size: must be at most 384, the model's padded size, got 400"):
            model(torch.tensor([[1, 2, 3]]), None, None)


def test_status_lists_aligned_and_stock_modules(checkpoint, world):
    model = workers.build(checkpoint(), torch.bfloat16)
    with patch_megatron(300):
        assert not {"contract", "backend"} & set(status())  # they depend on a model's device
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
        assert any(name.endswith("GPTModel._postprocess") for name in report["names"])
        assert report["symmetric_memory"] is False


def test_state_dict_keys_and_class_names_do_not_change(checkpoint, world):
    """Weight converters read class names, and checkpoints depend on the keys."""
    model = workers.build(checkpoint(), torch.bfloat16)
    keys, names = list(model.state_dict()), [type(m).__name__ for m in model.modules()]
    with patch_megatron(300):
        model(torch.tensor([[1, 2]]), None, None)
        assert list(model.state_dict()) == keys
        assert [type(m).__name__ for m in model.modules()] == names


def test_a_version_that_is_not_validated_is_rejected(monkeypatch, tmp_path):
    import megatron.core

    from alignkit.megatron.versions import VERSIONS

    monkeypatch.setenv("ALIGNKIT_CERTIFICATES", str(tmp_path))
    monkeypatch.setattr(megatron.core, "__version__", "0.20.0+abc")
    for version in list(VERSIONS.validated):
        monkeypatch.delitem(VERSIONS.validated, version)
    with pytest.raises(UnsupportedError, match="Megatron-core 0.20.0: is neither validated nor proved"):
        patch_megatron(300)
    assert not status()["patched"]


def test_importing_alignkit_megatron_imports_no_engine():
    code = (
        "import sys, alignkit.megatron, alignkit.convert, alignkit.megatron.versions, alignkit.jobs.train;"
        "assert not any(m.split('.')[0] in ('megatron', 'vllm') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_logprobs_need_the_patch(checkpoint, world):
    model = workers.build(checkpoint(), torch.bfloat16)
    tokens = torch.tensor([[1, 2]])
    with pytest.raises(UnsupportedError, match="patch_megatron"):
        logprobs(model, tokens, None, None, tokens)


def test_ignored_labels_give_zeros_and_change_no_other_logprob(checkpoint, rows, world):
    """Ignored labels give exact zeros and change no other logprob, also through Float16Module."""
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


def test_output_processor_gives_the_bits_of_logprobs(checkpoint, rows, world):
    """Like verl, pass an object with a temperature and read log_probs and entropy.

    On Megatron-core versions without the hook, the test only compares calls of `logprobs`.
    """

    class Context:
        temperature = 0.7

    with patch_megatron(300) as handle, torch.no_grad():
        model = workers.build(checkpoint(), torch.bfloat16)
        tokens, positions, labels, _ = workers.batch(rows[1:2])
        expected = logprobs(model, tokens, positions, None, labels, temperature=0.7, return_entropy=True)
        per_token = logprobs(model, tokens, positions, None, labels, temperature=torch.full(labels.shape, 0.7))
        assert_bitwise_equal(per_token.log_probs, expected.log_probs, "temperature of each token")
        if not handle.has_hook:
            return
        asked = dict(labels=labels, output_processor_context=Context())
        actual = model(tokens, positions, None, output_processor=output_processor, **asked)
        assert_bitwise_equal(actual.log_probs, expected.log_probs, "log_probs")
        assert_bitwise_equal(actual.entropy, expected.entropy, "entropy")
        with pytest.raises(UnsupportedError, match="output_processor"):
            model(tokens, positions, None, output_processor=lambda **kw: None, **asked)


def test_cross_entropy_imported_before_the_patch_is_aligned(checkpoint, rows, world):
    """Logits rounded to bf16 and label smoothing are rejected."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as early

    tokens, positions, labels, counted = workers.batch(rows)
    with patch_megatron(300), torch.no_grad():
        model = workers.build(checkpoint(), torch.bfloat16)
        loss, logits = model(tokens, positions, None, labels=labels), model(tokens, positions, None)
        assert_bitwise_equal(early(logits, labels)[counted], loss[counted])
        assert_bitwise_equal(model.compute_language_model_loss(labels, logits.transpose(0, 1))[counted], loss[counted])
        with pytest.raises(UnsupportedError, match="logits: must be fp32, .*, got torch.bfloat16"):
            early(logits.bfloat16(), labels)
        with pytest.raises(UnsupportedError, match="label_smoothing"):
            early(logits, labels, 0.1)


@pytest.mark.parametrize(
    "what,kind",
    [
        ("vocab_size", InputError),
        ("input_ids", InputError),
        ("labels", InputError),
        ("MoE", UnsupportedError),
        ("attention_mask", UnsupportedError),
    ],
)
def test_difference_between_ranks_raises_on_both_ranks(what, kind, checkpoint, rows, pair):
    for outcome in pair.outcomes(2, workers.disagree, checkpoint(), rows, what):
        assert outcome.kind is kind and what in outcome.message, outcome.traceback


class LinearForLastLayer(torch.nn.Linear):
    """Value head of a critic in verl, mbridge, NeMo-RL and slime."""

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return super().forward(input_).float(), None


def test_critic_has_a_stock_head_and_an_aligned_decoder(checkpoint, rows, world):
    """`status` lists the head as left; the policy stays aligned; logprobs of the critic are rejected."""
    path = checkpoint()
    tokens, positions, labels, counted = workers.batch(rows)
    with patch_megatron(300), torch.no_grad():
        policy, critic = (workers.build(path, torch.bfloat16) for _ in range(2))
        expected = policy(tokens, positions, None, labels=labels)
        critic.output_layer = LinearForLastLayer(256, 1, bias=True, dtype=torch.bfloat16)
        values = critic(tokens, positions, None)
        assert values.shape == (*tokens.shape, 1) and values.dtype == torch.float32
        report = status(critic)
        assert list(report["left"]) == ["output_layer"] and "LinearForLastLayer" in report["left"]["output_layer"]
        assert "output_layer" not in report["aligned"] and "decoder.final_layernorm" in report["aligned"]
        assert status(policy)["left"] == {}
        assert_bitwise_equal(policy(tokens, positions, None, labels=labels), expected, "the policy")
        one = torch.cat([critic(tokens[i : i + 1], positions[:1], None) for i in range(len(tokens))])
        assert_bitwise_equal(one[counted], values[counted], "one by one")
        with pytest.raises(UnsupportedError, match="one number"):
            critic(tokens, positions, None, labels=labels)
        with pytest.raises(UnsupportedError, match="one number"):
            logprobs(critic, tokens, positions, None, labels)


@pytest.mark.parametrize("how", ["two numbers", "a vocabulary", "logits of its own"])
def test_output_layer_that_could_give_logits_is_rejected(how, checkpoint, world):
    class Scorer(LinearForLastLayer):
        def forward(self, input_, weight=None, runtime_gather_output=None):
            return torch.zeros(*input_.shape[:2], 384), None

    heads = {
        "two numbers": lambda: LinearForLastLayer(256, 2),
        "a vocabulary": lambda: torch.nn.Linear(256, 384),
        "logits of its own": lambda: Scorer(256, 1),
    }
    with patch_megatron(300), torch.no_grad():
        model = workers.build(checkpoint(), torch.bfloat16)
        model.output_layer = heads[how]()
        with pytest.raises(UnsupportedError, match="output_layer"):
            model(torch.tensor([[1, 2, 3]]), None, None)


def test_each_model_has_its_own_vocab_size(checkpoint, rows, world):
    """Cross entropy finds the size from the number of logit columns; ambiguous columns are rejected."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    tokens, positions, labels, counted = workers.batch(rows)
    small, large = checkpoint("qwen3", vocab=300), checkpoint("qwen2", vocab=500)

    def losses(model):
        return model(tokens, positions, None, labels=labels)[counted]

    with torch.no_grad():
        expected = {}
        for path, size in ((small, 300), (small, 290), (large, 500)):
            with patch_megatron(size):
                expected[path, size] = losses(workers.build(path, torch.bfloat16))
        assert not torch.equal(expected[small, 300], expected[small, 290])
        with patch_megatron():
            first, second, cut = (workers.build(path, torch.bfloat16) for path in (small, large, small))
            with pytest.raises(InputError, match="vocab_size"):
                losses(first)
            set_vocab_size(torch.nn.Sequential(first), 300)  # a wrapped model
            set_vocab_size(second, 500)
            assert_bitwise_equal(losses(first), expected[small, 300])
            assert_bitwise_equal(losses(second), expected[large, 500])
            assert_bitwise_equal(losses(workers.deep_copy(first)), expected[small, 300], "a copy")
            for model, key in ((first, (small, 300)), (second, (large, 500))):
                loss = vocab_parallel_cross_entropy(model(tokens, positions, None), labels)
                assert_bitwise_equal(loss[counted], expected[key], "logits")
            set_vocab_size(cut, 290)
            assert_bitwise_equal(losses(cut), expected[small, 290])
            with pytest.raises(UnsupportedError, match="290 and 300"):
                vocab_parallel_cross_entropy(cut(tokens, positions, None), labels)
        with patch_megatron(290):
            assert_bitwise_equal(losses(workers.build(small, torch.bfloat16)), expected[small, 290])
            second = workers.build(large, torch.bfloat16)
            set_vocab_size(second, 500)
            assert_bitwise_equal(losses(second), expected[large, 500])
            set_vocab_size(second, 513)
            with pytest.raises(InputError, match=r"vocab_size: must be at most 512, the model's padded size, got 513"):
                losses(second)
    for size in (0, True, "7"):
        with pytest.raises(InputError, match="vocab_size"):
            set_vocab_size(first, size)
    with pytest.raises(InputError, match="model"):
        set_vocab_size(torch.nn.Linear(2, 2), 7)
