"""The process groups of vLLM as `TP` objects for alignkit's ops.

`register_groups` registers them under names, which compiled graphs contain. vLLM caches such graphs on disk and other
engines load them, so the names are the same for all engines.
"""

from __future__ import annotations

import torch
from vllm.distributed import get_dp_group, get_ep_group, get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available

from alignkit.dist import TP
from alignkit.engines.hook_points import relies_on
from alignkit.errors import BackendError
from alignkit.ops import library

TP_GROUP = "vllm"
"""Name of the tensor-parallel group."""
EP_GROUP = "vllm-experts"
"""Name of the expert-parallel group. With data parallelism it has all ranks, ordered by replica, then by
tensor-parallel rank."""
DP_GROUP = "vllm-replicas"
"""Name of the data-parallel group: the ranks with the same tensor-parallel rank in each replica."""


class EngineTP(TP):
    """A `GroupCoordinator` of vLLM. It all-gathers with vLLM's communicator, which supports CUDA graph capture."""

    def __init__(self, coordinator, label: str = "tensor-parallel") -> None:
        self._coordinator = coordinator
        super().__init__(coordinator.device_group, agreed=True, label=label)  # vLLM makes the same calls on all ranks

    @relies_on(
        "distributed/device_communicators/base_device_communicator.py:DeviceCommunicatorBase.all_gather", "input_ dim"
    )
    @relies_on(
        "distributed/device_communicators/cuda_communicator.py:CudaCommunicator.all_gather",
        "input_ dim",
        when="cuda_all_gather",
    )
    def gather(self, t: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return t
        return self._coordinator.device_communicator.all_gather(t.contiguous(), 0)


class AcrossReplicas(EngineTP):
    """A group of ranks in different data-parallel replicas, which pass different rows to an MoE layer.

    Each replica has its own batch. vLLM runs the steps of all replicas together; a replica without requests runs a
    dummy batch.
    """

    def __init__(self, coordinator, label: str) -> None:
        super().__init__(coordinator, label)
        self._ranks_per_replica = self.size // get_dp_group().world_size  # these ranks split the rows of a replica

    @relies_on("forward_context.py:DPMetadata", members="num_tokens_across_dp_cpu")
    @relies_on("forward_context.py:ForwardContext", members="dp_metadata")
    @relies_on("distributed/parallel_state.py:get_dp_group")
    @relies_on("distributed/parallel_state.py:get_ep_group")
    def padded_rows(self, rows: int) -> int:
        """Return the largest number of rows of any rank, to which all ranks pad.

        During CUDA graph capture vLLM has already padded, so the counts must be equal.
        """
        if not is_forward_context_available():  # in warm-up, all ranks have the same number of rows
            return rows
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            raise BackendError("dp_metadata: must be set in vLLM's forward context with data parallelism, got None")
        longest = -(-int(metadata.num_tokens_across_dp_cpu.max()) // self._ranks_per_replica)
        replicas = metadata.num_tokens_across_dp_cpu
        if rows > longest:
            raise BackendError(
                f"tokens: each rank must have at most {longest} with vLLM's num_tokens_across_dp_cpu = "
                f"{replicas.tolist()}, got {rows}"
            )
        if rows < longest and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise BackendError(
                f"tokens: each rank must have exactly {longest} during CUDA graph capture with vLLM's "
                f"num_tokens_across_dp_cpu = {replicas.tolist()}, got {rows}"
            )
        return longest


def register_groups(experts_shared: bool) -> None:
    """Register the engine's groups in `ops.library`. experts_shared: whether data-parallel replicas share experts."""
    library.register_group(TP_GROUP, EngineTP(get_tp_group()))
    if experts_shared:
        library.register_group(EP_GROUP, AcrossReplicas(get_ep_group(), "expert-parallel"))
        library.register_group(DP_GROUP, AcrossReplicas(get_dp_group(), "data-parallel"))
