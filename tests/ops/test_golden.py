"""Golden bits of the ops, forward and backward, as of the last change of the contract id, on this device's family.

The hashes are in alignkit/ops/golden_*.json. A change of hashes is a change of the contract (CONTRIBUTING.md, "Rules").
"""

import functools
import importlib
import json
import os

import pytest
import torch

from alignkit import doctor
from alignkit.errors import BackendError
from alignkit.ops import golden, tensor_core
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
    if golden_hashes[case] is None:
        pytest.skip(f"{case}: no golden bits of this family yet; `python -m alignkit.ops.golden {DEVICE}` adds them")
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
    file, other = tmp_path / "golden_cpu.json", tmp_path / "golden_sm90.json"
    for family in families.FAMILIES:
        (tmp_path / golden.path(family).name).write_text(golden.path(family).read_text())
    before = golden.load(families.SM90)
    monkeypatch.setattr(golden, "path", lambda family: tmp_path / f"golden_{family.name}.json")
    monkeypatch.setattr(golden, "CASES", dict.fromkeys(("norms float32", "new"), golden.CASES["norms float32"]))
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"sha256": {"norms float32": whole["sha256"]["norms float32"]}}))
    golden.write("cpu")
    assert golden.load(families.CPU).keys() == {"norms float32", "new"}
    assert json.loads(other.read_text())["sha256"] == before | {"new": None}
    assert golden.pending(families.SM90) == [*(case for case in before if before[case] is None), "new"]
    assert len(golden.load(families.CPU)["new"] or ()) == 8
    file.write_text(json.dumps(whole | {"sha256": {"norms float32": ["0" * 64]}}))
    with pytest.raises(BackendError, match="norms float32: hashes must equal those in golden"):
        golden.write("cpu")


def test_new_case_gets_the_hashes_of_the_tensor_core_model(tmp_path, monkeypatch):
    for family in families.FAMILIES:
        (tmp_path / f"golden_{family.name}.json").write_text(
            json.dumps({"contract": family.contract_id, "sha256": {"linears float32": None}})
        )
    want = golden.load(families.SM90)["linears bfloat16"]
    monkeypatch.setattr(golden, "path", lambda family: tmp_path / f"golden_{family.name}.json")
    monkeypatch.setattr(golden, "CASES", {case: golden.CASES[case] for case in ("linears float32", "linears bfloat16")})
    golden.write("cpu")
    assert golden.load(families.SM90) == {"linears float32": None, "linears bfloat16": want}
    assert golden.pending(families.CPU) == []


def test_case_without_bits_is_skipped_and_named(monkeypatch):
    monkeypatch.setattr(golden, "CASES", {"norms float32": golden.CASES["norms float32"]})
    stored = golden.load(families.CPU)
    monkeypatch.setattr(golden, "load", lambda family: stored | {"norms float32": None})
    monkeypatch.setattr(golden, "hashes", None)
    monkeypatch.setattr(golden.trials, "compare", lambda device, backend: None)
    assert golden.difference(torch.device("cpu"), "cpu") is None
    assert doctor._without_bits("cpu") == ", except 1 cases without stored bits: norms float32"


def test_doctor_identifies_the_tensor_core(monkeypatch):
    """The CPU's chain is that of no tensor core; the model's is that of Hopper."""
    assert doctor._tensor_core("cpu") == "step must be that of Hopper, got that of no known GPU"
    monkeypatch.setattr(doctor, "matmul", tensor_core.chain)
    assert doctor._tensor_core("cpu") is None
