"""Recordings of Megatron-core with a fault planted: ``python -m tests.bisection.faulty JOB.json`` writes, beside the job's
own recording, one of each fault of its ``what``: "faults", "experts" (of a mixture), "products", or "swaps", of a stock model
after each exchange of an op."""

import json
import sys
from pathlib import Path

import torch

from alignkit.check import train
from alignkit.drift.bisect import hf_side, megatron_side
from alignkit.drift.bisect import job as jobs
from alignkit.drift.bisect.points import OPS
from alignkit.megatron import modules

from .elsewhere import named


def main(path):
    job = jobs.read(path)
    if job["engine"] == "hf":
        swaps_of_hf(path, job)
    else:
        train.launch(job, {"faults": faults, "experts": experts, "products": products, "swaps": swaps}[job["what"]])


def record(rank, job, model, contract, name):
    for module in model.modules():  # those of the recording before
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    megatron_side.body(rank, named(job, name), model, contract)


def faults(rank, job, model, contract):
    megatron_side.body(rank, job, model, contract)
    layer = model.decoder.layers[1]

    # A stale shard: of one norm, one weight.
    weight = layer.pre_mlp_layernorm.weight
    kept = weight[5].item()
    with torch.no_grad():
        weight[5] += 0.25
    record(rank, job, model, contract, "norm-weight")
    with torch.no_grad():
        weight[5] = kept

    # Another rope base, as a config read wrongly would give it.
    rotary, kept = model.rotary_pos_emb, (model.rotary_base, model.rotary_pos_emb.inv_freq)
    model.rotary_base = 2 * kept[0]
    half = torch.arange(0, model.config.kv_channels, 2, dtype=torch.float32, device=kept[1].device)
    half /= model.config.kv_channels
    rotary.inv_freq = 1.0 / model.rotary_base**half
    record(rank, job, model, contract, "rope-base")
    model.rotary_base, rotary.inv_freq = kept

    # One rank's shard of one weight.
    if rank == 1:
        with torch.no_grad():
            layer.self_attention.linear_qkv.weight[0] *= 1.5
    record(rank, job, model, contract, "stale-shard")

    # One rank's module is the stock one again. A forward takes it over, as it does those of a new model.
    if rank == 1:
        module = layer.mlp.linear_fc2
        module.__class__ = modules.stock_class(type(module))
    record(rank, job, model, contract, "lost-patch")


def experts(rank, job, model, contract):
    megatron_side.body(rank, job, model, contract)
    mixture = model.decoder.layers[1].mlp
    with torch.no_grad():
        mixture.router.weight[3] += 1.0
    record(rank, job, model, contract, "router")
    with torch.no_grad():
        mixture.router.weight[3] -= 1.0  # nearly as it was
        for expert in mixture.experts.local_experts[:4]:  # some token has chosen one of them
            expert.linear_fc2.weight[0] += 0.5
    record(rank, job, model, contract, "expert")


def products(rank, job, model, contract):
    """Another way to the products: what a setting of the process, or another algorithm of the library, does."""
    megatron_side.body(rank, job, model, contract)
    if not job["patched"]:  # an aligned model would refuse it
        down = model.decoder.layers[1].mlp.linear_fc2
        down.forward = lambda x: (in_two_parts(x, down.weight), None)
        record(rank, job, model, contract, "split")
        del down.forward
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        record(rank, job, model, contract, "tf32")
        torch.backends.cuda.matmul.allow_tf32 = False
        for library in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(library)
            record(rank, job, model, contract, library)


def in_two_parts(x, weight):
    """As an algorithm that splits the sum and adds the parts in the output's type, as cuBLAS may in bf16: the even
    columns, the odd ones, then the two."""
    even, odd = (x[..., i::2] @ weight[:, i::2].T for i in range(2))
    return even + odd


def swaps(rank, job, model, contract):
    megatron_side.body(rank, job, model, contract)
    for op in OPS:
        megatron_side.swap(model, op)
        record(rank, job, model, contract, f"swapped-{op}")


def swaps_of_hf(path, job):
    """One process for each would be slow; the exchanges add up, in the order of `OPS`."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    done = []

    def swapped(*args, **kwargs):
        model = load(*args, **kwargs)
        for op in done:
            hf_side.swap(model, op, jobs.read_architecture(job["model"]))
        return model

    transformers.AutoModelForCausalLM.from_pretrained = swapped
    Path(job["runs"][0]["out"]).parent.mkdir(exist_ok=True)
    hf_side.main([path])
    for op in OPS:
        done.append(op)
        one = Path(path).with_name("one.json")
        one.write_text(json.dumps(named(job, f"swapped-{op}")))
        hf_side.main([str(one)])


if __name__ == "__main__":
    from tests.bisection import faulty  # not of __main__, which the ranks' processes cannot import

    faulty.main(sys.argv[1])
