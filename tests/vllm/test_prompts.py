"""Requests for results that the engine does not compute are rejected by name; the engine goes on."""

import pytest

from alignkit.errors import UnsupportedError
from tests.vllm.conftest import start

VOCAB = 290
"""Size of the vocabulary, which vLLM pads to 320."""


def prompt_logprobs(state, prompt, **options):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0, **options)
    (output,) = state.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return [step[token].logprob for token, step in list(zip(prompt, output.prompt_logprobs, strict=True))[1:]]


@pytest.fixture(scope="module")
def engine(vllm_process, checkpoint):
    process = vllm_process(VLLM_PLUGINS="")
    process(start, checkpoint(vocab=VOCAB), {"max_logprobs": 1000})
    return process


@pytest.mark.parametrize("token", [VOCAB, 300, 100000, -1])
def test_an_id_outside_of_the_vocabulary_is_rejected(token, engine):
    before = engine(prompt_logprobs, [1, VOCAB - 1, 3])
    message = rf"prompt_token_ids: must be in \[0, {VOCAB}\), the model's vocabulary, got {token}"
    with pytest.raises(UnsupportedError, match=message):
        engine(prompt_logprobs, [1, token, 3])
    assert engine(prompt_logprobs, [1, VOCAB - 1, 3]) == before


def test_prompt_logprobs_are_not_read_from_the_prefix_cache(engine):
    prompt = [*range(129)]
    before = engine(prompt_logprobs, prompt)
    with pytest.raises(UnsupportedError, match="skip_reading_prefix_cache: must be None or True with prompt_logprobs"):
        engine(cached_prompt_logprobs, prompt)
    assert engine(prompt_logprobs, prompt) == before


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_ids_are_rejected(field, engine):
    assert engine(count_logprobs, field, VOCAB) == engine(count_logprobs, field, -1) == VOCAB
    for count in (VOCAB + 1, 1000, 2.5):
        message = f"{field}: must be an integer of at most {VOCAB}, the model's vocabulary size, .*, got {count}"
        with pytest.raises(UnsupportedError, match=message):
            engine(count_logprobs, field, count)
    assert engine(count_logprobs, field, 3) in (3, 4)  # a token that is not among the 3 comes with its own


def count_logprobs(state, field, count):
    """Return the number of logprobs of the last token."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, **{field: count})
    (output,) = state.llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    return len((output.prompt_logprobs if field == "prompt_logprobs" else output.outputs[0].logprobs)[-1])


def cached_prompt_logprobs(state, prompt):
    return prompt_logprobs(state, prompt, skip_reading_prefix_cache=False)
