"""Real Megatron-core on one, two or four Hopper GPUs over NCCL: bits, gradients, optimizer, no synchronization.

Part of `make gpu-test`. Ranks may share GPUs. It repeats test_bits.py and test_gradients.py at larger sizes.
"""

import os
import subprocess
import sys

import pytest
import torch

from alignkit.convert import Checkpoint, read_architecture
from alignkit.runtime.machine import gpus as visible
from alignkit.runtime.machine import most_ranks
from alignkit.testing import assert_bitwise_equal
from tests.megatron import reference, workers
from tests.megatron.gpus import GPUs
from tests.megatron.test_gradients import bound
from tests.megatron.test_recompute import DISTRIBUTED, RECOMPUTE_CONFIGS, same

COUNT = most_ranks()
WORLD = max((n for n in (1, 2, 4) if n <= COUNT), default=0)
SIZES = [n for n in (1, 2, 4) if n <= WORLD]
LAYOUTS = [(tp, sp) for tp in SIZES for sp in ((False, True) if tp > 1 else (False,))]
BIG = dict(hidden=512, layers=4, heads=8, kv_heads=4, intermediate=1536)
# Vocabulary 2000: the last shard of both padded sizes has padding. 100: some ranks have only padding.
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
def test_invalid_value_on_the_device_stops_the_process_with_its_name(qwen3, strict):
    """Check the output of a device-side assertion, or of the host-side error in strict mode.

    Each case runs in its own process on one GPU, because a device-side assertion ends the CUDA context. The name of the
    CUDA error is not checked: processes that fail on a GPU at the same time can report a launch failure.
    """
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
        output = process.communicate(timeout=120)[0]
        assert process.returncode != 0 and WRONG[what] in output and "no error" not in output, output
        assert (ASSERTION in output) is (strict == "0"), output


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_equal_across_calls_and_layouts(name, checkpoint, gpus, long_rows):
    path, dtype = checkpoint(*MODELS[name], **BIG), MODELS[name][1]
    single_rank = gpus.with_tp(1, workers.all_calls, path, dtype, False, long_rows)[0]
    for call in ("padded", "packed", "loss call", "logits", "logprobs at 1.0"):
        assert_bitwise_equal(single_rank[call], single_rank["one"], call)
    for tp, sp in LAYOUTS:
        for rank, result in enumerate(gpus.with_tp(tp, workers.all_calls, path, dtype, sp, long_rows)):
            assert result.keys() == single_rank.keys()
            for call, value in result.items():
                assert_bitwise_equal(value, single_rank[call], f"{call}, TP {tp}, SP {sp}, rank {rank}")


@pytest.mark.parametrize("name", ["qwen3", "llama-tied"])
def test_one_step_agrees_with_float64_and_across_layouts(name, checkpoint, gpus, long_rows):
    """Check gradients under Megatron's DDP.

    They agree with float64, and are bit-equal with recomputation, on all ranks and, except for norms, with sequence
    parallelism. The output layer's gradient is bit-equal at every TP size.
    """
    path, dtype = checkpoint(*MODELS[name], **BIG), MODELS[name][1]
    arch, weights = read_architecture(path), reference.weights64(Checkpoint(path))
    expected = -torch.cat([reference.logprobs(arch, weights, row) for row in long_rows]).mean()
    expected.backward()
    limit, without, first = bound(arch, dtype), {}, {}
    for tp, sp in LAYOUTS:
        how = f"TP {tp}, SP {sp}"
        configs = {"stored": {}, **RECOMPUTE_CONFIGS, **({} if sp else {"distributed": DISTRIBUTED})}
        results = gpus.with_tp(tp, workers.steps_by_config, path, dtype, sp, long_rows, configs)
        stored = loss, grads = results[0]["stored"]
        for rank, result in enumerate(results):
            for config, actual in result.items():
                same(actual, stored, f"{how}, {config}, rank {rank}")
        assert abs(loss - expected.item()) < limit * expected.item(), how
        assert grads.keys() == weights.keys()
        for weight, w in weights.items():
            error = ((grads[weight].double() - w.grad).norm() / w.grad.norm()).item()
            assert error < limit, f"{how}: {weight} is off by {error:.2e}, more than {limit:.2e}"
        if sp:
            for weight, gradient in grads.items():
                if "norm" not in weight:
                    assert_bitwise_equal(gradient, without[weight], f"{how}: {weight}")
        without = grads
        if not arch.tied:
            first = first or grads
            assert_bitwise_equal(grads["lm_head.weight"], first["lm_head.weight"], how)


def test_main_grad_is_the_models_own_gradient(qwen3, gpus, long_rows):
    """Covers overlapped reduction, micro-batches and Float16Module."""
    tp = SIZES[-1]
    given = qwen3, torch.bfloat16, False, long_rows
    expected = gpus.with_tp(tp, workers.step_without_ddp, *given, micro_batches=3)[0]
    actual = gpus.with_tp(tp, workers.step, *given, micro_batches=3, wrapped=True, overlap=True)[0][1]
    for name, gradient in actual.items():
        if tp == 1 or "norm" not in name:
            assert_bitwise_equal(gradient, expected[name], name)


@several
def test_distributed_optimizer_gives_the_losses_of_the_plain_one(qwen3, gpus, long_rows):
    """With overlap, each forward waits for the parameters that are being gathered."""
    given = qwen3, torch.bfloat16, long_rows
    plain = gpus.with_tp(1, workers.optimizer_steps, *given, False, False)[0]
    assert len(set(plain)) == len(plain)  # the weights change
    for overlap in (False, True):
        for losses in gpus.with_tp(1, workers.optimizer_steps, *given, True, overlap):
            assert losses == plain, f"overlap {overlap}"


def test_forward_and_backward_do_not_synchronize(qwen3, gpus, long_rows):
    """Run padded, masked and packed micro-batches while torch raises at every synchronization."""
    for tp, sp in LAYOUTS:
        gpus.with_tp(tp, workers.run_without_synchronization, qwen3, torch.bfloat16, sp, long_rows)
