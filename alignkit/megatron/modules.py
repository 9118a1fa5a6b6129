"""Megatron-core's modules with their arithmetic replaced by alignkit's ops.

Each class replaces the class of a module that already exists (`module.__class__`), so that parameters, hooks,
checkpoints and `isinstance` stay as they are. Nothing else of a module is changed, but for `look.LOOK`: what a class
needs beside the module's own attributes is kept here, by module. The names are Megatron's on purpose: weight converters tell
column from row parallel by class name. What is aligned is told by `op`, the op the module runs through.
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
from .look import LOOK
from .models import hybrid_block

vocabulary: weakref.WeakKeyDictionary[OutputLayer, int] = weakref.WeakKeyDictionary()
"""The size without padding, which Megatron does not keep, by output layer."""

VOCAB_SIZE = "alignkit_vocab_size"
"""The attribute of a GPTModel by which `set_vocab_size` keeps it with the model and its copies."""


@dataclass(frozen=True)
class Rotations:
    """Which `ops.rope_table` a model's rotary embedding hands down."""

    base: float
    rotary_dim: int
    device: torch.device
    scaling: Scaling | None = None

    def table(self, max_seq_len: int) -> torch.Tensor:
        """A power of two of rows, so that few tables are made; a row does not depend on how many there are."""
        rows = 1 << max(int(max_seq_len) - 1, 0).bit_length()
        return ops.rope_table(self.rotary_dim, rows, self.base, self.device, self.scaling)


rotations: weakref.WeakKeyDictionary[torch.nn.Module, Rotations] = weakref.WeakKeyDictionary()

begun: weakref.WeakKeyDictionary[Trunk, Any] = weakref.WeakKeyDictionary()
"""Blocks whose model has been checked in this forward, and the packed_seq_params that were checked with it."""

turning: weakref.WeakKeyDictionary[SelfAttention, Any] = weakref.WeakKeyDictionary()
"""Attention whose queries and keys are to be normalised and rotated in one op: the table, and the packed_seq_params."""

handing_on: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Norms whose output is what comes in, meanwhile: that op does their work."""


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """``ops.linear``; the stock forward around it has Megatron's rules for tied weights, bias and gather."""

    op = "linear"
    out_dtype: torch.dtype | None = None
    agreed = True
    """The ranks agreed on the model and its input where its forward began, and all that a layer is called with follows."""

    def _forward_impl(self, input, weight, bias=None, **_):
        return ops.linear(
            input,
            weight,
            bias,
            tp=TP(self.tp_group, agreed=type(self).agreed),
            # Not as stock's forward has it: Megatron's shared experts may be built to leave that to its dispatcher.
            sequence_parallel=self.sequence_parallel,
            out_dtype=type(self).out_dtype,
        )


class OutputLayer(ColumnParallelLinear):
    """The output layer: its logits are fp32 and never rounded to the model type."""

    op = "linear_logp"
    out_dtype = torch.float32
    agreed = False  # frameworks call it by itself

    def forward(self, input_, weight=None, *args, into: Callable | None = None, **kwargs):
        """Logits, as stock; or ``into(input_, weight)``, which comes through here so that the module's hooks run
        before its weight is read: Megatron's DDP waits in one for parameters that are being gathered."""
        if into is None:
            return super().forward(input_, weight, *args, **kwargs)
        return into(input_, self.weight if weight is None else weight)


OutputLayer.__name__ = ColumnParallelLinear.__name__  # weight converters go by it


class RowParallelLinear(layers.RowParallelLinear):
    """``ops.row_parallel_linear``, which also does the reduction over ranks."""

    op = "row_parallel_linear"

    def forward(self, input_):
        out = ops.row_parallel_linear(
            input_, self.weight, tp=TP(self.tp_group, agreed=True), sequence_parallel=self.sequence_parallel
        )
        return out, None


