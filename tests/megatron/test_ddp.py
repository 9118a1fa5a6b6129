"""Gradients of one step under Megatron's DistributedDataParallel on one data-parallel rank, with one or two TP ranks.

The fp32 main gradients must equal those of the same step without DDP, bit for bit, with overlap and micro-batches too.
test_data_parallel.py has two data-parallel ranks, optimizers and weights; workers.py holds the functions of the steps.
"""

from functools import partial

import pytest
import torch

from alignkit.megatron import logprobs, patch_megatron
from alignkit.testing import assert_bitwise_equal
from tests.megatron import workers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"wrapped": True},
        {"overlap": True},
        {"micro_batches": 2},
        {"wrapped": True, "overlap": True, "micro_batches": 3},
    ],
    ids=str,
)
def test_main_grad_is_the_models_own_gradient(options, checkpoint, rows, world, pair):
    path = checkpoint("qwen3", torch.bfloat16)
    step = partial(workers.step, **options)
    bare = partial(workers.step_without_ddp, micro_batches=options.get("micro_batches", 1))
    given = path, torch.bfloat16, False, rows
    expected = bare(world, *given)
    for name, gradient in step(world, *given)[1].items():
        assert_bitwise_equal(gradient, expected[name], name)
    for sequence_parallel in (False, True):
        given = path, torch.bfloat16, sequence_parallel, rows
        expected = pair.run(2, bare, *given)[0]
        for name, gradient in pair.run(2, step, *given)[0][1].items():
            if "norm" not in name:  # finalize_model_grads sums the ranks' parts of a norm's gradient
                assert_bitwise_equal(gradient, expected[name], f"{name}, SP {sequence_parallel}")


def test_every_module_with_parameters_runs_its_forward_pre_hooks(checkpoint, world):
    """The distributed optimizer's forward pre-hooks wait for parameters that are being gathered."""
    called = []
    with patch_megatron(300):
        model = workers.build(checkpoint(), torch.bfloat16)
        waiting = {path for path, module in model.named_modules() if module._parameters}
        for path in waiting:
            model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: called.append(path))
        tokens = torch.tensor([[1, 2, 3]])
        for run in (
            lambda: model(tokens, None, None, labels=tokens),
            lambda: model(tokens, None, None),
            lambda: logprobs(model, tokens, None, None, tokens),
        ):
            called.clear()
            run()
            assert sorted(called) == sorted(waiting) and "output_layer" in called
