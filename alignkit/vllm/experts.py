"""vLLM's mixture of experts with alignkit's ops inside: its weights, their loading and their layout over ranks stay.

Of a rank, `w13_weight` has the rows of each expert's gate, then those of up, and `w2_weight` the down projection: all
features of some experts (expert parallelism), or some features of all. With data parallelism the ranks of all replicas
share them, and each replica has a batch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from alignkit.errors import UnsupportedError
from alignkit.ops import library
from alignkit.vllm.parallel import EXPERTS, GROUP, REPLICAS

ROUTERS = ("FusedTopKRouter", "CPURouter")
"""Those of vLLM that may be the plain choice of the best, by softmax or by sigmoid with a bias and groups."""

SHARED = ("Qwen2MoeMLP", "Glm4MoeMLP")
"""Those of vLLM's MLPs that a shared expert may be."""


class AlignedExpertsMethod(UnquantizedFusedMoEMethod):
    """The weights as they were loaded: no kernel of vLLM's is chosen, for which they would be padded, packed or
    turned round."""

    def __init__(self, moe) -> None:
        super(UnquantizedFusedMoEMethod, self).__init__(moe)

    @property
    def supports_internal_mk(self) -> bool:
        return True  # until 0.26 vLLM makes a kernel for methods that have none of their own

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    def maybe_roundup_sizes(self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config):
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leaves the weights as they were loaded."""

    def apply(self, *args, **kwargs):
        raise UnsupportedError("experts computed outside MoERunner.forward")


class AlignedMoERunner(MoERunner):
    """The whole of a mixture: the router's logits, its choice, the experts and their sum over ranks, and the shared expert."""

    def __init__(self, *args, shared_experts: torch.nn.Module | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._shared: Any = shared_experts
        if reasons := [reason for reason, present in _unknown(self) if present]:
            raise UnsupportedError(f"mixture of experts {self.layer_name}: {', '.join(reasons)}")
        if self._shared is not None:
            self._shared.down_proj.reduce_results = True
        ranks, experts = self.moe_config.moe_parallel_config, self.routed_experts
        self._experts = experts.global_num_experts
        self._first = ranks.ep_rank * experts.local_num_experts
        group = EXPERTS if ranks.dp_size > 1 else GROUP
        self._tp, self._ep = (group if size > 1 else "" for size in (ranks.tp_size, ranks.ep_size))
        self._rows = _whose_rows(ranks)

    def forward(self, hidden_states, router_logits, input_ids=None, shared_experts_input=None):
        if self.gate is not None:  # else the model has called it
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
            self.routed_scaling_factor
            * experts.routed_scaling_factor,  # vLLM multiplies by one of them, the other is 1
        )
        output = library.moe_experts(
            hidden_states,
            ids,
            weights,
            experts.w13_weight,
            experts.w2_weight,
            self._experts,
            self._first,
            self._tp,
            self._ep,
            self._rows,
        )
        return output if self._shared is None else library.add(output, self._of_all_tokens(hidden_states))

    def _of_all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """What the shared expert makes of x. vLLM would add each rank's part of it to that rank's part of the experts'
        sum; here its second product is summed over ranks by itself, as a dense MLP's."""
        shared = self._shared
        output, _ = shared.down_proj(shared.act_fn(shared.gate_up_proj(x)[0]))
        gate = getattr(shared, "expert_gate", None)
        return output if gate is None else library.sigmoid_mul(gate(x)[0], output)


def _whose_rows(ranks: Any) -> str:
    """Who has rows of their own: nobody, of one replica; each rank, if each is a replica or vLLM has divided the rows of
    a replica among its ranks (sequence parallelism); else the replicas."""
    if ranks.dp_size == 1:
        return ""
    return EXPERTS if ranks.dp_size * ranks.sp_size == max(ranks.tp_size, ranks.ep_size) else REPLICAS


def _unknown(runner: Any) -> Iterator[tuple[str, bool]]:
    """What alignkit does not compute, by name, and whether it is asked for."""
    config, experts, router = runner.moe_config, runner.routed_experts, runner.router
    ranks, placement = config.moe_parallel_config, experts.expert_map_manager
    method = type(experts.quant_method)
    yield f"quantization ({method.__name__})", method is not AlignedExpertsMethod
    shared = type(runner._shared).__name__
    yield f"shared experts of {shared}", runner._shared is not None and shared not in SHARED
    yield "shared experts computed by vLLM", runner.shared_experts is not None
    yield "a gate of shared experts outside of them", runner.shared_expert_gate is not None
    yield "fused shared experts", placement.num_fused_shared_experts > 0
    yield "transforms around the experts", (runner.routed_input_transform or runner.routed_output_transform) is not None
    yield f"activation {config.activation}", config.activation != MoEActivation.SILU
    yield (
        "a changed SwiGLU",
        any(
            getattr(part, name, None) is not None
            for part in (config, experts)
            for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta")
        ),
    )
    yield "biases of experts", config.has_bias
    yield "LoRA", config.is_lora_enabled
    yield "router weights on the input", experts.apply_router_weight_on_input
    yield f"router {type(router).__name__}", type(router).__name__ not in ROUTERS
    softmax = experts.scoring_func == "softmax"
    yield f"scores by {experts.scoring_func}", not softmax and experts.scoring_func != "sigmoid"
    yield "groups of experts", softmax and experts.use_grouped_topk
    yield "a routing function of the model's", experts.custom_routing_function is not None
    yield "a bias of the choice", softmax and experts.e_score_correction_bias is not None
    yield "two scales of the routed output", 1.0 not in (runner.routed_scaling_factor, experts.routed_scaling_factor)
    yield "redundant experts", config.num_experts != config.num_logical_experts or ranks.enable_eplb
    yield f"{placement.placement_strategy} placement", placement.placement_strategy != "linear"
    yield "context parallelism", ranks.pcp_size > 1
    yield "sequence parallelism without data parallelism", ranks.is_sequence_parallel and ranks.dp_size == 1
    yield "sums over ranks left to later", getattr(config, "skip_final_all_reduce", False)  # not in 0.24
