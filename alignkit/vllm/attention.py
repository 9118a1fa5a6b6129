"""The attention backend for vLLM, which calls `ops.paged_attention`.

vLLM calls the classes by the interface in its `v1/attention/backend.py`, and imports the backend by the name that
`layers.aligned_layers` registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm import _custom_ops as vllm_ops
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import UnsupportedError
from alignkit.ops.attention import PagedAttention, reserve
from alignkit.vllm import versions


@dataclass
class AlignedAttentionMetadata(AttentionMetadata):
    """Attention metadata of a step.

    num_tokens: rows of q to compute. In a CUDA graph they include padding after the last sequence, and some sequences
    have no rows. attention: the op for the sequences of the step.
    """

    num_tokens: int
    attention: PagedAttention


@relies_on("v1/attention/backend.py:AttentionMetadataBuilder", members="_cudagraph_support")
@relies_on("v1/attention/backend.py:AttentionCGSupport", members="ALWAYS")
@relies_on("v1/attention/backend.py:AttentionMetadataBuilder", "kv_cache_spec layer_names vllm_config device")
@relies_on(
    "v1/attention/backend.py:CommonAttentionMetadata",
    members="num_actual_tokens query_start_loc seq_lens block_table_tensor causal",
)
class AlignedAttentionMetadataBuilder(AttentionMetadataBuilder[AlignedAttentionMetadata]):
    # The kernel's grid depends only on shapes. The kernel reads lengths and block ids on the device.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @replaces()
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AlignedAttentionMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError(f"causal: must be True, got {common.causal!r}")
        attention = PagedAttention(common.block_table_tensor, common.query_start_loc, common.seq_lens)
        return AlignedAttentionMetadata(num_tokens=common.num_actual_tokens, attention=attention)


class AlignedAttentionImpl(AttentionImpl[AlignedAttentionMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra,
    ) -> None:
        refused = {
            "alibi_slopes (ALiBi): must be None, got slopes": alibi_slopes is not None,
            f"sliding_window: must be None, got {sliding_window}": sliding_window is not None,
            f"logits_soft_cap (attention soft cap): must be None or 0, got {logits_soft_cap}": bool(logits_soft_cap),
            f"attn_type: must be {AttentionType.DECODER.value}, got {attn_type}": attn_type != AttentionType.DECODER,
            "kv_sharing_target_layer_name (KV cache shared between layers): must be None, got "
            f"{kv_sharing_target_layer_name}": kv_sharing_target_layer_name is not None,
            f"kv_cache_dtype: must be auto, bfloat16 or float32, got {kv_cache_dtype}": kv_cache_dtype
            not in ("auto", "bfloat16", "float32"),
        } | {f"{name}: must be None, got a {type(value).__name__}": value is not None for name, value in extra.items()}
        names = [name for name, present in refused.items() if present]
        if names:
            raise UnsupportedError(f"attention: unsupported settings: {'; '.join(names)}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.longest = get_current_vllm_config().model_config.max_model_len

    @replaces(
        "v1/attention/backends/cpu_attn.py:CPUAttentionBackendImpl.do_kv_cache_update",
        "key value kv_cache slot_mapping",
        when="cpu",
    )
    @replaces(
        "v1/attention/backends/triton_attn.py:TritonAttentionImpl.do_kv_cache_update",
        "key value kv_cache slot_mapping",
        when="cuda",
    )
    @relies_on("model_executor/layers/attention/attention.py:unified_kv_cache_update", "key value layer_name")
    @relies_on("v1/attention/backends/utils.py:NULL_BLOCK_ID")
    @relies_on(
        "_custom_ops.py:reshape_and_cache_flash",
        "key value key_cache value_cache slot_mapping kv_cache_dtype",
        when="cuda",
    )
    def do_kv_cache_update(
        self, layer, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write key and value [T, Hkv, D] to their cache slots.

        Padding has slot -1. vLLM's kernel skips it; on the CPU it is written to block 0, vLLM's unused null block.
        """
        k_cache, v_cache = _split(kv_cache)
        if kv_cache.is_cuda:
            vllm_ops.reshape_and_cache_flash(
                key, value, k_cache, v_cache, slot_mapping, "auto", layer._k_scale, layer._v_scale
            )
            return
        slots = slot_mapping.clamp(min=0)
        block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
        k_cache[block, offset] = key[: len(slots)]
        v_cache[block, offset] = value[: len(slots)]

    @replaces(accepts="kv_cache attn_metadata output")
    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AlignedAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of query [T, Hq, D] into output [T, Hq, D], and return output."""
        for name, given in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if given is not None:
                raise UnsupportedError(f"{name}: must be None, because quantized attention output is not supported")
        if attn_metadata is None:  # a dummy batch: the output is unused but must be finite
            reserve(query, self.num_kv_heads, self.longest)  # vLLM measures peak memory with a dummy batch
            return output.zero_()
        n = attn_metadata.num_tokens
        k_cache, v_cache = _split(kv_cache)
        attn_metadata.attention(query[:n], k_cache, v_cache, self.scale, output[:n])
        return output


@relies_on("v1/attention/backend.py:AttentionBackend", members="get_builder_cls")
class AlignedAttentionBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return versions.installed().attention  # the entry of vLLM's registry that this backend replaces

    @staticmethod
    def get_impl_cls() -> type[AlignedAttentionImpl]:
        return AlignedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AlignedAttentionMetadataBuilder]:
        return AlignedAttentionMetadataBuilder

    @classmethod
    @relies_on("v1/kv_cache_layout.py:KVCacheLayout", members="LBNHC", when="kv_cache_layouts")
    @replaces(when="kv_cache_layouts")
    def supported_kv_cache_layouts(cls) -> tuple:
        """Return the supported layouts; vLLM calls this since 0.32."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBNHC,)

    @staticmethod
    @replaces(when="kv_cache_shape")
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of the logical view that `_split` takes; vLLM calls this until 0.26."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    @replaces(when="kv_cache_shape")
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the dimensions of the logical view in memory order; vLLM calls this until 0.26."""
        if include_num_layers_dimension:
            raise NotImplementedError  # tells vLLM that each layer has its own cache
        return 0, 2, 1, 3

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


def empty_cache(page: int, kv_heads: int, dim: int, dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zero K and V caches of one block, in the engine's layout."""
    return _split(torch.zeros(1, page, kv_heads, 2 * dim, dtype=dtype, device=device).permute(0, 2, 1, 3))


def _split(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views K and V [blocks, block_size, Hkv, D] of vLLM's logical view [blocks, Hkv, block_size, 2 * D].

    The memory layout is [blocks, block_size, Hkv, 2 * D].
    """
    k_cache, v_cache = kv_cache.permute(0, 2, 1, 3).chunk(2, dim=-1)
    return k_cache, v_cache
