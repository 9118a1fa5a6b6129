"""Attention backends, the children of TransformerEngine's `DotProductAttention`.

Only `UnfusedDotProductAttention` computes. An aligned parent ignores both children, and rejects children that have
parameters.
"""

import contextlib
import itertools

import torch


class FlashAttention(torch.nn.Module):
    def __init__(self, softmax_scale, attention_dropout=0.0, attention_dropout_ctx=contextlib.nullcontext):
        super().__init__()
        self.softmax_scale = softmax_scale
        self.attention_dropout = attention_dropout
        self.attention_dropout_ctx = attention_dropout_ctx


class UnfusedDotProductAttention(torch.nn.Module):
    def __init__(self, softmax_scale, attention_dropout=0.0, attention_dropout_ctx=contextlib.nullcontext):
        super().__init__()
        self.softmax_scale = softmax_scale
        self.attention_dropout = torch.nn.Dropout(attention_dropout)
        self.attention_dropout_ctx = attention_dropout_ctx

    def forward(self, query, key, value, cu_seqlens):
        """Compute causal attention of packed sequences, ``[t, h, d]`` -> ``[t, h * d]``."""
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = []
        for a, b in itertools.pairwise(cu_seqlens.tolist()):
            scores = torch.einsum("qhd,khd->hqk", query[a:b], key[a:b]).float() * self.softmax_scale
            hidden = torch.ones(b - a, b - a, dtype=torch.bool, device=query.device).triu(1)
            probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(query.dtype)
            out.append(torch.einsum("hqk,khd->qhd", self.attention_dropout(probabilities), value[a:b]))
        return torch.cat(out).flatten(1)
