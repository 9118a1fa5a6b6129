"""Fixtures that start Megatron's ranks on a CPU (gloo) and make random checkpoints.

GPU tests take their ranks from gpus.py.

Without Megatron-core, two test files are collected.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from alignkit.jobs.model import make_checkpoint
from tests.forks import METHOD, preload

if importlib.util.find_spec("megatron") is None:  # tests of the converter and the hook points run without it
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.stem not in ("test_convert", "test_hook_points")
    ]

preload("tests.megatron.preload")
SMALL = dict(hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512)


@pytest.fixture(scope="package")
def world():
    """Make this process Megatron's only rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from alignkit.dist import TP
    from tests.megatron import workers

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tp = TP(dist.group.WORLD)
    with workers.megatron(tp):
        yield tp
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def te():
    """Return ``te(size, function, *args)``, which runs `function` on ranks with TransformerEngine from `te_on_cpu`.

    The first call with a size starts its ranks.
    """
    from alignkit.testing import Ranks

    with contextlib.ExitStack() as stack:
        started = {}

        def run(size, function, *args, **options):
            if size not in started:
                sys.path.insert(0, str(Path(__file__).parent / "te_on_cpu"))
                try:
                    started[size] = stack.enter_context(Ranks(size))
                finally:
                    sys.path.pop(0)
            return started[size].run(size, function, *args, **options)

        yield run


@pytest.fixture(scope="package")
def pair():
    """Start two processes that are Megatron's tensor-parallel ranks."""
    from alignkit.testing import Ranks

    with Ranks(2, method=METHOD) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    """Start two processes for one test module, whose Megatron layouts would persist in shared processes."""
    from alignkit.testing import Ranks

    with Ranks(2, method=METHOD) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    from alignkit.testing import Ranks

    with Ranks(4, method=METHOD) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return a function that makes and caches HF checkpoint directories.

    Example: ``checkpoint("qwen3", torch.bfloat16, tied=True, vocab=300)``.
    """
    cache = {}

    def make(arch="qwen3", dtype=torch.bfloat16, tied=False, vocab=300, **sizes):
        key = (arch, dtype, tied, vocab, repr(sorted(sizes.items())))
        if key not in cache:
            path = tmp_path_factory.mktemp("hf")
            cache[key] = make_checkpoint(path, arch=arch, dtype=dtype, tied=tied, vocab=vocab, **(SMALL | sizes))
        return cache[key]

    return make


@pytest.fixture(scope="session")
def long_rows():
    """Return token lists for a GPU, with lengths below and above its kernels' tile sizes."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 100, (n,), generator=generator).tolist() for n in (2, 300, 129, 66)]


@pytest.fixture(scope="session")
def rows():
    """Return token lists of several lengths, with ids below 100."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 100, (n,), generator=generator).tolist() for n in (2, 70, 33, 34)]
