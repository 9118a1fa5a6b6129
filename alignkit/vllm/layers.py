"""Subclasses of vLLM's layers that call alignkit's ops, and the context in which vLLM builds models from them.

Each class inherits vLLM's parameters, weight loading and tensor-parallel layout, and overrides the computation.
Weights stay plain tensors (on the CPU vLLM would pack them for oneDNN), so in-place updates take effect. torch.compile
compiles the decoder layers' `forward` methods in full graphs, so these methods only call custom ops and reshape.
"""

from __future__ import annotations

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
from vllm.model_executor.models import glm4_moe, qwen3, qwen3_moe
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from alignkit import ops
from alignkit.contract.rope import Llama3, Scaling, Yarn
from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import UnsupportedError
from alignkit.ops import library
from alignkit.vllm import versions
from alignkit.vllm.attention import AlignedAttentionBackend
from alignkit.vllm.experts import AlignedExpertsMethod, AlignedMoERunner
from alignkit.vllm.parallel import TP_GROUP
from alignkit.vllm.policy import VOCAB_SIZE


class AlignedLinearMethod(UnquantizedLinearMethod):
    @replaces()
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weight as loaded."""

    @replaces()
    def apply(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return library.linear(x, layer.weight, bias)


@relies_on("model_executor/layers/vocab_parallel_embedding.py:UnquantizedEmbeddingMethod", members="tie_weights")
class AlignedEmbeddingMethod(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weight as loaded."""

    def apply(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise UnsupportedError(
            "lm_head: must be called by LogitsProcessor.forward, which computes fp32 logits, got another caller"
        )


class _Linear:
    """Mixin that sets alignkit's linear method."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _require_plain(self, UnquantizedLinearMethod)
        self.quant_method = AlignedLinearMethod()


class _Router(_Linear):
    """Mixin that returns the logits of a router or gate in fp32.

    Stock vLLM rounds them, and its kernel depends on the number of rows.
    """

    def forward(self: Any, x: torch.Tensor):
        logits = library.linear_fp32(x, self.weight, self.bias)
        return (logits, None) if self.return_bias else logits


class AlignedReplicatedLinear(_Router, ReplicatedLinear):
    """A router (vLLM until 0.26) or a shared expert's gate: supported models have no other replicated linear layers."""


class AlignedGateLinear(_Router, GateLinear):
    """A router whose weight has the model's dtype, as in Megatron-core, even if the model requests fp32."""

    def __init__(self, *args, params_dtype: torch.dtype | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)


class AlignedColumnParallelLinear(_Linear, ColumnParallelLinear):
    pass


class AlignedMergedColumnParallelLinear(_Linear, MergedColumnParallelLinear):
    pass


class AlignedQKVParallelLinear(_Linear, QKVParallelLinear):
    pass


@relies_on("model_executor/layers/linear.py:RowParallelLinear", "input_is_parallel reduce_results disable_tp")
class AlignedRowParallelLinear(_Linear, RowParallelLinear):
    """A row-parallel layer that returns complete sums.

    After the build, `refuse_model` rejects layers with reduce_results=False. The MoE runner sets it to True for a
    shared expert.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._group = TP_GROUP if self.tp_size > 1 else ""

    @replaces()
    def forward(self, input_):
        if not self.input_is_parallel:
            input_ = split_tensor_along_last_dim(input_, self.tp_size)[self.tp_rank]
        bias = None if self.skip_bias_add else self.bias
        output = library.row_parallel_linear(input_, self.weight, bias, self._group)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


class _Embedding:
    """Mixin that keeps vLLM's lookup, which is exact, and the plain weight."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _require_plain(self, UnquantizedEmbeddingMethod)
        if self.num_added_embeddings:  # pyright: ignore[reportAttributeAccessIssue] - vLLM's class has it
            added = self.num_added_embeddings  # pyright: ignore[reportAttributeAccessIssue] - vLLM's class has it
            raise UnsupportedError(f"num_added_embeddings (LoRA): must be 0, got {added}")
        self.quant_method = AlignedEmbeddingMethod()


class AlignedVocabParallelEmbedding(_Embedding, VocabParallelEmbedding):
    pass


@relies_on("model_executor/layers/vocab_parallel_embedding.py:ParallelLMHead", members="tie_weights")
class AlignedParallelLMHead(_Embedding, ParallelLMHead):
    pass


@relies_on("model_executor/layers/layernorm.py:RMSNorm", "eps var_hidden_size has_weight")
class AlignedRMSNorm(RMSNorm):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None:
            raise UnsupportedError(f"RMSNorm: var_hidden_size: must be None, got {self.variance_size_override}")
        if not self.has_weight:
            raise UnsupportedError("RMSNorm: has_weight: must be True, got False")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        if residual is None:
            return library.rms_norm(x, self.weight, self.variance_epsilon)
        return library.add_rms_norm(x, residual, self.weight, self.variance_epsilon)


class AlignedSiluAndMul(SiluAndMul):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return library.silu_mul(gate, up)


class _Rotary:
    """Mixin that uses the fp32 table of `ops.rope_table`."""

    scaling: Scaling | None = None

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return torch.empty(0)  # vLLM's table has the model's dtype; _make_table replaces it

    def _make_table(self: Any, positions: int) -> None:
        if not self.is_neox_style:
            raise UnsupportedError(
                "rotary embedding: is_neox_style: must be True, because the interleaved layout is not supported, got "
                "False"
            )
        device = torch.get_default_device()  # the model's device during the build
        table = ops.rope_table(self.rotary_dim, positions, self.base, scaling=self.scaling)
        # Copy the table, which `ops.rope_table` caches: vLLM's sleep mode frees the memory of a model's buffers.
        self.register_buffer("cos_sin_cache", table.to(device, copy=True), persistent=False)

    def forward(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None):
        q, k = library.rope_qk(*self._heads(positions, query, key), positions, self.cos_sin_cache, self.rotary_dim)
        return q.view(query.shape), k.view(key.shape)

    def normed(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, q_norm, k_norm):
        """Normalize each head by `q_norm` and `k_norm`, then rotate, in one op."""
        heads = self._heads(positions, query, key)
        norms = q_norm.weight, k_norm.weight, q_norm.variance_epsilon
        q, k = library.qk_norm_rope(*heads, *norms, positions, self.cos_sin_cache, self.rotary_dim)
        return q.view(query.shape), k.view(key.shape)

    def _heads(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None):
        if positions.dim() != 1:
            raise UnsupportedError(
                f"positions: must have 1 dimension, because M-RoPE is not supported, got shape {tuple(positions.shape)}"
            )
        if key is None:
            raise UnsupportedError("key: must be given, because KV sharing between layers is not supported, got None")
        return (t.view(positions.shape[0], -1, self.head_size) for t in (query, key))


@relies_on(
    "model_executor/layers/rotary_embedding/base.py:RotaryEmbedding",
    "head_size rotary_dim max_position_embeddings base is_neox_style init_cache",
)
class AlignedRotaryEmbedding(_Rotary, RotaryEmbedding):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._make_table(self.max_position_embeddings)


@relies_on(
    "model_executor/layers/rotary_embedding/llama3_rope.py:Llama3RotaryEmbedding.__init__",
    "orig_max_position",
    mentions="scaling_factor low_freq_factor high_freq_factor",
)
class AlignedLlama3RotaryEmbedding(_Rotary, Llama3RotaryEmbedding):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.scaling = Llama3(self.scaling_factor, self.low_freq_factor, self.high_freq_factor, self.orig_max_position)
        self._make_table(self.max_position_embeddings)


@relies_on(
    "model_executor/layers/rotary_embedding/yarn_scaling_rope.py:YaRNScalingRotaryEmbedding.__init__",
    "scaling_factor truncate",
    mentions="beta_fast beta_slow mscale truncate",
)
class AlignedYaRNScalingRotaryEmbedding(_Rotary, YaRNScalingRotaryEmbedding):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        original = self.max_position_embeddings
        self.scaling = Yarn(self.scaling_factor, original, self.beta_fast, self.beta_slow, self.mscale, self.truncate)
        self._make_table(self.scaling.positions)


class NormedAttention:
    """Mixin that normalizes and rotates queries and keys in one op.

    The norm modules only hold the weights; their `forward` is not called.
    """

    @replaces(
        "model_executor/models/qwen3.py:Qwen3Attention.forward",
        mentions="qkv_proj q_size kv_size q_norm k_norm rotary_emb attn o_proj",
    )
    @replaces(
        "model_executor/models/qwen3_moe.py:Qwen3MoeAttention.forward",
        mentions="qkv_proj q_size kv_size q_norm k_norm rotary_emb attn o_proj",
    )
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


class AlignedGlm4MoE(glm4_moe.Glm4MoE):
    """GLM-4.5's MoE layer. Its router is a `GateLinear` from vLLM 0.32 on, and torch's `Linear` in fp32 before."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        stock = self.gate
        if isinstance(stock, torch.nn.Linear):
            self.gate = AlignedReplicatedLinear(stock.in_features, stock.out_features, bias=False)
            self.gate.e_score_correction_bias = stock.e_score_correction_bias  # the experts hold it too

    @replaces("model_executor/models/glm4_moe.py:Glm4MoE.forward", mentions="gate experts")
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states=hidden_states, router_logits=logits)


@relies_on("model_executor/layers/logits_processor.py:LogitsProcessor", "scale logits_as_input soft_cap")
@relies_on("model_executor/layers/logits_processor.py:LogitsProcessor._gather_logits", "logits")
@relies_on("model_executor/layers/logits_processor.py:LogitsProcessor.forward", "skip_gather", when="sharded_logits")
class AlignedLogitsProcessor(LogitsProcessor):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.logits_as_input:
            raise UnsupportedError("LogitsProcessor: logits_as_input: must be False, got True")
        settings = get_current_vllm_config().additional_config
        self._vocab_size = (
            settings.get(VOCAB_SIZE, self.org_vocab_size) if isinstance(settings, dict) else self.org_vocab_size
        )

    def forward(self, lm_head, hidden_states, embedding_bias=None, skip_gather: bool = False):
        """Return fp32 logits [T, org_vocab_size], equal to the logits of `ops.linear_logp` before temperature.

        Ids beyond the engine's vocabulary size have logit -inf: they are never sampled and have no probability.
        """
        if skip_gather:
            raise UnsupportedError("enable_batch_sharded_sampling: must be False, got True")
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

    @replaces(accepts="lm_head hidden_states")
    def get_top_tokens(self, *args, **kwargs):
        raise UnsupportedError(
            "LogitsProcessor.get_top_tokens: must not be called, because speculative decoding is not supported"
        )

    @replaces(accepts="lm_head hidden_states", when="sharded_logits")
    def get_top_k_tokens(self, *args, **kwargs):
        raise UnsupportedError(
            "LogitsProcessor.get_top_k_tokens: must not be called, because speculative decoding is not supported"
        )


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
    "Glm4MoE": AlignedGlm4MoE,
}
"""Name of a vLLM class -> the class that replaces it.

A built model may contain only these classes and the containers in `refuse.STRUCTURE`. A name also needs a hook point,
and an op that `alignkit bisect --swap` replaces needs it in `LAYERS` of `alignkit.bisect.vllm_worker`.
"""

MODEL_CLASSES = (qwen3.Qwen3Attention, qwen3_moe.Qwen3MoeAttention, glm4_moe.Glm4MoE)
"""Classes that vLLM's registry cannot replace, because model files instantiate them by name."""


@relies_on("model_executor/custom_op.py:PluggableLayer", members="__new__")
@relies_on("model_executor/custom_op.py:CustomOp", members="__new__")
@relies_on("v1/attention/backends/registry.py:AttentionBackendEnum", members="is_overridden clear_override")
@relies_on("v1/attention/backends/registry.py:register_backend", "backend class_path")
@contextmanager
def aligned_layers(names: Collection[str] = ALIGNED.keys(), attention: bool = True) -> Iterator[None]:
    """Within the block, vLLM builds models from aligned classes. Models built outside of it do not change.

    Args:
        names: Names of the vLLM classes to replace, by default all. `alignkit bisect` replaces one at a time.
        attention: Whether to replace the attention backend too.

    Raises:
        UnsupportedError: If another vLLM plugin has already replaced one of the classes.
    """
    registry = custom_op.op_registry_oot
    entry: Any = AttentionBackendEnum[versions.installed().attention]
    model_classes = [(sys.modules[cls.__module__], cls.__name__, cls) for cls in MODEL_CLASSES]
    taken = sorted(ALIGNED.keys() & registry.keys())
    taken += [name for file, name, cls in model_classes if getattr(file, name) is not cls]
    if taken or entry.is_overridden():
        raise UnsupportedError(
            f"{', '.join(taken) or entry.name}: already replaced by another vLLM plugin. Disable that plugin"
        )
    # vLLM caches rotary embeddings and attention backends globally: clear both caches here and at the end.
    ropes = dict(rotary_embedding._ROPE_DICT)
    backend = AlignedAttentionBackend
    registry.update({name: ALIGNED[name] for name in names})
    for file, name, _ in model_classes:
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
        for file, name, cls in model_classes:
            setattr(file, name, cls)
        if attention:
            entry.clear_override()
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(ropes)
        selector._cached_get_attn_backend.cache_clear()


def _require_plain(layer: Any, method: type) -> None:
    if type(layer.quant_method) is not method:
        name = type(layer.quant_method).__name__
        raise UnsupportedError(
            f"{type(layer).__name__}.quant_method (quantization): must be {method.__name__}, got {name}"
        )
