"""Recorder in a vLLM worker: vLLM mixes `Recording` into the worker's class (``worker_extension_cls``).

`vllm_side` starts the engine and calls the ``alignkit_*`` methods by name. The hooks do not change any value. They are
defined in alignkit, because an aligned worker rejects foreign hooks. vLLM must run eagerly, since hooks do not run in a
CUDA graph.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignkit.convert import read_architecture
from alignkit.errors import UnsupportedError
from alignkit.jobs.routing import rows_of_step
from alignkit.models import FAMILIES
from alignkit.runtime.families import on_host
from alignkit.vllm.versions import installed, resolve

from . import job as jobs
from .points import ROUTER_CHOICE

SWAP = "alignkit_swap"
"""Key in vLLM's ``additional_config`` with the ops that `SwappedWorker` replaces."""
LAYERS = {
    "rms_norm": ("RMSNorm",),
    "linear": (
        "ReplicatedLinear",
        "ColumnParallelLinear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "RowParallelLinear",
    ),
    "rope": ("RotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding"),
    "attention": (),
    "silu_mul": ("SiluAndMul",),
    "head": ("LogitsProcessor", "ParallelLMHead", "VocabParallelEmbedding"),
}
"""vLLM's layer classes by op."""


class Recording:
    """Worker extension whose methods are called with ``collective_rpc``."""

    model_runner: Any  # provided by vLLM's worker class

    def alignkit_record(self, job_file: str) -> None:
        self._alignkit_job = jobs.read(job_file)
        self._alignkit_hooks = _Hooks(self.model_runner, self._alignkit_job)
        if (watch := getattr(self, "_watch", None)) is not None:  # an aligned worker's; a stock layer stays recordable
            watch.allow_hooks()

    def alignkit_save(self) -> None:
        from vllm.distributed import get_tp_group

        self._alignkit_hooks.recorder.save(jobs.part(self._alignkit_job, get_tp_group().rank_in_group))


class _Hooks:
    def __init__(self, runner, job: dict):
        from alignkit.vllm.layers import NormedAttention

        self._runner = runner
        self.recorder = jobs.recorder(job)
        arch = read_architecture(job["model"])
        sequences = job["sequences"]
        starts = np.cumsum([0] + [len(s) + job["decode"] for s in sequences])
        self._first_row = {tuple(s): int(starts[i]) for i, s in enumerate(sequences)}
        self._hidden: torch.Tensor | None = None
        self._sampled = np.zeros(0, dtype=np.int64)
        model = runner.get_model()
        model.register_forward_pre_hook(self._step, with_kwargs=True)
        model.register_forward_hook(self._after_step)
        _after(model.model.embed_tokens, self.recorder, "embedding")
        layers = list(model.model.layers)
        for i, layer in enumerate(layers):
            attention = layer.self_attn
            # A fused norm adds the residual first and returns both.
            _norm(layer.input_layernorm, self.recorder, f"layers.{i}.input_norm", f"layers.{i - 1}.residual")
            attention.qkv_proj.register_forward_hook(
                _split(
                    self.recorder,
                    [f"layers.{i}.{x}" for x in "qkv"],
                    [attention.q_size, attention.kv_size, attention.kv_size],
                )
            )
            if arch.qk_norm:
                _after(attention.q_norm, self.recorder, f"layers.{i}.q_norm")
                _after(attention.k_norm, self.recorder, f"layers.{i}.k_norm")
                if issubclass(type(attention), NormedAttention):
                    attention.qkv_proj.register_forward_hook(_call_norms(attention))
            attention.attn.register_forward_pre_hook(_rope(self.recorder, i))
            _before(attention.o_proj, self.recorder, f"layers.{i}.attention")
            _after(attention.o_proj, self.recorder, f"layers.{i}.attention_proj")
            _norm(
                layer.post_attention_layernorm, self.recorder, f"layers.{i}.post_norm", f"layers.{i}.attention_residual"
            )
            mlp = getattr(layer, FAMILIES[arch.family].mlp)
            if arch.experts:
                mlp.gate.register_forward_hook(_router(self.recorder, f"layers.{i}.{ROUTER_CHOICE}", arch.top_k))
                _after(mlp, self.recorder, f"layers.{i}.experts")
                continue
            width = arch.intermediate // job["tp"]
            mlp.gate_up_proj.register_forward_hook(
                _split(self.recorder, [f"layers.{i}.gate", f"layers.{i}.up"], [width, width])
            )
            _before(mlp.down_proj, self.recorder, f"layers.{i}.activation")
            _after(mlp.down_proj, self.recorder, f"layers.{i}.down")
        _norm(model.model.norm, self.recorder, "final_norm", f"layers.{len(layers) - 1}.residual")
        model.logits_processor.register_forward_hook(self._logits)

    def _step(self, _, args, kwargs) -> None:
        """Set the recorder's row index of each token of this step."""
        index, starts = rows_of_step(self._runner, args, kwargs, self._first_row)
        self.recorder.index = index
        self._sampled = index[starts[1:] - 1]

    def _after_step(self, _, inputs, output) -> None:
        self._hidden = output

    def _logits(self, _, inputs, output) -> None:
        """Record logits; their input is either a gather of the sampled rows or a slice of the prompts' rows."""
        if output is None:  # gathered on another rank
            return
        requested, hidden = inputs[1], self._hidden
        assert hidden is not None  # set by this step's forward
        offset, rest = divmod(requested.data_ptr() - hidden.data_ptr(), hidden.stride(0) * hidden.element_size())
        if rest == 0 and 0 <= offset <= len(hidden) - len(requested):
            index = self.recorder.index[offset : offset + len(requested)]
        elif len(requested) == len(self._sampled):
            index = self._sampled
        else:
            raise UnsupportedError(
                "logits: vLLM must compute logits from a slice of the hidden states or from the "
                f"{len(self._sampled)} sampled rows, got {len(requested)} other rows. alignkit bisect does not support "
                "this vLLM version."
            )
        self.recorder.put("logits", output, index)


