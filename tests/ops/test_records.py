"""Tests that follow from the ops' records (alignkit/ops/<op>/op.py), so that a new op needs no line here.

On a CPU and on a GPU, rows do not depend on the batch, on every backend. On a CPU, floating-point modes of the caller
change no golden bit.
"""

from importlib import import_module

import pytest
import torch

from alignkit import ops
from alignkit.ops import golden, library
from alignkit.ops.inputs import Inputs, Normal
from alignkit.ops.record import Check
from alignkit.ops.registry import RECORDS
from alignkit.runtime import dispatch, families
from alignkit.testing import assert_bitwise_equal
from tests.samples import as_custom, examples

from .helpers import CPU
from .test_modes import MODES, in_mode

DEVICE = "cpu" if CPU else "cuda"
DTYPES = (torch.float32, torch.bfloat16)
RECORD = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.folder)


@RECORD
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", families.of_type(torch.device(DEVICE)).backends)
def test_the_self_test_passes_on_every_backend(record, dtype, backend):
    with dispatch.use(backend):
        for test in record.self_test(Normal(dtype, DEVICE)):
            if backend == families.REFERENCE and isinstance(test, Check):
                continue  # seconds each; test_contract_bits.py compares the reference with the kernels
            problem = test.run()
            assert problem is None, f"{test.name}: {problem}"


@RECORD
def test_the_self_test_does_not_depend_on_the_default_device(record):
    with torch.device("meta" if CPU else "cpu"):
        for test in record.self_test(Normal(torch.bfloat16, DEVICE)):
            problem = test.run()
            assert problem is None, f"{test.name}: {problem}"


@RECORD
def test_every_record_has_a_self_test_and_custom_ops_are_defined(record):
    assert list(record.self_test(Normal(torch.float32, DEVICE)))
    for custom in record.custom:
        assert getattr(library, custom.name) is getattr(torch.ops.alignkit, custom.name).default
    assert import_module(f"alignkit.ops.{record.folder}.op").OP is record


@RECORD
def test_operations_whose_kernel_depends_on_the_problem_are_described(record):
    """`alignkit explain` makes the problem from words."""
    with_rules = {name for name, kernels in record.kernels.items() if any(kernel.rule for kernel in kernels)}
    assert with_rules == record.described.keys()


@RECORD
def test_every_public_function_and_custom_op_has_samples(record):
    samples = examples(record, 40)
    found = {sample.op for sample in (*samples, *filter(None, map(as_custom, samples)))}
    public = {name for name in ops.__all__ if getattr(ops, name).__module__.split(".")[2] == record.folder}
    public -= {"delta_page_words"}  # a number without tensors
    assert found >= public | {f"alignkit::{custom.name}" for custom in record.custom}


@pytest.mark.skipif(not CPU, reason="the modes of a CPU")
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "down"])
@pytest.mark.parametrize("case", [case for case, (found, _) in golden.CASES.items() if not found.slow])
def test_modes_of_the_caller_change_no_golden_bit(case, mode):
    """In mode "down", torch's own sum of two slices' gradients gives -0 for 0 + -0; test_modes.py covers that mode."""
    found, dtype = golden.CASES[case]
    want = found.function(Inputs("cpu", dtype))
    with in_mode(mode):
        got = found.function(Inputs("cpu", dtype))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise_equal(a, b, f"{mode}: tensor {i}")
