"""Invalid arguments of the forward, of `logprobs` and of `output_processor`, with real Megatron-core on a CPU.

Each raises an error that names the caller's argument, before any computation and on all tensor-parallel ranks. The
tests match texts of alignkit/megatron/calls.py. test_rejections.py tests unsupported models and settings.
"""

import types

import pytest
import torch

from alignkit.errors import InputError, UnsupportedError
from alignkit.megatron import logprobs, output_processor, patch_megatron
from tests.megatron import workers

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
S = TOKENS.shape[1]


@pytest.fixture(scope="module")
def model(checkpoint, world):
    with patch_megatron(300):
        yield workers.build(checkpoint(), torch.bfloat16)


class Subclass(torch.Tensor):
    pass


def nested(dtype=torch.int64):
    return torch.nested.nested_tensor([torch.ones(3, dtype=dtype), torch.ones(2, dtype=dtype)])


NO_TOKENS = [
    None,
    "x",
    [[1, 2]],
    1,
    TOKENS.float(),
    TOKENS[0],
    TOKENS[None],
    TOKENS.to("meta"),
    TOKENS.to_sparse(),
    nested(),
    TOKENS.as_subclass(Subclass),
    TOKENS.bool(),
]


def cases():
    for tokens in NO_TOKENS:
        yield "input_ids", dict(tokens=tokens)
    for positions in ["x", [0, 1, 2], TOKENS.float(), TOKENS[:, :2], TOKENS[0], TOKENS.repeat(2, 1), nested()]:
        yield "position_ids", dict(position_ids=positions)
    for mask in [
        "x",
        1,
        [[True]],
        nested(torch.bool),
        torch.ones(1, 1, S, S, dtype=torch.bool, device="meta"),
        torch.ones(1, 1, S, S, dtype=torch.bool).triu(1).to_sparse(),
    ]:
        yield "attention_mask", dict(attention_mask=mask)
    for packed in ["x", 1, {"qkv_format": "thd"}, torch.tensor([0, 3])]:
        yield "packed_seq_params", dict(packed_seq_params=packed)
    for labels in [*NO_TOKENS, TOKENS[:1], TOKENS[:, :2], TOKENS.t(), TOKENS.int()]:
        yield "labels", dict(labels=labels)
    for temperature in [
        None,
        "x",
        [1.0],
        0,
        0.0,
        -1,
        float("nan"),
        float("inf"),
        1e300,
        10**400,
        1j,
        True,
        1e-60,
        torch.ones(S),
        torch.ones(S, 2),
        torch.ones(2, 1),
        torch.ones(2, S).double(),
        torch.zeros(2, S),
        torch.full((2, S), float("nan")),
        torch.ones(2, S, device="meta"),
        torch.tensor(0.0),
        torch.tensor(1),
        torch.ones(2, S).to_sparse(),
        nested(torch.float32),
    ]:
        yield "temperature", dict(temperature=temperature)
    for temperature in (torch.tensor(1.0, requires_grad=True), torch.ones(2, S, requires_grad=True)):
        yield "temperature: must not require a gradient, ", dict(temperature=temperature)
    for ignored in [None, "x", -100.0, True]:
        yield "ignore_index", dict(ignore_index=ignored)
    yield "return_entropy", dict(return_entropy="x")
    right = "labels: must be in [0, 300) or equal ignore_index = -100, "
    yield f"{right}got 300 at [1, 2]", dict(labels=torch.tensor([[0, 0, 0], [0, 0, 300]]))
    yield f"{right}got -1 at [0, 1]", dict(labels=torch.tensor([[0, -1, 0], [0, 0, 0]]))
    yield "input_ids: must not be empty, got 0 sequences of 3 tokens", dict(tokens=TOKENS[:0], labels=TOKENS[:0])
    yield "input_ids: must not be empty, got 2 sequences of 0 tokens", dict(tokens=TOKENS[:, :0], labels=TOKENS[:, :0])


def ask(model, tokens=TOKENS, position_ids=None, attention_mask=None, labels=TOKENS, **asked):
    return logprobs(model, tokens, position_ids, attention_mask, labels, **asked)


ALL = list(cases())


