"""HybridModel, GPTModel's successor in Megatron-core: attention and MLP are layers of their own, the bits are GPTModel's."""

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
from tests.megatron.test_recompute import RECOMPUTED, same
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
    """``ranks(size, function, *args)``, without TransformerEngine."""
    return lambda size, function, *args: [function(world, *args)] if size == 1 else pair.run(2, function, *args)


@pytest.fixture
def patched(world):
    with patch_megatron(300) as handle:
        yield handle


@pytest.fixture
def qwen3(checkpoint, patched):
    return workers.build(checkpoint(), torch.bfloat16, **PATTERN)


@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_the_bits_of_gpt_model(name, checkpoint, rows, world, ranks, te):
    path, dtype = checkpoint(*MODELS[name]), MODELS[name][1]
    expected = workers.every_way(world, path, dtype, False, rows)
    for run, spec in ((ranks, False), (te, True), (te, False)):  # the final norm is TransformerEngine's where it is
        for size, sequence_parallel in WAYS[run is te :]:
            way_of = partial(workers.every_way, transformer_engine=spec, **PATTERN)
            for rank, result in enumerate(run(size, way_of, path, dtype, sequence_parallel, rows)):
                assert result.keys() == expected.keys()
                for way, value in result.items():
                    how = f"{way}, TP {size}, SP {sequence_parallel}, its spec {spec}, rank {rank}"
                    assert_bitwise_equal(value, expected[way], how)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_gpt_model(name, checkpoint, rows, ranks, te):
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
    ids=["even", "inside of a layer", "no borders", "interleaved", "empty stages"],
)
def test_stages(how, pattern, fields, checkpoint, rows, world, two):
    given = checkpoint("qwen3", torch.bfloat16, **FOUR), torch.bfloat16, rows
    run = partial(layouts.pipeline, how=how, fields=fields | {"hybrid_layer_pattern": pattern})
    check(two.run(2, run, *given), alone(world, *given))


def test_stages_with_tensor_and_sequence_parallelism(checkpoint, rows, world, two, four):
    given = checkpoint("qwen3", torch.bfloat16, **FOUR), torch.bfloat16, rows
    fields = dict(sequence_parallel=True)
    logp, _ = alone(world, *given)
    _, grads = two.run(2, partial(layouts.pipeline, how=dict(tp=2), fields=fields, packed=True), *given)[0]
    fields |= {"hybrid_layer_pattern": "*-*|-*-*-"}
    results = four.run(4, partial(layouts.pipeline, how=dict(tp=2, pp=2), fields=fields, packed=True), *given)
    check(results, (logp, grads))


def test_context_parallelism(checkpoint, rows, two):
    run = partial(layouts.context, how=dict(cp=2))
    given = checkpoint("qwen3", torch.bfloat16), torch.bfloat16, rows
    expected = two.run(2, partial(run, fields={}), *given)
    for result, wanted in zip(two.run(2, partial(run, fields=PATTERN), *given), expected, strict=True):
        for actual, other in zip((*result[0], *result[1]), (*wanted[0], *wanted[1]), strict=True):
            assert_bitwise_equal(actual, other)
        same((0.0, result[2]), (0.0, wanted[2]), "CP 2")


def test_stages_whose_layers_are_not_the_models(checkpoint, rows, two):
    run = partial(
        layouts.pipeline, how=dict(pp=2), fields=dict(hybrid_layer_pattern="*-|*-"), change=layouts.another_layer
    )
    for outcome in two.outcomes(2, run, checkpoint(), torch.bfloat16, rows):
        assert outcome.kind is InputError and "its stages have the layers [1, 2, 1, 4], of 4" in outcome.message


def test_recomputation(checkpoint, rows, ranks):
    path = checkpoint(*MODELS["qwen3"])
    stored = ranks(2, workers.step, path, torch.bfloat16, True, rows)[0]
    configs = {name: config | PATTERN for name, config in RECOMPUTED.items()}
    for result in ranks(2, workers.recomputed, path, torch.bfloat16, True, rows, configs):
        for name, actual in result.items():
            same(actual, stored, name)


def test_yarn(checkpoint, rows, world):
    """Its base is kept by the rotary embedding itself."""
    path = checkpoint("qwen3", torch.bfloat16, rope_scaling=ROPES["yarn"])
    expected = workers.every_way(world, path, torch.bfloat16, False, rows)
    for way, value in workers.every_way(world, path, torch.bfloat16, False, rows, **PATTERN).items():
        assert_bitwise_equal(value, expected[way], way)


def test_taken_over_and_back(checkpoint, rows, te):
    """Names, classes and state dict of a model of TransformerEngine's spec, which stock Megatron can build too."""
    run = partial(te_workers.taken_over_and_back, **PATTERN)
    for report, before, aligned, after in te(2, run, checkpoint(), True, rows):
        assert not report["stock"] and report["aligned"]["decoder"] == "trunk"
        assert report["aligned"]["decoder.layers.2.self_attention.linear_qkv"] == "rms_norm, linear"
        assert report["aligned"]["decoder.layers.3.mlp.linear_fc1"] == "rms_norm, linear"
        assert report["aligned"]["decoder.final_norm"] == "rms_norm"
        assert_bitwise_equal(after, before, "after undo")
        assert not torch.equal(aligned, before)


