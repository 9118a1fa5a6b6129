"""An engine of the vLLM that Python imports; `test_versions.py` runs it, with overlays of other versions too.

``python -m tests.vllm.other_version MODEL OUT`` writes the result of `collect_answers` to OUT. If ``VLLM_DP_SIZE`` and
``VLLM_DP_RANK`` are set, the engine is one of two replicas that share experts, with chunked prefill. The second replica
reverses the prompts, so that one replica waits for the other.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

LENGTHS = (3, 40, 64, 65, 130)


def collect_answers(model: str) -> dict:
    """Return the engine's answers by kind.

    The kinds are: greedy tokens, ranks and logprobs of single requests and of a batch, prompt logprobs, the batch after
    a weight reload, the worker's module counts, and the result of `v2_logprobs_match`.
    """
    from vllm import LLM

    from alignkit.vllm import patch_vllm, worker_status
    from tests.vllm.conftest import reload
    from tests.vllm.settings import ENGINE
    from tests.vllm.test_engine import evaluate, generate

    patch_vllm()
    replica = {}
    if "VLLM_DP_SIZE" in os.environ:
        replica = {"enable_expert_parallel": True, "distributed_executor_backend": "uni", "max_num_batched_tokens": 64}
    state = SimpleNamespace(llm=LLM(model, dtype="bfloat16", **ENGINE | replica))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2000, (n,), generator=generator).tolist() for n in LENGTHS]
    if os.environ.get("VLLM_DP_RANK") == "1":
        prompts.reverse()
    found = {"one at a time": [generate(state, [p], temperature=0.0)[0] for p in prompts]}
    state.llm.reset_prefix_cache()
    found["batch"] = generate(state, prompts, temperature=0.0)
    found["prompt"] = [
        (tokens, evaluate(state, prompt, tokens, 0))
        for prompt, (tokens, _) in zip(prompts, found["batch"], strict=True)
    ]
    reload(state, model)
    found["again"] = generate(state, prompts, temperature=0.0)
    (status,) = worker_status(state.llm)
    return found | {"modules": status["modules"], "v2": v2_logprobs_match()}


def v2_logprobs_match() -> list:
    """Return whether the V2 runner's logprobs equal alignkit's, per batch.

    A stub replaces vLLM's kernel that counts ranks, which needs a GPU.
    """
    from alignkit import ops
    from alignkit.vllm import sampler_v2

    class NoRanks:
        def __getitem__(self, grid):
            return lambda ranks, *args, **kwargs: ranks.zero_()

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    (scores,) = sampler_v2._scores.values()
    scores.__globals__["_ranks_kernel"] = NoRanks()
    found = scores(logits, 2, torch.tensor([1, 2, 3]))
    return [torch.equal(found.logprobs, ops.log_softmax(logits).gather(1, found.logprob_token_ids))]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(collect_answers(sys.argv[1])))
