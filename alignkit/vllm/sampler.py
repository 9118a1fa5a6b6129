"""vLLM's V1 sampler with `ops.log_softmax` for every logprob. What is sampled, and how, is vLLM's."""

from __future__ import annotations

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from alignkit import ops
from alignkit.errors import UnsupportedError


class AlignedSampler(Sampler):
    def __init__(self, logprobs_mode, use_fp64_gumbel: bool = False) -> None:
        super().__init__(logprobs_mode, use_fp64_gumbel)
        if logprobs_mode == "processed_logprobs":
            self.topk_topp_sampler = ProcessedLogprobs(use_fp64_gumbel)

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """logits fp32 [T, V] -> logprobs fp32 [T, V]."""
        require_fp32(logits)
        return ops.log_softmax(logits)


class ProcessedLogprobs(torch.nn.Module):
    """vLLM's last sampling step takes its log-softmax inline; asked for logits, it leaves it to us."""

    def __init__(self, use_fp64_gumbel: bool) -> None:
        super().__init__()
        self.sampler = TopKTopPSampler("processed_logits", use_fp64_gumbel)

    def forward(self, logits, generators, k, p) -> tuple[torch.Tensor, torch.Tensor]:
        sampled, processed = self.sampler(logits, generators, k, p)
        return sampled, AlignedSampler.compute_logprobs(processed)


def require_fp32(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32:
        raise UnsupportedError(f"logits in {logits.dtype}: they were rounded on their way to the sampler")
