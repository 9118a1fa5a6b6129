"""The V2 runner's sampler and prompt logprobs, with logprobs by `ops.token_logp`.

vLLM computes all logprobs in one function, `compute_token_logprobs`, which its classes call through two others. The
classes here are subclasses with copies of these callers that call alignkit's function instead. A stock engine in the
same process keeps vLLM's functions. vLLM's own code samples the tokens and counts the ranks of tokens.
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

from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import UnsupportedError
from alignkit.ops.linear_logp import token_logp
from alignkit.vllm.sampler import require_fp32
from alignkit.vllm.versions import installed

_SCORES = installed().scores
"""Name of the function of vLLM that returns the logprobs of token ids."""


def _rebind(function: Callable, **names: Any) -> Callable:
    """Return a copy of `function` with other global `names`; raise UnsupportedError if it does not use them."""
    missing = names.keys() - set(function.__code__.co_names)
    if missing:
        raise UnsupportedError(
            f"vLLM: {function.__qualname__} must call {', '.join(sorted(missing))}, which alignkit replaces, but does "
            "not. Install a supported version (docs/vllm.md)"
        )
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names, "__name__": __name__},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@replaces("v1/worker/gpu/sample/logprob.py:compute_token_logprobs")
def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return fp32 logprobs [n, k] of integer token_ids [n, k] under fp32 logits [n, V]."""
    require_fp32(logits)
    return token_logp(logits, token_ids)


@relies_on("v1/worker/gpu/sample/logprob.py:_ranks_kernel", "logits_ptr vocab_size BLOCK_SIZE")
class _Ranks:
    """vLLM's Triton kernel for token ranks (one CTA per row), launched with larger blocks and more warps.

    The kernel counts logits in integers, so both choices affect speed alone.

    Aligned logits are fp32, twice the bytes of stock ones, and do not fit in the caches. Larger blocks keep more loads
    in flight.
    """

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        kernel: Any = logprob._ranks_kernel
        return functools.partial(self._launch, kernel[grid])

    @staticmethod
    def _launch(kernel: Callable, *tensors, BLOCK_SIZE: int) -> None:
        kernel(*tensors, BLOCK_SIZE=max(BLOCK_SIZE, 16384), num_warps=16)


relies_on(
    "v1/worker/gpu/sample/logprob.py:compute_topk_logprobs",
    "logits num_logprobs sampled_token_ids",
    mentions="compute_token_logprobs _ranks_kernel",
    when="topk_logprobs",
)
relies_on(
    "v1/worker/gpu/sample/logprob.py:compute_topk_scores",
    "logits num_logprobs sampled_token_ids",
    mentions="compute_token_logprobs _ranks_kernel",
    when="topk_scores",
)
_scores = {_SCORES: _rebind(getattr(logprob, _SCORES), compute_token_logprobs=token_logprobs, _ranks_kernel=_Ranks())}
"""Global name in vLLM's classes -> the rebound copy of the function."""


class AlignedStates(SamplingStates):
    @replaces()
    def apply_temperature(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray
    ) -> None:
        """Divide logits by the temperature in place. The division is correctly rounded, unlike vLLM's kernel."""
        temperatures = self.temperature.np[idx_mapping_np]
        if ((temperatures == 0) | (temperatures == 1)).all():
            return
        divisor = self.temperature.gpu[expanded_idx_mapping]
        logits.div_(divisor.masked_fill(divisor == 0, 1)[:, None])  # 0 means greedy: no division


@relies_on("v1/worker/gpu/sample/sampler.py:Sampler", members="sample")
@relies_on("v1/worker/gpu/sample/sampler.py:Sampler.__call__", "logits input_batch")
@relies_on("v1/worker/gpu/sample/sampler.py:compute_topk_logprobs", when="topk_logprobs")
@relies_on("v1/worker/gpu/sample/sampler.py:compute_topk_scores", when="topk_scores")
@relies_on("v1/worker/gpu/sample/sampler.py:Sampler.__call__", mentions="compute_topk_logprobs", when="topk_logprobs")
@relies_on("v1/worker/gpu/sample/sampler.py:Sampler.__call__", mentions="compute_topk_scores", when="topk_scores")
class AlignedSamplerV2(Sampler):
    __init__ = _rebind(Sampler.__init__, SamplingStates=AlignedStates)
    __call__ = _rebind(Sampler.__call__, **_scores)


@relies_on(
    "v1/worker/gpu/sample/prompt_logprob.py:PromptLogprobsWorker.compute_prompt_logprobs",
    "logits_fn hidden_states input_batch",
)
@relies_on("v1/worker/gpu/sample/prompt_logprob.py:compute_prompt_logprobs_with_chunking", "prompt_token_ids logits_fn")
@relies_on("v1/worker/gpu/sample/prompt_logprob.py:compute_topk_logprobs", when="topk_logprobs")
@relies_on("v1/worker/gpu/sample/prompt_logprob.py:compute_topk_scores", when="topk_scores")
@relies_on("v1/worker/gpu/sample/prompt_logprob.py:compute_token_logprobs", when="imported_scores")
@relies_on(
    "v1/worker/gpu/sample/prompt_logprob.py:compute_prompt_logprobs_with_chunking",
    mentions="compute_topk_logprobs",
    when="topk_logprobs",
)
@relies_on(
    "v1/worker/gpu/sample/prompt_logprob.py:compute_prompt_logprobs_with_chunking",
    mentions="compute_topk_scores",
    when="topk_scores",
)
class AlignedPromptLogprobs(prompt_logprob.PromptLogprobsWorker):
    compute_prompt_logprobs = _rebind(
        prompt_logprob.PromptLogprobsWorker.compute_prompt_logprobs,
        compute_prompt_logprobs_with_chunking=_rebind(prompt_logprob.compute_prompt_logprobs_with_chunking, **_scores),
    )


@contextmanager
def aligned_sampling() -> Iterator[None]:
    """Within the block, a V2 model runner that loads its model creates the aligned classes."""
    stock = model_runner.Sampler, model_runner.PromptLogprobsWorker
    model_runner.Sampler, model_runner.PromptLogprobsWorker = AlignedSamplerV2, AlignedPromptLogprobs
    try:
        yield
    finally:
        model_runner.Sampler, model_runner.PromptLogprobsWorker = stock
