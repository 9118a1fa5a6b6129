"""Every Triton kernel compiles for every kind of GPU, within its shared memory and with the contract's instructions.

The calls come from the ops' records: their golden cases and self-tests. A kernel that they do not reach fails the test.
hopper.py is excluded: its Gluon kernel is written for Hopper alone.
"""

import functools
import importlib
import itertools
import pkgutil
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from alignkit import UnsupportedError, ops
from alignkit.ops import golden, library, self_test, trials
from alignkit.ops.inputs import Inputs, Normal
from alignkit.ops.record import Rows
from alignkit.ops.registry import RECORDS
from alignkit.ops.samples import Source
from alignkit.runtime import families

from .helpers import CPU

triton = pytest.importorskip("triton")
from .targets import META, Compiled, compiling  # noqa: E402

pytestmark = pytest.mark.skipif(not CPU, reason="compiles on a CPU")
DTYPES = (torch.bfloat16, torch.float32)
"""bf16 first: the representative of a kernel is the first that is reached."""
TARGETS = [gpu for gpu in families.GPUS if gpu.capability in {(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)}]
TENSOR_MEMORY = 512
"""Columns of tensor memory of an SM (tcgen05)."""
GPU = pytest.mark.parametrize("gpu", TARGETS, ids=lambda gpu: families.capability_text(gpu.capability))

MMA = re.compile(r"(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*")
SYNC = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16\.bf16|f16\.f16)\.f32"
INSTRUCTIONS = {
    9: SYNC + r"|wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(bf16\.bf16|f16\.f16)",
    10: SYNC + r"|tcgen05\.mma\.cta_group::1\.kind::f16",
}
"""Tensor-core instructions by major compute capability; elsewhere mma.sync of 16 k. None has tf32 operands."""
INTEGERS = r"(mma|wgmma)\S+\.s32\.s8\.s8(\.s32)?|tcgen05\.mma\.cta_group::1\.kind::i8"
"""Products of integers, which are exact: of bit_sums."""
FUNCTIONS = re.compile(r"\b((?:ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos|div)\.(?:\w+\.)*b?f\d\w*)")
"""Exponentials, logarithms, roots and divisions, with their rounding and treatment of denormals."""


def jit_functions() -> dict[str, Any]:
    """Return the Triton functions of alignkit.ops by their full name."""
    found = {}
    for module in pkgutil.walk_packages(ops.__path__, "alignkit.ops."):
        if module.name == "alignkit.ops.linear.hopper":
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, triton.JITFunction):
                found[f"{value.fn.__module__}.{value.fn.__name__}"] = value
    return found


def kernels() -> set[str]:
    """Return the names of the functions that no other function calls: those that are launched."""
    functions = jit_functions()
    called = {
        value
        for function in functions.values()
        for name in function.fn.__code__.co_names
        if isinstance(value := function.fn.__globals__.get(name), triton.JITFunction)
    }
    return {name.removeprefix("alignkit.ops.") for name, function in functions.items() if function not in called}


def golden_cases() -> Iterator[Callable[[], object]]:
    for dtype in DTYPES:
        for case, own in golden.CASES.values():
            if own == dtype:
                yield functools.partial(case.function, Inputs(META, dtype))


def fallbacks() -> Iterator[Callable[[], object]]:
    """Yield trials of kernels that are used only if the self-test passes over a faster one without a rule."""
    for record in RECORDS:
        for op, kernels in record.kernels.items():
            (first, *others) = (kernel for kernel in kernels if kernel.backend == families.TRITON)
            for kernel in others if first.rule is first.prepare is None else ():
                for case in trials.cases(record, op, kernel):
                    yield functools.partial(trials.run, record, op, kernel, case, META, families.TRITON)


def self_tests(rows: tuple[int, ...] = ()) -> Iterator[Callable[[], object]]:
    """Yield the calls of the self-tests, forward and backward.

    Args:
        rows: Numbers of rows of the row-wise ops; the self-test's own number if empty.
    """
    for dtype in DTYPES:
        for test in (test for record in RECORDS for test in record.self_test(Normal(dtype, META))):
            if not isinstance(test, Rows):
                yield test.run
                continue
            for n in rows or (len(test.inputs[0]),):
                yield functools.partial(forward_and_backward, test.function, test.inputs, n)


def custom_ops() -> Iterator[Callable[[], object]]:
    """Yield random calls of the custom ops."""
    customs = {f"alignkit::{custom.name}": custom for record in RECORDS for custom in record.custom}
    generators = [generator for record in RECORDS for generator in record.samples()]
    for seed, generator in itertools.product(range(3), generators):
        sample = generator(Source(random.Random(seed)))
        if sample.schema:
            custom = customs[sample.schema]
            given = [
                sample.given[argument.name].value if argument.name in sample.given else argument.default_value
                for argument in getattr(library, custom.name)._schema.arguments
            ]
            yield functools.partial(custom.run, *(t.to(META) if isinstance(t, torch.Tensor) else t for t in given))


def forward_and_backward(function: Callable, inputs: list[torch.Tensor], n: int) -> None:
    given = [x.new_empty(n, *x.shape[1:]).requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*given)
    out = [y for y in (out if isinstance(out, tuple) else (out,)) if y.requires_grad]
    if out:
        torch.autograd.backward(out, [torch.empty_like(y) for y in out])


def run(calls: Iterator[Callable[[], object]]) -> list[str]:
    """Run the calls; return the messages of unsupported ones."""
    rejected = []
    modules = [self_test, *(importlib.import_module(f"alignkit.ops.{record.folder}.op") for record in RECORDS)]
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "difference", lambda *_: None, raising=False)  # tensors without memory have no values
        for call in calls:
            try:
                call()
            except UnsupportedError as e:
                rejected.append(str(e))
    return rejected


