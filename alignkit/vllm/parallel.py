"""vLLM's tensor-parallel ranks, as alignkit's ops take them."""

from __future__ import annotations

import torch
from vllm.distributed import get_tp_group

from alignkit.dist import TP

GROUP = "vllm"
"""What `ops.library` calls the ranks below. One name for all engines: it ends up in compiled graphs on disk."""


class EngineTP(TP):
    """The tensor-parallel group of the engine in this process, gathering through vLLM's own communicator, which vLLM
    makes ready for CUDA graphs."""

    def __init__(self) -> None:
        self._engine = get_tp_group()
        super().__init__(self._engine.device_group, agreed=True)  # vLLM gives all ranks the same batch

    def all_gather(self, t: torch.Tensor) -> list[torch.Tensor]:
        gathered = self._engine.device_communicator.all_gather(t.contiguous(), 0)
        return list(gathered.view(self.size, *t.shape).unbind(0))
