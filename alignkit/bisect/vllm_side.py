"""Recorder of a vLLM engine: ``python -m alignkit.bisect.vllm_side JOB.json``.

`job` documents the job file. The hooks are in `vllm_worker`, which runs in vLLM's workers. All sequences are sent as
prompts in one batch, and ``decode`` tokens are sampled after each. The engine runs eagerly, since hooks do not run in a
CUDA graph.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

from alignkit.jobs import rollout

from . import job as jobs


def main(arguments: list[str]) -> None:
    job = jobs.read(arguments[0])
    llm = engine(job)
    record(llm, job)
    rollout.shut_down(llm)


def engine(job: dict, **options):
    """Return the job's engine; `options` are passed to ``vllm.LLM``."""
    settings = {
        "model": job["model"],
        "dtype": job["dtype"],
        "patched": job["patched"],
        "tp": job["tp"],
        "dp": 1,
        "eager": True,
        "runner": "v1",
        "prompts": job["sequences"],
        "max_tokens": max(job["decode"], 1),
        "seed": job["seed"],
        "max_num_batched_tokens": job["chunk"] or max(2048, sum(map(len, job["sequences"]))),
    }
    invariant = job.get("batch_invariant", False)
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(invariant))  # overrides the user's environment
    rollout.prepare(settings)
    from . import vllm_worker

    module = vllm_worker.__name__
    overrides = {"worker_extension_cls": f"{module}.Recording", "enable_prefix_caching": False}
    if job["swap"]:
        overrides |= {"worker_cls": f"{module}.SwappedWorker", "additional_config": {vllm_worker.SWAP: job["swap"]}}
    if invariant:
        overrides["attention_backend"] = "FLASH_ATTN"  # vLLM selects no backend in this mode
    return rollout.engine(settings, **overrides | options)


def record(llm, job: dict, *, prompts: bool = True) -> None:
    """Send the job's sequences and write the recording.

    prompts: also record the logprobs of prompt tokens, for which vLLM recomputes every prompt.
    """
    import vllm
    from vllm import SamplingParams

    from alignkit.vllm import worker_status

    from . import vllm_worker

    decode = job["decode"]
    worker_job = vllm_worker.write_job(job, Path(job["runs"][0]["out"]).parent / "workers.json")
    llm.collective_rpc("alignkit_record", args=(worker_job,))
    params = SamplingParams(
        max_tokens=max(decode, 1),
        temperature=1.0,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0 if prompts else None,
        detokenize=False,
    )
    outputs = llm.generate([{"prompt_token_ids": s} for s in job["sequences"]], params, use_tqdm=False)
    workers = worker_status(llm)
    contract = next((status["contract"] for status in workers if "contract" in status), "stock")
    replaced = [f"worker {i}: {status['replaced']}" for i, status in enumerate(workers) if "replaced" in status]
    llm.collective_rpc("alignkit_save")

    recorder = jobs.recorder(job)
    sequences, start = [], 0
    for prompt, output in zip(job["sequences"], outputs, strict=True):
        sampled = list(output.outputs[0].token_ids)[:decode]
        sequence = prompt + sampled
        prompt_steps = output.prompt_logprobs[1:] if prompts else []
        steps = [*prompt_steps, *output.outputs[0].logprobs[:decode]]
        first = len(sequence) - len(steps)  # token of the first step
        values = [step[token].logprob for step, token in zip(steps, sequence[first:], strict=True)]
        if values:
            recorder.put("logprob", torch.tensor(values), start + first - 1 + np.arange(len(values)))
        sequences.append(sequence)
        start += len(sequence)
    driver = jobs.part(job, job["tp"])
    recorder.save(driver)
    Path(worker_job).unlink()
    jobs.finish(
        job,
        f"vllm {vllm.__version__}",
        contract,
        sequences,
        {
            "eager": True,
            "runner": "v1",
            "chunk": job["chunk"],
            "decode": decode,
            "batch_invariant": job.get("batch_invariant", False),
        }
        | ({"replaced": "; ".join(replaced)} if replaced else {}),
        extra=driver,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
