"""Megatron-core's modules with their arithmetic replaced by alignkit's ops.

Each class replaces the class of an existing module (`module.__class__`), so parameters, hooks, checkpoints and
`isinstance` are unaffected. Modules get no attributes, except `snapshot.SNAPSHOT`; additional state is in the weak
dictionaries below, keyed by module. Class names are Megatron's on purpose: weight converters distinguish column- and
row-parallel layers by class name. The class attribute `op` names the op that the module runs through.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
from megatron.core.ssm import mlp_layer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import attention, dot_product_attention, mlp, transformer_block, transformer_layer
from megatron.core.transformer.moe import moe_layer
from torch.nn.modules import module as torch_module

from alignkit import ops
from alignkit.contract.rope import Scaling, yarn_attention_factor
from alignkit.dist import CP, TP, check_same_across
from alignkit.errors import UnsupportedError

from . import calls, hooks, moe
from .models import hybrid_block
from .snapshot import SNAPSHOT

vocabulary: weakref.WeakKeyDictionary[OutputLayer, int] = weakref.WeakKeyDictionary()
"""Output layer -> vocabulary size without padding, which Megatron does not store."""

VOCAB_SIZE = "alignkit_vocab_size"
"""Attribute in which `set_vocab_size` stores the size, in a model and thus its copies."""


@dataclass(frozen=True)
class Rotations:
    """Parameters of the `ops.rope_table` that a model's rotary embedding returns."""

    base: float
    rotary_dim: int
    device: torch.device
    scaling: Scaling | None = None

    def table(self, max_seq_len: int) -> torch.Tensor:
        """Return a table of at least `max_seq_len` rows.

        Rows are rounded up to a power of two to limit the number of tables. A row does not depend on their number.
        """
        rows = 1 << max(int(max_seq_len) - 1, 0).bit_length()
        return ops.rope_table(self.rotary_dim, rows, self.base, self.device, self.scaling)


rotations: weakref.WeakKeyDictionary[torch.nn.Module, Rotations] = weakref.WeakKeyDictionary()
"""Rotary embedding -> parameters of its table."""

checked_packed_seq_params: weakref.WeakKeyDictionary[DecoderBlock, Any] = weakref.WeakKeyDictionary()
"""Decoder block -> checked packed_seq_params, for models whose checks of the current forward have passed."""

fused_rope_inputs: weakref.WeakKeyDictionary[SelfAttention, Any] = weakref.WeakKeyDictionary()
"""Attention module -> (rope table, packed_seq_params), while its norms and RoPE run in one op."""

bypassed_norms: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Norms that currently return their input, because `ops.qk_norm_rope` applies them."""


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """``ops.linear`` inside of the stock forward, which handles tied weights, bias and gathering."""

    op = "linear"
    out_dtype: torch.dtype | None = None
    agreed = True
    """The ranks agreed on model and inputs at the start of the forward, so they agree on the inputs of this layer."""

    def _forward_impl(self, input, weight, bias=None, **_):
        return ops.linear(
            input,
            weight,
            bias,
            tp=TP(self.tp_group, agreed=type(self).agreed),
            # The module's own flag: stock passes False for shared experts whose gather is left to its dispatcher.
            sequence_parallel=self.sequence_parallel,
            out_dtype=type(self).out_dtype,
        )


class OutputLayer(ColumnParallelLinear):
    """Output layer with fp32 logits, which are never rounded to the model type."""

    op = "linear_logp"
    out_dtype = torch.float32
    agreed = False  # frameworks also call it outside of a forward

    def forward(self, input_, weight=None, *args, compute: Callable | None = None, **kwargs):
        """Return logits, like stock, or ``compute(input_, weight)``.

        `compute` runs inside of the module's call, so that forward pre-hooks run before the weight is read. In one of
        them Megatron's DDP waits for parameters that are being gathered.
        """
        if compute is None:
            return super().forward(input_, weight, *args, **kwargs)
        return compute(input_, self.weight if weight is None else weight)


OutputLayer.__name__ = ColumnParallelLinear.__name__  # weight converters read it


class RowParallelLinear(layers.RowParallelLinear):
    """``ops.row_parallel_linear``, reduction over ranks included."""

    op = "row_parallel_linear"

    def forward(self, input_):
        out = ops.row_parallel_linear(
            input_, self.weight, tp=TP(self.tp_group, agreed=True), sequence_parallel=self.sequence_parallel
        )
        return out, None


class RMSNorm(torch.nn.RMSNorm):
    """``ops.rms_norm``, also under sequence parallelism, with which stock Megatron does not use torch's norm."""

    op = "rms_norm"

    def forward(self, x):
        return x if self in bypassed_norms else ops.rms_norm(x, self.weight, self.eps)

    @classmethod
    def build(cls, config, hidden_size, eps=1e-5, **_) -> RMSNorm:
        """Return the norm for ``WrappedTorchNorm(config, hidden_size, eps)`` while the patch is active."""
        if config.normalization != "RMSNorm":
            raise UnsupportedError(f"normalization: must be 'RMSNorm', got {config.normalization!r}")
        if config.layernorm_zero_centered_gamma:
            raise UnsupportedError("layernorm_zero_centered_gamma: must be False, got True")
        norm = cls(hidden_size, eps=eps)
        # Megatron sums the gradients of marked weights over the tensor-parallel ranks.
        norm.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        return norm


