"""Patch vLLM and Megatron-core, sample with vLLM, compare both engines' logprobs: `python first.py [MODEL]`.

README.md and docs/vllm.md link to this file. No test runs it.
"""

import os
import sys
import tempfile

import torch
from vllm import LLM, SamplingParams

import alignkit
from alignkit.check.model import make_checkpoint
from alignkit.convert import read_architecture

if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    path = sys.argv[1] if len(sys.argv) > 1 else make_checkpoint(tempfile.mkdtemp() + "/model", "qwen3", torch.bfloat16)

    # Rollout: vLLM samples 16 tokens.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # both engines in this process
    alignkit.patch_vllm()
    llm = LLM(
        str(path), skip_tokenizer_init=True, enforce_eager=not on_gpu, gpu_memory_utilization=0.4, max_model_len=64
    )
    sampling = SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)
    prompt = [1, 2, 3, 4, 5]
    (sample,) = llm.generate([{"prompt_token_ids": prompt}], sampling)[0].outputs
    rollout = torch.tensor([step[token].logprob for token, step in zip(sample.token_ids, sample.logprobs, strict=True)])

    # Training: Megatron-core computes the same tokens' logprobs.
    from megatron.core import parallel_state

    from alignkit.megatron import build, cpu, logprobs

    with cpu.cpu_host():
        parallel_state.initialize_model_parallel()  # in the process group that vLLM has created
        alignkit.patch_megatron(read_architecture(path).vocab)
        model = build.gpt_model(path, torch.bfloat16)
        tokens = torch.tensor([prompt + list(sample.token_ids)], device="cuda" if on_gpu else "cpu")
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None]
        training = logprobs(model, tokens[:, :-1], positions, None, tokens[:, 1:]).log_probs[0, len(prompt) - 1 :].cpu()

    print(alignkit.drift.compare_tensors(rollout[None], training[None]))
