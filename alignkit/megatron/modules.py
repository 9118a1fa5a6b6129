"""Megatron-core's modules with their arithmetic replaced by alignkit's ops.

Each class replaces the class of an existing module (`module.__class__`), so parameters, hooks, checkpoints and
`isinstance` are unaffected. Modules get no attributes: `state` has the record of their model. Class names are
Megatron's on purpose: weight converters distinguish column- and row-parallel layers by class name. The class attribute
`op` names the op that the module runs through.
"""

from __future__ import annotations

import copy
import functools
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
from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import UnsupportedError

from . import calls, moe
from . import state as states
from .models import hybrid_block


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


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """``ops.linear`` inside of the stock forward, which handles tied weights, bias and gathering."""

    op = "linear"
    out_dtype: torch.dtype | None = None
    agreed = True
    """The ranks agreed on model and inputs at the start of the forward, so they agree on the inputs of this layer."""

    @replaces(accepts="input weight")
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

    @replaces("tensor_parallel/layers.py:ColumnParallelLinear.forward", "input_ weight")
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

    @replaces()
    def forward(self, input_):
        out = ops.row_parallel_linear(
            input_, self.weight, tp=TP(self.tp_group, agreed=True), sequence_parallel=self.sequence_parallel
        )
        return out, None


class RMSNorm(torch.nn.RMSNorm):
    """``ops.rms_norm``, also under sequence parallelism, with which stock Megatron does not use torch's norm."""

    op = "rms_norm"

    def forward(self, x, weight_only: bool = False):
        """Return the norm of x, or only the weight, which is read in a module call so that pre-hooks run first."""
        return self.weight if weight_only else ops.rms_norm(x, self.weight, self.eps)

    @classmethod
    @replaces("transformer/torch_norm.py:WrappedTorchNorm.__new__")
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

    @replaces()
    def forward(self, hidden_states, per_token_scale=None, **_):
        if per_token_scale is not None:
            raise UnsupportedError("per_token_scale: must be None for an MLP outside of a MoELayer")
        return self.linear_fc2(ops.silu_mul(self.linear_fc1(hidden_states)[0]))


class RotaryEmbedding(rotary_pos_embedding.RotaryEmbedding):
    """Rotary embedding that returns the fp32 table of ``ops.rope_table`` instead of angles."""

    op = "rope_table"

    @replaces()
    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        return _rotations(self, offset).table(max_seq_len)


class YarnRotaryEmbedding(yarn_rotary_pos_embedding.YarnRotaryEmbedding):
    """YaRN rotary embedding: the table and YaRN's factor, which the table already includes."""

    op = "rope_table"

    @replaces()
    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        rotations = _rotations(self, offset)
        return rotations.table(max_seq_len), rotations.scaling.attention_factor


def _rotations(rotary: torch.nn.Module, offset: int) -> Any:
    if offset:
        raise UnsupportedError(f"offset: must be 0, because rotary positions start at 0, got {offset}")
    record = states.of(rotary)
    if record is None or record.rotations is None:
        raise UnsupportedError(
            f"{type(rotary).__name__}: must be called inside the forward() of a model that patch_megatron has patched"
        )
    return record.rotations


YARN_FIELDS = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
"""Attributes of a configuration that `attention_factor` reads."""


def attention_factor(config) -> float:
    """Return Megatron's factor of cos and sin: YaRN's attention factor, or 1 without YaRN."""
    factor, *mscales = (getattr(config, name, None) for name in YARN_FIELDS)
    return 1.0 if factor is None else yarn_attention_factor(factor, *mscales)


def context_parallel(config, group) -> CP:
    """Return the context-parallel ranks of `group`; if None, of Megatron's global group."""
    if config.context_parallel_size == 1:
        return CP()
    return CP(parallel_state.get_context_parallel_group() if group is None else group)


