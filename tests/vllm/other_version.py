"""An engine of another vLLM version on this CPU; `test_versions.py` runs it.

The Python code comes from an unpacked wheel, the CPU kernels from the installed vLLM. Only vLLM's worker calls these
kernels, when it starts; alignkit does not.

``python -m tests.vllm.other_version MODEL OUT [PACKAGE VERSION FOLDER]`` writes the result of `collect_answers` to OUT.
PACKAGE is the vllm package of the other version, FOLDER an empty folder. If ``VLLM_DP_SIZE`` and ``VLLM_DP_RANK`` are
set, the engine is one of two replicas that share experts, with chunked prefill. The second replica reverses the
prompts, so that one replica waits for the other.
"""

import dataclasses
import glob
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

LENGTHS = (3, 40, 64, 65, 130)
SCORES = {"0.24": "compute_topk_logprobs", "0.25": "compute_topk_logprobs"}


def use_version(package: str, version: str, folder: str) -> None:
    """Make later imports of vLLM find `version` as a CPU build that alignkit accepts."""
    (installed,) = importlib.util.find_spec("vllm").submodule_search_locations
    overlay = Path(folder)
    (overlay / "vllm").symlink_to(package)
    metadata = overlay / f"vllm-{version}+cpu.dist-info/METADATA"  # vLLM reads its build target there
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    sys.path.insert(0, folder)
    # The same choice of kernels as in vLLM.
    suffix = "" if torch.cpu._is_avx512_bf16_supported() else "_AVX512" if torch.cpu._is_avx512_supported() else "_AVX2"
    for library in glob.glob(f"{installed}/_C{suffix}.*so"):
        torch.ops.load_library(library)

    from alignkit.vllm.versions import VERSIONS

    minor, on_cpu = VERSIONS.known(version), VERSIONS.rows["0.32"].runs
    facts = {"client_error": "builtins:ValueError"}
    if minor in SCORES:
        facts["scores"] = SCORES[minor]
    VERSIONS.rows[minor] = dataclasses.replace(VERSIONS.rows[minor], runs=dataclasses.replace(on_cpu, **facts))


def collect_answers(model: str) -> dict:
    """Return the engine's answers by kind.

    The kinds are: greedy tokens, ranks and logprobs of single requests and of a batch, prompt logprobs, the batch after
    a weight reload, the worker's module counts, and the result of `v2_logprobs_match`.
    """
    from vllm import LLM

    from alignkit.vllm import patch_vllm, worker_status
    from tests.vllm.settings import ENGINE
    from tests.vllm.test_engine import evaluate, generate, reload

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


def main(model: str, out: str, *other: str) -> None:
    if other:
        use_version(*other)
    Path(out).write_text(json.dumps(collect_answers(model)))


if __name__ == "__main__":
    main(*sys.argv[1:])
