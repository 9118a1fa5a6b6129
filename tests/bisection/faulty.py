"""Recordings with planted faults: ``python -m tests.bisection.faulty JOB.json``, of a Megatron-core or HF job.

It writes the job's recording and, in sibling directories, one recording per fault. The job's ``what`` selects the
faults: "faults" (dense), "experts" (MoE), "gemms", or "swaps" (a stock model after each op swap). `test_engines.py` and
`test_cuda.py` run it and read the recordings by the names of the faults.
"""

import json
import sys
from pathlib import Path

import torch

from alignkit.bisect import hf_side, megatron_side
from alignkit.bisect import job as jobs
from alignkit.bisect.points import OPS
from alignkit.jobs import train
from alignkit.megatron import modules

from .paths import redirected


def main(path):
    job = jobs.read(path)
    if job["engine"] == "hf":
        hf_swaps(path, job)
    else:
        train.launch(job, {"faults": faults, "experts": experts, "gemms": gemms, "swaps": swaps}[job["what"]])


def record(rank, job, model, contract, name):
    for module in model.modules():  # remove the previous recording's hooks
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    megatron_side.body(rank, redirected(job, name), model, contract)


def faults(rank, job, model, contract):
    megatron_side.body(rank, job, model, contract)
    layer = model.decoder.layers[1]

    # A stale value in a norm weight.
    weight = layer.pre_mlp_layernorm.weight
    saved = weight[5].item()
    with torch.no_grad():
        weight[5] += 0.25
    record(rank, job, model, contract, "norm-weight")
    with torch.no_grad():
        weight[5] = saved

    # A wrong RoPE base, as from a misread config.
    rotary, saved = model.rotary_pos_emb, (model.rotary_base, model.rotary_pos_emb.inv_freq)
    model.rotary_base = 2 * saved[0]
    half = torch.arange(0, model.config.kv_channels, 2, dtype=torch.float32, device=saved[1].device)
    half /= model.config.kv_channels
    rotary.inv_freq = 1.0 / model.rotary_base**half
    record(rank, job, model, contract, "rope-base")
    model.rotary_base, rotary.inv_freq = saved

    # A stale shard of a weight on one rank.
    if rank == 1:
        with torch.no_grad():
            layer.self_attention.linear_qkv.weight[0] *= 1.5
    record(rank, job, model, contract, "stale-shard")

    # A module that lost its patch on one rank. The next forward patches it again, as in a new model.
    if rank == 1:
        module = layer.mlp.linear_fc2
        module.__class__ = modules.stock_class(type(module))
    record(rank, job, model, contract, "lost-patch")


def experts(rank, job, model, contract):
    megatron_side.body(rank, job, model, contract)
    moe = model.decoder.layers[1].mlp
    with torch.no_grad():
        moe.router.weight[3] += 1.0
    record(rank, job, model, contract, "router")
    with torch.no_grad():
        moe.router.weight[3] -= 1.0  # approximately restored
        for expert in moe.experts.local_experts[:4]:  # some token is routed to one of these experts
            expert.linear_fc2.weight[0] += 0.5
    record(rank, job, model, contract, "expert")


def gemms(rank, job, model, contract):
    """Record models whose GEMMs use split-K, TF32, or another BLAS library."""
    megatron_side.body(rank, job, model, contract)
    if not job["patched"]:  # an aligned model rejects a replaced forward
        down = model.decoder.layers[1].mlp.linear_fc2
        down.forward = lambda x: (split_k_matmul(x, down.weight), None)
        record(rank, job, model, contract, "split")
        del down.forward
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        record(rank, job, model, contract, "tf32")
        torch.backends.cuda.matmul.allow_tf32 = False
        for library in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(library)
            record(rank, job, model, contract, library)


def split_k_matmul(x, weight):
    """Return x @ weight.T as the sum of even and odd k, added in the output dtype, as cuBLAS may do in bf16."""
    even, odd = (x[..., i::2] @ weight[:, i::2].T for i in range(2))
    return even + odd


def swaps(rank, job, model, contract):
    megatron_side.body(rank, job, model, contract)
    for op in OPS:
        megatron_side.swap(model, op)
        record(rank, job, model, contract, f"swapped-{op}")


def hf_swaps(path, job):
    """Record a Hugging Face model after swapping ops cumulatively, in the order of `OPS`, in one process."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    swapped_ops = []

    def swapped(*args, **kwargs):
        model = load(*args, **kwargs)
        for op in swapped_ops:
            hf_side.swap(model, op, jobs.read_architecture(job["model"]))
        return model

    transformers.AutoModelForCausalLM.from_pretrained = swapped
    Path(job["runs"][0]["out"]).parent.mkdir(exist_ok=True)
    hf_side.main([path])
    for op in OPS:
        swapped_ops.append(op)
        one = Path(path).with_name("one.json")
        one.write_text(json.dumps(redirected(job, f"swapped-{op}")))
        hf_side.main([str(one)])


if __name__ == "__main__":
    from tests.bisection import faulty  # the ranks' processes cannot import __main__

    faulty.main(sys.argv[1])
