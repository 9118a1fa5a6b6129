"""The same tokens get the same bits, however vLLM comes to compute them.

Greedy, so that every mode takes the same tokens; tests of sampled ones follow.
"""

import pytest
import torch

from alignkit.contract import contract_id
from alignkit.testing import assert_bitwise_equal, bitwise_equal

DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]


def assert_same(actual, expected):
    assert actual.contract == expected.contract == contract_id("cpu")
    assert actual.prompts == expected.prompts
    assert actual.tokens == expected.tokens
    for i, (a, b) in enumerate(zip(actual.logprobs, expected.logprobs, strict=True)):
        assert_bitwise_equal(a, b, f"sequence {i}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["one", "prefix", "prompt_logprobs"])
def test_batch_is_one_at_a_time_is_prefix_hit_is_prefill(rollout, dtype, mode):
    modes = rollout(("batch", "one", "prefix", "prompt_logprobs"), dtype)
    assert_same(modes[mode], modes["batch"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunked_prefill_mixed_with_decode(rollout, dtype):
    whole = rollout(("batch", "one", "prefix", "prompt_logprobs"), dtype)["batch"]
    chunked = rollout(("batch", "prompt_logprobs"), dtype, chunk=64)
    assert_same(chunked["batch"], whole)
    assert_same(chunked["prompt_logprobs"], whole)


def test_sampled_tokens(rollout):
    modes = rollout(("batch", "prompt_logprobs"), temperature=1.0)
    assert len({token for row in modes["batch"].tokens for token in row}) > 50  # drawn, not stuck
    assert_same(modes["prompt_logprobs"], modes["batch"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_ranks(rollout, dtype):
    whole = rollout(("batch", "one", "prefix", "prompt_logprobs"), dtype)["batch"]
    assert_same(rollout(("batch",), dtype, tp=2)["batch"], whole)


def test_stock_engine_drifts(rollout):
    """Without the patch these comparisons fail: they do have something to find. (Of two ranks on every processor: without AVX-512
    the bits of vLLM for CPUs do not depend on the batch.)"""
    stock = rollout(("batch", "one", "prefix", "prompt_logprobs"), torch.float32, patched=False)
    batch = stock.pop("batch")
    stock["two ranks"] = rollout(("batch",), torch.float32, patched=False, tp=2)["batch"]
    assert batch.contract == "stock"
    assert not all(
        bitwise_equal(a, b) for mode in stock.values() for a, b in zip(mode.logprobs, batch.logprobs, strict=True)
    )
