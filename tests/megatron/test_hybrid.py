"""HybridModel, GPTModel's successor with separate attention and MLP layers, gives GPTModel's bits on a CPU.

Megatron-core is real; versions without HybridModel skip the file. Unsupported layers and settings are rejected.
hybrids.py holds the functions that run on the ranks.
"""

from functools import partial

import pytest
import torch

pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="this Megatron-core has no HybridModel")

from alignkit.convert import Checkpoint, read_architecture
from alignkit.errors import InputError, UnsupportedError
from alignkit.megatron import logprobs, output_processor, patch_megatron, set_vocab_size, status
from alignkit.testing import assert_bitwise_equal
from tests.megatron import hybrids, layouts, te_workers, workers
from tests.megatron.test_pipeline import FOUR, OVERLAPPED, alone, check
from tests.megatron.test_recompute import RECOMPUTE_CONFIGS, same
from tests.ropes import ROPES

PATTERN = dict(hybrid_layer_pattern="*-*-")
MODELS = {
    "qwen2": ("qwen2", torch.bfloat16, False),
    "qwen3": ("qwen3", torch.bfloat16, False),
    "llama-tied": ("llama", torch.float32, True),
}
WAYS = [(1, False), (2, False), (2, True)]


@pytest.fixture(scope="module")
def ranks(world, pair):
    """Return ``ranks(size, function, *args)``, which runs `function` on ranks without TransformerEngine."""
    return lambda size, function, *args: [function(world, *args)] if size == 1 else pair.run(2, function, *args)


@pytest.fixture
def patched(world):
    with patch_megatron(300) as handle:
        yield handle


@pytest.fixture
def qwen3(checkpoint, patched):
    return workers.build(checkpoint(), torch.bfloat16, **PATTERN)


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_have_the_bits_of_gpt_model(name, checkpoint, rows, world, ranks, te):
    path, dtype = checkpoint(*MODELS[name]), MODELS[name][1]
    expected = workers.all_calls(world, path, dtype, False, rows)
    for run, spec in ((ranks, False), (te, True), (te, False)):  # with TE installed, the local spec uses its final norm
        for size, sequence_parallel in WAYS[run is te :]:
            all_calls = partial(workers.all_calls, transformer_engine=spec, **PATTERN)
            for rank, result in enumerate(run(size, all_calls, path, dtype, sequence_parallel, rows)):
                assert result.keys() == expected.keys()
                for call, value in result.items():
                    how = f"{call}, TP {size}, SP {sequence_parallel}, its spec {spec}, rank {rank}"
                    assert_bitwise_equal(value, expected[call], how)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_bits_of_gpt_model(name, checkpoint, rows, ranks, te):
    path, dtype = checkpoint(*MODELS[name]), MODELS[name][1]
    for size, sequence_parallel in WAYS:
        given = path, dtype, sequence_parallel, rows
        loss, grads = ranks(size, workers.step, *given)[0]
        for run, spec in ((ranks, False), (te, True))[:size]:
            for result in run(size, partial(workers.step, transformer_engine=spec, **PATTERN), *given):
                same(result, (loss, grads), f"TP {size}, SP {sequence_parallel}, its spec {spec}")


@pytest.mark.parametrize(
    "how, pattern, fields",
    [
        (dict(pp=2), "*-*-|*-*-", {}),
        (dict(pp=2), "*-*|-*-*-", {}),
        (dict(pp=2), "*-*-*-*-", {}),
        (dict(pp=2, vpp=2), "*-|*-|*-|*-", OVERLAPPED),
        (dict(pp=2, vpp=2), "||*-*-*-*-|", OVERLAPPED),
    ],
    ids=["even", "inside of a layer", "no separator", "interleaved", "empty stages"],
)
def test_pipeline_gives_the_bits_of_one_process(how, pattern, fields, checkpoint, rows, world, two):
    given = checkpoint("qwen3", torch.bfloat16, **FOUR), torch.bfloat16, rows
    run = partial(layouts.pipeline, how=how, fields=fields | {"hybrid_layer_pattern": pattern})
    check(two.run(2, run, *given), alone(world, *given))


def test_pipeline_with_tensor_and_sequence_parallelism_changes_no_bit(checkpoint, rows, world, two, four):
    given = checkpoint("qwen3", torch.bfloat16, **FOUR), torch.bfloat16, rows
    fields = dict(sequence_parallel=True)
    logp, _ = alone(world, *given)
    _, grads = two.run(2, partial(layouts.pipeline, how=dict(tp=2), fields=fields, packed=True), *given)[0]
    fields |= {"hybrid_layer_pattern": "*-*|-*-*-"}
    results = four.run(4, partial(layouts.pipeline, how=dict(tp=2, pp=2), fields=fields, packed=True), *given)
    check(results, (logp, grads))


