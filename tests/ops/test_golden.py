"""Golden bits of the ops, forward and backward, as of the last change of the contract id, on this device's family.

The hashes are in alignkit/ops/golden_*.json. A change of hashes is a change of the contract (CONTRIBUTING.md, "Rules").
"""

import functools
import importlib
import json
import os

import pytest
import torch

from alignkit.errors import BackendError
from alignkit.ops import golden
from alignkit.ops.gated_delta_rule import reference
from alignkit.runtime import dispatch, families
from alignkit.testing import assert_bitwise_equal

from .test_qk_norm_rope import separate

DEVICE = os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu")


@pytest.fixture(scope="module")
def golden_hashes() -> dict:
    return golden.load(dispatch.family(DEVICE))


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda f: f.name)
def test_every_case_has_golden_bits(family):
    assert golden.load(family).keys() == golden.CASES.keys()


@pytest.mark.parametrize("case", golden.CASES)
def test_bits_are_golden(golden_hashes, case):
    assert golden.hashes(case, DEVICE) == golden_hashes[case]


@pytest.mark.parametrize("case", [case for case in golden.CASES if "normed_rotations" in case])
def test_qk_norm_rope_has_the_golden_bits_of_separate_ops(case, golden_hashes, monkeypatch):
    """All families share these bits: no sum of squares depends on its order, and no value is zero."""
    assert golden.load(families.CPU)[case] == golden.load(families.SM90)[case]
    golden_case, dtype = golden.CASES[case]
    found = golden_case.function(golden.Inputs(DEVICE, dtype))
    assert all(bool(t.isfinite().all() and (t != 0).all()) for t in found)
    monkeypatch.setattr(importlib.import_module("alignkit.ops.qk_norm_rope.op"), "qk_norm_rope", separate)
    assert golden.hashes(case, DEVICE) == golden_hashes[case]


@pytest.mark.parametrize("case", [case for case in golden.CASES if "gated_delta_rule" in case])
def test_golden_gated_delta_rule_of_the_cpu_is_exact(case, monkeypatch):
    """Sums are exact, so their order changes no bit."""
    golden_case, dtype = golden.CASES[case]
    found = golden_case.function(golden.Inputs("cpu", dtype))
    assert all(bool(t.isfinite().all()) and len(t.unique()) > 4 for t in found)
    monkeypatch.setattr(reference, "bwd_dhu", functools.partial(reference.bwd_dhu, dtype=torch.float64))
    for a, b in zip(found, golden_case.function(golden.Inputs("cpu", dtype)), strict=True):
        assert_bitwise_equal(a, b)


def test_writing_new_cases_keeps_the_old_ones(tmp_path, monkeypatch):
    file = tmp_path / "golden.json"
    file.write_text(golden.path(families.CPU).read_text())
    monkeypatch.setattr(golden, "path", lambda _: file)
    monkeypatch.setattr(golden, "CASES", dict.fromkeys(("norms float32", "new"), golden.CASES["norms float32"]))
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"sha256": {"norms float32": whole["sha256"]["norms float32"]}}))
    golden.write("cpu")
    assert golden.load(families.CPU).keys() == {"norms float32", "new"}
    file.write_text(json.dumps(whole | {"sha256": {"norms float32": ["0" * 64]}}))
    with pytest.raises(BackendError, match="norms float32: hashes must equal those in golden"):
        golden.write("cpu")
