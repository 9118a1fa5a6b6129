"""Recorder of a Megatron-core model: ``python -m alignkit.bisect.megatron_side JOB.json``.

`job` documents the job file, and `points` names what the hooks record. The hooks only read; `swap` replaces an op.
`check.train` starts the ranks and builds the model.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import torch
import torch.distributed as dist

from alignkit.convert import read_architecture
from alignkit.errors import UnsupportedError
from alignkit.jobs import train

from . import job as jobs
from .points import ROUTER_CHOICE

_LOGITS = "logits"


def main(arguments: list[str]) -> None:
    train.launch(jobs.read(arguments[0]), body)


def body(rank: int, job: dict, model, contract: str) -> None:
    """Record one rank's part; rank 0 then merges all parts into the recording."""
    import megatron.core

    arch = read_architecture(job["model"])
    for op in job["swap"]:
        swap(model, op)
    recorder = jobs.recorder(job)
    record = _Hooks(model, recorder, arch)
    device = next(model.parameters()).device
    packed = job["mode"] == "packed"
    for tokens, rows in (
        jobs.micro_batches(job["sequences"], "one" if packed else job["mode"])
        if not packed
        else [_packed(job["sequences"])]
    ):
        _forward(
            model,
            tokens.to(device),
            rows,
            record,
            recorder,
            patched=job["patched"],
            starts=np.cumsum([0] + [len(s) for s in job["sequences"]]) if packed else None,
        )
    recorder.save(jobs.part(job, rank))
    dist.barrier()
    if rank == 0:
        jobs.finish(
            job, f"megatron-core {megatron.core.__version__}", contract, job["sequences"], {"mode": job["mode"]}
        )


def _packed(sequences: list[list[int]]) -> tuple[torch.Tensor, np.ndarray]:
    tokens = torch.tensor([list(itertools.chain.from_iterable(sequences))])
    return tokens, np.arange(tokens.numel()).reshape(1, -1)


def _forward(model, tokens: torch.Tensor, rows: np.ndarray, record: _Hooks, recorder, *, patched: bool, starts) -> None:
    """Run a forward with labels, then one without labels that records only the logits."""
    device = tokens.device
    s = tokens.shape[1]
    mask = packed = None
    positions = torch.arange(s, device=device).expand_as(tokens)
    labels, known = jobs.targets(tokens.cpu(), rows, train.IGNORE)
    if starts is not None:
        from megatron.core.packed_seq_params import PackedSeqParams

        last = starts[1:] - 1
        labels[0, last], known[0, last] = train.IGNORE, -1
        cu_seqlens = torch.from_numpy(starts).to(device, torch.int32)
        longest = int(np.diff(starts).max())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    else:
        mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1)  # True masks out
    labels = labels.to(device)
    recorder.index = np.ascontiguousarray(rows.T).reshape(-1)  # Megatron's [s, b, ...]
    record.logits = False
    if patched:
        from alignkit.megatron import logprobs

        logp = logprobs(
            model, tokens, positions, mask, labels, ignore_index=train.IGNORE, packed_seq_params=packed
        ).log_probs
    else:
        # Positions without a next token get label 0, a valid id; their rows are not recorded.
        logp = -model(tokens, positions, mask, labels=labels.clamp(min=0)).float()
    recorder.put("logprob", logp.reshape(-1), known.reshape(-1))
    if recorder.wants(_LOGITS):
        record.logits = True
        model(tokens, positions, mask, **({} if packed is None else {"packed_seq_params": packed}))


