"""Forward and backward of a model, timed: ``cost.py`` runs ``python -m cost_training JOB.json``.

JOB: ``engine`` ("stock" | "stock_fused" | "stock_te" | "hf_compiled" | "aligned" | "aligned_keeping" | "aligned_te"),
``model`` (a directory with a ``config.json``), ``cases`` (``[b, s]`` each), ``repeats``, ``profile`` (bool) and
``runs``, ``[{"out"}]``. The loss is the mean of the losses that the model returns for its labels. A micro-batch that
does not fit the memory is halved; of one sequence it is left out. OUT holds seconds and bytes for each case, and
``too_large``, the cases that were left out. Weights are drawn on the device.

"stock" is the local layer spec with Megatron-core's defaults; "stock_fused" switches on the fusions that it can run
without TransformerEngine and Apex; both are Megatron-core's, and so is "aligned", and "aligned_keeping", with
``keep_logits``. "stock_te" and "aligned_te" have TransformerEngine's layer spec, the stock one with every fusion that
Megatron-core knows for it, and with the attention that TransformerEngine chooses. "hf_compiled" is the neighbour that
people train with: Hugging Face's model with torch's scaled_dot_product_attention, causal by its argument and not by a
mask, the loss in fp32, all of it by torch.compile. Experts are modules of their own in the local layer spec;
TransformerEngine's has them in one, ``moe_grouped_gemm``. OUT says which.
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
"""Engines with its layer spec."""
MASKED = ("stock", "stock_fused")
"""Engines whose attention takes a mask; that of the others knows that it is causal."""
_WARM_UP = 3


def run(job: dict) -> None:
    """Builds the model, times every case, and writes the result."""
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
            weights=_drawn(arch),
            transformer_engine=job["engine"] in TRANSFORMER_ENGINE,
            **_fusions(job["engine"]),
            **({"moe_grouped_gemm": True} if arch.experts and job["engine"] in TRANSFORMER_ENGINE else {}),
        ).train()
    dist.destroy_process_group()


def _drawn(arch: Architecture) -> dict[str, torch.Tensor]:
    """Weights by their names in a checkpoint: a step's time does not know their values."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        options = {"dtype": torch.bfloat16, "device": device}
        return torch.ones(shape, **options) if len(shape) == 1 else torch.randn(shape, **options) * 0.02

    return {name: draw(shape) for _, shapes, _ in arch.weights() for name, shape in shapes.items()}


def _fusions(engine: str) -> dict[str, bool]:
    """Fields of the TransformerConfig."""
    if engine == "stock_te":
        from megatron.core.models.common.embeddings import rope_utils

        rope = rope_utils.fused_apply_rotary_pos_emb is not None  # TransformerEngine's, on a GPU alone
        return FUSIONS | {"apply_rope_fusion": rope, "cross_entropy_loss_fusion": True}
    return FUSIONS if engine == "stock_fused" else {}


class _HuggingFace(torch.nn.Module):
    """Called as the Megatron model is: [b, s] losses."""

    def __init__(self, model_dir: str):
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        config = AutoConfig.from_pretrained(model_dir)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        # It makes no mask where it sees that there is nothing to hide but what comes later. While torch compiles it, it
        # does not look; with a mask of s x s entries torch's attention has twice the work, and none of its fast kernels.
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
    """Forward and backward of one micro-batch, its gradients fresh. masked: with a causal mask."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(b * s)
    tokens, labels = (torch.randint(vocab, (b, s), generator=generator).to(device) for _ in range(2))
    positions = torch.arange(s, device=device).expand(b, s)
    mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1) if masked else None  # True hides

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, positions, mask, labels=labels).float().mean().backward()

    return step


def _measure(model, b: int, s: int, vocab: int, repeats: int, masked: bool) -> dict | None:
    """Seconds of each step and the most memory in use; None if it did not fit."""
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
    if seconds is None:  # out here the error no longer holds the step's tensors
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return None
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated() if gpu else 0}


def _seconds(step: Callable[[], None]) -> float:
    """Of one step, from an idle device to an idle device."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    began = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - began


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
