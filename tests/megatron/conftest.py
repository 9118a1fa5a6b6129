import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from alignkit.check.model import make_checkpoint
from tests.forks import METHOD, preload

if importlib.util.find_spec("megatron") is None:  # the converter and the seams are tested without it
    collect_ignore = [
        f"test_{name}.py"
        for name in (
            "arguments",
            "bits",
            "bridges",
            "context",
            "cuda",
            "data_parallel",
            "ddp",
            "fingerprint",
            "frameworks",
            "gradients",
            "hybrid",
            "moe",
            "parallel_cuda",
            "patch",
            "pipeline",
            "published",
            "qk_norm_rope",
            "recompute",
            "refusals",
            "replaced",
            "te",
            "te_cuda",
            "train",
        )
    ]

preload("tests.megatron.preload")
SMALL = dict(hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512)


@pytest.fixture(scope="package")
def world():
    """This process as Megatron's only rank."""
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
    """``te(size, function, *args)`` runs on ranks for which TransformerEngine is installed, that of `te_on_cpu`. So many are
    started when they are first asked for."""
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
    """Two processes, Megatron's tensor-parallel ranks."""
    from alignkit.testing import Ranks

    with Ranks(2, method=METHOD) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    """Two processes of a module's own, as it chooses among layouts that would outlast it."""
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
    """Makes (once) and returns an HF directory: checkpoint("qwen3", torch.bfloat16, tied=True, vocab=300)."""
    made = {}

    def make(arch="qwen3", dtype=torch.bfloat16, tied=False, vocab=300, **sizes):
        key = (arch, dtype, tied, vocab, repr(sorted(sizes.items())))
        if key not in made:
            path = tmp_path_factory.mktemp("hf")
            made[key] = make_checkpoint(path, arch=arch, dtype=dtype, tied=tied, vocab=vocab, **(SMALL | sizes))
        return made[key]

    return make


@pytest.fixture(scope="session")
def long_rows():
    """Sequences for a GPU, of lengths on both sides of its kernels' tiles."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 100, (n,), generator=generator).tolist() for n in (2, 300, 129, 66)]


@pytest.fixture(scope="session")
def rows():
    """Token lists of several lengths, ids below 100."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 100, (n,), generator=generator).tolist() for n in (2, 70, 33, 34)]
