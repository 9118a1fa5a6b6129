"""Models that Megatron-Bridge and mbridge build from an HF directory are aligned and export their weights.

Both packages are real and run on real Megatron-core; TransformerEngine, which they need, is `te_on_cpu`. bridges.py
holds the functions that run on the ranks.
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
    """Return the skip reason if `package` is missing or Megatron-core's version has no prefix in `core`; else None."""
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
    for stock, logp, *exports in results:
        assert not stock
        assert_bitwise_equal(logp, expected)
        for given in exports:
            assert set(given) == set(weights)
            for name, value in given.items():
                assert_bitwise_equal(value.cpu(), weights[name], name)


@pytest.mark.parametrize(
    "build, name",
    [pytest.param(bridges.megatron_bridge, name, marks=needs_bridge) for name in MODELS]
    + [pytest.param(bridges.mbridge, "qwen2-tied", marks=needs_mbridge)],
)
def test_bridge_models_are_aligned_and_export_their_weights(build, name, checkpoint, rows, world, te):
    """At TP 2 with sequence parallelism, logprobs equal those of alignkit's own model at TP 1."""
    path = checkpoint(*MODELS[name])
    expected = workers.all_calls(world, path, torch.bfloat16, False, rows)["loss call"]
    check(te(2, build, path, rows, True, timeout=300), path, expected)  # the first call imports the bridge


@needs_bridge
def test_bridge_hybrid_model_is_aligned(checkpoint, rows, world, te):
    path = checkpoint(*MODELS["llama"])
    expected = workers.all_calls(world, path, torch.bfloat16, False, rows)["loss call"]
    check(te(2, bridges.hybrid_provider, path, rows, True, timeout=300), path, expected)
