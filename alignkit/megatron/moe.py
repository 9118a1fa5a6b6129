"""Megatron-core's mixture of experts through alignkit's ops: the router's choice, and the experts for all ranks' tokens.

As in `modules`, each class takes the place of a module's own. Experts are computed together: the modules below
`experts` keep their parameters, names and checkpoints, and hand down their weights; Megatron's token dispatchers never run.
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
from alignkit.errors import UnsupportedError


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
    """``ops.moe_router`` in place of Megatron's ``topk_routing_with_score_function``: weights and choice, both
    ``[tokens, experts]``. Megatron's losses that balance experts are attached to what it returns."""
    if router_replay is not None or any(value is not None and value is not False for value in others.values()):
        raise UnsupportedError("topk_routing_with_score_function: routing from elsewhere is not supported")
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
    """Logits are fp32 and never rounded, and `topk_routing` chooses. Losses and counts of tokens stay Megatron's."""

    op = "moe_router"

    def gating(self, input):
        return ops.linear(input, self.weight, out_dtype=torch.float32)

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        """As stock, which torch.compile has compiled."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                if padding_mask is not None:
                    routing_map = routing_map & ~padding_mask[:, None]
                self.local_tokens_per_expert += routing_map.sum(dim=0)


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """Of one expert; it hands its weight down through its own call, so that hooks run before: Megatron's DDP waits in one
    for parameters that are being gathered."""

    op = "moe_experts"
    hands_down = True

    def forward(self):
        return self.weight


class RowParallelLinear(layers.RowParallelLinear):
    """The same."""

    op = "moe_experts"
    hands_down = True

    def forward(self):
        return self.weight


class MLP(mlp.MLP):
    """Both weights of an expert."""

    op = "moe_experts"
    hands_down = True

    def forward(self):
        return self.linear_fc1(), self.linear_fc2()


class SequentialMLP(experts.SequentialMLP):
    """The weights of this rank's experts: gate above up of each, and down."""

    op = "moe_experts"
    hands_down = True

    def forward(self):
        return tuple(map(list, zip(*(expert() for expert in self.local_experts), strict=True)))


class TEGroupedMLP(experts.TEGroupedMLP):
    """The same, of TransformerEngine's linears that have one weight for each expert."""

    op = "moe_experts"
    hands_down = True

    def forward(self):
        return self.linear_fc1(), self.linear_fc2()


class SharedExpertMLP(shared_experts.SharedExpertMLP):
    """SwiGLU, as a dense layer's, and times a gate of one number for each token if it has one."""

    op = "silu_mul"

    def forward(self, hidden_states):
        output, _ = self.linear_fc2(ops.silu_mul(self.linear_fc1(hidden_states)[0]))
        if not self.use_shared_expert_gate:
            return output
        logits = ops.linear(hidden_states, self.gate_weight, out_dtype=torch.float32)
        return ops.sigmoid_mul(logits, output)


class MoELayer(moe_layer.MoELayer):
    """The router's choice, then ``ops.moe_experts`` over the rows of all ranks that share experts."""

    op = "moe_experts"

    def forward(self, hidden_states, intermediate_tensors=None, padding_mask=None):
        if intermediate_tensors is not None:
            raise UnsupportedError("intermediate_tensors: a part of a mixture of experts is not supported")
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self.mixed, False, hidden_states, padding_mask), None
        return self.mixed(hidden_states, padding_mask), None

    def mixed(self, hidden_states, padding_mask):
        weights, chosen = self.route(hidden_states, padding_mask)
        # The ids in ascending order: every token has as many.
        numbers = torch.arange(chosen.shape[-1], device=chosen.device)
        numbers = torch.where(chosen, numbers, chosen.shape[-1])
        ids = numbers.topk(self.router.topk, dim=-1, largest=False, sorted=True).values
        out = self.of_all_tokens(hidden_states.flatten(0, -2), ids, weights.gather(-1, ids)).view(hidden_states.shape)
        if not self.use_shared_expert:
            return out
        if self.shared_experts_recompute and self.training:
            return out + tensor_parallel.checkpoint(self.shared_experts, False, hidden_states)
        return out + self.shared_experts(hidden_states)

    def of_all_tokens(self, x, ids, weights):
        """x ``[tokens, h]`` through the experts. Without sequence parallelism the tensor-parallel ranks have the same
        tokens: each then takes a part of them to the experts, so that those meet every token once."""
        tp, tokens = TP(self.attn_tp_group, agreed=True), len(x)
        if self.config.sequence_parallel or tp.size == 1:
            return self.of_own_tokens(x, ids, weights)
        padded = tokens + -tokens % tp.size
        x, weights = (scatter_to_sequence_parallel_region(_filled(t, padded, 0), group=tp.group) for t in (x, weights))
        out = self.of_own_tokens(x, tp.shard(_filled(ids, padded, -1)), weights)
        return gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=False, group=tp.group)[:tokens]

    def of_own_tokens(self, x, ids, weights):
        """The same of tokens that no other rank has."""
        tp, ep = expert_ranks(self, agreed=True)
        tokens = longest = len(x)
        if tp.size * ep.size > self.attn_tp_group.size():  # else all have parts of the same micro-batch
            for group in expert_ranks(self):
                longest = max(group.check("MoELayer", lambda longest=longest: longest))
        gate_up, down = self.experts()
        out = ops.moe_experts(
            _filled(x, longest, 0),
            _filled(ids, longest, -1),
            _filled(weights, longest, 0),
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
    """Those that share each expert of a layer, and those that have the others."""
    return (
        TP(layer.experts.tp_group, agreed=agreed, called="expert-tensor-parallel"),
        TP(layer.ep_group, agreed=agreed, called="expert-parallel"),
    )


def _filled(t: torch.Tensor, rows: int, value: int) -> torch.Tensor:
    """With rows of `value` at the end, so that there are so many."""
    return t if len(t) == rows else F.pad(t, (0, 0, 0, rows - len(t)), value=value)


ALIGNED = (TopKRouter, SequentialMLP, TEGroupedMLP, SharedExpertMLP, MoELayer)
OF_EXPERTS = (MLP, ColumnParallelLinear, RowParallelLinear)
"""The classes of modules below `experts`."""
