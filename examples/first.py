"""Sample with vLLM, train with Megatron-core, compare their logprobs: `python first.py [MODEL]`, on a GPU or a CPU."""

import os
import sys
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # both engines in this process

import torch
from megatron.core import parallel_state
from vllm import LLM, SamplingParams

import alignkit
from alignkit.convert import read_architecture
from alignkit.jobs.model import make_checkpoint
from alignkit.megatron import build, cpu, logprobs

path = sys.argv[1] if len(sys.argv) > 1 else make_checkpoint(tempfile.mkdtemp() + "/model", "qwen3", torch.bfloat16)
prompt = [1, 2, 3, 4, 5]

# Rollout: vLLM samples 16 tokens.
alignkit.patch_vllm()
llm = LLM(str(path), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, gpu_memory_utilization=0.4)
sampling = SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)
(sample,) = llm.generate([{"prompt_token_ids": prompt}], sampling)[0].outputs
rollout = [step[token].logprob for token, step in zip(sample.token_ids, sample.logprobs, strict=True)]

# Training: Megatron-core computes the logprobs of the same tokens.
alignkit.patch_megatron(read_architecture(path).vocab)
with cpu.cpu_host():  # lets Megatron-core run on a CPU; does nothing on a GPU
    parallel_state.initialize_model_parallel()  # in the process group that vLLM has created
    model = build.gpt_model(path, torch.bfloat16)
    tokens = torch.tensor([prompt + list(sample.token_ids)], device=next(model.parameters()).device)
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None]
    training = logprobs(model, tokens[:, :-1], positions, None, tokens[:, 1:]).log_probs[:, len(prompt) - 1 :]

report = alignkit.drift.compare_tensors(torch.tensor([rollout]), training.cpu())
print(f"{report.bit_equal} of {report.tokens} logprobs are bit-equal")
