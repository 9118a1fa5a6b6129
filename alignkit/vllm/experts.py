"""vLLM's MoE layer with alignkit's ops. The weights, their loading and their layout over ranks are vLLM's.

On each rank, `w13_weight` holds the gate rows of each expert, then its up rows; `w2_weight` holds the down projections.
A rank has all features of some experts (expert parallelism), or some features of all experts. With data parallelism
the ranks of all replicas share the experts, and each replica has its own batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import UnsupportedError
from alignkit.ops import library
from alignkit.vllm.parallel import DP_GROUP, EP_GROUP, TP_GROUP

ROUTERS = ("FusedTopKRouter", "FusedTopKBiasRouter", "GroupedTopKRouter", "CPURouter")
"""Supported router classes of vLLM: top-k by softmax, or by sigmoid with a bias and expert groups."""

SHARED_EXPERTS = ("Qwen2MoeMLP", "Glm4MoeMLP")
"""Supported classes of a shared expert."""


class AlignedExpertsMethod(UnquantizedFusedMoEMethod):
    """Expert weights as loaded, without a vLLM kernel, which would pad, pack or transpose them."""

    def __init__(self, moe) -> None:
        super(UnquantizedFusedMoEMethod, self).__init__(moe)

    @property
    def supports_internal_mk(self) -> bool:
        return True  # until 0.26 vLLM creates a kernel for methods that return False

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    @replaces("model_executor/layers/fused_moe/fused_moe_method_base.py:FusedMoEMethodBase.maybe_roundup_sizes")
    def maybe_roundup_sizes(self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config):
        return hidden_size, intermediate_size_per_partition

    @replaces()
    @relies_on(
        "model_executor/layers/fused_moe/unquantized_fused_moe_method.py:UnquantizedFusedMoEMethod.create_weights",
        "layer num_experts hidden_size intermediate_size_per_partition params_dtype",
    )
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weights as loaded."""

    def apply(self, *args, **kwargs):
        raise UnsupportedError(
            "MoE layer: quant_method.apply must not be called, because MoERunner.forward computes the layer"
        )


