"""Forward of a micro-batch under pipeline and context parallelism, with all logprobs returned on every rank.

Only `train` uses it. It moves tokens and logprobs between ranks and computes no logprob, so it holds no numerics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from alignkit.dist import CP

Logp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Any], torch.Tensor]
"""(tokens, positions, mask, labels, packed_seq_params) -> fp32 logprobs [b, s]."""


def through_stages(model, logp: Logp) -> Logp:
    """Return `logp` run by Megatron's pipeline schedule, with the last stage's logprobs broadcast to all stages.

    On other stages `logp` must return the model's output.
    """
    group, cp_size = model.pg_collection.pp, model.pg_collection.cp.size()
    if group.size() == 1:
        return logp
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def run(tokens, positions, mask, labels, packed) -> torch.Tensor:
        result = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)

        def forward_step(_, model):
            def loss(output):
                result.copy_(output)
                return output.sum(), {}

            return logp(tokens, positions, mask, labels, packed), loss

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[model],
            num_microbatches=1,
            seq_length=tokens.shape[1] * cp_size,  # the schedule divides by the CP size
            micro_batch_size=len(tokens),
            forward_only=True,
        )
        dist.broadcast(result, dist.get_global_rank(group, group.size() - 1), group=group)
        return result

    return run


def over_context_chunks(model, logp: Logp) -> Logp:
    """Return `logp` run on this rank's context-parallel chunks, with the result all-gathered in token order.

    Each sequence's length must be a multiple of 2 * ranks.
    """
    cp = CP(model.pg_collection.cp)
    if cp.size == 1:
        return logp

    def run(tokens, positions, mask, labels, packed) -> torch.Tensor:
        starts = torch.tensor([0, tokens.shape[1]], device=tokens.device) if packed is None else packed.cu_seqlens_q
        order = cp.order(tokens.shape[1] // cp.size, starts)
        local = order.view(cp.size, -1)[cp.rank]
        local_logp = logp(tokens[:, local], positions[:, local], None, labels[:, local], packed).contiguous()
        parts = [torch.empty_like(local_logp) for _ in range(cp.size)]
        dist.all_gather(parts, local_logp, group=cp.group)
        result = torch.empty(tokens.shape, dtype=local_logp.dtype, device=local_logp.device)
        result[:, order] = torch.cat(parts, 1)
        return result

    return run
