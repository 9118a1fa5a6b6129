"""Warm-up: kernels are compiled and cuBLASLt's algorithms are tried when the engine starts, not in the first requests.

Each happens once per range of row or sequence counts, so a few representative counts suffice. A missing count delays a
request and changes no bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, RowParallelLinear

from alignkit import ops
from alignkit.ops import library
from alignkit.ops.attention.sharing import variant_batches
from alignkit.ops.linear.cublaslt import warmup_rows
from alignkit.vllm.attention import AlignedAttentionImpl, empty_cache


@torch.inference_mode()
def warm_up(model: Any, config: VllmConfig, logprobs: Callable[[torch.Tensor], object]) -> None:
    """Run the linear layers, one MoE layer, attention, the head and `logprobs` on zeros, for a range of batch sizes.

    All ranks must call this collectively.

    Args:
        model: The model that the worker built.
        config: The engine's configuration. It limits the tokens and sequences of a step.
        logprobs: Function that computes logprobs of logits [sequences, vocabulary].
    """
    tokens, sequences = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
    layers: dict[Any, Any] = {}  # one layer per distinct shape
    for layer in model.modules():
        if isinstance(layer, LinearBase):
            weight: Any = layer.weight
            layers[type(layer), weight.shape, weight.stride(), weight.dtype, layer.bias is None] = layer
    for layer in layers.values():
        weight, bias = layer.weight, layer.bias
        x = torch.zeros(tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for rows in warmup_rows(tokens):
            if isinstance(layer, RowParallelLinear):
                library.row_parallel_linear(x[:rows], weight, bias, layer._group)
            elif isinstance(layer, ReplicatedLinear):
                library.linear_fp32(x[:rows], weight, bias)
            else:
                library.linear(x[:rows], weight, bias)
    runner = next((m for m in model.modules() if isinstance(m, MoERunner)), None)
    if runner is not None:
        weight: Any = runner.routed_experts.w13_weight
        x = torch.zeros(tokens, weight.shape[-1], dtype=weight.dtype, device=weight.device)
        logits = torch.zeros(tokens, runner.moe_config.num_experts, device=weight.device)
        for rows in warmup_rows(tokens):
            runner(x[:rows], logits[:rows])
    _attention(config, {m.impl for m in model.modules() if isinstance(getattr(m, "impl", None), AlignedAttentionImpl)})
    hidden = torch.zeros(
        sequences,
        config.model_config.get_hidden_size(),
        dtype=config.model_config.dtype,
        device=config.device_config.device,
    )
    for rows in warmup_rows(sequences):
        logits = model.compute_logits(hidden[:rows])
        if logits is not None and rows <= 32:  # this rank samples; larger batches use the same kernels
            logprobs(logits)


def _attention(config: VllmConfig, layers: set[AlignedAttentionImpl]) -> None:
    """Run attention of each distinct shape, for every number of sequences that compiles another kernel.

    Each runs twice: with one query token per sequence (decode), and with one more token.
    """
    device, dtype = torch.device(config.device_config.device), config.model_config.dtype  # pyright: ignore[reportArgumentType]
    page = config.cache_config.block_size
    width = -(-config.model_config.max_model_len // page)
    max_sequences = min(config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens - 1)
    kinds = {(layer.num_heads, layer.num_kv_heads, layer.head_size): layer for layer in layers}
    for (heads, kv_heads, dim), layer in kinds.items():
        caches = empty_cache(page, kv_heads, dim, dtype, device)
        for seqs in variant_batches(heads, kv_heads, dim, width * page, max_sequences):
            table = torch.zeros(seqs, width, dtype=torch.int32, device=device)
            for extra in (0, 1):
                starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
                starts[-1] += extra
                q = torch.zeros(seqs + extra, heads, dim, dtype=dtype, device=device)
                ops.paged_attention(q, *caches, table, starts, starts.diff(), layer.scale)