@relies_on(
    "model_executor/layers/fused_moe/runner/moe_runner.py:MoERunner.__init__",
    "moe_config router routed_experts gate shared_experts routed_input_transform",
    mentions="shared_expert_gate routed_output_transform routed_scaling_factor layer_name",
)
class AlignedMoERunner(MoERunner):
    """An MoE layer: the router, the routed experts, their sum over ranks, and the shared expert."""

    def __init__(self, *args, shared_experts: torch.nn.Module | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._shared: Any = shared_experts
        if reasons := [reason for reason, present in _unsupported(self) if present]:
            raise UnsupportedError(f"MoE layer {self.layer_name}: unsupported features: {', '.join(reasons)}")
        if self._shared is not None:
            self._shared.down_proj.reduce_results = True
        ranks, experts = self.moe_config.moe_parallel_config, self.routed_experts
        self._experts = experts.global_num_experts
        self._first_expert = ranks.ep_rank * experts.local_num_experts
        group = EP_GROUP if ranks.dp_size > 1 else TP_GROUP
        self._tp, self._ep = (group if size > 1 else "" for size in (ranks.tp_size, ranks.ep_size))
        self._rows = _row_group(ranks)

    @replaces(accepts="hidden_states router_logits input_ids")
    def forward(self, hidden_states, router_logits, input_ids=None, shared_experts_input=None):
        if self.gate is not None:  # otherwise the model has called the gate
            router_logits, _ = self.gate(hidden_states)
        experts = self.routed_experts
        grouped = experts.use_grouped_topk
        weights, ids = library.moe_router(
            router_logits,
            experts.top_k,
            experts.scoring_func,
            experts.renormalize,
            experts.e_score_correction_bias,
            experts.num_expert_group if grouped else 1,
            experts.topk_group if grouped else 1,
            self.routed_scaling_factor * experts.routed_scaling_factor,  # one of the two factors is 1
        )
        output = library.moe_experts(
            hidden_states,
            ids,
            weights,
            experts.w13_weight,
            experts.w2_weight,
            self._experts,
            self._first_expert,
            self._tp,
            self._ep,
            self._rows,
        )
        return output if self._shared is None else library.add(output, self._shared_output(hidden_states))

    def _shared_output(self, x: torch.Tensor) -> torch.Tensor:
        """Return the shared expert's output for x.

        Stock vLLM adds the rank's partial sums of shared and routed experts, then all-reduces. Here the down projection
        is summed over ranks separately, like a dense MLP's.
        """
        shared = self._shared
        output, _ = shared.down_proj(shared.act_fn(shared.gate_up_proj(x)[0]))
        gate = getattr(shared, "expert_gate", None)
        return output if gate is None else library.sigmoid_mul(gate(x)[0], output)


def _row_group(ranks: Any) -> str:
    """Return the name of the group whose ranks hold distinct rows ('' for one replica).

    It has all ranks if each rank is a replica, or if vLLM splits the rows of a replica over its ranks (sequence
    parallelism). Otherwise it has one rank of each replica.
    """
    if ranks.dp_size == 1:
        return ""
    return EP_GROUP if ranks.dp_size * ranks.sp_size == max(ranks.tp_size, ranks.ep_size) else DP_GROUP


@relies_on(
    "model_executor/layers/fused_moe/routed_experts.py:RoutedExperts.__init__",
    mentions="""
        global_num_experts local_num_experts top_k renormalize scoring_func use_grouped_topk custom_routing_function
        routed_scaling_factor e_score_correction_bias apply_router_weight_on_input swiglu_limit expert_map_manager
        quant_method
    """,
)
@relies_on(
    "model_executor/layers/fused_moe/config.py:FusedMoEParallelConfig",
    members="tp_size ep_size ep_rank dp_size sp_size pcp_size is_sequence_parallel enable_eplb",
)
@relies_on(
    "model_executor/layers/fused_moe/config.py:FusedMoEConfig",
    members="num_experts num_logical_experts activation has_bias is_lora_enabled",
)
@relies_on(
    "model_executor/layers/fused_moe/config.py:FusedMoEConfig", members="skip_final_all_reduce", when="deferred_sum"
)
@relies_on(
    "model_executor/layers/fused_moe/expert_map_manager.py:ExpertMapManager",
    members="placement_strategy local_num_experts",
)
def _unsupported(runner: Any) -> Iterator[tuple[str, bool]]:
    """Yield (unsupported feature, whether the layer uses it)."""
    config, experts, router = runner.moe_config, runner.routed_experts, runner.router
    ranks, placement = config.moe_parallel_config, experts.expert_map_manager
    method = type(experts.quant_method)
    yield f"quantization ({method.__name__})", method is not AlignedExpertsMethod
    shared = type(runner._shared).__name__
    yield (
        f"shared expert class {shared} (supported: {', '.join(SHARED_EXPERTS)})",
        runner._shared is not None and shared not in SHARED_EXPERTS,
    )
    yield "shared experts computed by vLLM", runner.shared_experts is not None
    yield "shared expert gate outside the shared expert", runner.shared_expert_gate is not None
    yield "fused shared experts", placement.num_fused_shared_experts > 0
    yield (
        "input or output transforms of the routed experts",
        (runner.routed_input_transform or runner.routed_output_transform) is not None,
    )
    yield f"activation {config.activation} (supported: silu)", config.activation != MoEActivation.SILU
    yield (
        "SwiGLU parameters (limit, alpha, beta)",
        any(
            getattr(part, name, None) is not None
            for part in (config, experts)
            for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta")
        ),
    )
    yield "expert biases", config.has_bias
    yield "LoRA", config.is_lora_enabled
    yield "router weights applied to the input", experts.apply_router_weight_on_input
    yield f"router {type(router).__name__} (supported: {', '.join(ROUTERS)})", type(router).__name__ not in ROUTERS
    softmax = experts.scoring_func == "softmax"
    yield (
        f"score function {experts.scoring_func} (supported: softmax, sigmoid)",
        not softmax and experts.scoring_func != "sigmoid",
    )
    yield "expert groups with softmax scores", softmax and experts.use_grouped_topk
    yield "custom routing function", experts.custom_routing_function is not None
    yield "router bias with softmax scores", softmax and experts.e_score_correction_bias is not None
    yield (
        "routed_scaling_factor in both the runner and the experts",
        1.0 not in (runner.routed_scaling_factor, experts.routed_scaling_factor),
    )
    yield "redundant experts", config.num_experts != config.num_logical_experts or ranks.enable_eplb
    yield (
        f"expert placement {placement.placement_strategy} (supported: linear)",
        placement.placement_strategy != "linear",
    )
    yield "context parallelism", ranks.pcp_size > 1
    yield "sequence parallelism without data parallelism", ranks.is_sequence_parallel and ranks.dp_size == 1
    yield "deferred all-reduce", getattr(config, "skip_final_all_reduce", False)  # absent in 0.24
