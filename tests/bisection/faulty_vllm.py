"""vLLM recordings with a planted fault: ``python -m tests.bisection.faulty_vllm JOB.json FAULT``.

FAULT "stale-cache" writes the recordings ``stale`` and ``good``; "stock-layer" writes the job's recording.
`test_engines.py` runs the module and reads the recordings.
"""

import os
import sys

import torch

from alignkit.bisect import job as jobs
from alignkit.bisect import vllm_side
from alignkit.bisect.vllm_worker import Recording
from alignkit.jobs.rollout import shut_down

from .paths import redirected

BLOCK = 8
"""Tokens per KV cache block, by which `test_engines.py` knows the cached tokens."""


class Faulty(Recording):
    """Methods for ``collective_rpc``."""

    def new_weights(self, seed: int) -> None:
        """Change the first layer's weights."""
        weight = self.model_runner.get_model().model.layers[0].self_attn.qkv_proj.weight
        with torch.no_grad():
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).to(weight.dtype) / 64

    def stock_layer(self) -> None:
        """Make one column-parallel layer stock on rank 1. A row-parallel layer would hang in its collective."""
        from vllm.distributed import get_tp_group
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear, UnquantizedLinearMethod

        if get_tp_group().rank_in_group == 1:
            layer = self.model_runner.get_model().model.layers[1].mlp.gate_up_proj
            layer.__class__, layer.quant_method = MergedColumnParallelLinear, UnquantizedLinearMethod()
            layer.quant_method.process_weights_after_loading(layer)


def main(path: str, fault: str) -> None:
    job = jobs.read(path)
    cached = fault == "stale-cache"
    llm = vllm_side.engine(
        job, worker_extension_cls="tests.bisection.faulty_vllm.Faulty", enable_prefix_caching=cached, block_size=BLOCK
    )
    if fault == "stale-cache":
        from vllm import SamplingParams

        os.environ["ALIGNKIT_READ_METHODS"] = "new_weights"  # a false claim: cached keys of the old weights are used

        prompts = [{"prompt_token_ids": s} for s in job["sequences"]]
        llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        llm.collective_rpc("new_weights", args=(1,))
        vllm_side.record(llm, redirected(job, "stale"), prompts=False)
        llm.reset_prefix_cache()  # the missing reset
        vllm_side.record(llm, redirected(job, "good"), prompts=False)
    else:
        llm.collective_rpc("stock_layer")
        vllm_side.record(llm, job)
    shut_down(llm)


if __name__ == "__main__":
    from tests.bisection import faulty_vllm  # the workers cannot import __main__

    faulty_vllm.main(*sys.argv[1:])
