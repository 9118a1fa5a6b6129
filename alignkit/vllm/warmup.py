"""What the first use of a kernel costs, paid when the engine starts: compiling it, trying cuBLASLt's algorithms. Both
happen once for a range of numbers of rows, or of sequences, so a few of those stand for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, RowParallelLinear

from alignkit import ops
from alignkit.ops import library
from alignkit.ops.attention.sharing import batches
from alignkit.ops.linear.cublaslt import ladder
from alignkit.vllm.attention import AlignedAttentionImpl, empty_cache


@torch.inference_mode()
def warm_up(model: Any, config: VllmConfig, logprobs: Callable[[torch.Tensor], object]) -> None:
    """Runs the linear layers of `model`, and one mixture of experts, with as many rows as a step may have tokens, attention with
    few and many sequences, the head with as many rows as there may be sequences, and `logprobs` on some logits. All ranks call
    it together."""
    tokens, sequences = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
    layers: dict[Any, Any] = {}  # one for all that are computed alike
    for layer in model.modules():
        if isinstance(layer, LinearBase):
            weight: Any = layer.weight
            layers[type(layer), weight.shape, weight.stride(), weight.dtype, layer.bias is None] = layer
    for layer in layers.values():
        weight, bias = layer.weight, layer.bias
        x = torch.zeros(tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for rows in ladder(tokens):
            if isinstance(layer, RowParallelLinear):
                library.row_parallel_linear(x[:rows], weight, bias, layer._group)
            elif isinstance(layer, ReplicatedLinear):
                library.linear_fp32(x[:rows], weight, bias)
            else:
                library.linear(x[:rows], weight, bias)
    runner = next((m for m in model.modules() if isinstance(m, MoERunner)), None)
    if runner is not None:
        like: Any = runner.routed_experts.w13_weight
        x = torch.zeros(tokens, like.shape[-1], dtype=like.dtype, device=like.device)
        logits = torch.zeros(tokens, runner.moe_config.num_experts, device=like.device)
        for rows in ladder(tokens):
            runner(x[:rows], logits[:rows])
    _attention(config, {m.impl for m in model.modules() if isinstance(getattr(m, "impl", None), AlignedAttentionImpl)})
    hidden = torch.zeros(
        sequences,
        config.model_config.get_hidden_size(),
        dtype=config.model_config.dtype,
        device=config.device_config.device,
    )
    for rows in ladder(sequences):
        logits = model.compute_logits(hidden[:rows])
        if logits is not None and rows <= 32:  # this rank samples; more rows take the same kernels
            logprobs(logits)


def _attention(config: VllmConfig, layers: set[AlignedAttentionImpl]) -> None:
    """Runs attention of each kind of layer, with as many sequences as it is compiled anew for: with a query for each, and with one
    more."""
    device, dtype = torch.device(config.device_config.device), config.model_config.dtype  # pyright: ignore[reportArgumentType]
    page = config.cache_config.block_size
    width = -(-config.model_config.max_model_len // page)
    most = min(config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens - 1)
    kinds = {(layer.num_heads, layer.num_kv_heads, layer.head_size): layer for layer in layers}
    for (heads, kv_heads, dim), layer in kinds.items():
        caches = empty_cache(page, kv_heads, dim, dtype, device)
        for seqs in batches(heads, kv_heads, dim, width * page, most):
            table = torch.zeros(seqs, width, dtype=torch.int32, device=device)
            for more in (0, 1):
                starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
                starts[-1] += more
                q = torch.zeros(seqs + more, heads, dim, dtype=dtype, device=device)
                ops.paged_attention(q, *caches, table, starts, starts.diff(), layer.scale)
