"""Models that Megatron-Bridge and mbridge build from an HF directory: they are aligned, and their weights come back.

Both run as they are installed, over Megatron-core's own classes; TransformerEngine, which they need, is that of `te_on_cpu`.
"""

import importlib.metadata
import importlib.util

import pytest
import torch

from alignkit.convert import Checkpoint
from alignkit.testing import assert_bitwise_equal
from tests.megatron import bridges, workers

MODELS = {
    "qwen2-tied": ("qwen2", torch.bfloat16, True),
    "qwen3": ("qwen3", torch.bfloat16, False),
    "llama": ("llama", torch.bfloat16, False),
}


def missing(package, core):
    """Why what needs a `package`, and Megatron-core of a version that begins with one of `core`, is not tested."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"
    found = importlib.metadata.version("megatron-core")
    return None if found.startswith(core) else f"this {package} does not run on Megatron-core {found}"


NO_BRIDGE = missing("megatron-bridge", ("0.19",))
NO_MBRIDGE = missing("mbridge", ("0.16", "0.17"))
needs_bridge = pytest.mark.skipif(NO_BRIDGE is not None, reason=NO_BRIDGE or "")
needs_mbridge = pytest.mark.skipif(NO_MBRIDGE is not None, reason=NO_MBRIDGE or "")


def check(results, path, expected):
    weights = Checkpoint(path)
    for stock, logp, *given_back in results:
        assert not stock
        assert_bitwise_equal(logp, expected)
        for given in given_back:
            assert set(given) == set(weights)
            for name, value in given.items():
                assert_bitwise_equal(value.cpu(), weights[name], name)


@pytest.mark.parametrize(
    "build, name",
    [pytest.param(bridges.megatron_bridge, name, marks=needs_bridge) for name in MODELS]
    + [pytest.param(bridges.mbridge, "qwen2-tied", marks=needs_mbridge)],
)
def test_models_of(build, name, checkpoint, rows, world, te):
    """At TP 2 with sequence parallelism: the logprobs of alignkit's own model at TP 1."""
    path = checkpoint(*MODELS[name])
    expected = workers.every_way(world, path, torch.bfloat16, False, rows)["loss call"]
    check(te(2, build, path, rows, True, timeout=300), path, expected)  # the first one imports a lot


@needs_bridge
def test_its_hybrid_model(checkpoint, rows, world, te):
    path = checkpoint(*MODELS["llama"])
    expected = workers.every_way(world, path, torch.bfloat16, False, rows)["loss call"]
    check(te(2, bridges.hybrid_provider, path, rows, True, timeout=300), path, expected)
