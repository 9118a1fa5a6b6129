"""Recording and comparison of the routers' expert choices in MoE models, token by token, with read-only hooks.

A row is one input token: every prompt and sampled token of a sequence except the last. Rows of all sequences are
concatenated. On the vLLM side, the hooks record router logits, because vLLM's kernels do not expose the selected
experts. On the Megatron-core side, they record the selected experts. vLLM must run eagerly with the V1 model runner.
`rollout` calls the ``alignkit_*`` methods by name; bisect has hooks of its own (`alignkit.bisect.vllm_worker`).
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
    """Return the path of the routing file that belongs to a logprob file."""
    return Path(logprobs).with_suffix(".routing.safetensors")


def rows_of_step(runner: Any, args: tuple, kwargs: Mapping[str, Any], first: Mapping[tuple[int, ...], int]):
    """Return the row of each token of a vLLM step (-1 for other tokens) and the start of each request's tokens.

    Call it in a forward pre-hook of the model. first: map from prompt ids to the row of the prompt's first token.
    """
    batch = runner.input_batch
    positions = kwargs["positions"] if "positions" in kwargs else args[1]
    if positions.dim() != 1:
        raise UnsupportedError(
            f"positions: vLLM must pass position ids of shape [tokens] to the model, got {list(positions.shape)}. "
            "Models with M-RoPE are not supported."
        )
    starts = np.asarray(runner.query_start_loc.np[: batch.num_reqs + 1])
    rows = np.full(positions.shape[0], -1, dtype=np.int64)  # the step may end in padding
    positions = positions.cpu().numpy()
    for i, request in enumerate(batch.req_ids[: batch.num_reqs]):
        first_row = first.get(tuple(runner.requests[request].prompt_token_ids))
        if first_row is not None:
            tokens = slice(starts[i], starts[i + 1])
            rows[tokens] = first_row + positions[tokens]
    return rows, starts


class Recording:
    """Worker extension (vLLM's ``worker_extension_cls``) whose methods are called with ``collective_rpc``."""

    # Provided by vLLM's worker class.
    model_runner: Any
    rank: int

    def alignkit_watch_routers(self, prompts: list[list[int]], longest: int) -> None:
        """Start recording these prompts; `longest` bounds the tokens of one sequence, sampled ones included."""
        if not hasattr(self, "_alignkit_routers"):
            self._alignkit_routers = _Routers(self.model_runner)
        self._alignkit_routers.begin(prompts, longest)

    def alignkit_save_routing(self, lengths: list[int], path: str) -> None:
        """Save the logits of the prompts' sequences of `lengths` tokens; rank 0 saves, as every rank has all tokens."""
        if self.rank == 0:
            save_file({"logits": self._alignkit_routers.end(lengths)}, path)


class _Routers:
    """Recorder of the router logits of a vLLM model."""

    def __init__(self, runner: Any):
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self._runner = runner
        model = runner.get_model()
        gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
        moe_layers = [module for module in model.modules() if isinstance(module, MoERunner)]
        if len(gates) != len(moe_layers):
            raise UnsupportedError(
                "model: vLLM's model must have one router (a module with a name that ends in .gate) per MoE layer (a "
                f"module of class MoERunner), because alignkit check records the routers' scores, got {len(gates)} "
                f"routers and {len(moe_layers)} MoE layers. This model or vLLM version is not supported"
            )
        model.register_forward_pre_hook(self._step, with_kwargs=True)
        for i, (gate, moe_layer) in enumerate(zip(gates, moe_layers, strict=True)):
            gate.register_forward_hook(self._gate(i, moe_layer.routed_experts))
        self._layers = len(gates)

    def begin(self, prompts: list[list[int]], longest: int) -> None:
        self._longest = longest
        self._first = {tuple(prompt): i * longest for i, prompt in enumerate(prompts)}
        self._logits: torch.Tensor | None = None

    def end(self, lengths: list[int]) -> torch.Tensor:
        """Return the recorded logits, fp32 [rows, layers, experts]; NaN where a row was not computed."""
        if self._logits is None:
            raise InputError(
                'runs: "routing" requires a model with MoE layers, but vLLM ran none, so no router scores were '
                'recorded. Omit "routing" for a dense model.'
            )
        return torch.cat([self._logits[i * self._longest :][: length - 1] for i, length in enumerate(lengths)])

    def _step(self, _, args, kwargs) -> None:
        self._rows = torch.from_numpy(rows_of_step(self._runner, args, kwargs, self._first)[0])

    def _gate(self, layer: int, experts: Any):
        def hook(_, inputs, output) -> None:
            logits = _selection_scores(output[0] if isinstance(output, tuple) else output, experts)
            if self._logits is None:
                shape = len(self._first) * self._longest, self._layers, logits.shape[-1]
                self._logits = torch.full(shape, torch.nan)
            wanted = self._rows >= 0
            self._logits[self._rows[wanted], layer] = logits.float().cpu()[wanted]

        return hook


def _selection_scores(logits: torch.Tensor, experts: Any) -> torch.Tensor:
    """Return the scores by which vLLM selects experts: logits, or sigmoid plus bias; -inf in excluded groups."""
    if experts.scoring_func == "softmax":
        return logits
    logits, bias = logits.float(), experts.e_score_correction_bias
    values = sigmoid(logits) if bias is None else sigmoid(logits) + bias
    groups, best = experts.num_expert_group, experts.topk_group
    if not experts.use_grouped_topk or groups == 1:
        return values
    candidates = logits.shape[-1] // groups * best
    _, ids = ops.moe_router(logits, candidates, score="sigmoid", bias=bias, groups=groups, top_groups=best)
    return torch.full_like(values, -torch.inf).scatter(-1, ids, values.gather(-1, ids))


@dataclass(frozen=True)
class Placed:
    """Position of a sequence's tokens in a forward: the row of the first token and the stride to the next."""

    sequence: int
    first: int
    step: int


class Choices:
    """Context manager that records the expert choices of a Megatron-core model.

    All ranks run the same tokens; with sequence parallelism each rank has a part of them.
    """

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
        """Return the choices for the sequences of `given`, uint8 [rows, layers, experts].

        forwards: the placement of the sequences in each recorded forward. Collective over sequence-parallel ranks.
        """
        lengths = [len(p) + len(t) for p, t in zip(given.prompts, given.tokens, strict=True)]
        parts: list[torch.Tensor] = [torch.empty(0)] * len(lengths)
        for n, sequences in enumerate(forwards):
            chosen = torch.stack([seen[n] for seen in self._seen], dim=1).to(torch.uint8)
            if self._parts is not None:
                chosen = self._parts.gather(chosen)
            chosen = chosen.cpu()
            for placed in sequences:
                parts[placed.sequence] = chosen[placed.first :: placed.step][: lengths[placed.sequence] - 1]
        return torch.cat(parts)


def _chosen_by(seen: list[torch.Tensor]):
    def hook(_, inputs, output) -> None:
        seen.append(output[1].flatten(0, -2))

    return hook


def rerouted(rollout: Path, training: Path) -> tuple[int, int]:
    """Return (rerouted rows, rows known on both sides).

    A row is rerouted if, in some layer, an expert selected in training has a lower rollout score than an expert that
    was not. vLLM's tie-breaking is not observable, so equal scores never count as rerouted.
    """
    logits, chosen = load_file(rollout)["logits"], load_file(training)["chosen"].bool()
    if logits.shape != chosen.shape:
        raise InputError(
            f"{training}: tensor 'chosen': must have the shape {list(logits.shape)} of 'logits' in {rollout}, "
            f"got {list(chosen.shape)}"
        )
    known = ~logits.isnan().flatten(1).any(dim=1)
    worst = logits.masked_fill(~chosen, torch.inf).amin(dim=-1)
    best = logits.masked_fill(chosen, -torch.inf).amax(dim=-1)
    return int(((worst < best).any(dim=1) & known).sum()), int(known.sum())