@functools.cache
def representatives(gpu: families.Gpu) -> dict[str, Compiled]:
    """Return the first variant of each kernel that the records' calls reach."""
    seen = set()
    with compiling(gpu, lambda kernel: kernel not in seen and not seen.add(kernel)) as found:
        assert not run(golden_cases())
        assert not run(fallbacks())
        assert not run(self_tests())
        assert not run(custom_ops())
        return {compiled.name: compiled for compiled in found}


def check(compiled: Compiled, gpu: families.Gpu) -> None:
    """Check the memory and the tensor-core instructions of a kernel."""
    assert compiled.shared <= gpu.shared_memory, f"{compiled}: {compiled.shared} bytes of shared memory"
    assert compiled.tensor_memory <= TENSOR_MEMORY, f"{compiled}: {compiled.tensor_memory} columns of tensor memory"
    allowed = INSTRUCTIONS.get(gpu.capability[0], SYNC)
    for instruction in {match[0] for match in MMA.finditer(compiled.ptx)}:
        integers = compiled.name.startswith("bit_sums.") and re.fullmatch(INTEGERS, instruction)
        assert integers or re.fullmatch(allowed, instruction), f"{compiled}: {instruction}"
    assert "tf32" not in compiled.ptx, compiled


@GPU
def test_every_kernel_compiles_and_fits(gpu):
    found = representatives(gpu)
    assert found.keys() == kernels()
    for compiled in found.values():
        check(compiled, gpu)


@GPU
def test_functions_of_the_hardware_are_those_of_hopper(gpu):
    for name, compiled in representatives(gpu).items():
        wanted = set(FUNCTIONS.findall(representatives(families.HOPPER)[name].ptx))
        assert set(FUNCTIONS.findall(compiled.ptx)) == wanted, compiled


def attention_calls(
    dtypes=DTYPES, dims: tuple[int, ...] = (64, 128, 256), groups: tuple[int, ...] = (1, 8, 64)
) -> Iterator[tuple[tuple, Callable[[], object]]]:
    """Yield calls of attention, each with its dtype, head dimension, query heads per KV head, and kind."""
    for dtype, dim, group in itertools.product(dtypes, dims, groups):
        if dtype == torch.float32 and (group == 1 or dim == 64):
            continue  # half a minute each, and no schedule of their own
        q, k, v = (torch.empty((300, heads, dim), dtype=dtype, device=META) for heads in (group, 1, 1))
        starts, cache = torch.empty(3, dtype=torch.int64, device=META), k.new_empty(4096, 16, 1, dim)
        for kind, width, batch in (("decode", 64, 300), ("decode one", 2048, 1), ("prefill", 64, 2)):
            table, lengths = starts.new_empty(batch, width), (starts.new_empty(batch + 1), starts.new_empty(batch))
            queries = q[:1] if batch == 1 else q
            call = functools.partial(ops.paged_attention, queries, cache, cache, table, *lengths)
            yield (dtype, dim, group, kind), call
        train = functools.partial(ops.attention, cu_seqlens=starts)
        yield (dtype, dim, group, "training"), functools.partial(forward_and_backward, train, [q, k, v], 300)


def rejected(gpu: families.Gpu, calls: Iterator[tuple[tuple, Callable[[], object]]]) -> dict[tuple, str]:
    """Compile calls for `gpu` and check that the kernels fit; return the message of each rejected call."""
    found = {}
    with compiling(gpu) as compiled:
        for kind, call in calls:
            if messages := run(iter((call,))):
                found[kind] = messages[0]
    for kernel in compiled:
        check(kernel, gpu)
    return found


def test_schedule_is_fitted_to_the_shared_memory():
    """A GPU with less memory gets fewer stages of the same kernel. Hopper's schedule is used as it is."""
    stages = {}
    ((_, call),) = (each for each in attention_calls(DTYPES[:1], (128,), (8,)) if each[0][3] == "training")
    for gpu in (each for each in TARGETS if each.capability in {(8, 9), (9, 0)}):
        with compiling(gpu, lambda kernel: kernel.fn.__name__.startswith("_grad")) as found:
            call()
        for kernel in found:
            check(kernel, gpu)
            stages[gpu.capability, kernel.kernel.fn.__name__] = int(kernel.arguments.rpartition("num_stages=")[2])
    used = {"_grad_q": 1, "_grad_kv": 2}
    assert stages == {((8, 9), name): n for name, n in used.items()} | {((9, 0), name): 3 for name in used}


def test_attention_that_does_not_fit_is_rejected_by_name():
    calls = (each for each in attention_calls(DTYPES[:1], (256,), (8,)) if each[0][3] == "training")
    (message,) = rejected(families.GPUS[2], calls).values()
    assert re.fullmatch(
        r"q: head_dim 256 in bf16 with 8 heads per KV head is unsupported on this GPU. attention: the kernel _tiles "
        r"must fit into 101376 bytes of shared memory per CTA on GPUs of compute capability 8\.9 \(.*\), "
        r"but needs 1\d{5}",
        message,
    )


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [families.GPUS[0], families.HOPPER], ids=str)
def test_every_variant_compiles_and_fits(gpu, monkeypatch):
    """The records' calls, then those of row-wise ops with more rows and wider GEMMs, which select other tiles."""
    with compiling(gpu) as found:
        assert not run(itertools.chain(golden_cases(), self_tests(), custom_ops()))
        for folder in ("linear", "moe_experts"):
            monkeypatch.setattr(importlib.import_module(f"alignkit.ops.{folder}.op"), "WIDTH", 2048)
        assert not run(self_tests(rows=(1, 64, 200, 3000)))
    for compiled in found:
        check(compiled, gpu)
