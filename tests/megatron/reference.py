"""A dense Qwen2, Qwen3 or Llama in plain float64 torch. Shares no code with what it judges."""

import torch


def weights64(checkpoint):
    """HF name -> float64 leaf that takes a gradient."""
    return {name: checkpoint[name].double().requires_grad_() for name in checkpoint}


def logprobs(arch, w, tokens):
    """Log-probabilities of tokens[1:] given what precedes them, float64 [len(tokens) - 1]."""
    return logits(arch, w, tokens[:-1]).log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


def entropy(arch, w, tokens, temperature):
    """Entropy, in nats, of the distribution that each of tokens[1:] was drawn from, float64."""
    logp = (logits(arch, w, tokens[:-1]) / temperature).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def logits(arch, w, tokens):
    """float64 [len(tokens), vocab]."""
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    t, d = x.shape[0], arch.head_dim
    angle = torch.arange(t).double()[:, None] / arch.rope_base ** (torch.arange(0, d, 2).double() / d)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    hidden_from = torch.ones(t, t, dtype=torch.bool).triu(1)

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + arch.norm_eps).sqrt() * weight

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

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
        gate = project(y, "mlp.gate")
        x = x + project(gate * gate.sigmoid() * project(y, "mlp.up"), "mlp.down")

    head = w["model.embed_tokens.weight" if arch.tied else "lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T