class MLP(mlp.MLP):
    """SwiGLU: ``ops.silu_mul`` of the two halves of the first GEMM's output."""

    op = "silu_mul"

    def forward(self, hidden_states, per_token_scale=None, **_):
        if per_token_scale is not None:
            raise UnsupportedError("per_token_scale: must be None for an MLP outside of a MoELayer")
        return self.linear_fc2(ops.silu_mul(self.linear_fc1(hidden_states)[0]))


class RotaryEmbedding(rotary_pos_embedding.RotaryEmbedding):
    """Rotary embedding that returns the fp32 table of ``ops.rope_table`` instead of angles."""

    op = "rope_table"

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        return _table(self, max_seq_len, offset)


class YarnRotaryEmbedding(yarn_rotary_pos_embedding.YarnRotaryEmbedding):
    """YaRN rotary embedding: the table and YaRN's factor, which the table already includes."""

    op = "rope_table"

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        return _table(self, max_seq_len, offset), rotations[self].scaling.attention_factor


def _table(rotary: torch.nn.Module, max_seq_len: int, offset: int) -> torch.Tensor:
    if offset:
        raise UnsupportedError(f"offset: must be 0, because rotary positions start at 0, got {offset}")
    if rotary not in rotations:
        raise UnsupportedError(
            f"{type(rotary).__name__}: must be called inside the forward() of a model that patch_megatron has patched"
        )
    return rotations[rotary].table(max_seq_len)


def attention_factor(config) -> float:
    """Return Megatron's factor of cos and sin: YaRN's attention factor, or 1 without YaRN."""
    factor = getattr(config, "yarn_rotary_scaling_factor", None)
    if factor is None:
        return 1.0
    mscales = getattr(config, "yarn_mscale", None), getattr(config, "yarn_mscale_all_dim", None)
    return yarn_attention_factor(factor, *mscales)


def context_parallel(config, group) -> CP:
    """Return the context-parallel ranks of `group`; if None, of Megatron's global group."""
    if config.context_parallel_size == 1:
        return CP()
    return CP(parallel_state.get_context_parallel_group() if group is None else group)


def apply_rotary_pos_emb(t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None, **_):
    """Apply ``ops.rope`` to t ``[s, b, h, d]``, or packed ``[t, h, d]`` with `cu_seqlens`.

    As in stock Megatron, a token's position is its index in its sequence, and `position_ids` are ignored. Ranks of a
    context-parallel group have parts of each sequence.

    freqs: the table of the aligned RotaryEmbedding, which includes YaRN's `mscale`.
    """
    if freqs.dim() != 2:
        raise UnsupportedError(
            "freqs: must be the table [positions, rotary_dim] that rotary_pos_emb of a patched model returns, got "
            f"shape {tuple(freqs.shape)}"
        )
    if mscale != (factor := attention_factor(config)):
        raise UnsupportedError(f"mscale: must be {factor}, the attention factor of the configuration, got {mscale}")
    positions = _positions(t, cu_seqlens, config, cp_group)
    return ops.rope(t.reshape(-1, *t.shape[-2:]), positions, freqs, rotary_dim=freqs.shape[1]).view(t.shape)


def _positions(t: torch.Tensor, cu_seqlens: torch.Tensor | None, config, cp_group) -> torch.Tensor:
    """Return the positions of t's tokens in memory order: [s, b], or packed with `cu_seqlens`."""
    positions = context_parallel(config, cp_group).positions(t.shape[0], cu_seqlens, t.device)
    return positions.repeat_interleave(t.shape[1]) if cu_seqlens is None else positions


