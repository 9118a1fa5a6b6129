"""Megatron-core's MoE modules through alignkit's ops: routing, and the experts for the tokens of all ranks.

As in `modules`, each class replaces a module's class. One op computes all experts of a layer. The modules below
`experts` have the same parameters, names and checkpoints, but only return their weights. Megatron's token dispatchers
never run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import experts, moe_layer, router, shared_experts

from alignkit import ops
from alignkit.dist import TP
from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import UnsupportedError


@relies_on(
    "transformer/moe/router.py:TopKRouter.routing",
    "logits padding_mask",
    mentions="topk_routing_with_score_function _apply_aux_loss _apply_expert_bias apply_z_loss",
)
@replaces(
    "transformer/moe/moe_utils.py:topk_routing_with_score_function",
    "logits topk use_pre_softmax num_groups group_topk scaling_factor expert_bias router_replay",
)
def topk_routing(
    logits,
    topk,
    use_pre_softmax=False,
    num_groups=None,
    group_topk=None,
    scaling_factor=None,
    score_function="softmax",
    expert_bias=None,
    fused=False,
    router_replay=None,
    **others,
):
    """Return routing weights and selection, both ``[tokens, experts]``, by ``ops.moe_router``.

    Replaces Megatron's ``topk_routing_with_score_function``. Megatron attaches its load-balancing losses to the result.
    """
    enabled = {name: value for name, value in others.items() if value is not False}
    for name, value in {"router_replay": router_replay, **enabled}.items():
        if value is not None:
            allowed = "None" if name == "router_replay" else "None or False"
            raise UnsupportedError(f"topk_routing_with_score_function: {name}: must be {allowed}, got {value!r:.200}")
    sigmoid = score_function == "sigmoid"
    weights, ids = ops.moe_router(
        logits,
        topk,
        score=score_function,
        normalize=topk > 1 if sigmoid else not use_pre_softmax,
        bias=expert_bias if sigmoid else None,
        groups=num_groups if group_topk else 1,
        top_groups=group_topk or 1,
        scale=scaling_factor or 1.0,
    )
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, True)
    return torch.zeros_like(logits).scatter(-1, ids, weights), chosen


class TopKRouter(router.TopKRouter):
    """Router with fp32 logits, which are never rounded, and `topk_routing`. Losses and token counts are Megatron's."""

    op = "moe_router"

    @replaces("transformer/moe/router.py:Router.gating")
    def gating(self, input):
        return ops.linear(input, self.weight, out_dtype=torch.float32)

    @replaces()
    def _apply_expert_bias(self, routing_map, padding_mask=None):
        """Update the token counts like stock, without its torch.compile."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                if padding_mask is not None:
                    routing_map = routing_map & ~padding_mask[:, None]
                self.local_tokens_per_expert += routing_map.sum(dim=0)


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """Column-parallel linear of one expert: returns its weight.

    The weight is read in a module call, so that forward pre-hooks run first. In one of them Megatron's DDP waits for
    parameters that are being gathered.
    """

    op = "moe_experts"
    returns_weights = True

    def forward(self):
        return self.weight


class RowParallelLinear(layers.RowParallelLinear):
    """Row-parallel linear of one expert: returns its weight."""

    op = "moe_experts"
    returns_weights = True

    def forward(self):
        return self.weight


class MLP(mlp.MLP):
    """One expert: returns both weights."""

    op = "moe_experts"
    returns_weights = True

    def forward(self):
        return self.linear_fc1(), self.linear_fc2()


class SequentialMLP(experts.SequentialMLP):
    """Experts of this rank: returns two lists of their weights, gate and up (one tensor), and down."""

    op = "moe_experts"
    returns_weights = True

    @relies_on("transformer/moe/experts.py:SequentialMLP.__init__", mentions="local_experts tp_group")
    def forward(self):
        return tuple(map(list, zip(*(expert() for expert in self.local_experts), strict=True)))


class TEGroupedMLP(experts.TEGroupedMLP):
    """Experts of this rank in TransformerEngine's grouped linears: returns two lists of their weights."""

    op = "moe_experts"
    returns_weights = True

    @relies_on("transformer/moe/experts.py:TEGroupedMLP.__init__", mentions="linear_fc1 linear_fc2 tp_group")
    def forward(self):
        return self.linear_fc1(), self.linear_fc2()


class SharedExpertMLP(shared_experts.SharedExpertMLP):
    """Shared expert: SwiGLU, scaled by the gate of each token if it has a gate."""

    op = "silu_mul"

    @replaces(mentions="gate_weight")
    @relies_on("transformer/moe/shared_experts.py:SharedExpertMLP.__init__", mentions="use_shared_expert_gate")
    def forward(self, hidden_states):
        output, _ = self.linear_fc2(ops.silu_mul(self.linear_fc1(hidden_states)[0]))
        if not self.use_shared_expert_gate:
            return output
        logits = ops.linear(hidden_states, self.gate_weight, out_dtype=torch.float32)
        return ops.sigmoid_mul(logits, output)