def test_distributed_checkpoints(checkpoint, rows, te, tmp_path):
    for folder in ("stock", "aligned"):
        (tmp_path / folder).mkdir()
    te(2, partial(te_workers.checkpointed, **PATTERN), checkpoint(), tmp_path, rows)


@pytest.mark.parametrize("name", ["qwen2", "llama-tied"])
def test_megatrons_own_spec(name, checkpoint, rows, te):
    """It has no norms of q and k."""
    path = checkpoint(MODELS[name][0], torch.bfloat16, MODELS[name][2])
    for before, aligned, expected, after, report in te(2, hybrids.with_megatrons_own_spec, path, rows):
        assert_bitwise_equal(aligned, expected, name)
        assert_bitwise_equal(after, before, "after undo")
        assert not torch.equal(aligned, before) and not report["stock"]


def test_weights_under_their_hf_names(checkpoint, ranks):
    path = checkpoint()
    expected = Checkpoint(path)
    for size in (1, 2):
        for weights in ranks(size, hybrids.sent, path):
            assert set(weights) == set(expected)
            for name, value in weights.items():
                assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("what", hybrids.WRONG)
def test_what_one_rank_refuses_raises_on_both(what, checkpoint, ranks):
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
def test_other_layers_are_refused_before_they_are_built(letter, patched):
    """There is no spec that they could be built of."""
    pattern = letter * 2 if letter in "D+" else f"*-{letter}-"
    with pytest.raises(UnsupportedError) as raised:
        hybrids.bare(None, pattern)
    assert str(raised.value).startswith(f"hybrid_layer_pattern: {letter} ({LETTERS[letter]}")


def test_its_subclass_is_refused(patched):
    from megatron.core.models.mamba.mamba_model import MambaModel

    with pytest.raises(UnsupportedError, match="MambaModel is not supported"):
        hybrids.bare(spec(), cls=MambaModel)


def test_multi_token_prediction_is_refused(patched):
    with pytest.raises(UnsupportedError, match=r"hybrid_layer_pattern: / \(multi-token prediction"):
        hybrids.bare(None, "*-*-/*-")


def spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from alignkit.megatron.build import hybrid_spec

    return hybrid_spec(get_gpt_layer_local_spec(normalization="RMSNorm"))


@pytest.mark.parametrize("base", [2, 10000, 123456, 1000000, 5000000, 150000000])
def test_the_base_is_read_off_the_frequencies(base, patched):
    model = hybrids.bare(spec(), rotary_base=base)
    assert patched.models.adopt(model)["rotary_base"] == repr(float(base))


@pytest.mark.parametrize("base", [1000001, 10000.001, 12345678])
def test_a_base_that_cannot_be_read_is_refused(base, patched):
    with pytest.raises(UnsupportedError, match="rotary_base|rotary_pos_emb"):
        hybrids.bare(spec(), rotary_base=base)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(position_embedding_type="none"), "position_embedding_type: 'none'"),
        (dict(rotary_percent=0.5), "rotary_pos_emb"),
        (dict(seq_len_interpolation_factor=2.0), "seq_len_interpolation_factor"),
        (dict(fields=dict(num_moe_experts=2)), "num_moe_experts"),
    ],
    ids=["no positions", "partial", "interpolated", "a field"],
)
def test_settings_that_are_refused(arguments, named, patched):
    with pytest.raises(UnsupportedError, match=named):
        hybrids.bare(spec(), **arguments)


def test_frequencies_of_another_scaling_are_refused(qwen3, monkeypatch):
    frequencies = qwen3.rotary_pos_emb.inv_freq.clone()
    frequencies[8:] /= 8
    monkeypatch.setattr(qwen3.rotary_pos_emb, "inv_freq", frequencies)
    with pytest.raises(UnsupportedError, match="rotary_pos_emb"):
        qwen3(hybrids.tensor(hybrids.TOKENS), None, None)


def test_what_a_forward_is_called_with(qwen3):
    tokens = hybrids.tensor(hybrids.TOKENS)
    expected = logprobs(qwen3, tokens, None, None, tokens, temperature=0.7).log_probs
    asked = type("Asked", (), {"temperature": 0.7})
    given = dict(labels=tokens, output_processor_context=asked)
    assert_bitwise_equal(qwen3(tokens, None, None, output_processor=output_processor, **given).log_probs, expected)
    with pytest.raises(UnsupportedError, match="output_processor"):
        qwen3(tokens, None, None, output_processor=print, **given)
    with pytest.raises(UnsupportedError, match="inference_context"):
        qwen3(tokens, None, None, inference_params=object())
    with pytest.raises(UnsupportedError, match="HybridStack: called outside of"):
        qwen3.decoder(torch.zeros(2, 1, 256, dtype=torch.bfloat16), None)
    logits = qwen3(tokens, None, None)
    embedded = qwen3.embedding(tokens, None)
    assert_bitwise_equal(qwen3(None, None, None, decoder_input=embedded), logits)


def test_a_vocabulary_of_its_own_and_a_critic(checkpoint, world):
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
def test_a_pattern_that_is_not_the_checkpoints(pattern, checkpoint, patched):
    with pytest.raises(InputError, match="hybrid_layer_pattern"):
        workers.build(checkpoint(), torch.bfloat16, hybrid_layer_pattern=pattern)
    assert read_architecture(checkpoint()).layers == 2