class RMSNorm(torch.nn.RMSNorm):
    """``ops.rms_norm``, also under sequence parallelism, which torch's norm is not used with in Megatron."""

    op = "rms_norm"

    def forward(self, x):
        return x if self in handing_on else ops.rms_norm(x, self.weight, self.eps)

    @classmethod
    def build(cls, config, hidden_size, eps=1e-5, **_) -> RMSNorm:
        """What ``WrappedTorchNorm(config, hidden_size, eps)`` gives while the patch is on."""
        if config.normalization != "RMSNorm":
            raise UnsupportedError(f"normalization: {config.normalization!r} is not supported, only RMSNorm")
        if config.layernorm_zero_centered_gamma:
            raise UnsupportedError("layernorm_zero_centered_gamma is not supported")
        norm = cls(hidden_size, eps=eps)
        # Megatron sums the gradients of marked weights over the tensor-parallel ranks.
        norm.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        return norm


class MLP(mlp.MLP):
    """SwiGLU: ``ops.silu_mul`` of the two halves of the first product."""

    op = "silu_mul"

    def forward(self, hidden_states, per_token_scale=None, **_):
        if per_token_scale is not None:
            raise UnsupportedError("per_token_scale: an expert (MoE) outside of a MoELayer is not supported")
        return self.linear_fc2(ops.silu_mul(self.linear_fc1(hidden_states)[0]))


class RotaryEmbedding(rotary_pos_embedding.RotaryEmbedding):
    """Hands the fp32 table of ``ops.rope_table`` down to `apply_rotary_pos_emb` in place of angles."""

    op = "rope_table"

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        return _table(self, max_seq_len, offset)


class YarnRotaryEmbedding(yarn_rotary_pos_embedding.YarnRotaryEmbedding):
    """The same; the factor that stock hands down beside the angles is in the table."""

    op = "rope_table"

    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None):
        return _table(self, max_seq_len, offset), rotations[self].scaling.attention_factor


def _table(rotary: torch.nn.Module, max_seq_len: int, offset: int) -> torch.Tensor:
    if offset:
        raise UnsupportedError("offset: rotary positions that do not start at 0 are not supported")
    if rotary not in rotations:
        raise UnsupportedError("RotaryEmbedding: called outside of a GPTModel's forward")
    return rotations[rotary].table(max_seq_len)


def attention_factor(config) -> float:
    """What Megatron multiplies rotations by, by its configuration: YaRN's, which only some configurations have."""
    factor = getattr(config, "yarn_rotary_scaling_factor", None)
    if factor is None:
        return 1.0
    mscales = getattr(config, "yarn_mscale", None), getattr(config, "yarn_mscale_all_dim", None)
    return yarn_attention_factor(factor, *mscales)


def context_parallel(config, group) -> CP:
    """The ranks of `group`, of a module or of Megatron's own if that has none, that share sequences."""
    if config.context_parallel_size == 1:
        return CP()
    return CP(parallel_state.get_context_parallel_group() if group is None else group)


def apply_rotary_pos_emb(t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None, **_):
    """``ops.rope`` on t ``[s, b, h, d]``, or packed ``[t, h, d]`` with `cu_seqlens`.

    freqs: the table that the aligned RotaryEmbedding made, with YaRN's `mscale` in it. As in Megatron, a token's position is its
    index in its sequence, of which context-parallel ranks have parts; `position_ids` are not looked at.
    """
    if freqs.dim() != 2 or mscale != attention_factor(config):
        raise UnsupportedError("rotary embedding: not the default one of an aligned GPTModel")
    positions = _positions(t, cu_seqlens, config, cp_group)
    return ops.rope(t.reshape(-1, *t.shape[-2:]), positions, freqs, rotary_dim=freqs.shape[1]).view(t.shape)


def _positions(t: torch.Tensor, cu_seqlens: torch.Tensor | None, config, cp_group) -> torch.Tensor:
    """The positions of t's tokens, which are [s, b] without `cu_seqlens`, in the order they lie in."""
    positions = context_parallel(config, cp_group).positions(t.shape[0], cu_seqlens, t.device)
    return positions.repeat_interleave(t.shape[1]) if cu_seqlens is None else positions


