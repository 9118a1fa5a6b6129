"""Logprobs of real vLLM on a CPU: the same tokens get the same bits in every mode of batching, caching and ranks.

Greedy sampling gives every mode the same tokens; one test samples randomly. A stock engine must drift.
"""

import pytest
import torch

from alignkit.runtime.ids import contract_id
from alignkit.testing import assert_bitwise_equal, bitwise_equal

MODES = ("batch", "one", "prefix", "prompt_logprobs")
"""Modes of the default engine. The fixture `rollout` caches results by this tuple, so tests with it share an engine."""
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]


def assert_same(actual, expected):
    assert actual.contract == expected.contract == contract_id("cpu")
    assert actual.prompts == expected.prompts
    assert actual.tokens == expected.tokens
    for i, (a, b) in enumerate(zip(actual.logprobs, expected.logprobs, strict=True)):
        assert_bitwise_equal(a, b, f"sequence {i}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES[1:])
def test_single_requests_prefix_hits_and_prefill_match_the_batch(rollout, dtype, mode):
    modes = rollout(MODES, dtype)
    assert_same(modes[mode], modes["batch"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunked_prefill_mixed_with_decode_matches_whole_prompts(rollout, dtype):
    whole = rollout(MODES, dtype)["batch"]
    chunked = rollout(("batch", "prompt_logprobs"), dtype, chunk=64)
    assert_same(chunked["batch"], whole)
    assert_same(chunked["prompt_logprobs"], whole)


def test_sampled_tokens_get_equal_prompt_logprobs(rollout):
    modes = rollout(("batch", "prompt_logprobs"), temperature=1.0)
    assert len({token for row in modes["batch"].tokens for token in row}) > 50  # random, not repetitive
    assert_same(modes["prompt_logprobs"], modes["batch"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_ranks_match_one(rollout, dtype):
    whole = rollout(MODES, dtype)["batch"]
    assert_same(rollout(("batch",), dtype, tp=2)["batch"], whole)


def test_a_stock_engine_drifts(rollout):
    """The comparisons above fail without the patch, so they can detect a difference.

    Two ranks differ on every processor. Without AVX-512, vLLM's bits on a CPU do not depend on the batch.
    """
    stock = rollout(MODES, torch.float32, patched=False)
    batch = stock.pop("batch")
    stock["two ranks"] = rollout(("batch",), torch.float32, patched=False, tp=2)["batch"]
    assert batch.contract == "stock"
    assert not all(
        bitwise_equal(a, b) for mode in stock.values() for a, b in zip(mode.logprobs, batch.logprobs, strict=True)
    )