class SelfAttention(attention.SelfAttention):
    """Stock attention that applies query/key norms and RoPE in one op, ``ops.qk_norm_rope``.

    The stock code still calls the norms, which then return their input, and gets no rotary embedding. The op runs
    between these two steps. Without query/key norms, with YaRN, or if a hook observes a norm's output, ``ops.rms_norm``
    and ``ops.rope`` run in the stock places, with the same bits.
    """

    op = "qk_norm_rope, rope"

    def forward(self, hidden_states, attention_mask, *args, rotary_pos_emb=None, packed_seq_params=None, **kwargs):
        if self._can_fuse_norm_rope(rotary_pos_emb):
            fused_rope_inputs[self] = rotary_pos_emb, packed_seq_params
            rotary_pos_emb = None
        try:
            return super().forward(
                hidden_states,
                attention_mask,
                *args,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        finally:
            fused_rope_inputs.pop(self, None)

    def get_query_key_value_tensors(self, *args, **kwargs):
        if self not in fused_rope_inputs:
            return super().get_query_key_value_tensors(*args, **kwargs)
        (table, packed), norms = fused_rope_inputs.pop(self), (self.q_layernorm, self.k_layernorm)
        bypassed_norms.update(norms)
        try:
            query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        finally:
            bypassed_norms.difference_update(norms)
        starts = None if packed is None else calls.packed_cu_seqlens(packed)
        rotated = ops.qk_norm_rope(
            query.flatten(0, 1),
            key.flatten(0, 1),
            *(norm.weight for norm in norms),
            norms[0].eps,
            _positions(query, starts, self.config, self.pg_collection.cp),
            table,
            rotary_dim=table.shape[1],
        )
        return *(new.view(old.shape) for new, old in zip(rotated, (query, key), strict=True)), *rest

    def _can_fuse_norm_rope(self, rotary_pos_emb) -> bool:
        norms = self.q_layernorm, self.k_layernorm
        return (
            isinstance(rotary_pos_emb, torch.Tensor)
            and rotary_pos_emb.dim() == 2
            and getattr(self.config, "yarn_rotary_scaling_factor", None)
            is None  # `apply_rotary_pos_emb` checks YaRN's factor
            and all(getattr(type(norm), "op", None) == RMSNorm.op and not _output_hooked(norm) for norm in norms)
            and norms[0].eps == norms[1].eps
        )


_OUTPUT_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Kinds of hooks that receive a module's output or its gradient."""


def _output_hooked(module: torch.nn.Module) -> bool:
    """Return whether a hook receives the output of `module` or its gradient."""
    return any(getattr(module, name) or getattr(torch_module, f"_global{name}") for name in _OUTPUT_HOOKS)


class DotProductAttention(dot_product_attention.DotProductAttention):
    """``ops.attention`` for ``[s, b, h, d]`` micro-batches, and for packed (THD) ones, which stock does not support."""

    op = "attention"

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        cp = context_parallel(self.config, getattr(self.pg_collection, "cp", None))
        if packed_seq_params is not None:
            return attend(cp, query, key, value, calls.packed_cu_seqlens(packed_seq_params)).flatten(1)
        s, b = query.shape[:2]
        if cp.size == 1:
            # All rows have one length, so they pass as heads of one sequence, without a transposed copy.
            q, k, v = (x.flatten(1, 2) for x in (query, key, value))
            return ops.attention(q, k, v, _equal_cu_seqlens(1, s, q.device)).view(s, b, -1)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        return (
            attend(cp, q, k, v, _equal_cu_seqlens(b, s * cp.size, q.device)).view(b, s, -1).transpose(0, 1).contiguous()
        )

    @staticmethod
    def build(stock: Callable) -> Callable:
        """Return ``DotProductAttention.__init__`` that accepts context parallelism, which stock rejects."""

        @functools.wraps(stock)
        def init(module, config, *args, **kwargs):
            without_cp = copy.copy(config)
            without_cp.context_parallel_size = 1
            stock(module, without_cp, *args, **kwargs)
            module.config = config

        return init


def _equal_cu_seqlens(sequences: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the cu_seqlens of sequences of one length."""
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * length


def attend(cp: CP, q, k, v, cu_seqlens) -> torch.Tensor:
    """Return ``ops.attention``, under context parallelism with heads instead of rows distributed over ranks.

    An all-to-all gives each rank all rows of a part of the heads, and another one redistributes the result.
    """
    if cp.size == 1:
        return ops.attention(q, k, v, cu_seqlens)
    order, heads = cp.order(q.shape[0], cu_seqlens), q.shape[1]
    return cp.to_rows(ops.attention(*(cp.to_heads(x, order, heads) for x in (q, k, v)), cu_seqlens), order)


class TransformerLayer(transformer_layer.TransformerLayer):
    """Stock layer with `residual_add` instead of Megatron's ``get_bias_dropout_add``.

    HybridModel's layers have only attention or only an MLP. Their missing half has a module as its bda, which is used.
    """

    op = "residual_add"

    @property
    def self_attn_bda(self) -> Callable:
        return self._modules.get("self_attn_bda", residual_add)  # pyright: ignore[reportReturnType]

    @self_attn_bda.setter
    def self_attn_bda(self, value) -> None:  # stored like an ordinary attribute; the next forward rejects it
        self.__dict__["self_attn_bda"] = value

    @property
    def mlp_bda(self) -> Callable:
        return self._modules.get("mlp_bda", residual_add)  # pyright: ignore[reportReturnType]

    @mlp_bda.setter
    def mlp_bda(self, value) -> None:
        self.__dict__["mlp_bda"] = value


class MLPLayer(TransformerLayer, mlp_layer.MLPLayer):
    """HybridModel's MLP layer, with `residual_add`."""


class DecoderBlock(torch.nn.Module):
    """Stock block of all layers of a model, with a collective check of its arguments."""

    op = "decoder"
    config: Any
    input_tensor: Any
    pre_process: bool

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        groups = tp, _ = parallel_groups(self)
        name = stock_class(type(self)).__name__
        cp = context_parallel(self.config, getattr(self.pg_collection, "cp", None))
        ranks = tp.size if self.config.sequence_parallel else 1

        def checks() -> dict:
            hooks.check_hooks()
            if self not in checked_packed_seq_params:
                raise UnsupportedError(
                    f"{name}: must be called inside its model's forward(), which runs alignkit's checks"
                )
            if checked_packed_seq_params.pop(self) is not kwargs.get("packed_seq_params"):
                raise UnsupportedError(
                    "packed_seq_params: must be the object that the model's forward() received, got another one"
                )
            s, b = (hidden_states if self.pre_process else self.input_tensor).shape[:2]
            return calls.check_call(s * ranks, b, cp, attention_mask, **kwargs)

        check_same_across(groups, name, checks, outer=expert_ranks(self))
        if (packed := kwargs.get("packed_seq_params")) is not None:
            for group in groups:
                group.check_same_values(name, cu_seqlens=calls.packed_cu_seqlens(packed))
        return super().forward(hidden_states, attention_mask, **kwargs)


class TransformerBlock(DecoderBlock, transformer_block.TransformerBlock):
    """GPTModel's decoder block."""


def parallel_groups(module) -> tuple[TP, TP]:
    """Return the tensor-parallel and context-parallel groups of a model or block."""
    groups = module.pg_collection
    cp = getattr(groups, "cp", None) if module.config.context_parallel_size > 1 else None
    return TP(groups.tp), TP(cp, label="context-parallel")


def expert_ranks(module) -> tuple[TP, ...]:
    """Return the expert-tensor-parallel and expert-parallel groups of a model or block; () without experts.

    Ranks of these groups have different tokens, but run the same collectives.
    """
    for layer in getattr(module, "decoder", module).layers:
        if isinstance(mlp_module := getattr(layer, "mlp", None), moe_layer.MoELayer):
            return moe.expert_ranks(mlp_module)
    return ()


def residual_add(training: bool, fused: bool):
    """Return the residual addition in the model type, in place of ``get_bias_dropout_add``."""

    def add(x_with_bias, residual, dropout):
        x, bias = x_with_bias
        if bias is not None:
            raise UnsupportedError("add_bias_linear: must be False, got a layer whose output has a bias")
        if training and dropout > 0:
            raise UnsupportedError(f"hidden_dropout: must be 0 in training, got {dropout}")
        return x + residual

    return add


ALIGNED = (
    ColumnParallelLinear,
    OutputLayer,
    RowParallelLinear,
    RMSNorm,
    MLP,
    RotaryEmbedding,
    YarnRotaryEmbedding,
    SelfAttention,
    DotProductAttention,
    TransformerLayer,
    MLPLayer,
    TransformerBlock,
    *moe.ALIGNED,
    *moe.EXPERT_MODULES,
)
if hybrid_block is not None:

    class HybridStack(DecoderBlock, hybrid_block.HybridStack):
        """HybridModel's decoder block."""

    ALIGNED += (HybridStack,)


STOCK: dict[type, type] = {
    cls: next(base for base in cls.__mro__ if base not in (*ALIGNED, DecoderBlock)) for cls in ALIGNED
}
"""Aligned class -> stock class that it replaces; `te` adds TransformerEngine's."""


def stock_class(cls: type) -> type:
    """Return the stock class of an aligned class; any other class is returned unchanged."""
    return STOCK.get(cls, cls)


def _setstate(self, state: dict) -> None:
    """Restore a copied or unpickled module: registered with the active patch, or of stock class without one."""
    from . import patch

    stock_class(type(self)).__setstate__(self, {k: v for k, v in state.items() if k != SNAPSHOT})
    if patch.is_active():
        hooks.patched_modules.add(self)
    else:
        self.__class__ = stock_class(type(self))


for _cls in ALIGNED:
    _cls.__setstate__ = _setstate
