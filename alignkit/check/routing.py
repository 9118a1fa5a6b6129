"""Which experts the routers of a mixture chose, token by token: hooks that only look on, and what they saw compared.

A row is a token of a sequence, prompt and sampled ones but the last, which nothing is computed from; rows of all sequences stand end
to end. vLLM's routers are seen by their logits, as its kernels do not tell whom they choose; Megatron's by their choice.
vLLM must run eagerly, in its V1 runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .. import ops
from ..dist import TP
from ..drift import Logprobs
from ..errors import InputError, UnsupportedError
from ..ops.moe_router.reference import sigmoid


def file_of(logprobs: Path | str) -> Path:
    """Where the choices lie that belong to a logprob file."""
    return Path(logprobs).with_suffix(".routing.safetensors")


def rows_of_step(runner: Any, args: tuple, kwargs: Mapping[str, Any], first: Mapping[tuple[int, ...], int]):
    """In a hook before vLLM's model: the row of each token of this step, -1 for others; and where each request's tokens start
    in it. first: by the ids of a prompt, the row of its first token."""
    batch = runner.input_batch
    positions = kwargs["positions"] if "positions" in kwargs else args[1]
    if positions.dim() != 1:
        raise UnsupportedError("positions: of several dimensions (M-RoPE)")
    starts = np.asarray(runner.query_start_loc.np[: batch.num_reqs + 1])
    rows = np.full(positions.shape[0], -1, dtype=np.int64)  # behind the last request there may be padding
    positions = positions.cpu().numpy()
    for i, request in enumerate(batch.req_ids[: batch.num_reqs]):
        found = first.get(tuple(runner.requests[request].prompt_token_ids))
        if found is not None:
            mine = slice(starts[i], starts[i + 1])
            rows[mine] = found + positions[mine]
    return rows, starts


class Recording:
    """Methods for ``collective_rpc`` of a vLLM worker (its ``worker_extension_cls``)."""

    # vLLM's, of the worker that these are methods of
    model_runner: Any
    rank: int

    def alignkit_watch_routers(self, prompts: list[list[int]], longest: int) -> None:
        """From now on, of these prompts; longest: most tokens of one, with those that are sampled."""
        if not hasattr(self, "_alignkit_routers"):
            self._alignkit_routers = _Routers(self.model_runner)
        self._alignkit_routers.begin(prompts, longest)

    def alignkit_save_routing(self, lengths: list[int], path: str) -> None:
        """What was seen of the sequences of those prompts; lengths: tokens of each. Every rank has all tokens: one saves."""
        if self.rank == 0:
            save_file({"logits": self._alignkit_routers.end(lengths)}, path)


class _Routers:
    def __init__(self, runner: Any):
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self._runner = runner
        model = runner.get_model()
        gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
        mixtures = [module for module in model.modules() if isinstance(module, MoERunner)]
        if len(gates) != len(mixtures):
            raise UnsupportedError(f"{len(gates)} routers of {len(mixtures)} mixtures")
        model.register_forward_pre_hook(self._step, with_kwargs=True)
        for i, (gate, mixture) in enumerate(zip(gates, mixtures, strict=True)):
            gate.register_forward_hook(self._gate(i, mixture.routed_experts))
        self._layers = len(gates)

    def begin(self, prompts: list[list[int]], longest: int) -> None:
        self._longest = longest
        self._first = {tuple(prompt): i * longest for i, prompt in enumerate(prompts)}
        self._logits: torch.Tensor | None = None

    def end(self, lengths: list[int]) -> torch.Tensor:
        """fp32 [rows, layers, experts]; NaN where nothing was computed."""
        if self._logits is None:
            raise InputError("routers: none was asked")
        return torch.cat([self._logits[i * self._longest :][: length - 1] for i, length in enumerate(lengths)])

    def _step(self, _, args, kwargs) -> None:
        self._rows = torch.from_numpy(rows_of_step(self._runner, args, kwargs, self._first)[0])

    def _gate(self, layer: int, experts: Any):
        def hook(_, inputs, output) -> None:
            logits = _decisive(output[0] if isinstance(output, tuple) else output, experts)
            if self._logits is None:
                shape = len(self._first) * self._longest, self._layers, logits.shape[-1]
                self._logits = torch.full(shape, torch.nan)
            wanted = self._rows >= 0
            self._logits[self._rows[wanted], layer] = logits.float().cpu()[wanted]

        return hook


def _decisive(logits: torch.Tensor, experts: Any) -> torch.Tensor:
    """What vLLM's `experts` are chosen by: the logits, or sigmoids and a bias; in groups that are left out, -inf."""
    if experts.scoring_func == "softmax":
        return logits
    logits, bias = logits.float(), experts.e_score_correction_bias
    values = sigmoid(logits) if bias is None else sigmoid(logits) + bias
    groups, best = experts.num_expert_group, experts.topk_group
    if not experts.use_grouped_topk or groups == 1:
        return values
    of_best = logits.shape[-1] // groups * best
    _, ids = ops.moe_router(logits, of_best, score="sigmoid", bias=bias, groups=groups, top_groups=best)
    return torch.full_like(values, -torch.inf).scatter(-1, ids, values.gather(-1, ids))


