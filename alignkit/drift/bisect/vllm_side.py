"""Records a vLLM engine: ``python -m alignkit.drift.bisect.vllm_side JOB.json`` (see `job`).

All sequences are sent as prompts at once, with ``decode`` tokens to be sampled after each. The engine runs eagerly:
hooks see nothing in a CUDA graph.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from alignkit.check import rollout

from . import job as jobs


def main(arguments: list[str]) -> None:
    job = jobs.read(arguments[0])
    decode = job["decode"]
    asked = {
        "model": job["model"],
        "dtype": job["dtype"],
        "patched": job["patched"],
        "tp": job["tp"],
        "eager": True,
        "runner": "v1",
        "prompts": job["sequences"],
        "max_tokens": max(decode, 1),
        "seed": job["seed"],
        "max_num_batched_tokens": job["chunk"] or max(2048, sum(map(len, job["sequences"]))),
    }
    rollout.prepare(asked)
    from . import vllm_worker

    module = vllm_worker.__name__
    overrides = {"worker_extension_cls": f"{module}.Recording", "enable_prefix_caching": False}
    if job["swap"]:
        overrides |= {"worker_cls": f"{module}.SwappedWorker", "additional_config": {vllm_worker.SWAP: job["swap"]}}
    llm = rollout.engine(asked, **overrides)
    import vllm
    from vllm import SamplingParams

    from alignkit.vllm import worker_status

    for_workers = vllm_worker.write_job(job, Path(job["runs"][0]["out"]).parent / "workers.json")
    llm.collective_rpc("alignkit_record", args=(for_workers,))
    params = SamplingParams(
        max_tokens=max(decode, 1), temperature=1.0, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": s} for s in job["sequences"]], params, use_tqdm=False)
    contract = worker_status(llm)[0].get("contract", "stock")
    llm.collective_rpc("alignkit_save")
    llm.llm_engine.engine_core.shutdown()

    recorder = jobs.recorder(job)
    sequences, start = [], 0
    for prompt, output in zip(job["sequences"], outputs, strict=True):
        drawn = list(output.outputs[0].token_ids)[:decode]
        sequence = prompt + drawn
        steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs[:decode]]
        values = [step[token].logprob for step, token in zip(steps, sequence[1:], strict=True)]
        if values:
            recorder.put("logprob", torch.tensor(values), start + np.arange(len(values)))
        sequences.append(sequence)
        start += len(sequence)
    driver = jobs.part(job, job["tp"])
    recorder.save(driver)
    Path(for_workers).unlink()
    jobs.finish(
        job,
        f"vllm {vllm.__version__}",
        contract,
        sequences,
        {"eager": True, "runner": "v1", "chunk": job["chunk"], "decode": decode},
        extra=driver,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
