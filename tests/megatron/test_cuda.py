"""Megatron-core on Hopper GPUs, as many as there are, up to four: ``python -m pytest tests/megatron/test_cuda.py``."""

import os
import subprocess
import sys

import pytest
import torch

from alignkit.check.machine import gpus as visible
from alignkit.check.machine import most_ranks
from alignkit.convert import Checkpoint, read_architecture
from alignkit.testing import assert_bitwise_equal
from tests.megatron import reference, workers
from tests.megatron.gpus import GPUs
from tests.megatron.test_gradients import bound
from tests.megatron.test_recompute import DISTRIBUTED, RECOMPUTED, same

COUNT = most_ranks()
WORLD = max((n for n in (1, 2, 4) if n <= COUNT), default=0)
SIZES = [n for n in (1, 2, 4) if n <= WORLD]
CUTS = [(tp, sp) for tp in SIZES for sp in ((False, True) if tp > 1 else (False,))]
BIG = dict(hidden=512, layers=4, heads=8, kv_heads=4, intermediate=1536)
# 2000 cuts the last shard of both paddings; 100 leaves ranks that have nothing but padding.
MODELS = {
    "qwen3": ("qwen3", torch.bfloat16, False, 2000),
    "llama-tied": ("llama", torch.bfloat16, True, 100),
    "qwen2-fp32": ("qwen2", torch.float32, False, 2000),
}
ASSERTION = "_assert_async_cuda_kernel"
WRONG = {"tokens": "input_ids", "mask": "attention_mask", "packed": "cu_seqlens", "max_seqlen": "max_seqlen"}

pytestmark = pytest.mark.skipif(not WORLD, reason="needs a GPU")
several = pytest.mark.skipif(WORLD < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def gpus():
    with GPUs(WORLD) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def qwen3(checkpoint):
    return checkpoint(*MODELS["qwen3"], **BIG)


@pytest.mark.parametrize("strict", "10")
def test_wrong_values(qwen3, strict):
    """The device's assertion says what is wrong, and stops the process; in strict mode the error has a name. Each in a process of
    its own, which sees one GPU, for after an assertion the device takes no more work; before the GPUs have ranks that these would be
    beside. What CUDA calls the error is not told: of processes that stop on one GPU at a time, some hear of a launch failure."""
    code = "import sys; from tests.megatron import workers; workers.wrong_value(*sys.argv[1:])"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": visible()[0], "ALIGNKIT_STRICT": strict, "NCCL_DEBUG": "WARN"}
    started = {
        what: subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, qwen3, what],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for what in WRONG
    }
    for what, process in started.items():
        said = process.communicate(timeout=120)[0]
        assert process.returncode != 0 and WRONG[what] in said and "no error" not in said, said
        assert (ASSERTION in said) is (strict == "0"), said


@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_the_same_bits(name, checkpoint, gpus, long_rows):
    path, dtype = checkpoint(*MODELS[name], **BIG), MODELS[name][1]
    alone = gpus.with_tp(1, workers.every_way, path, dtype, False, long_rows)[0]
    for way in ("padded", "packed", "loss call", "logits", "logprobs at 1.0"):
        assert_bitwise_equal(alone[way], alone["one"], way)
    for tp, sp in CUTS:
        for rank, result in enumerate(gpus.with_tp(tp, workers.every_way, path, dtype, sp, long_rows)):
            assert result.keys() == alone.keys()
            for way, value in result.items():
                assert_bitwise_equal(value, alone[way], f"{way}, TP {tp}, SP {sp}, rank {rank}")


@pytest.mark.parametrize("name", ["qwen3", "llama-tied"])
def test_one_step(name, checkpoint, gpus, long_rows):
    """Gradients under Megatron's DDP: near float64's; the same bytes with recomputation, on every rank, and, but for
    the norms, with sequence parallelism; the output layer's at every TP size."""
    path, dtype = checkpoint(*MODELS[name], **BIG), MODELS[name][1]
    arch, weights = read_architecture(path), reference.weights64(Checkpoint(path))
    expected = -torch.cat([reference.logprobs(arch, weights, row) for row in long_rows]).mean()
    expected.backward()
    most, without, first = bound(arch, dtype), {}, {}
    for tp, sp in CUTS:
        how = f"TP {tp}, SP {sp}"
        configs = {"stored": {}, **RECOMPUTED, **({} if sp else {"distributed": DISTRIBUTED})}
        results = gpus.with_tp(tp, workers.recomputed, path, dtype, sp, long_rows, configs)
        stored = loss, grads = results[0]["stored"]
        for rank, result in enumerate(results):
            for config, actual in result.items():
                same(actual, stored, f"{how}, {config}, rank {rank}")
        assert abs(loss - expected.item()) < most * expected.item(), how
        assert grads.keys() == weights.keys()
        for weight, w in weights.items():
            error = ((grads[weight].double() - w.grad).norm() / w.grad.norm()).item()
            assert error < most, f"{how}: {weight} is off by {error:.2e}, more than {most:.2e}"
        if sp:
            for weight, gradient in grads.items():
                if "norm" not in weight:
                    assert_bitwise_equal(gradient, without[weight], f"{how}: {weight}")
        without = grads
        if not arch.tied:
            first = first or grads
            assert_bitwise_equal(grads["lm_head.weight"], first["lm_head.weight"], how)


def test_main_grad(qwen3, gpus, long_rows):
    """Overlapped reduction, micro-batches and Float16Module leave the model's own gradients, added in fp32."""
    tp = SIZES[-1]
    given = qwen3, torch.bfloat16, False, long_rows
    expected = gpus.with_tp(tp, workers.bare_step, *given, micro_batches=3)[0]
    actual = gpus.with_tp(tp, workers.step, *given, micro_batches=3, wrapped=True, overlap=True)[0][1]
    for name, gradient in actual.items():
        if tp == 1 or "norm" not in name:
            assert_bitwise_equal(gradient, expected[name], name)


@several
def test_the_distributed_optimizer(qwen3, gpus, long_rows):
    """Parameters that are gathered while the next forward runs are waited for: the losses of the plain optimizer."""
    given = qwen3, torch.bfloat16, long_rows
    plain = gpus.with_tp(1, workers.optimizer_steps, *given, False, False)[0]
    assert len(set(plain)) == len(plain)  # the weights move
    for overlap in (False, True):
        for losses in gpus.with_tp(1, workers.optimizer_steps, *given, True, overlap):
            assert losses == plain, f"overlap {overlap}"


def test_nothing_waits_for_the_device(qwen3, gpus, long_rows):
    """Forward and backward of micro-batches, with masks and packed, while torch raises at every synchronisation."""
    for tp, sp in CUTS:
        gpus.with_tp(tp, workers.without_waiting, qwen3, torch.bfloat16, sp, long_rows)
