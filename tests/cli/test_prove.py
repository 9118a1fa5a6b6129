"""`alignkit prove`: a certificate is written if all checks pass, and only then; with real engines of other versions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignkit import prove
from alignkit.errors import UnsupportedError
from alignkit.runtime import certificates
from alignkit.runtime.certificates import SELF_TEST, Certificate
from alignkit.runtime.machine import proof_key
from tests.vllm.overlay import make_overlay
from tests.vllm.settings import ENV
from tests.vllm.test_hook_points import wheel_root

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ALIGNKIT_CERTIFICATES", str(tmp_path / "certificates"))
    return tmp_path / "certificates"


def test_the_ops_of_this_machine_are_proved(alignkit, tmp_path, folder):
    """The certificate has every check; the proof leaves nothing behind that would admit an engine."""
    status, out, _ = alignkit("prove", "--ops", "--out", str(tmp_path / "out"))
    (file,) = folder.iterdir()
    found = certificates.require("ops", proof_key(), [SELF_TEST])
    assert status == 0 and str(file) in out.replace("\n", "") and "FAIL" not in out
    assert found.checks[SELF_TEST] == len(found.checks) - 1 == out.count("pass  ") > 20
    assert any("golden bits" in name for name in found.checks) and any("kernels on" in name for name in found.checks)
    assert not certificates.proving() and "ALIGNKIT_PROOF" not in os.environ
    assert not (tmp_path / "out/running").exists()


def test_a_failed_check_leaves_no_certificate(alignkit, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(prove, "self_test", lambda: iter([("first", None), ("second", "rows differ")]))
    status, out, _ = alignkit("prove", "--out", str(tmp_path / "out"))
    assert status == 1 and "FAIL  second: rows differ" in out and "NOT proved, no certificate" in out
    assert not folder.exists()


@pytest.mark.parametrize("arguments", [("--tp", "0"), ("--model-family", "gemma")])
def test_invalid_options_are_rejected(alignkit, tmp_path, arguments):
    assert alignkit("prove", "--out", str(tmp_path / "out"), *arguments)[0] in (2, 3)


def test_a_folder_with_other_files_is_kept(alignkit, tmp_path):
    (tmp_path / "mine").touch()
    status, _, err = alignkit("prove", "--ops", "--out", str(tmp_path))
    assert status == 3 and "out: must be new, empty" in err and (tmp_path / "mine").exists()


def test_pairs_cover_every_rollout_and_training():
    found = prove.pairs(2, gpu=True, experts=True)
    assert {"batch", "one", "chunked", "prefix", "prompt_logprobs", "eager", "v1", "tp2", "tp2-ep", "dp2-ep"} == {
        rollout for rollout, _ in found
    }
    assert {"tp1-packed", "tp1-one", "tp2-sp-padded", "tp2-sp-ep2-one"} <= {training for _, training in found}
    assert len(found) == len(set(found))


def under(overlay, code, **variables):
    """Run code or a command's arguments with another vLLM first on the path, and return the finished process."""
    path = os.pathsep.join([str(overlay), str(ROOT)])
    command = [sys.executable, *(["-c", code] if isinstance(code, str) else ["-m", "alignkit.cli", *code])]
    environment = os.environ | ENV | {"PYTHONPATH": path, "VLLM_PLUGINS": ""} | variables
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)


PATCH = "import alignkit; alignkit.patch_vllm(); print('patched')"
CHECK = """
from alignkit.vllm.versions import installed
from alignkit.engines.versions import rollout_check
installed(rollout_check({family!r}, tp={tp}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", [pytest.param("0.26.0", marks=pytest.mark.matrix), "0.33.0"])
def test_a_version_that_is_not_validated_is_proved(version, tmp_path, folder):
    """The patch rejects it, `alignkit prove` runs both engines, and the patch accepts what was run and no more."""
    overlay = make_overlay(wheel_root(version, tmp_path), version, tmp_path / "overlay")
    before = under(overlay, PATCH)
    assert before.returncode and f"vLLM {version}: is neither validated nor proved" in before.stderr
    proved = under(overlay, ["prove", "--tp", "1", "--model-family", "qwen3", "--out", str(tmp_path / "out")])
    assert proved.returncode == 0, proved.stderr[-3000:] + proved.stdout[-2000:]
    names = {file.name.partition("-")[0] for file in folder.iterdir()}
    assert names == {"ops", "vllm"}, "Megatron-core is validated"
    assert under(overlay, PATCH).stdout.strip().endswith("patched")
    assert under(overlay, CHECK.format(family="qwen3", tp=1)).returncode == 0
    for family, tp in (("llama", 1), ("qwen3", 2)):
        rejected = under(overlay, CHECK.format(family=family, tp=tp))
        assert rejected.returncode and f"lacks the check 'rollout {family} tp{tp} dp1'" in rejected.stderr
    (file,) = folder.glob("vllm-*")
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"checks": record["checks"] | {"rollout llama tp1 dp1": 1}}))
    edited = under(overlay, PATCH)
    assert edited.returncode and "was changed after" in edited.stderr


def test_an_engine_is_rejected_without_a_proof_of_its_files():
    """The certificate of another state of the files does not count."""
    from alignkit.megatron.versions import VERSIONS

    root, version = Path(VERSIONS.adapter), "0.0.0"
    with pytest.raises(UnsupportedError, match="these names are missing or changed"):
        VERSIONS.require(root, version)
    Certificate("megatron-core", proof_key(), {"training dense tp1 ep1 pp1 cp1": 1}).write()
    with pytest.raises(UnsupportedError, match="these names are missing or changed"):
        VERSIONS.require(root, version)