@relies_on("transformer/attention.py:apply_rotary_pos_emb")
@replaces("models/common/embeddings/rope_utils.py:apply_rotary_pos_emb")
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
    """Attention layer that applies query/key norms and RoPE in one op, ``ops.qk_norm_rope``.

    Replaces Megatron's forward as a whole, for the settings that `policy` allows. Without query/key norms, or if a hook
    observes a norm's output, ``ops.rms_norm`` and ``ops.rope`` run one after the other, with the same bits.
    """

    op = "qk_norm_rope, rope"

    @replaces(
        "transformer/attention.py:Attention.forward",
        "hidden_states attention_mask rotary_pos_emb packed_seq_params",
        mentions="""
            get_query_key_value_tensors apply_rotary_pos_emb checkpoint_core_attention training attn_mask_type
            _checkpointed_attention_forward core_attention linear_proj
        """,
    )
    @relies_on(
        "transformer/attention.py:Attention._checkpointed_attention_forward",
        "query key value attention_mask attn_mask_type attention_bias packed_seq_params",
    )
    def forward(self, hidden_states, attention_mask, *, rotary_pos_emb=None, packed_seq_params=None, **unsupported):
        for name, value in unsupported.items():
            if value is not None:
                raise UnsupportedError(
                    f"{name}: must be None, because aligned attention does not support it, got a {type(value).__name__}"
                )
        query, key, value = self._projected(hidden_states)
        starts = None if packed_seq_params is None else calls.packed_cu_seqlens(packed_seq_params)
        query, key = self._rotated(query, key, rotary_pos_emb, starts)
        if packed_seq_params is not None:
            query, key, value = (t.squeeze(1) for t in (query, key, value))
        attend = self.core_attention
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        out = attend(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            attention_bias=None,
            packed_seq_params=packed_seq_params,
        )
        return self.linear_proj(out if packed_seq_params is None else out.reshape(len(out), 1, -1))

    @replaces(
        "transformer/attention.py:SelfAttention.get_query_key_value_tensors",
        mentions="""
            linear_qkv hidden_size_per_attention_head num_query_groups_per_partition num_attention_heads_per_partition
            q_layernorm k_layernorm
        """,
    )
    def _projected(self, hidden_states):
        """Return queries ``[s, b, heads, d]``, keys and values ``[s, b, kv_heads, d]``: q, k, v of each KV head."""
        qkv, _ = self.linear_qkv(hidden_states)
        d, kv_heads = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = self.num_attention_heads_per_partition // kv_heads
        query, key, value = qkv.view(*qkv.shape[:2], kv_heads, -1).split((heads * d, d, d), dim=-1)
        return query.reshape(*qkv.shape[:2], -1, d), key, value

    def _rotated(self, query, key, table, cu_seqlens):
        """Return queries and keys, normed if the layer has norms, and rotated by the `table` of the model."""
        if not isinstance(table, torch.Tensor) or table.dim() != 2:
            raise UnsupportedError(
                "rotary_pos_emb: must be the table [positions, rotary_dim] that rotary_pos_emb of a patched model "
                f"returns, got {f'shape {tuple(table.shape)}' if isinstance(table, torch.Tensor) else type(table)}"
            )
        both, norms = (query, key), (self.q_layernorm, self.k_layernorm)
        positions = _positions(query, cu_seqlens, self.config, self.pg_collection.cp)
        if self._can_fuse_norms():
            flat = (t.flatten(0, 1) for t in both)
            weights = (norm(t, weight_only=True) for norm, t in zip(norms, both, strict=True))
            done = ops.qk_norm_rope(*flat, *weights, norms[0].eps, positions, table, rotary_dim=table.shape[1])
        else:
            normed = (t if norm is None else norm(t) for norm, t in zip(norms, both, strict=True))
            done = (ops.rope(t.flatten(0, 1), positions, table, rotary_dim=table.shape[1]) for t in normed)
        return (new.view(old.shape) for new, old in zip(done, both, strict=True))

    def _can_fuse_norms(self) -> bool:
        norms = self.q_layernorm, self.k_layernorm
        return (
            all(getattr(type(norm), "op", None) == RMSNorm.op and not _output_hooked(norm) for norm in norms)
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

    @replaces()
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
    @replaces("transformer/dot_product_attention.py:DotProductAttention.__init__", "config pg_collection")
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

    @replaces(
        "transformer/transformer_block.py:TransformerBlock.forward",
        "hidden_states attention_mask attention_bias inference_context packed_seq_params",
    )
    @replaces(
        "models/hybrid/hybrid_block.py:HybridStack.forward",
        "hidden_states attention_mask rotary_pos_emb packed_seq_params padding_mask",
        mentions="input_tensor layers final_norm",
        when="hybrid",
    )
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        groups = tp, _ = parallel_groups(self)
        name, record = stock_class(type(self)).__name__, states.of(self)
        cp = context_parallel(self.config, getattr(self.pg_collection, "cp", None))
        ranks = tp.size if self.config.sequence_parallel else 1

        def checks() -> dict:
            if record is None or record.packed_seq_params is None:
                raise UnsupportedError(
                    f"{name}: must be called inside its model's forward(), which runs alignkit's checks"
                )
            record.check_hooks()
            (packed,), record.packed_seq_params = record.packed_seq_params, None
            if packed is not kwargs.get("packed_seq_params"):
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


@replaces("fusions/fused_bias_dropout.py:get_bias_dropout_add")
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

    stock_class(type(self)).__setstate__(self, state)
    if patch.is_active():
        states.register([self])
    else:
        self.__class__ = stock_class(type(self))


for _cls in ALIGNED:
    _cls.__setstate__ = _setstate