@dataclass(frozen=True)
class Placed:
    """Where a forward has the tokens of a sequence: in which row the first one, and how many rows on each further one."""

    sequence: int
    first: int
    step: int


class Choices:
    """Within the block, what the routers of a Megatron-core model choose; its ranks have the same tokens, or with sequence
    parallelism parts of the same."""

    def __init__(self, model: Any):
        from megatron.core.transformer.moe.router import TopKRouter

        self._routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        self._seen: list[list[torch.Tensor]] = []
        self._parts = TP(model.pg_collection.tp) if model.config.sequence_parallel else None

    def __enter__(self) -> Choices:
        self._seen = [[] for _ in self._routers]
        hooks = [_chosen_by(seen) for seen in self._seen]
        self._handles = [r.register_forward_hook(hook) for r, hook in zip(self._routers, hooks, strict=True)]
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def of(self, given: Logprobs, forwards: list[list[Placed]]) -> torch.Tensor:
        """uint8 [rows, layers, experts]: what was chosen for the sequences of `given`, which the forwards had. A collective of
        the ranks with parts of them."""
        lengths = [len(p) + len(t) for p, t in zip(given.prompts, given.tokens, strict=True)]
        parts: list[torch.Tensor] = [torch.empty(0)] * len(lengths)
        for n, sequences in enumerate(forwards):
            chosen = torch.stack([seen[n] for seen in self._seen], dim=1).to(torch.uint8)
            if self._parts is not None:
                chosen = self._parts.gather(chosen)
            chosen = chosen.cpu()
            for at in sequences:
                parts[at.sequence] = chosen[at.first :: at.step][: lengths[at.sequence] - 1]
        return torch.cat(parts)


def _chosen_by(seen: list[torch.Tensor]):
    def hook(_, inputs, output) -> None:
        seen.append(output[1].flatten(0, -2))

    return hook


def rerouted(rollout: Path, training: Path) -> tuple[int, int]:
    """How many rows went to another expert in some layer, and of how many both are known.

    A row did if a chosen expert's logit, or whatever the choice goes by, in the rollout is less than that of one that was not chosen: which of equal logits
    vLLM takes is not seen, so any of them counts as its choice."""
    logits, chosen = load_file(rollout)["logits"], load_file(training)["chosen"].bool()
    if logits.shape != chosen.shape:
        raise InputError(f"{training}: choices of shape {tuple(chosen.shape)}, logits of {tuple(logits.shape)}")
    known = ~logits.isnan().flatten(1).any(dim=1)
    worst = logits.masked_fill(~chosen, torch.inf).amin(dim=-1)
    best = logits.masked_fill(chosen, -torch.inf).amax(dim=-1)
    return int(((worst < best).any(dim=1) & known).sum()), int(known.sum())
