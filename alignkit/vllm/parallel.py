"""vLLM's ranks, as alignkit's ops take them."""

from __future__ import annotations

import torch
from vllm.distributed import get_dp_group, get_ep_group, get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available

from alignkit.dist import TP
from alignkit.errors import BackendError
from alignkit.ops import library

GROUP = "vllm"
"""What `ops.library` calls the tensor-parallel ranks of an engine. One name for all engines: it ends up in compiled graphs
on disk, as the two below."""
EXPERTS = "vllm-experts"
"""With data parallelism, the ranks that share experts: those of all replicas, by replica, then by tensor-parallel rank."""
REPLICAS = "vllm-replicas"
"""With data parallelism, the ranks of one place in each replica."""


class EngineTP(TP):
    """The ranks of a group of vLLM's, gathering through vLLM's own communicator, which vLLM makes ready for CUDA graphs."""

    def __init__(self, engine, called: str = "tensor-parallel") -> None:
        self._engine = engine
        super().__init__(engine.device_group, agreed=True, called=called)  # vLLM gives all ranks the same batch

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return t
        return self._engine.device_communicator.all_gather(t.contiguous(), 0)


class Replicated(EngineTP):
    """Ranks of several replicas, which have a batch each and bring rows of their own to a mixture of experts. vLLM lets all
    replicas step together; one without requests has a dummy batch."""

    def __init__(self, engine, called: str) -> None:
        super().__init__(engine, called)
        self._share = self.size // get_dp_group().world_size  # ranks that divide the rows of a replica

    def height(self, rows: int) -> int:
        """What the longest batch of a replica comes to on a rank. In CUDA graphs, all are as long: vLLM pads them."""
        metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
        if metadata is None:  # when the engine starts, all ranks run the same
            return rows
        most = -(-int(metadata.num_tokens_across_dp_cpu.max()) // self._share)
        captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if rows > most or (rows < most and captured):
            raise BackendError(f"{rows} rows on a rank of which vLLM said {metadata.num_tokens_across_dp_cpu.tolist()}")
        return most


def name_groups(replicated: bool) -> None:
    """Tells `ops.library` the ranks of the engine in this process. replicated: whether its replicas share experts."""
    library.name_group(GROUP, EngineTP(get_tp_group()))
    if replicated:
        library.name_group(EXPERTS, Replicated(get_ep_group(), "expert-parallel"))
        library.name_group(REPLICAS, Replicated(get_dp_group(), "data-parallel"))
