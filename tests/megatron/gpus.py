"""Pool of processes, one per GPU, that stay alive between calls and are Megatron's ranks over NCCL.

The `*_cuda.py` tests of this folder and of tests/ops use it; tests/fuzz uses `join`.
"""

import os
import pickle
import traceback
from functools import partial

import torch
import torch.distributed as dist

from alignkit.dist import TP
from alignkit.jobs.store import connect_store
from alignkit.runtime.machine import gpu_of
from alignkit.testing import Ranks


class GPUs(Ranks):
    """Context manager of `world` GPU ranks."""

    def __init__(self, world):
        super().__init__(world, _serve)
        self.world = world

    def with_tp(self, size, function, *args, **keywords):
        """Run ``function(tp, *args)`` on all GPUs, in groups of `size` tensor-parallel ranks.

        Returns:
            The result of each rank, with tensors moved to the CPU.
        """
        return self.run(self.world, partial(_with_tp, size, function, args, keywords))


def join(rank, world, **where):
    """Make this process NCCL rank `rank` of `world`, on the GPU of that rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Megatron makes gloo groups beside NCCL's
    device = gpu_of(rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device, **where)


_groups = {}
"""Tensor-parallel size -> group globals of parallel_state, reused because Megatron never destroys process groups."""


def tensor_parallel(size):
    """Switch Megatron to groups of `size` tensor-parallel ranks and return the `TP` of this rank."""
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized() or (
        parallel_state.get_tensor_model_parallel_world_size() != size
    ):
        parallel_state.destroy_model_parallel()
        if size in _groups:
            vars(parallel_state).update(_groups[size])
        else:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
            _groups[size] = {
                name: value
                for name, value in vars(parallel_state).items()
                if name.startswith("_") and not name.startswith("__") and not callable(value)
            }
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    return TP(parallel_state.get_tensor_model_parallel_group())


def _serve(rank, world, port, inbox, outbox):
    torch.set_num_threads(4)
    join(rank, world, store=connect_store(port))
    while (job := inbox.get()) is not None:
        _, function, _ = pickle.loads(job)
        try:
            outbox.send((rank, None, pickle.dumps(function())))
        except Exception as e:
            outbox.send((rank, traceback.format_exc(), pickle.dumps((type(e), str(e)))))
    dist.destroy_process_group()


def _with_tp(size, function, args, keywords):
    return _on_cpu(function(tensor_parallel(size), *args, **keywords))


def _on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(v) for key, v in value.items()}
    return type(value)(map(_on_cpu, value)) if isinstance(value, (list, tuple)) else value