class SelfAttention(attention.SelfAttention):
    """The stock module. Norms of queries and keys and their rotation are ``ops.qk_norm_rope``, between the two places where
    stock has them: its norms, which are called as ever, hand on what they are given, and to rotate it is given nothing.
    Without such norms, or where that would be seen, it is ``ops.rms_norm`` and ``ops.rope`` in those places: the same bits."""

    op = "qk_norm_rope, rope"

    def forward(self, hidden_states, attention_mask, *args, rotary_pos_emb=None, packed_seq_params=None, **kwargs):
        if self._in_one(rotary_pos_emb):
            turning[self] = rotary_pos_emb, packed_seq_params
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
            turning.pop(self, None)

    def get_query_key_value_tensors(self, *args, **kwargs):
        if self not in turning:
            return super().get_query_key_value_tensors(*args, **kwargs)
        (table, packed), norms = turning.pop(self), (self.q_layernorm, self.k_layernorm)
        handing_on.update(norms)
        try:
            query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        finally:
            handing_on.difference_update(norms)
        starts = None if packed is None else calls.packed_cu_seqlens(packed)
        turned = ops.qk_norm_rope(
            query.flatten(0, 1),
            key.flatten(0, 1),
            *(norm.weight for norm in norms),
            norms[0].eps,
            _positions(query, starts, self.config, self.pg_collection.cp),
            table,
            rotary_dim=table.shape[1],
        )
        return *(new.view(old.shape) for new, old in zip(turned, (query, key), strict=True)), *rest

    def _in_one(self, rotary_pos_emb) -> bool:
        norms = self.q_layernorm, self.k_layernorm
        return (
            isinstance(rotary_pos_emb, torch.Tensor)
            and rotary_pos_emb.dim() == 2
            and getattr(self.config, "yarn_rotary_scaling_factor", None)
            is None  # its factor is checked in the other place
            and all(getattr(type(norm), "op", None) == RMSNorm.op and not _seen(norm) for norm in norms)
            and norms[0].eps == norms[1].eps
        )


_SEEING = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Hooks of a module that are given what it puts out, or its gradient."""


def _seen(module: torch.nn.Module) -> bool:
    """Whether a hook is given what `module` puts out."""
    return any(getattr(module, name) or getattr(torch_module, f"_global{name}") for name in _SEEING)


class DotProductAttention(dot_product_attention.DotProductAttention):
    """``ops.attention`` for ``[s, b, h, d]`` micro-batches and for packed (THD) ones, which stock refuses."""

    op = "attention"

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        cp = context_parallel(self.config, getattr(self.pg_collection, "cp", None))
        if packed_seq_params is not None:
            return attend(cp, query, key, value, calls.packed_cu_seqlens(packed_seq_params)).flatten(1)
        s, b = query.shape[:2]
        if cp.size == 1:
            # The sequences of a micro-batch are of one length, as the heads of one sequence are: they stay where they lie.
            q, k, v = (x.flatten(1, 2) for x in (query, key, value))
            return ops.attention(q, k, v, _starts(1, s, q.device)).view(s, b, -1)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        return attend(cp, q, k, v, _starts(b, s * cp.size, q.device)).view(b, s, -1).transpose(0, 1).contiguous()

    @staticmethod
    def build(stock: Callable) -> Callable:
        """``DotProductAttention.__init__`` while the patch is on: stock's, which refuses context parallelism."""

        @functools.wraps(stock)
        def init(module, config, *args, **kwargs):
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            stock(module, alone, *args, **kwargs)
            module.config = config

        return init


def _starts(sequences: int, length: int, device: torch.device) -> torch.Tensor:
    """The first rows of so many sequences, then the number of rows."""
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * length


def attend(cp: CP, q, k, v, cu_seqlens) -> torch.Tensor:
    """``ops.attention``; ranks that share sequences have all of their rows meanwhile, and a part of the heads each."""
    if cp.size == 1:
        return ops.attention(q, k, v, cu_seqlens)
    order, heads = cp.order(q.shape[0], cu_seqlens), q.shape[1]
    return cp.to_rows(ops.attention(*(cp.to_heads(x, order, heads) for x in (q, k, v)), cu_seqlens), order)


