"""The names that alignkit relies on exist in every vLLM version it knows."""
import importlib.util
import os
import zipfile
from pathlib import Path

import pytest

from alignkit.errors import UnsupportedError
from alignkit.vllm import seams


def installed():
    return Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


def wheel_root(version, unpack_into):
    """The vllm package of `version` below ALIGNKIT_WHEELS: a folder vllm-VERSION, or a wheel."""
    folder = os.environ.get("ALIGNKIT_WHEELS")
    if not folder:
        pytest.skip("ALIGNKIT_WHEELS is not set")
    for path in Path(folder).glob(f"vllm*-{version}*"):
        if (path / "vllm").is_dir():
            return path / "vllm"
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(unpack_into, [n for n in wheel.namelist() if n.endswith(".py")])
            return unpack_into / "vllm"
    pytest.fail(f"no vLLM {version} in ALIGNKIT_WHEELS={folder}")


def test_installed_version_has_every_seam():
    assert seams.unresolved(installed(), seams.RUNS) == []


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_other_known_versions_have_every_seam(version, tmp_path):
    root = wheel_root(version, tmp_path)
    assert seams.unresolved(root, version.rpartition(".")[0]) == []


def test_a_lost_seam_is_named(tmp_path):
    for seam in seams.SEAMS[seams.RUNS]:
        copy = tmp_path / seam.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((installed() / seam.file).read_text())
    assert seams.unresolved(tmp_path, seams.RUNS) == []

    sampler = tmp_path / "v1/sample/sampler.py"
    text = sampler.read_text()
    sampler.write_text(text.replace("def compute_logprobs(logits", "def compute_logprobs(scores"))
    (tmp_path / "v1/worker/gpu/sample/prompt_logprob.py").unlink()
    lost = seams.unresolved(tmp_path, seams.RUNS)
    assert len(lost) == 2
    assert any("Sampler.compute_logprobs: does not take logits" in line for line in lost)
    assert any("prompt_logprob.py: compute_token_logprobs: no such file" in line for line in lost)
    with pytest.raises(UnsupportedError, match="does not take logits"):
        seams.require_seams(tmp_path)


@pytest.mark.parametrize("version, reason", [
    ("0.26.0", "no CUDA backend yet"), ("0.33.0", "no CUDA backend yet"),
    ("0.31.1", "unknown version"), ("1.0.0rc1", "unknown version")])
def test_other_versions_are_refused_by_name(version, reason):
    with pytest.raises(UnsupportedError, match=f"vLLM {version}: .*{reason}"):
        seams.require_version(version)


def test_patch_releases_of_the_version_run():
    seams.require_version("0.32.0")
    seams.require_version("0.32.1+cpu")