def test_context_parallelism_gives_the_bits_of_gpt_model(checkpoint, rows, two):
    run = partial(layouts.context, how=dict(cp=2))
    given = checkpoint("qwen3", torch.bfloat16), torch.bfloat16, rows
    expected = two.run(2, partial(run, fields={}), *given)
    for result, wanted in zip(two.run(2, partial(run, fields=PATTERN), *given), expected, strict=True):
        for actual, other in zip((*result[0], *result[1]), (*wanted[0], *wanted[1]), strict=True):
            assert_bitwise_equal(actual, other)
        same((0.0, result[2]), (0.0, wanted[2]), "CP 2")


def test_stages_with_wrong_layer_numbers_are_rejected(checkpoint, rows, two):
    run = partial(
        layouts.pipeline, how=dict(pp=2), fields=dict(hybrid_layer_pattern="*-|*-"), change=layouts.change_layer_number
    )
    for outcome in two.outcomes(2, run, checkpoint(), torch.bfloat16, rows):
        assert outcome.kind is InputError and "must have layers 1 to 4 in order, got [1, 2, 1, 4]" in outcome.message


def test_recomputation_changes_no_gradient(checkpoint, rows, ranks):
    path = checkpoint(*MODELS["qwen3"])
    stored = ranks(2, workers.step, path, torch.bfloat16, True, rows)[0]
    configs = {name: config | PATTERN for name, config in RECOMPUTE_CONFIGS.items()}
    for result in ranks(2, workers.steps_by_config, path, torch.bfloat16, True, rows, configs):
        for name, actual in result.items():
            same(actual, stored, name)


def test_yarn_gives_the_bits_of_gpt_model(checkpoint, rows, world):
    """With YaRN, the rotary embedding stores the base."""
    path = checkpoint("qwen3", torch.bfloat16, rope_scaling=ROPES["yarn"])
    expected = workers.all_calls(world, path, torch.bfloat16, False, rows)
    for call, value in workers.all_calls(world, path, torch.bfloat16, False, rows, **PATTERN).items():
        assert_bitwise_equal(value, expected[call], call)


def test_undo_restores_the_te_hybrid_model(checkpoint, rows, te):
    """Checks names, classes and state dict of a model with TransformerEngine's layer spec."""
    run = partial(te_workers.patch_and_undo, **PATTERN)
    for report, before, aligned, after in te(2, run, checkpoint(), True, rows):
        assert not report["stock"] and report["aligned"]["decoder"] == "decoder"
        assert report["aligned"]["decoder.layers.2.self_attention.linear_qkv"] == "rms_norm, linear"
        assert report["aligned"]["decoder.layers.3.mlp.linear_fc1"] == "rms_norm, linear"
        assert report["aligned"]["decoder.final_norm"] == "rms_norm"
        assert_bitwise_equal(after, before, "after undo")
        assert not torch.equal(aligned, before)


def test_distributed_checkpoints_load_stock_and_aligned(checkpoint, rows, te, tmp_path):
    for folder in ("stock", "aligned"):
        (tmp_path / folder).mkdir()
    te(2, partial(te_workers.cross_load_checkpoints, **PATTERN), checkpoint(), tmp_path, rows)


@pytest.mark.parametrize("name", ["qwen2", "llama-tied"])
def test_hybrid_stack_spec_gives_the_bits_of_gpt_models_spec(name, checkpoint, rows, te):
    """`hybrid_stack_spec` has no query/key norms."""
    path = checkpoint(MODELS[name][0], torch.bfloat16, MODELS[name][2])
    for before, aligned, expected, after, report in te(2, hybrids.compare_hybrid_stack_spec, path, rows):
        assert_bitwise_equal(aligned, expected, name)
        assert_bitwise_equal(after, before, "after undo")
        assert not torch.equal(aligned, before) and not report["stock"]


def test_exported_weights_equal_the_checkpoint(checkpoint, ranks):
    path = checkpoint()
    expected = Checkpoint(path)
    for size in (1, 2):
        for weights in ranks(size, hybrids.exported_weights, path):
            assert set(weights) == set(expected)
            for name, value in weights.items():
                assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("what", hybrids.WRONG)
def test_invalid_input_on_one_rank_raises_on_both_ranks(what, checkpoint, ranks):
    raised = ranks(2, hybrids.wrong_on_one_rank, checkpoint(), what)
    assert all(raised) and all(what.removesuffix(" None") in message for _, message in raised), raised


LETTERS = {
    "M": "Mamba",
    "G": "gated delta net",
    "D": "sparse attention",
    "+": "multi-latent attention",
    "E": "mixture of experts",
}


@pytest.mark.parametrize("letter", LETTERS)
def test_unsupported_layer_types_are_rejected_before_construction(letter, patched):
    """Without a spec, construction would fail."""
    pattern = letter * 2 if letter in "D+" else f"*-{letter}-"
    with pytest.raises(UnsupportedError) as raised:
        hybrids.build_without_checkpoint(None, pattern)
    message = str(raised.value)
    assert message.startswith("hybrid_layer_pattern: must contain only * (attention) and - (dense MLP), got ")
    assert f", got {letter} ({LETTERS[letter]}" in message


