"""Timing of a model's forward and backward: ``cost.py`` runs ``python -m cost_training JOB.json``.

JOB has ``engine`` ("stock" | "stock_fused" | "stock_te" | "hf_compiled" | "aligned" | "aligned_keeping" |
"aligned_te"), ``model`` (a directory with a ``config.json``), ``cases`` (``[b, s]`` each), ``repeats``, ``profile``
(bool) and ``runs`` (``[{"out"}]``). The loss is the mean over the tokens. A micro-batch that does not fit into memory
is halved; one sequence that does not fit is skipped. OUT has the seconds and peak bytes of each case, and
``too_large``, the skipped cases. The weights are random and generated on the device.

"stock" is Megatron-core's local layer spec with default options; "stock_fused" enables the fusions that need neither
TransformerEngine nor Apex. "aligned" has the local layer spec; "aligned_keeping" adds ``keep_logits``. "stock_te" and
"aligned_te" have TransformerEngine's layer spec; "stock_te" enables all of Megatron-core's fusions for it and uses the
attention that TransformerEngine selects. "hf_compiled" is Hugging Face's model with torch.compile: torch's
scaled_dot_product_attention with ``is_causal`` instead of a mask, and an fp32 loss. Experts are separate modules in
the local layer spec and one ``moe_grouped_gemm`` module in TransformerEngine's; OUT's ``experts`` names the class.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from alignkit.convert import Architecture, read_architecture

FUSIONS = {"bias_activation_fusion": True, "bias_dropout_fusion": True}
TRANSFORMER_ENGINE = ("stock_te", "aligned_te")
"""Engines with TransformerEngine's layer spec."""
MASKED = ("stock", "stock_fused")
"""Engines whose attention takes a mask; the others' attention is causal without one."""
_WARM_UP = 3


def run(job: dict) -> None:
    """Build the model, time all cases, and write the result."""
    from lib import profiles

    result = {"engine": job["engine"], "cases": [], "too_large": [], "profiles": [], "experts": None}
    arch, masked = read_architecture(job["model"]), job["engine"] in MASKED
    vocab = arch.vocab
    with _hugging_face(job) if job["engine"] == "hf_compiled" else _megatron(job, arch) as model:
        if arch.experts and job["engine"] != "hf_compiled":
            result["experts"] = type(model.decoder.layers[0].mlp.experts).__name__
        for b, s in job["cases"]:
            while (measured := _measure(model, b, s, vocab, job["repeats"], masked)) is None and b > 1:
                b //= 2
            if measured is None:
                result["too_large"].append([b, s])
                continue
            result["cases"].append({"b": b, "s": s} | measured)
            if job["profile"]:
                step = _step(model, b, s, vocab, masked)
                _seconds(step)
                running = profiles.start()
                seconds = _seconds(step)
                result["profiles"].append(
                    {"case": f"{b} x {s}", "wall_ms": seconds * 1e3, "kernels": profiles.stop(running)}
                )
    Path(job["runs"][0]["out"]).write_text(json.dumps(result))


@contextlib.contextmanager
def _megatron(job: dict, arch: Architecture) -> Iterator[torch.nn.Module]:
    from megatron.core import parallel_state, tensor_parallel

    from alignkit.megatron import cpu, patch_megatron
    from alignkit.megatron.build import gpt_model

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cpu.cpu_host():
        parallel_state.initialize_model_parallel()
        if gpu:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        if job["engine"].startswith("aligned"):
            patch_megatron(arch.vocab, keep_logits=job["engine"] == "aligned_keeping")
        yield gpt_model(
            job["model"],
            torch.bfloat16,
            weights=_random_weights(arch),
            transformer_engine=job["engine"] in TRANSFORMER_ENGINE,
            **_fusions(job["engine"]),
            **({"moe_grouped_gemm": True} if arch.experts and job["engine"] in TRANSFORMER_ENGINE else {}),
        ).train()
    dist.destroy_process_group()


def _random_weights(arch: Architecture) -> dict[str, torch.Tensor]:
    """Return random weights by checkpoint name; the time of a step does not depend on their values."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        options = {"dtype": torch.bfloat16, "device": device}
        return torch.ones(shape, **options) if len(shape) == 1 else torch.randn(shape, **options) * 0.02

    return {name: random(shape) for _, shapes, _ in arch.weights() for name, shape in shapes.items()}


def _fusions(engine: str) -> dict[str, bool]:
    """Return the fusion fields of the TransformerConfig."""
    if engine == "stock_te":
        from megatron.core.models.common.embeddings import rope_utils

        rope = rope_utils.fused_apply_rotary_pos_emb is not None  # TransformerEngine's, GPU only
        return FUSIONS | {"apply_rope_fusion": rope, "cross_entropy_loss_fusion": True}
    return FUSIONS if engine == "stock_fused" else {}


class _HuggingFace(torch.nn.Module):
    """Hugging Face's model with the call signature of the Megatron model, which returns losses [b, s]."""

    def __init__(self, model_dir: str):
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        config = AutoConfig.from_pretrained(model_dir)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        # transformers omits a purely causal mask in eager mode, but always builds one under torch.compile. With an
        # s x s mask, torch's attention does twice the work and cannot use its fast kernels.
        sys.modules[type(self.model).__module__].create_causal_mask = lambda *_, **__: None

    def forward(self, tokens, positions, mask, labels):
        logits = self.model(tokens, position_ids=positions, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape)


@contextlib.contextmanager
def _hugging_face(job: dict) -> Iterator[torch.nn.Module]:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = _HuggingFace(job["model"])
    yield torch.compile(model.train(), dynamic=False)


def _step(model, b: int, s: int, vocab: int, masked: bool) -> Callable[[], None]:
    """Return a function that runs forward and backward of one micro-batch; `masked`: with a causal mask."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(b * s)
    tokens, labels = (torch.randint(vocab, (b, s), generator=generator).to(device) for _ in range(2))
    positions = torch.arange(s, device=device).expand(b, s)
    mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1) if masked else None  # True: masked out

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, positions, mask, labels=labels).float().mean().backward()

    return step


def _measure(model, b: int, s: int, vocab: int, repeats: int, masked: bool) -> dict | None:
    """Return the seconds of each step and the peak memory; None if out of memory."""
    gpu = torch.cuda.is_available()
    step = _step(model, b, s, vocab, masked)
    try:
        for _ in range(_WARM_UP):
            step()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = [_seconds(step) for _ in range(repeats)]
    except torch.OutOfMemoryError:
        seconds = None
    if seconds is None:  # after the except clause the error no longer references the step's tensors
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return None
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated() if gpu else 0}


def _seconds(step: Callable[[], None]) -> float:
    """Return the seconds of one step, with a device synchronization before and after."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    began = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - began


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
