"""The V2 model runner's sampler and prompt logprobs with `ops.token_logp` for every logprob.

vLLM takes all of them in one function, `compute_token_logprobs`, which its classes reach through two others. The
classes here are vLLM's with that function replaced in copies of their own, so a stock engine in the same process
keeps its. What is sampled, and the ranks of tokens, are vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample import logprob, prompt_logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from alignkit.errors import UnsupportedError
from alignkit.ops.linear_logp import token_logp
from alignkit.vllm.sampler import require_fp32
from alignkit.vllm.versions import installed

_SCORES = installed().scores


def _calling(function: Callable, **names: Any) -> Callable:
    """A copy of `function` that calls ours by the global `names`. Raises UnsupportedError if it knows no such name."""
    lacking = names.keys() - set(function.__code__.co_names)
    if lacking:
        raise UnsupportedError(f"vLLM's {function.__qualname__} does not call {', '.join(sorted(lacking))}")
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names, "__name__": __name__},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """logits fp32 [n, V], token_ids int [n, k] -> logprobs fp32 [n, k]."""
    require_fp32(logits)
    return token_logp(logits, token_ids)


class _Ranks:
    """vLLM's kernel that counts ranks, a block to a row. Our logits have twice the bytes of stock ones, which the caches do
    not hold, so more of a row is on its way at once."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        kernel: Any = logprob._ranks_kernel
        return functools.partial(self._launch, kernel[grid])

    @staticmethod
    def _launch(kernel: Callable, *tensors, BLOCK_SIZE: int) -> None:
        kernel(*tensors, BLOCK_SIZE=max(BLOCK_SIZE, 16384), num_warps=16)


_scores = {_SCORES: _calling(getattr(logprob, _SCORES), compute_token_logprobs=token_logprobs, _ranks_kernel=_Ranks())}
"""What vLLM's classes call it by, and our copy."""


class AlignedStates(SamplingStates):
    def apply_temperature(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray
    ) -> None:
        """Divides in place, correctly rounded as the contract asks; the quotients of vLLM's kernel are not."""
        temperatures = self.temperature.np[idx_mapping_np]
        if ((temperatures == 0) | (temperatures == 1)).all():
            return
        divisor = self.temperature.gpu[expanded_idx_mapping]
        logits.div_(divisor.masked_fill(divisor == 0, 1)[:, None])  # 0 is greedy: as it is


class AlignedSamplerV2(Sampler):
    __init__ = _calling(Sampler.__init__, SamplingStates=AlignedStates)
    __call__ = _calling(Sampler.__call__, **_scores)


class AlignedPromptLogprobs(prompt_logprob.PromptLogprobsWorker):
    compute_prompt_logprobs = _calling(
        prompt_logprob.PromptLogprobsWorker.compute_prompt_logprobs,
        compute_prompt_logprobs_with_chunking=_calling(prompt_logprob.compute_prompt_logprobs_with_chunking, **_scores),
    )


@contextmanager
def aligned_sampling() -> Iterator[None]:
    """Inside, a V2 model runner that loads its model makes the classes above for itself."""
    stock = model_runner.Sampler, model_runner.PromptLogprobsWorker
    model_runner.Sampler, model_runner.PromptLogprobsWorker = AlignedSamplerV2, AlignedPromptLogprobs
    try:
        yield
    finally:
        model_runner.Sampler, model_runner.PromptLogprobsWorker = stock