class _Hooks:
    """Forward hooks that record the modules' outputs on one rank, without changing them.

    logits: if True, record the logits and nothing else.
    """

    def __init__(self, model, recorder, arch):
        self._recorder, self._arch = recorder, arch
        self._tp = model.pg_collection.tp
        self.logits = False
        self._after(model.embedding, "embedding")
        for i, layer in enumerate(model.decoder.layers):

            def name(point: str, i: int = i) -> str:
                return f"layers.{i}.{point}"

            attention, mlp = layer.self_attention, layer.mlp
            self._after(layer.input_layernorm, name("input_norm"))
            attention.linear_qkv.register_forward_hook(self._qkv(i))
            if arch.qk_norm:
                self._after(attention.q_layernorm, name("q_norm"))
                self._after(attention.k_layernorm, name("k_norm"))
            attention.core_attention.register_forward_pre_hook(self._rope(i), with_kwargs=True)
            self._before(attention.linear_proj, name("attention"))
            self._after(attention.linear_proj, name("attention_proj"))
            self._before(layer.pre_mlp_layernorm, name("attention_residual"))
            self._after(layer.pre_mlp_layernorm, name("post_norm"))
            if arch.experts:
                mlp.router.register_forward_hook(self._router(i))
                self._after(mlp, name("experts"))
            else:
                mlp.linear_fc1.register_forward_hook(self._gate_up(i))
                self._before(mlp.linear_fc2, name("activation"))
                self._after(mlp.linear_fc2, name("down"))
            self._after(layer, name("residual"))
        self._after(model.decoder.final_layernorm, "final_norm")
        model.output_layer.register_forward_hook(self._output_layer)

    def _put(self, name: str, value: torch.Tensor) -> None:
        if not self.logits:
            self._recorder.put(name, value)

    def _after(self, module, name: str) -> None:
        def hook(_, inputs, output) -> None:
            self._put(name, output[0] if isinstance(output, tuple) else output)

        module.register_forward_hook(hook)

    def _before(self, module, name: str) -> None:
        def hook(_, inputs) -> None:
            self._put(name, inputs[0])

        module.register_forward_pre_hook(hook)

    def _qkv(self, i: int):
        def hook(_, inputs, output) -> None:
            arch = self._arch
            groups = output[0].unflatten(-1, (arch.kv_heads // self._tp.size(), -1, arch.head_dim))
            sizes = [arch.heads // arch.kv_heads, 1, 1]  # per KV head: its query heads, key and value
            for x, part in zip("qkv", groups.split(sizes, -2), strict=True):
                self._put(f"layers.{i}.{x}", part)

        return hook

    def _rope(self, i: int):
        def hook(_, inputs, keywords) -> None:
            for j, x in enumerate(("query", "key")):
                value = keywords[x] if x in keywords else inputs[j]
                self._put(f"layers.{i}.{x[0]}_rope", value)

        return hook

    def _router(self, i: int):
        def hook(_, inputs, output) -> None:
            self._put(f"layers.{i}.{ROUTER_CHOICE}", output[1].float())

        return hook

    def _gate_up(self, i: int):
        def hook(_, inputs, output) -> None:
            for x, part in zip(("gate", "up"), output[0].chunk(2, -1), strict=True):
                self._put(f"layers.{i}.{x}", part)

        return hook

    def _output_layer(self, _, inputs, output) -> None:
        if not self.logits:
            return
        local = output[0].contiguous()
        parts = [local]
        if self._tp.size() > 1:
            parts = [torch.empty_like(local) for _ in range(self._tp.size())]
            dist.all_gather(parts, local, group=self._tp)
        if self._tp.rank() == 0:
            self._recorder.put(_LOGITS, torch.cat(parts, -1)[..., : self._arch.vocab])


def swap(model, op: str) -> None:
    """Replace the modules of one op of a stock model with alignkit's."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import attention

    from alignkit.megatron import modules, state, supported

    replaced = 0
    for module in list(model.modules()):
        kind = type(module)
        target = None
        if module is model.output_layer:
            target = modules.OutputLayer if op == "head" else None
        elif op == "linear" and kind is layers.ColumnParallelLinear:
            target = modules.ColumnParallelLinear
        elif op == "linear" and kind is layers.RowParallelLinear:
            target = modules.RowParallelLinear
        else:
            candidates = (getattr(modules, name) for name in _CLASSES.get(op, ()))
            target = next((cls for cls in candidates if kind is modules.stock_class(cls)), None)
        if target is not None:
            module.__class__ = target
            replaced += 1
    if op == "rope" and replaced:
        base, scaling = supported.check_rotary(model)
        record = state.of_model(model)
        device = next(model.parameters()).device
        record.rotations = modules.Rotations(base, supported.rotary_dim(model), device, scaling)
        state.register([model.rotary_pos_emb], record)
        attention.apply_rotary_pos_emb = modules.apply_rotary_pos_emb
    if not replaced:
        raise UnsupportedError(
            f"swap: must be an op that a module of this Megatron-core model computes, got {op!r}. Omit --swap, or pass "
            "another op."
        )


_CLASSES = {
    "rms_norm": ("RMSNorm",),
    "attention": ("DotProductAttention",),
    "silu_mul": ("MLP",),
    "rope": ("RotaryEmbedding", "YarnRotaryEmbedding"),
}


if __name__ == "__main__":
    from alignkit.bisect import megatron_side

    megatron_side.main(sys.argv[1:])  # not __main__'s main, which the ranks' processes cannot import