@pytest.mark.parametrize("i", range(len(ALL)), ids=[f"{name}-{i}" for i, (name, _) in enumerate(ALL)])
def test_invalid_argument_raises_an_error_that_starts_with_its_name(i, model):
    name, arguments = ALL[i]
    with pytest.raises((InputError, UnsupportedError)) as e:
        ask(model, **arguments)
    assert str(e.value).startswith(name), e.value
    assert ask(model).log_probs.shape == TOKENS.shape  # the next call succeeds


def test_errors_report_the_callers_shapes(model):
    with pytest.raises(InputError, match=r"labels: expected int64 \[2, 3\], got int64 \[3, 2\]"):
        ask(model, labels=TOKENS.t())
    with pytest.raises(InputError, match=r"temperature: expected float32 \[2, 3\], got float32 \[3, 2\]"):
        ask(model, temperature=torch.ones(3, 2))
    with pytest.raises(InputError, match=r"labels: expected int64 \[2, 3\], got int64 \[2, 2\]"):
        model(TOKENS, None, None, labels=TOKENS[:, :2])
    with pytest.raises(InputError, match=r"input_ids: expected int64 or int32 \[any, any\], got float32 \[2, 3\]"):
        model(TOKENS.float(), None, None)
    with pytest.raises(InputError, match=r"position_ids: expected int64 or int32 \[any, 3\], got int64 \[2, 2\]"):
        model(TOKENS, TOKENS[:, :2], None)


def test_equivalent_arguments_give_the_same_logprobs(model):
    expected = ask(model, temperature=0.5).log_probs
    for temperature in (torch.tensor(0.5), torch.full(TOKENS.shape, 0.5), torch.full((3, 2), 0.5).t()):
        assert torch.equal(ask(model, temperature=temperature).log_probs, expected)
    for positions in (torch.arange(3)[None], torch.arange(3).expand(2, 3).int()):
        assert torch.equal(ask(model, position_ids=positions, temperature=0.5).log_probs, expected)
    assert torch.equal(ask(model, tokens=TOKENS.int(), temperature=0.5).log_probs, expected)


def packed(ends=(3,), **fields):
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, *ends], dtype=torch.int32)
    usual = dict(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=3, max_seqlen_kv=3)
    return PackedSeqParams(**(usual | fields))


@pytest.mark.parametrize(
    "fields, named",
    [
        (dict(cu_seqlens_q=None), "packed_seq_params"),
        (dict(cu_seqlens_q=[0, 3]), "packed_seq_params.cu_seqlens_q"),
        (dict(cu_seqlens_q=torch.tensor([0.0, 3.0])), "packed_seq_params.cu_seqlens_q"),
        (dict(cu_seqlens_q_padded=torch.tensor([[0, 3]])), "packed_seq_params.cu_seqlens_q_padded"),
        (dict(cu_seqlens_kv="x"), "packed_seq_params.cu_seqlens_kv"),
        (dict(cu_seqlens_q=torch.tensor([0, 3], device="meta")), "packed_seq_params.cu_seqlens_q"),
        (dict(max_seqlen_q=None), "packed_seq_params.max_seqlen_q"),
        (dict(max_seqlen_kv="x"), "packed_seq_params.max_seqlen_kv"),
        (dict(max_seqlen_kv=2.5), "packed_seq_params.max_seqlen_kv"),
        (dict(max_seqlen_q=-1), "packed_seq_params.max_seqlen_q"),
        (dict(qkv_format=None), "packed_seq_params.qkv_format"),
        (
            dict(cu_seqlens_q_padded=torch.tensor([0, 3])),
            "packed_seq_params.cu_seqlens_kv_padded: must be given and equal packed_seq_params.cu_seqlens_q_padded, "
            "got None",
        ),
        (
            dict(cu_seqlens_kv_padded=torch.tensor([0, 3])),
            "packed_seq_params.cu_seqlens_q_padded: must be given and equal packed_seq_params.cu_seqlens_kv_padded, "
            "got None",
        ),
    ],
)
def test_invalid_field_of_packed_seq_params_raises_an_error_that_names_it(fields, named, model):
    tokens = TOKENS[:1]
    with pytest.raises((InputError, UnsupportedError)) as e:
        ask(model, tokens=tokens, labels=tokens, packed_seq_params=packed(**fields))
    assert str(e.value).startswith(named), e.value
    ask(model, tokens=tokens, labels=tokens, packed_seq_params=packed(max_seqlen_q=torch.tensor(3)))


