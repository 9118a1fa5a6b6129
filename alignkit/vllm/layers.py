"""vLLM's layers with alignkit's ops inside, and the scope in which vLLM builds a model out of them.

Each class keeps vLLM's parameters, weight loading and tensor-parallel layout, and replaces what is computed.
Weights stay plain tensors (vLLM would pack them for oneDNN on the CPU), so an update in place reaches the
numbers. What runs in the trunk's `forward` methods is compiled whole: they call custom ops and reshape, and nothing else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import split_tensor_along_last_dim
from vllm.model_executor import custom_op
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models import qwen3, qwen3_moe
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from alignkit import ops
from alignkit.contract.rope import Llama3, Scaling, Yarn
from alignkit.errors import UnsupportedError
from alignkit.ops import library
from alignkit.vllm import versions
from alignkit.vllm.attention import AlignedAttentionBackend
from alignkit.vllm.experts import AlignedExpertsMethod, AlignedMoERunner
from alignkit.vllm.parallel import GROUP
from alignkit.vllm.policy import VOCAB_SIZE


class AlignedLinearMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leaves the weight as it was loaded."""

    def apply(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return library.linear(x, layer.weight, bias)


class AlignedEmbeddingMethod(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leaves the weight as it was loaded."""

    def apply(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise UnsupportedError("logits made outside LogitsProcessor.forward: they would not stay fp32")


class _Linear:
    """Mixin: the linear method is alignkit's."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _require_plain(self, UnquantizedLinearMethod)
        self.quant_method = AlignedLinearMethod()


class _Router(_Linear):
    """Mixin: the logits of a router or gate stay fp32. Stock they are rounded, and of kernels that change with the number of rows."""

    def forward(self: Any, x: torch.Tensor):
        logits = library.linear_fp32(x, self.weight, self.bias)
        return (logits, None) if self.return_bias else logits


class AlignedReplicatedLinear(_Router, ReplicatedLinear):
    """In the models that alignkit knows, only routers are replicated, which vLLM makes of this class until 0.26, and the gates of
    shared experts."""


class AlignedGateLinear(_Router, GateLinear):
    """Its weight is of the model's type, as in Megatron-core: the product needs no more, and a model's may ask for fp32."""

    def __init__(self, *args, params_dtype: torch.dtype | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)


class AlignedColumnParallelLinear(_Linear, ColumnParallelLinear):
    pass


class AlignedMergedColumnParallelLinear(_Linear, MergedColumnParallelLinear):
    pass


class AlignedQKVParallelLinear(_Linear, QKVParallelLinear):
    pass


class AlignedRowParallelLinear(_Linear, RowParallelLinear):
    """Gives whole sums. One that was to give partial ones is refused once the model is built, unless it is of a shared
    expert, whose mixture asks for the whole."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._group = GROUP if self.tp_size > 1 else ""

    def forward(self, input_):
        if not self.input_is_parallel:
            input_ = split_tensor_along_last_dim(input_, self.tp_size)[self.tp_rank]
        bias = None if self.skip_bias_add else self.bias
        output = library.row_parallel_linear(input_, self.weight, bias, self._group)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


class _Embedding:
    """Mixin: the lookup is vLLM's, and exact; the weight stays plain."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _require_plain(self, UnquantizedEmbeddingMethod)
        if self.num_added_embeddings:  # pyright: ignore[reportAttributeAccessIssue] - vLLM's class has it
            raise UnsupportedError("a vocabulary with added embeddings (LoRA)")
        self.quant_method = AlignedEmbeddingMethod()


class AlignedVocabParallelEmbedding(_Embedding, VocabParallelEmbedding):
    pass


class AlignedParallelLMHead(_Embedding, ParallelLMHead):
    pass


class AlignedRMSNorm(RMSNorm):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None or not self.has_weight:
            raise UnsupportedError("RMSNorm over a part of the hidden size, or without a weight")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        if residual is None:
            return library.rms_norm(x, self.weight, self.variance_epsilon)
        return library.add_rms_norm(x, residual, self.weight, self.variance_epsilon)


class AlignedSiluAndMul(SiluAndMul):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return library.silu_mul(gate, up)


class _Rotary:
    """Mixin: the table is ``ops.rope_table``'s, in fp32."""

    scaling: Scaling | None = None

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return torch.empty(0)  # vLLM would round it to the model's type

    def _make_table(self: Any, positions: int) -> None:
        if not self.is_neox_style:
            raise UnsupportedError("interleaved rotary embedding")
        device = torch.get_default_device()  # while it builds, the model's
        table = ops.rope_table(self.rotary_dim, positions, self.base, scaling=self.scaling)
        # A copy of its own: vLLM's sleep mode takes the memory away from under a model's buffers.
        self.register_buffer("cos_sin_cache", table.to(device, copy=True), persistent=False)

    def forward(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None):
        q, k = library.rope_qk(*self._heads(positions, query, key), positions, self.cos_sin_cache, self.rotary_dim)
        return q.view(query.shape), k.view(key.shape)

    def normed(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, q_norm, k_norm):
        """`forward` of what the norms make of each head."""
        heads = self._heads(positions, query, key)
        norms = q_norm.weight, k_norm.weight, q_norm.variance_epsilon
        q, k = library.qk_norm_rope(*heads, *norms, positions, self.cos_sin_cache, self.rotary_dim)
        return q.view(query.shape), k.view(key.shape)

    def _heads(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None):
        if positions.dim() != 1 or key is None:
            raise UnsupportedError("multi-dimensional positions (M-RoPE), or keys shared between layers")
        return (t.view(positions.shape[0], -1, self.head_size) for t in (query, key))


class AlignedRotaryEmbedding(_Rotary, RotaryEmbedding):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._make_table(self.max_position_embeddings)


class AlignedLlama3RotaryEmbedding(_Rotary, Llama3RotaryEmbedding):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.scaling = Llama3(self.scaling_factor, self.low_freq_factor, self.high_freq_factor, self.orig_max_position)
        self._make_table(self.max_position_embeddings)


class AlignedYaRNScalingRotaryEmbedding(_Rotary, YaRNScalingRotaryEmbedding):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        original = self.max_position_embeddings
        self.scaling = Yarn(self.scaling_factor, original, self.beta_fast, self.beta_slow, self.mscale, self.truncate)
        self._make_table(math.ceil(original * self.scaling_factor))


class NormedAttention:
    """Mixin: queries and keys are normalised and rotated by one op. The norms are modules yet, which hold the weights;
    nobody calls them."""

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb.normed(positions, q, k, self.q_norm, self.k_norm)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class AlignedQwen3Attention(NormedAttention, qwen3.Qwen3Attention):
    pass


class AlignedQwen3MoeAttention(NormedAttention, qwen3_moe.Qwen3MoeAttention):
    pass


class AlignedLogitsProcessor(LogitsProcessor):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.logits_as_input:
            raise UnsupportedError("logits_as_input: the model makes its logits itself")
        settings = get_current_vllm_config().additional_config
        self._vocab_size = (
            settings.get(VOCAB_SIZE, self.org_vocab_size) if isinstance(settings, dict) else self.org_vocab_size
        )

    def forward(self, lm_head, hidden_states, embedding_bias=None, skip_gather: bool = False):
        """Logits fp32 [T, org_vocab_size], the ones before temperature in `ops.linear_logp`. Ids beyond the vocabulary
        that the engine was given have -inf: they are never sampled, and count as little as absent ones."""
        if skip_gather:
            raise UnsupportedError("batch-sharded sampling")
        logits = ops.head_logits(
            hidden_states, lm_head.weight, embedding_bias, soft_cap=self.soft_cap, logit_scale=self.scale
        )
        if lm_head.tp_size > 1:
            logits = self._gather_logits(logits)
        if logits is None:
            return None
        if self._vocab_size < self.org_vocab_size:
            logits[..., self._vocab_size :] = float("-inf")
        return logits[..., : self.org_vocab_size]

    def get_top_tokens(self, *args, **kwargs):
        raise UnsupportedError("vocabulary-parallel argmax (speculative decoding)")

    def get_top_k_tokens(self, *args, **kwargs):
        raise UnsupportedError("vocabulary-parallel top-k (speculative decoding)")


ALIGNED = {
    "ReplicatedLinear": AlignedReplicatedLinear,
    "GateLinear": AlignedGateLinear,
    "ColumnParallelLinear": AlignedColumnParallelLinear,
    "MergedColumnParallelLinear": AlignedMergedColumnParallelLinear,
    "QKVParallelLinear": AlignedQKVParallelLinear,
    "RowParallelLinear": AlignedRowParallelLinear,
    "VocabParallelEmbedding": AlignedVocabParallelEmbedding,
    "ParallelLMHead": AlignedParallelLMHead,
    "RMSNorm": AlignedRMSNorm,
    "SiluAndMul": AlignedSiluAndMul,
    "UnquantizedFusedMoEMethod": AlignedExpertsMethod,
    "MoERunner": AlignedMoERunner,
    "RotaryEmbedding": AlignedRotaryEmbedding,
    "Llama3RotaryEmbedding": AlignedLlama3RotaryEmbedding,
    "YaRNScalingRotaryEmbedding": AlignedYaRNScalingRotaryEmbedding,
    "LogitsProcessor": AlignedLogitsProcessor,
    "Qwen3Attention": AlignedQwen3Attention,
    "Qwen3MoeAttention": AlignedQwen3MoeAttention,
}
"""vLLM's class name -> the class that takes its place."""

OF_MODELS = (qwen3.Qwen3Attention, qwen3_moe.Qwen3MoeAttention)
"""Of vLLM's classes, those that its registry does not exchange: the file of a model makes them by name."""


@contextmanager
def aligned_layers(names: Collection[str] = ALIGNED.keys(), attention: bool = True) -> Iterator[None]:
    """Inside, vLLM builds models out of the classes above; outside, and in every model built there, nothing
    changes. Raises UnsupportedError if a layer is already replaced by someone else.

    names, attention: which of vLLM's classes, and whether its attention; `alignkit bisect` exchanges one at a time."""
    registry = custom_op.op_registry_oot
    entry: Any = AttentionBackendEnum[versions.installed().attention]
    in_files = [(sys.modules[cls.__module__], cls.__name__, cls) for cls in OF_MODELS]
    taken = sorted(ALIGNED.keys() & registry.keys())
    taken += [name for file, name, cls in in_files if getattr(file, name) is not cls]
    if taken or entry.is_overridden():
        raise UnsupportedError(f"{', '.join(taken) or entry.name}: already replaced by another vLLM plugin")
    # vLLM shares rotary embeddings between models and remembers backends: neither may cross the border.
    ropes = dict(rotary_embedding._ROPE_DICT)
    backend = AlignedAttentionBackend
    registry.update({name: ALIGNED[name] for name in names})
    for file, name, _ in in_files:
        if name in names:
            setattr(file, name, ALIGNED[name])
    if attention:
        register_backend(entry, f"{backend.__module__}.{backend.__qualname__}")
    rotary_embedding._ROPE_DICT.clear()
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        for name in ALIGNED:
            registry.pop(name, None)
        for file, name, cls in in_files:
            setattr(file, name, cls)
        if attention:
            entry.clear_override()
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(ropes)
        selector._cached_get_attn_backend.cache_clear()


def _require_plain(layer: Any, method: type) -> None:
    if type(layer.quant_method) is not method:
        name = type(layer.quant_method).__name__
        raise UnsupportedError(f"quantization ({name} in {type(layer).__name__})")
