"""A micro-batch through a model that is cut over pipeline stages, and over ranks with parts of its sequences: each rank gets
the logprobs of all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from alignkit.dist import CP

Logp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Any], torch.Tensor]
"""(tokens, positions, mask, labels, packed_seq_params) -> fp32 logprobs [b, s]."""


def through_stages(model, logp: Logp) -> Logp:
    """`logp` by Megatron's own schedule, with the last stage's logprobs on all of them. There, `logp` itself returns on any
    other stage what the model does."""
    group, cp_size = model.pg_collection.pp, model.pg_collection.cp.size()
    if group.size() == 1:
        return logp
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def run(tokens, positions, mask, labels, packed) -> torch.Tensor:
        found = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)

        def forward_step(_, model):
            def loss(output):
                found.copy_(output)
                return output.sum(), {}

            return logp(tokens, positions, mask, labels, packed), loss

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[model],
            num_microbatches=1,
            seq_length=tokens.shape[1] * cp_size,  # which the schedule divides again
            micro_batch_size=len(tokens),
            forward_only=True,
        )
        dist.broadcast(found, dist.get_global_rank(group, group.size() - 1), group=group)
        return found

    return run


def over_parts(model, logp: Logp) -> Logp:
    """`logp` of the part that this rank has of each sequence, whose length is a multiple of 2 * ranks, put together again."""
    cp = CP(model.pg_collection.cp)
    if cp.size == 1:
        return logp

    def run(tokens, positions, mask, labels, packed) -> torch.Tensor:
        starts = torch.tensor([0, tokens.shape[1]], device=tokens.device) if packed is None else packed.cu_seqlens_q
        order = cp.order(tokens.shape[1] // cp.size, starts)
        own = order.view(cp.size, -1)[cp.rank]
        mine = logp(tokens[:, own], positions[:, own], None, labels[:, own], packed).contiguous()
        parts = [torch.empty_like(mine) for _ in range(cp.size)]
        dist.all_gather(parts, mine, group=cp.group)
        whole = torch.empty(tokens.shape, dtype=mine.dtype, device=mine.device)
        whole[:, order] = torch.cat(parts, 1)
        return whole

    return run