def test_packed_micro_batch_may_have_empty_sequences_but_not_be_empty(model):
    with pytest.raises(InputError, match="input_ids: must not be empty, got 1 sequences of 0 tokens"):
        ask(model, tokens=TOKENS[:1, :0], labels=TOKENS[:1, :0], packed_seq_params=packed((0,)))
    tokens = TOKENS[:1]
    some = ask(model, tokens=tokens, labels=tokens, packed_seq_params=packed((0, 3, 3)))  # two empty sequences
    assert torch.equal(some.log_probs, ask(model, tokens=tokens, labels=tokens).log_probs)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(padding_mask="x"), "padding_mask"),
        (dict(padding_mask=torch.zeros(2, 2, dtype=torch.bool)), "padding_mask"),
        (dict(extra_block_kwargs={"attention_bias": 1}), "extra_block_kwargs"),
        (dict(extra_block_kwargs={"nonsense": 1}), "extra_block_kwargs"),
        (dict(extra_block_kwargs="x"), "extra_block_kwargs"),
        (dict(decoder_input="x"), "decoder_input"),
        (dict(decoder_input=torch.zeros(3, 2, 256)), "decoder_input"),
        (dict(decoder_input=torch.zeros(3, 2, 128, dtype=torch.bfloat16)), "decoder_input"),
        (dict(decoder_input=torch.zeros(0, 2, 256, dtype=torch.bfloat16)), "decoder_input: must not be empty"),
        (dict(inference_context="x"), "inference_context"),
    ],
)
def test_invalid_argument_of_the_forward_raises_an_error_that_names_it(arguments, named, model):
    with pytest.raises((InputError, UnsupportedError)) as e:
        model(TOKENS, None, None, **arguments)
    assert str(e.value).startswith(named), e.value


def test_decoder_input_replaces_input_ids(model):
    with torch.no_grad():
        given = model.embedding(TOKENS, None)
        assert torch.equal(model(None, None, None, decoder_input=given), model(TOKENS, None, None))


@pytest.mark.parametrize(
    "context, named",
    [
        (object(), "output_processor_context: must have an attribute temperature, got a object"),
        ("x", "output_processor_context: must have an attribute temperature, got a str"),
        (types.SimpleNamespace(temperature=None), "temperature"),
        (types.SimpleNamespace(temperature=1.0, ignore_index=None), "ignore_index"),
    ],
)
def test_invalid_output_processor_context_raises_an_error_that_names_it(context, named, model):
    """Versions without the hook can still call `output_processor` directly."""
    hidden = torch.zeros(3, 2, 256, dtype=torch.bfloat16)
    calls = [
        lambda: output_processor(
            hidden_states=hidden, output_layer=model.output_layer, output_weight=None, labels=TOKENS, context=context
        )
    ]
    if patch_megatron(300).has_hook:  # returns the handle of the existing patch
        calls.append(
            lambda: model(
                TOKENS, None, None, labels=TOKENS, output_processor=output_processor, output_processor_context=context
            )
        )
    for call in calls:
        with pytest.raises(InputError) as e:
            call()
        assert str(e.value).startswith(named), e.value


def test_output_processor_rejects_an_output_layer_of_an_unpatched_model(model):
    with pytest.raises(UnsupportedError, match="output_layer"):
        output_processor(
            hidden_states=torch.zeros(3, 2, 256), output_layer=torch.nn.Linear(2, 2), output_weight=None, labels=TOKENS
        )


@pytest.mark.parametrize(
    "logits, target, smoothing, named",
    [
        (None, TOKENS, 0.0, "logits"),
        (torch.zeros(()), TOKENS, 0.0, "logits"),
        (torch.zeros(2, 3, 384), None, 0.0, "target"),
        (torch.zeros(2, 3, 384), TOKENS, "x", "label_smoothing"),
    ],
)
def test_cross_entropy_rejects_invalid_arguments(logits, target, smoothing, named, model):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    with pytest.raises((InputError, UnsupportedError)) as e:
        vocab_parallel_cross_entropy(logits, target, smoothing)
    assert str(e.value).startswith(named), e.value


@pytest.mark.parametrize("what", sorted(workers.WRONG))
def test_invalid_argument_on_one_rank_raises_on_both_ranks(what, checkpoint, pair):
    for outcome in pair.run(2, workers.wrong_on_one_rank, checkpoint(), what):
        assert outcome is not None, "the rank raised no error"
        kind, message = outcome
        assert kind in ("InputError", "UnsupportedError") and what.split()[0] in message, message