class MoELayer(moe_layer.MoELayer):
    """MoE layer: routing, then ``ops.moe_experts`` on the tokens of all ranks that share experts."""

    op = "moe_experts"

    @replaces(mentions="moe_layer_recompute attn_tp_group")
    @relies_on(
        "transformer/moe/moe_layer.py:BaseMoELayer.__init__", mentions="ep_group local_expert_indices use_shared_expert"
    )
    def forward(self, hidden_states, intermediate_tensors=None, padding_mask=None):
        if intermediate_tensors is not None:
            raise UnsupportedError("intermediate_tensors: must be None, because alignkit runs a MoELayer as a whole")
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self.compute_layer, False, hidden_states, padding_mask), None
        return self.compute_layer(hidden_states, padding_mask), None

    @relies_on("transformer/moe/moe_layer.py:MoELayer.route", "hidden_states padding_mask")
    @relies_on(
        "tensor_parallel/mappings.py:gather_from_sequence_parallel_region", "input_ tensor_parallel_output_grad group"
    )
    @relies_on("tensor_parallel/mappings.py:scatter_to_sequence_parallel_region", "input_ group")
    def compute_layer(self, hidden_states, padding_mask):
        """Return the layer's output, shared expert included."""
        weights, chosen = self.route(hidden_states, padding_mask)
        # Selected expert ids of each token, ascending; all tokens have the same number.
        indices = torch.arange(chosen.shape[-1], device=chosen.device)
        indices = torch.where(chosen, indices, chosen.shape[-1])
        ids = indices.topk(self.router.topk, dim=-1, largest=False, sorted=True).values
        out = self.apply_experts(hidden_states.flatten(0, -2), ids, weights.gather(-1, ids)).view(hidden_states.shape)
        if not self.use_shared_expert:
            return out
        if self.shared_experts_recompute and self.training:
            return out + tensor_parallel.checkpoint(self.shared_experts, False, hidden_states)
        return out + self.shared_experts(hidden_states)

    def apply_experts(self, x, ids, weights):
        """Return the routed experts' output for x ``[tokens, h]``.

        Without sequence parallelism the tensor-parallel ranks have the same tokens. Each then processes its part of
        them, so that experts receive every token once.
        """
        tp, tokens = TP(self.attn_tp_group, agreed=True), len(x)
        if self.config.sequence_parallel or tp.size == 1:
            return self.apply_experts_to_own_tokens(x, ids, weights)
        padded = tokens + -tokens % tp.size
        x, weights = (scatter_to_sequence_parallel_region(_padded(t, padded, 0), group=tp.group) for t in (x, weights))
        out = self.apply_experts_to_own_tokens(x, tp.shard(_padded(ids, padded, -1)), weights)
        return gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=False, group=tp.group)[:tokens]

    def apply_experts_to_own_tokens(self, x, ids, weights):
        """Return the routed experts' output for tokens that no other rank has."""
        tp, ep = expert_ranks(self, agreed=True)
        tokens = longest = len(x)
        if tp.size * ep.size > self.attn_tp_group.size():  # else all ranks have equal parts of one micro-batch
            for group in expert_ranks(self):
                longest = max(group.check("MoELayer", lambda longest=longest: longest))
        gate_up, down = self.experts()
        out = ops.moe_experts(
            _padded(x, longest, 0),
            _padded(ids, longest, -1),
            _padded(weights, longest, 0),
            gate_up,
            down,
            num_experts=self.config.num_moe_experts,
            first_expert=self.local_expert_indices[0],
            tp=tp,
            ep=ep,
            gather=tp.size * ep.size > 1,
        )
        return out[:tokens]


def expert_ranks(layer: moe_layer.MoELayer, agreed: bool = False) -> tuple[TP, TP]:
    """Return a layer's expert-tensor-parallel group (same experts) and expert-parallel group (other experts)."""
    return (
        TP(layer.experts.tp_group, agreed=agreed, label="expert-tensor-parallel"),
        TP(layer.ep_group, agreed=agreed, label="expert-parallel"),
    )


def _padded(t: torch.Tensor, rows: int, value: int) -> torch.Tensor:
    """Pad `t` with rows of `value` to `rows` rows."""
    return t if len(t) == rows else F.pad(t, (0, 0, 0, rows - len(t)), value=value)


ALIGNED = (TopKRouter, SequentialMLP, TEGroupedMLP, SharedExpertMLP, MoELayer)
EXPERT_MODULES = (MLP, ColumnParallelLinear, RowParallelLinear)
"""Classes of the modules below `experts`."""
