"""Comparison of all kernels at the sizes of a model (alignkit/ops/sweep.py, alignkit/prove.py)."""

import json
from pathlib import Path

import pytest
import torch

from alignkit.convert import read_architecture
from alignkit.ops import sweep, trials
from alignkit.ops.linear import cpu
from alignkit.ops.registry import RECORDS
from alignkit.prove import problems
from alignkit.runtime import families

from .helpers import CPU, hopper_without_gpu  # noqa: F401

DEVICE = torch.device("cpu" if CPU else "cuda:0")
CONFIGS = Path(__file__).parents[1] / "megatron/configs.json"
SMALL = {
    "linear": ["rows=9 k=96 n=20 leaves=2", "rows=300 k=1024 n=72"],
    "attention": ["rows=14 heads=2 kv_heads=1 head_dim=8 seqs=2"],
    "rms_norm": ["rows=9 h=40"],
    "head_statistics": ["rows=9 ids=40 k=64"],
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", json.loads(CONFIGS.read_text()))
def test_problems_of_published_models_are_valid(name, tp, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(CONFIGS.read_text())[name]))
    found = problems(read_architecture(tmp_path), tp)
    known = {op: record for record in RECORDS for op in record.described}
    assert found.keys() <= known.keys() and {"linear", "attention", "paged_attention", "rms_norm"} <= found.keys()
    for backend in families.SM90.backends:
        for op, all_words in found.items():
            for words in all_words:
                trials.problem(known[op], op, backend, words)


@pytest.mark.parametrize("backend", families.of_type(DEVICE).backends[:1])
def test_all_kernels_are_equal(backend):
    found = dict(sweep.compare(DEVICE, backend, SMALL))
    assert found["linear"] and not any(why for comparisons in found.values() for why in comparisons.values())


@pytest.mark.skipif(not CPU, reason="replaces a kernel of the CPU")
def test_a_kernel_that_differs_is_named(monkeypatch):
    stock = cpu.matmul

    def wrong(a, b, leaves, bias, out, accumulate):
        stock(a, b, leaves, bias, out, accumulate)
        out[-1, -1] += 1

    monkeypatch.setattr(cpu, "matmul", wrong)
    ((op, comparisons),) = sweep.compare(DEVICE, "cpu", {"linear": SMALL["linear"]})
    assert op == "linear" and all("differs from that of the last kernel" in why for why in comparisons.values())
