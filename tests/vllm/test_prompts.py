"""Prompts that vLLM serves from memory that holds no weights or results are rejected; the engine goes on."""

import pytest

from alignkit.errors import UnsupportedError
from tests.vllm.conftest import ENGINE

VOCAB = 290
"""Size of the vocabulary, which vLLM pads to 320."""


def start(state, model):
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    state.patch = patch_vllm()
    state.llm = LLM(model, dtype="bfloat16", **ENGINE)


def prompt_logprobs(state, prompt, **options):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0, **options)
    (output,) = state.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return [step[token].logprob for token, step in list(zip(prompt, output.prompt_logprobs, strict=True))[1:]]


@pytest.fixture(scope="module")
def engine(vllm_process, checkpoint):
    process = vllm_process(VLLM_PLUGINS="")
    process(start, checkpoint(vocab=VOCAB))
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


def cached_prompt_logprobs(state, prompt):
    return prompt_logprobs(state, prompt, skip_reading_prefix_cache=False)
