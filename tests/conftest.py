"""Fixtures shared by all tests, and markers of tests by file and fixture.

`make test` runs the tests without the marks `slow` and `matrix`; `make test-slow` and `make test-matrix` run the rest,
all on a CPU. `make gpu-test` runs the files `*_cuda.py` and all of tests/ops, where ALIGNKIT_TEST_DEVICE selects the
device. Names that end in `_on_cpu.py` or `_interpreted.py` mark GPU kernels that run on a CPU. Tests that need missing
hardware or packages are skipped.

The tuples below hold paths relative to tests/: renaming a file changes them and SUITES of benchmarks/gpu_tests.py.
"""

import os
from pathlib import Path

import pytest

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:  # torch reads it when it is imported, here and in the processes that tests start
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))

import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.forks import METHOD, preload  # noqa: E402

# Shapes are random in each run; a failure prints its example. No deadline: two slow cores are a supported machine.
settings.register_profile(
    "alignkit",
    deadline=None,
    print_blob=True,
    max_examples=int(os.environ.get("ALIGNKIT_TEST_EXAMPLES", "20")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("alignkit")
preload()

# Device of the op tests; engine tests choose their own.
DEVICE = os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)


@pytest.fixture(scope="session")
def ranks():
    """Yield four processes joined by gloo."""
    from alignkit.testing import Ranks

    with Ranks(4, method=METHOD) as r:
        r.run(4, str)  # wait for the start-up, so that a test's timeout covers only its call
        yield r


STARTS_AN_ENGINE = {"world", "pair", "vllm_process", "rollout"}
"""Fixtures that start an engine."""
ENGINES = (
    "bisection/test_cuda.py",
    "benchmarks/test_engines.py",
    "e2e/test_check.py",
    "e2e/test_grpo.py",
    "integrations/test_verl.py",
    "megatron/test_cuda.py",
    "megatron/test_te.py",
    "megatron/test_te_cuda.py",
    "megatron/test_train.py",
    "vllm/test_cuda.py",
    "vllm/test_live.py",
    "vllm/test_processes.py",
    "vllm/test_serve.py",
    "vllm/test_versions.py",
)
SEVERAL_GPUS = (
    "fuzz/test_cuda.py",
    "ops/test_agreement_cuda.py",
    "ops/test_devices_cuda.py",
    "ops/test_tp_cuda.py",
    "ops/test_tp_faults_cuda.py",
)
SLOW = ("benchmarks/test_engines.py",)
"""Files in which every test is slow; other files mark single tests."""
LONGEST = (
    "cli/test_prove.py",
    "vllm/test_versions.py",
    "e2e/test_check.py",
    "benchmarks/test_engines.py",
    "vllm/test_experts.py",
    "bisection/test_engines.py",
    "vllm/test_processes.py",
    "e2e/test_grpo.py",
    "integrations/test_verl.py",
    "vllm/test_serve.py",
    "vllm/test_replicas.py",
    "fuzz/test_fuzz.py",
    "test_sm90_build.py",
    "test_package.py",
    "vllm/test_live.py",
    "vllm/test_engine.py",
    "ops/test_contract_bits.py",
)
"""Longest files, scheduled first so that all workers end at about the same time."""
GPU = ("ops/test_linear_logp_sm90.py", "ops/test_schedules.py")


def pytest_collection_modifyitems(items):
    """Mark tests by file and by fixture, and put the longest files first.

    GPU tests in other files mark themselves.
    """
    places = {}
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        places[item] = LONGEST.index(file) if file in LONGEST else len(LONGEST)
        if file in ENGINES or STARTS_AN_ENGINE & set(item.fixturenames):
            item.add_marker("engine")
        if file.endswith("_cuda.py") or file in GPU:
            item.add_marker("gpu")
        if file in SEVERAL_GPUS:
            item.add_marker("gpus")
        if file in SLOW:
            item.add_marker("slow")
    items.sort(key=places.get)
