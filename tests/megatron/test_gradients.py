"""Gradients of a training step of real Megatron-core on a CPU agree with a float64 model (reference.py).

The step includes Megatron's DDP and finalize_model_grads. Other gradient tests import `bound`.
"""

import math

import pytest
import torch

from alignkit.convert import Checkpoint, read_architecture
from tests.megatron import reference, workers

CASES = [("qwen3", False), ("qwen2", True), ("llama", True)]


def bound(arch, dtype):
    """Return the bound of the relative error of a gradient tensor, in norm.

    A value has about 12 roundings to the model type per layer, forward and again backward, and fp32 accumulations as
    long as each GEMM's k. n independent roundings of unit u give an error of about sqrt(n) u; a factor of 4 covers the
    tail.
    """
    k = arch.hidden + 2 * arch.heads * arch.head_dim + 2 * arch.intermediate
    typed, chained = 24 * arch.layers + 4, 2 * (k * arch.layers + arch.hidden + arch.vocab)
    u = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    return 4 * (math.sqrt(typed) * u + math.sqrt(chained) * 2.0**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", CASES, ids=["qwen3", "qwen2-tied", "llama-tied"])
def test_one_step_agrees_with_float64(model, dtype, checkpoint, rows, world, pair):
    arch_name, tied = model
    path = checkpoint(arch_name, dtype, tied)
    arch, weights = read_architecture(path), reference.weights64(Checkpoint(path))
    expected = -torch.cat([reference.logprobs(arch, weights, row) for row in rows]).mean()
    expected.backward()
    limit = bound(arch, dtype)
    assert limit < 0.2  # a lost or doubled term of a gradient exceeds it

    runs = {
        "tp1": workers.step(world, path, dtype, False, rows),
        "tp2": pair.run(2, workers.step, path, dtype, False, rows)[0],
        "tp2-sp": pair.run(2, workers.step, path, dtype, True, rows)[0],
    }
    for how, (loss, grads) in runs.items():
        assert abs(loss - expected.item()) < limit * expected.item(), how
        assert grads.keys() == weights.keys()
        for name, w in weights.items():
            error = ((grads[name].double() - w.grad).norm() / w.grad.norm()).item()
            assert error < limit, f"{how}: {name} is off by {error:.2e}, more than {limit:.2e}"


def test_entropy_gradients_agree_with_float64(checkpoint, rows, world):
    path = checkpoint("qwen3", torch.float32)
    arch, weights = read_architecture(path), reference.weights64(Checkpoint(path))
    grads = workers.entropy_step(world, path, torch.float32, rows[1:2], 0.7)
    expected = reference.entropy(arch, weights, rows[1], 0.7).sum()
    expected.backward()
    for name, w in weights.items():
        error = ((grads[name].double() - w.grad).norm() / w.grad.norm()).item()
        assert error < bound(arch, torch.float32), f"{name} is off by {error:.2e}"
