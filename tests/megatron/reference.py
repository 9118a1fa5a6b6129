"""A dense Qwen2, Qwen3 or Llama, or a Qwen2-MoE or Qwen3-MoE, in plain float64 torch. Shares no code with what it judges."""

import torch

from alignkit.contract.rope import Llama3, Yarn


def weights64(checkpoint):
    """HF name -> float64 leaf that takes a gradient."""
    return {name: checkpoint[name].double().requires_grad_() for name in checkpoint}


def logprobs(arch, w, tokens, chosen=None):
    """Log-probabilities of tokens[1:] given what precedes them, float64 [len(tokens) - 1]. chosen: as for `logits`."""
    return logits(arch, w, tokens[:-1], chosen).log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


def entropy(arch, w, tokens, temperature):
    """Entropy, in nats, of the distribution that each of tokens[1:] was drawn from, float64."""
    logp = (logits(arch, w, tokens[:-1]) / temperature).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def frequencies(arch):
    """Of the rotary embedding, float64 [head_dim / 2]: by torch, from the papers' definitions."""
    d, scaling = arch.rotary_dim, arch.rope_scaling
    f = 1 / arch.rope_base ** (torch.arange(0, d, 2).double() / d)
    if isinstance(scaling, Llama3):
        turns = scaling.original_max_position * f / (2 * torch.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    elif isinstance(scaling, Yarn):
        turns = torch.tensor([scaling.beta_fast, scaling.beta_slow]).double() * 2 * torch.pi
        border = d * (scaling.original_max_position / turns).log() / (2 * torch.tensor(arch.rope_base).double().log())
        low, high = border[0].floor().clamp(min=0), border[1].ceil().clamp(max=d - 1)
        kept = 1 - ((torch.arange(d // 2) - low) / (high - low)).clamp(0, 1)
    else:
        return f
    return f * kept + f / scaling.factor * (1 - kept)


def logits(arch, w, tokens, chosen=None):
    """float64 [len(tokens), vocab]. chosen: bool [mixtures, len(tokens), experts], the experts of each token; None: the best."""
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    t, d = x.shape[0], arch.head_dim
    angle = torch.arange(t).double()[:, None] * frequencies(arch)
    m = getattr(arch.rope_scaling, "attention_factor", 1.0)
    cos, sin = m * angle.cos()[:, None], m * angle.sin()[:, None]
    hidden_from = torch.ones(t, t, dtype=torch.bool).triu(1)

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + arch.norm_eps).sqrt() * weight

    def turn(x):
        a, b = x[..., : arch.rotary_dim].chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., arch.rotary_dim :]], -1)

    def mixture(y, project, gate, chosen, layer):
        scores = y @ gate.T
        if chosen is None:
            mine = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(arch.top_k).indices, True)
        else:
            mine = chosen[sum(arch.has_experts(i) for i in range(layer))]
        share = (scores.softmax(-1) if arch.score == "softmax" else scores.sigmoid()) * mine
        if arch.normalize_top_k:
            share = share / share.sum(-1, keepdim=True)
        share = share * arch.routed_scale
        out = 0
        for e in range(arch.experts):
            gate, up = (project(y, f"experts.{e}.{name}") for name in ("gate", "up"))
            out = out + share[:, e, None] * project(gate * gate.sigmoid() * up, f"experts.{e}.down")
        if not arch.shared_intermediate:
            return out
        shared = "shared_expert" if arch.shared_gate else "shared_experts"
        gate, up = (project(y, f"{shared}.{name}") for name in ("gate", "up"))
        share = (y @ w[f"model.layers.{layer}.mlp.shared_expert_gate.weight"].T).sigmoid() if arch.shared_gate else 1
        return out + share * project(gate * gate.sigmoid() * up, f"{shared}.down")

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
        q, k, v = turn(q), turn(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        attended = scores.masked_fill(hidden_from, float("-inf")).softmax(-1)
        x = x + project(torch.einsum("hqk,khd->qhd", attended, v).reshape(t, -1), "self_attn.o")
        y = norm(x, w[p + "post_attention_layernorm.weight"])
        if p + "mlp.gate.weight" in w:
            x = x + mixture(y, lambda y, name: project(y, f"mlp.{name}"), w[p + "mlp.gate.weight"], chosen, i)
            continue
        gate = project(y, "mlp.gate")
        x = x + project(gate * gate.sigmoid() * project(y, "mlp.up"), "mlp.down")

    head = w["model.embed_tokens.weight" if arch.tied else "lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T