def test_subclass_is_rejected(patched):
    from megatron.core.models.mamba.mamba_model import MambaModel

    with pytest.raises(UnsupportedError, match="MambaModel is not supported"):
        hybrids.build_without_checkpoint(spec(), cls=MambaModel)


def test_multi_token_prediction_is_rejected(patched):
    with pytest.raises(
        UnsupportedError, match=r"hybrid_layer_pattern: must contain only .*, got / \(multi-token prediction"
    ):
        hybrids.build_without_checkpoint(None, "*-*-/*-")


def spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from alignkit.megatron.build import hybrid_spec

    return hybrid_spec(get_gpt_layer_local_spec(normalization="RMSNorm"))


@pytest.mark.parametrize("base", [2, 10000, 123456, 1000000, 5000000, 150000000])
def test_rotary_base_is_derived_from_the_frequencies(base, patched):
    model = hybrids.build_without_checkpoint(spec(), rotary_base=base)
    assert patched.models.patch_model(model)["rotary_base"] == repr(float(base))


@pytest.mark.parametrize("base", [1000001, 10000.001, 12345678])
def test_rotary_base_that_the_frequencies_do_not_determine_is_rejected(base, patched):
    with pytest.raises(UnsupportedError, match="rotary_base|rotary_pos_emb"):
        hybrids.build_without_checkpoint(spec(), rotary_base=base)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(position_embedding_type="none"), "position_embedding_type: must be .*, got 'none'"),
        (dict(rotary_percent=0.5), "rotary_pos_emb"),
        (dict(seq_len_interpolation_factor=2.0), "seq_len_interpolation_factor"),
        (dict(fields=dict(num_moe_experts=2)), "num_moe_experts"),
    ],
    ids=["no positions", "partial", "interpolated", "a field"],
)
def test_unsupported_settings_are_rejected(arguments, named, patched):
    with pytest.raises(UnsupportedError, match=named):
        hybrids.build_without_checkpoint(spec(), **arguments)


def test_scaled_frequencies_are_rejected(qwen3, monkeypatch):
    frequencies = qwen3.rotary_pos_emb.inv_freq.clone()
    frequencies[8:] /= 8
    monkeypatch.setattr(qwen3.rotary_pos_emb, "inv_freq", frequencies)
    with pytest.raises(UnsupportedError, match="rotary_pos_emb"):
        qwen3(hybrids.tensor(hybrids.TOKENS), None, None)


def test_forward_arguments_are_used_or_rejected(qwen3):
    tokens = hybrids.tensor(hybrids.TOKENS)
    expected = logprobs(qwen3, tokens, None, None, tokens, temperature=0.7).log_probs
    context = type("Context", (), {"temperature": 0.7})
    given = dict(labels=tokens, output_processor_context=context)
    assert_bitwise_equal(qwen3(tokens, None, None, output_processor=output_processor, **given).log_probs, expected)
    with pytest.raises(UnsupportedError, match="output_processor"):
        qwen3(tokens, None, None, output_processor=print, **given)
    with pytest.raises(UnsupportedError, match="inference_context"):
        qwen3(tokens, None, None, inference_params=object())
    with pytest.raises(UnsupportedError, match="HybridStack: must be called inside its model's forward"):
        qwen3.decoder(torch.zeros(2, 1, 256, dtype=torch.bfloat16), None)
    logits = qwen3(tokens, None, None)
    embedded = qwen3.embedding(tokens, None)
    assert_bitwise_equal(qwen3(None, None, None, decoder_input=embedded), logits)


def test_own_vocab_size_and_critic_head_are_supported(checkpoint, world):
    tokens = hybrids.tensor(hybrids.TOKENS)
    with patch_megatron():
        model = workers.build(checkpoint(), torch.bfloat16, **PATTERN)
        with pytest.raises(InputError, match="vocab_size"):
            model(tokens, None, None)
        set_vocab_size(model, 200)
        assert torch.isfinite(model(tokens, None, None, labels=tokens)).all()
        with pytest.raises(InputError, match=r"\[0, 200\)"):
            model(tokens + 195, None, None, labels=tokens)
        model.output_layer = torch.nn.Linear(256, 1, bias=False, dtype=torch.bfloat16)
        model.output_layer.__class__ = type("Head", (torch.nn.Linear,), {"forward": value_head})
        assert model(tokens, None, None).shape == (2, 4, 1)
        assert list(status(model)["left"]) == ["output_layer"]


def value_head(self, hidden, weight=None, runtime_gather_output=None):
    return torch.nn.functional.linear(hidden, self.weight), None


@pytest.mark.parametrize("pattern", ["-*-*", "*-", "**--", "*-*-*-"])
def test_pattern_that_does_not_match_the_checkpoint_is_rejected(pattern, checkpoint, patched):
    with pytest.raises(InputError, match="hybrid_layer_pattern"):
        workers.build(checkpoint(), torch.bfloat16, hybrid_layer_pattern=pattern)
    assert read_architecture(checkpoint()).layers == 2
