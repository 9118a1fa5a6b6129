"""Reference logprobs of an MoE model: alignkit's ops composed on unsharded weights, without an engine.

tests/vllm/test_experts.py and tests/megatron/test_moe.py require equal bits from the real engines. A new router or
expert option of `Experts` (alignkit/models) needs its line here.
"""

import torch
from safetensors.torch import load_file

from alignkit import ops
from alignkit.convert import read_architecture


@torch.no_grad()
def logprobs(path, prompt, tokens, device="cpu"):
    """Return the logprob of each token in `tokens`, given the prompt and the earlier tokens."""
    arch, weights = read_architecture(path), load_file(f"{path}/model.safetensors", device)
    ids = torch.tensor(prompt + tokens, device=device)
    positions, cu_seqlens = torch.arange(len(ids), device=device), torch.tensor([0, len(ids)], device=device)
    table = ops.rope_table(arch.rotary_dim, len(ids), arch.rope_base, device)
    x, residual = weights["model.embed_tokens.weight"][ids], None

    def norm(x, name, residual=None):
        return ops.rms_norm(x, weights[name], arch.norm_eps, residual)

    for i in range(arch.layers):
        prefix = f"model.layers.{i}."
        if residual is None:
            residual, x = x, norm(x, prefix + "input_layernorm.weight")
        else:
            x, residual = norm(x, prefix + "input_layernorm.weight", residual)
        q, k, v = (
            ops.linear(
                x, weights[f"{prefix}self_attn.{name}_proj.weight"], weights.get(f"{prefix}self_attn.{name}_proj.bias")
            ).unflatten(-1, (-1, arch.head_dim))
            for name in "qkv"
        )
        if arch.qk_norm:
            q, k = norm(q, prefix + "self_attn.q_norm.weight"), norm(k, prefix + "self_attn.k_norm.weight")
        q, k = (ops.rope(x, positions, table, rotary_dim=arch.rotary_dim) for x in (q, k))
        x = ops.attention(q, k, v, cu_seqlens).flatten(1)
        x = ops.row_parallel_linear(x, weights[prefix + "self_attn.o_proj.weight"])
        x, residual = norm(x, prefix + "post_attention_layernorm.weight", residual)
        x = mlp(x, arch, {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)})
    hidden, _ = norm(x, "model.norm.weight", residual)
    head = weights["model.embed_tokens.weight" if arch.tied else "lm_head.weight"]
    return ops.linear_logp(hidden[len(prompt) - 1 : -1], head, ids[len(prompt) :]).cpu()


def mlp(x, arch, weights):
    """Return the output of an MoE layer, or of an MLP in a dense layer."""
    if "mlp.down_proj.weight" in weights:
        gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return ops.row_parallel_linear(ops.silu_mul(ops.linear(x, gate), ops.linear(x, up)), down)
    if arch.family == "mixtral":
        before, names = "block_sparse_moe.", ("w1", "w3", "w2")
    else:
        before, names = "mlp.", ("gate_proj", "up_proj", "down_proj")
    logits = ops.linear(x, weights[before + "gate.weight"], out_dtype=torch.float32)
    chosen, ids = ops.moe_router(
        logits,
        arch.top_k,
        score=arch.score,
        normalize=arch.normalize_top_k,
        bias=weights.get("mlp.gate.e_score_correction_bias"),
        groups=arch.groups,
        top_groups=arch.top_groups,
        scale=arch.routed_scale,
    )
    gate, up, down = ([weights[f"{before}experts.{e}.{name}.weight"] for e in range(arch.experts)] for name in names)
    out = ops.moe_experts(x, ids, chosen, [torch.cat(both) for both in zip(gate, up, strict=True)], down)
    if not arch.shared_intermediate:
        return out
    shared = "mlp.shared_experts" if "mlp.shared_experts.down_proj.weight" in weights else "mlp.shared_expert"
    gate, up, down = (weights[f"{shared}.{name}.weight"] for name in names)
    shared = ops.row_parallel_linear(ops.silu_mul(ops.linear(x, gate), ops.linear(x, up)), down)
    if "mlp.shared_expert_gate.weight" not in weights:
        return out + shared
    share = ops.linear(x, weights["mlp.shared_expert_gate.weight"], out_dtype=torch.float32)
    return out + ops.sigmoid_mul(share, shared)