def _after(module, recorder, name: str) -> None:
    def hook(_, inputs, output) -> None:
        recorder.put(name, output[0] if isinstance(output, tuple) else output)

    module.register_forward_hook(hook)


def _before(module, recorder, name: str) -> None:
    def hook(_, inputs) -> None:
        recorder.put(name, inputs[0])

    module.register_forward_pre_hook(hook)


def _norm(module, recorder, name: str, residual: str) -> None:
    def hook(_, inputs, output) -> None:
        if isinstance(output, tuple):
            recorder.put(residual, output[1])
            output = output[0]
        recorder.put(name, output)

    module.register_forward_hook(hook)


def _split(recorder, names: list[str], sizes: list[int]):
    def hook(_, inputs, output) -> None:
        for name, value in zip(names, output[0].split(sizes, -1), strict=True):
            recorder.put(name, value)

    return hook


def _call_norms(attention):
    """Return a hook that calls the q and k norms for their hooks, for models that fuse them with RoPE."""

    def hook(_, inputs, output) -> None:
        q, k, _ = output[0].split([attention.q_size, attention.kv_size, attention.kv_size], -1)
        for norm, x in ((attention.q_norm, q), (attention.k_norm, k)):
            norm(x.view(len(x), -1, attention.head_dim))

    return hook


def _router(recorder, name: str, top_k: int):
    """Return a hook that records the top_k experts by logit, ties to lower ids; vLLM's kernels hide the choice."""

    def hook(_, inputs, output) -> None:
        logits = (output[0] if isinstance(output, tuple) else output).float()
        best = logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
        recorder.put(name, torch.zeros_like(logits).scatter(-1, best, 1.0))

    return hook


def _rope(recorder, i: int):
    def hook(_, inputs) -> None:
        recorder.put(f"layers.{i}.q_rope", inputs[0])
        recorder.put(f"layers.{i}.k_rope", inputs[1])

    return hook


class SwappedWorker(resolve(installed().worker)):
    """Stock worker with some ops replaced by alignkit's."""

    def load_model(self, **kwargs) -> None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from alignkit.vllm.attention import AlignedAttentionImpl
        from alignkit.vllm.layers import ALIGNED, aligned_layers
        from alignkit.vllm.parallel import register_groups

        swapped = self.vllm_config.additional_config[SWAP]
        # vLLM's CPU attention assumes that the process has enabled AMX. oneDNN does so in stock vLLM's GEMMs, which a
        # swap may replace.
        if on_host(self.device) and torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        register_groups(experts_shared=False)
        if "attention" in swapped:
            # Otherwise vLLM selects its own backend on a GPU.
            self.vllm_config.attention_config.backend = AttentionBackendEnum[installed().attention]
        layers = [name for op in swapped for name in LAYERS[op]]
        with aligned_layers(layers, attention="attention" in swapped):
            super().load_model(**kwargs)
        modules = list(self.model_runner.get_model().modules())
        for op in swapped:
            kinds = (AlignedAttentionImpl,) if op == "attention" else tuple(ALIGNED[name] for name in LAYERS[op])
            if not any(isinstance(x, kinds) for m in modules for x in (m, getattr(m, "impl", None))):
                raise UnsupportedError(
                    f"swap: must be an op that a module of this vLLM model computes, got {op!r}. Omit --swap, or pass "
                    "another op."
                )


def write_job(job: dict, path: Path) -> str:
    """Write the workers' job, which contains the sequences; return its path."""
    job = job | {"runs": [{"out": job["runs"][0]["out"]}]}
    path.write_text(json.dumps(job))
    return str(path)