class TransformerLayer(transformer_layer.TransformerLayer):
    """The stock layer, with `residual_add` where the module has Megatron's ``get_bias_dropout_add``. A half that is not
    there, as in HybridModel's layers, adds nothing: it has a module in that place."""

    op = "residual_add"

    @property
    def self_attn_bda(self) -> Callable:
        return self._modules.get("self_attn_bda", residual_add)  # pyright: ignore[reportReturnType]

    @self_attn_bda.setter
    def self_attn_bda(self, value) -> None:  # as in a module without the property; the next forward refuses it
        self.__dict__["self_attn_bda"] = value

    @property
    def mlp_bda(self) -> Callable:
        return self._modules.get("mlp_bda", residual_add)  # pyright: ignore[reportReturnType]

    @mlp_bda.setter
    def mlp_bda(self, value) -> None:
        self.__dict__["mlp_bda"] = value


class MLPLayer(TransformerLayer, mlp_layer.MLPLayer):
    """The same of a layer that is an MLP and nothing else."""


class Trunk(torch.nn.Module):
    """All layers of a model: the stock block; only what it is called with is checked."""

    op = "trunk"
    config: Any
    input_tensor: Any
    pre_process: bool

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        groups = tp, _ = sharing(self)
        called = stock_class(type(self)).__name__
        cp = context_parallel(self.config, getattr(self.pg_collection, "cp", None))
        ranks = tp.size if self.config.sequence_parallel else 1

        def checks() -> dict:
            hooks.check_hooks()
            if self not in begun:
                raise UnsupportedError(
                    f"{called}: called outside of the forward of its model, where alignkit checks that"
                )
            if begun.pop(self) is not kwargs.get("packed_seq_params"):
                raise UnsupportedError("packed_seq_params: not those that the model's forward began with")
            s, b = (hidden_states if self.pre_process else self.input_tensor).shape[:2]
            return calls.check_call(s * ranks, b, cp, attention_mask, **kwargs)

        check_same_across(groups, called, checks, apart=expert_ranks(self))
        if (packed := kwargs.get("packed_seq_params")) is not None:
            for group in groups:
                group.check_same_values(called, cu_seqlens=calls.packed_cu_seqlens(packed))
        return super().forward(hidden_states, attention_mask, **kwargs)


class TransformerBlock(Trunk, transformer_block.TransformerBlock):
    """GPTModel's."""


def sharing(module) -> tuple[TP, TP]:
    """The ranks that compute a model or block together: the tensor-parallel and the context-parallel ones."""
    groups = module.pg_collection
    cp = getattr(groups, "cp", None) if module.config.context_parallel_size > 1 else None
    return TP(groups.tp), TP(cp, called="context-parallel")


def expert_ranks(module) -> tuple[TP, ...]:
    """The ranks that share the experts of a model or block: they compute with each other, on tokens of their own."""
    for layer in getattr(module, "decoder", module).layers:
        if isinstance(mixture := getattr(layer, "mlp", None), moe_layer.MoELayer):
            return moe.expert_ranks(mixture)
    return ()


def residual_add(training: bool, fused: bool):
    """Stands in for ``get_bias_dropout_add``: the sum in the model type, with nothing to fuse or to drop."""

    def add(x_with_bias, residual, dropout):
        x, bias = x_with_bias
        if bias is not None or (training and dropout > 0):
            raise UnsupportedError("add_bias_linear / hidden_dropout: neither is supported")
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
    *moe.OF_EXPERTS,
)
if hybrid_block is not None:

    class HybridStack(Trunk, hybrid_block.HybridStack):
        """HybridModel's."""

    ALIGNED += (HybridStack,)


STOCK: dict[type, type] = {cls: next(base for base in cls.__mro__ if base not in (*ALIGNED, Trunk)) for cls in ALIGNED}
"""Aligned class -> the one whose place it takes; `te` adds TransformerEngine's."""


def stock_class(cls: type) -> type:
    """The class that an aligned one takes the place of; of others, the class itself."""
    return STOCK.get(cls, cls)


def _copied(self, state: dict) -> None:
    """``__setstate__`` of all `ALIGNED`: the patch knows of a copy, or of what was pickled; without one it is stock."""
    from . import patch

    stock_class(type(self)).__setstate__(self, {k: v for k, v in state.items() if k != LOOK})
    if patch.is_active():
        hooks.adopted.add(self)
    else:
        self.__class__ = stock_class(type(self))


for _cls in ALIGNED:
    _cls.__setstate__ = _copied
