"""Float64 reference of dense and MoE models in plain torch, for logprobs and gradients within error bounds.

It shares no model code with alignkit. tests/moe_reference.py is the reference for equal bits.
"""

import torch

from alignkit.contract.rope import Llama3, Yarn


def weights64(checkpoint):
    """Return a dict from HF names to float64 leaf tensors that require gradients."""
    return {name: checkpoint[name].double().requires_grad_() for name in checkpoint}


def logprobs(arch, w, tokens, chosen=None):
    """Return the logprob of each of tokens[1:], float64 [len(tokens) - 1]; see `logits` for `chosen`."""
    return logits(arch, w, tokens[:-1], chosen).log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


def entropy(arch, w, tokens, temperature):
    """Return the entropy, in nats, of the distribution of each of tokens[1:], float64 [len(tokens) - 1]."""
    logp = (logits(arch, w, tokens[:-1]) / temperature).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def frequencies(arch):
    """Return the rotary frequencies from the papers' definitions, float64 [rotary_dim / 2]."""
    d, scaling = arch.rotary_dim, arch.rope_scaling
    f = 1 / arch.rope_base ** (torch.arange(0, d, 2).double() / d)
    if isinstance(scaling, Llama3):
        rotations = scaling.original_max_position * f / (2 * torch.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
    elif isinstance(scaling, Yarn):
        rotations = torch.tensor([scaling.beta_fast, scaling.beta_slow]).double() * 2 * torch.pi
        border = (
            d * (scaling.original_max_position / rotations).log() / (2 * torch.tensor(arch.rope_base).double().log())
        )
        low, high = border[0].floor().clamp(min=0), border[1].ceil().clamp(max=d - 1)
        unscaled = 1 - ((torch.arange(d // 2) - low) / (high - low)).clamp(0, 1)
    else:
        return f
    return f * unscaled + f / scaling.factor * (1 - unscaled)


def logits(arch, w, tokens, chosen=None):
    """Return the logits, float64 [len(tokens), vocab].

    Args:
        arch: Architecture.
        w: Weights from `weights64`.
        tokens: Token ids.
        chosen: Experts of each token, bool [MoE layers, len(tokens), experts]; None: the top_k of the router scores.
    """
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    t, d = x.shape[0], arch.head_dim
    angle = torch.arange(t).double()[:, None] * frequencies(arch)
    m = getattr(arch.rope_scaling, "attention_factor", 1.0)
    cos, sin = m * angle.cos()[:, None], m * angle.sin()[:, None]
    future = torch.ones(t, t, dtype=torch.bool).triu(1)

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + arch.norm_eps).sqrt() * weight

    def rotate(x):
        a, b = x[..., : arch.rotary_dim].chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., arch.rotary_dim :]], -1)

    def moe(y, project, gate, chosen, layer):
        scores = y @ gate.T
        if chosen is None:
            selected = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(arch.top_k).indices, True)
        else:
            selected = chosen[sum(arch.has_experts(i) for i in range(layer))]
        routing_weights = (scores.softmax(-1) if arch.score == "softmax" else scores.sigmoid()) * selected
        if arch.normalize_top_k:
            routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
        routing_weights = routing_weights * arch.routed_scale
        out = 0
        for e in range(arch.experts):
            gate, up = (project(y, f"experts.{e}.{name}") for name in ("gate", "up"))
            out = out + routing_weights[:, e, None] * project(gate * gate.sigmoid() * up, f"experts.{e}.down")
        if not arch.shared_intermediate:
            return out
        shared = "shared_expert" if arch.shared_gate else "shared_experts"
        gate, up = (project(y, f"{shared}.{name}") for name in ("gate", "up"))
        routing_weights = (
            (y @ w[f"model.layers.{layer}.mlp.shared_expert_gate.weight"].T).sigmoid() if arch.shared_gate else 1
        )
        return out + routing_weights * project(gate * gate.sigmoid() * up, f"{shared}.down")

    for i in range(arch.layers):
        p = f"model.layers.{i}."

        def project(y, name, p=p):
            bias = w.get(f"{p}{name}_proj.bias")
            y = y @ w[f"{p}{name}_proj.weight"].T
            return y if bias is None else y + bias

        y = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (project(y, f"self_attn.{n}").view(t, -1, d) for n in "qkv")
        if p + "self_attn.q_norm.weight" in w:
            q, k = norm(q, w[p + "self_attn.q_norm.weight"]), norm(k, w[p + "self_attn.k_norm.weight"])
        group = arch.heads // arch.kv_heads
        q, k, v = rotate(q), rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = x + project(torch.einsum("hqk,khd->qhd", probabilities, v).reshape(t, -1), "self_attn.o")
        y = norm(x, w[p + "post_attention_layernorm.weight"])
        if p + "mlp.gate.weight" in w:
            x = x + moe(y, lambda y, name: project(y, f"mlp.{name}"), w[p + "mlp.gate.weight"], chosen, i)
            continue
        gate = project(y, "mlp.gate")
        x = x + project(gate * gate.sigmoid() * project(y, "mlp.up"), "mlp.down")

    head = w["model.embed_tokens.weight" if arch.tied else "lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T
