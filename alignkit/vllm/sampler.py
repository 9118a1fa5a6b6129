"""The V1 runner's sampler, with logprobs by `ops.log_softmax`. vLLM's own code samples the tokens."""

from __future__ import annotations

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from alignkit import ops
from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import UnsupportedError


class AlignedSampler(Sampler):
    def __init__(self, logprobs_mode, use_fp64_gumbel: bool = False) -> None:
        super().__init__(logprobs_mode, use_fp64_gumbel)
        if logprobs_mode == "processed_logprobs":
            self.topk_topp_sampler = ProcessedLogprobs(use_fp64_gumbel)

    @staticmethod
    @replaces()
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """Return fp32 logprobs [T, V] of fp32 logits [T, V]."""
        require_fp32(logits)
        return ops.log_softmax(logits)


@relies_on("v1/sample/ops/topk_topp_sampler.py:TopKTopPSampler.forward_cpu", "logits generators k p")
@relies_on("v1/sample/ops/topk_topp_sampler.py:TopKTopPSampler.forward_native", "logits generators k p", when="cuda")
class ProcessedLogprobs(torch.nn.Module):
    """The last sampling step for processed logprobs.

    vLLM's step computes log-softmax inline. In mode "processed_logits" it returns the processed logits instead, and
    `ops.log_softmax` follows.
    """

    def __init__(self, use_fp64_gumbel: bool) -> None:
        super().__init__()
        self.sampler = TopKTopPSampler("processed_logits", use_fp64_gumbel)

    def forward(self, logits, generators, k, p) -> tuple[torch.Tensor, torch.Tensor]:
        sampled, processed = self.sampler(logits, generators, k, p)
        return sampled, AlignedSampler.compute_logprobs(processed)


def require_fp32(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32:
        raise UnsupportedError(f"logits: must be torch.float32 in the sampler, got {logits.dtype}")
