"""Recorder of a Hugging Face model in one process: ``python -m alignkit.bisect.hf_side JOB.json``.

`job` documents the job file, and `points` names what the hooks record. The hooks only read; `swap` replaces an op.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from alignkit import ops
from alignkit.convert import read_architecture
from alignkit.errors import UnsupportedError

from . import job as jobs
from .points import OPS


def main(arguments: list[str]) -> None:
    import transformers

    job = jobs.read(arguments[0])
    arch = read_architecture(job["model"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), local_files_only=True
    )
    model = loaded.to(device).eval()
    recorder = jobs.recorder(job)
    for op in job["swap"]:
        swap(model, op, arch)
    _hook(model, recorder)
    with torch.inference_mode():
        for tokens, rows in jobs.micro_batches(job["sequences"], job["mode"]):
            recorder.index = rows.reshape(-1)
            logits = model(tokens.to(device), use_cache=False).logits
            recorder.put("logits", logits)
            labels, known = jobs.targets(tokens, rows, 0)
            logp = torch.log_softmax(logits.float(), -1).gather(-1, labels.to(device)[..., None])
            recorder.put("logprob", logp, known.reshape(-1))
    recorder.save(jobs.part(job, 0))
    jobs.finish(
        job,
        f"transformers {transformers.__version__}",
        "stock",
        job["sequences"],
        {"mode": job["mode"], "attention": model.config._attn_implementation},
    )


def _hook(model, recorder) -> None:
    after, before = _after(recorder), _before(recorder)
    after(model.model.embed_tokens, "embedding")
    current = [0]
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        attention.register_forward_pre_hook(lambda *_, i=i: current.__setitem__(0, i))
        for module, point in (
            (layer.input_layernorm, "input_norm"),
            (attention.q_proj, "q"),
            (attention.k_proj, "k"),
            (attention.v_proj, "v"),
            (attention.o_proj, "attention_proj"),
            (layer.post_attention_layernorm, "post_norm"),
            (mlp.gate_proj, "gate"),
            (mlp.up_proj, "up"),
            (mlp.down_proj, "down"),
            (layer, "residual"),
        ):
            after(module, f"layers.{i}.{point}")
        for x in "qk":
            if hasattr(attention, f"{x}_norm"):
                after(getattr(attention, f"{x}_norm"), f"layers.{i}.{x}_norm")
        for module, point in (
            (attention.o_proj, "attention"),
            (mlp.down_proj, "activation"),
            (layer.post_attention_layernorm, "attention_residual"),
        ):
            before(module, f"layers.{i}.{point}")
    after(model.model.norm, "final_norm")
    # No module outputs the rotated queries and keys; wrap the function in the model's source file instead.
    code: Any = sys.modules[type(model).__module__]
    original = code.apply_rotary_pos_emb

    def recorded(*args, **kwargs):
        q, k = original(*args, **kwargs)
        for x, value in (("q", q), ("k", k)):
            recorder.put(f"layers.{current[0]}.{x}_rope", value.transpose(1, 2))  # [b, heads, s, d]
        return q, k

    code.apply_rotary_pos_emb = recorded


def _after(recorder):
    def register(module, name: str) -> None:
        module.register_forward_hook(
            lambda _, inputs, output: recorder.put(name, output[0] if isinstance(output, tuple) else output)
        )

    return register


def _before(recorder):
    def register(module, name: str) -> None:
        module.register_forward_pre_hook(lambda _, inputs: recorder.put(name, inputs[0]))

    return register


def swap(model, op: str, arch) -> None:
    """Replace one op of the model, in this process, with alignkit's."""
    code: Any = sys.modules[type(model).__module__]
    norm, mlp = type(model.model.norm), type(model.model.layers[0].mlp)
    if op == "rms_norm":
        norm.forward = lambda self, x: ops.rms_norm(x, self.weight, self.variance_epsilon)
    elif op == "linear":
        for name, module in model.model.named_modules():
            if type(module) is torch.nn.Linear:
                # Row-parallel linears have their own summation order, also on one rank.
                gemm = ops.row_parallel_linear if name.endswith(("o_proj", "down_proj")) else ops.linear
                linear: Any = module
                linear.forward = lambda x, m=module, gemm=gemm: gemm(x, m.weight, m.bias)
    elif op == "head":
        head = model.lm_head
        head.forward = lambda x: ops.head_logits(x, head.weight, head.bias)
    elif op == "silu_mul":
        mlp.forward = lambda self, x: self.down_proj(ops.silu_mul(self.gate_proj(x), self.up_proj(x)))
    elif op == "rope":
        code.apply_rotary_pos_emb = _rope(arch, next(model.parameters()).device)
    elif op == "attention":
        from transformers import AttentionInterface

        AttentionInterface.register("alignkit", _attention)
        model.config._attn_implementation = "alignkit"
    else:
        raise UnsupportedError(f"swap: expected one of {', '.join(OPS)} for Hugging Face models, got {op!r}")


def _rope(arch, device):
    table = ops.rope_table(arch.head_dim, arch.max_position, arch.rope_base, device, arch.rope_scaling)

    def rotate(q, k, cos, sin, *_, **__):
        def one(x):  # [b, heads, s, d]; without a KV cache the position is the token's index
            b, heads, s, d = x.shape
            positions = torch.arange(s, device=x.device).repeat(b)
            rows = x.transpose(1, 2).reshape(b * s, heads, d)
            return ops.rope(rows, positions, table).view(b, s, heads, d).transpose(1, 2)

        return one(q), one(k)

    return rotate


def _attention(module, query, key, value, attention_mask, scaling=None, **_):
    b, _, s, _ = query.shape
    cu_seqlens = torch.arange(b + 1, dtype=torch.int32, device=query.device) * s
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return ops.attention(q, k, v, cu_seqlens, scaling).unflatten(0, (b, s)), None


if __name__ == "__main__":
    main(sys.argv[1:])
