"""The names alignkit relies on, looked up in the sources of every version it claims; nothing is installed."""

import os
import pathlib
import zipfile

import pytest

from alignkit.engines.seams import unresolved
from alignkit.errors import UnsupportedError
from alignkit.megatron.seams import HOOK
from alignkit.megatron.versions import VERSIONS


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Gives the ``megatron/core`` folder of a version; $ALIGNKIT_WHEELS holds unpacked or .whl files."""
    root = os.environ.get("ALIGNKIT_WHEELS")
    if not root:
        pytest.skip("ALIGNKIT_WHEELS is not set")

    def find(version):
        unpacked = pathlib.Path(root) / f"megatron_core-{version}" / "megatron" / "core"
        if unpacked.is_dir():
            return unpacked
        wheels = sorted(pathlib.Path(root).glob(f"megatron_core-{version}-*.whl"))
        assert wheels, f"{root} has no megatron_core-{version}"
        target = tmp_path_factory.mktemp("wheel")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(target, [n for n in wheel.namelist() if n.endswith(".py")])
        return target / "megatron" / "core"

    return find


@pytest.mark.parametrize("version", VERSIONS.rows)
def test_every_name_is_there(version, core):
    assert VERSIONS.unresolved(core(version), version) == []


@pytest.mark.parametrize("version", [v for v, row in VERSIONS.rows.items() if row.runs and not row.runs.hook])
def test_versions_said_to_have_no_hook_have_none(version, core):
    assert len(unresolved(core(version), HOOK)) == len(HOOK)


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "transformer" / "mlp.py"
    path.parent.mkdir()
    path.write_text("class MLP:\n    def forward(self, hidden_states):\n        pass\n")
    missing = VERSIONS.unresolved(tmp_path, "0.19.2")
    assert "transformer/mlp.py: MLP.forward: does not take per_token_scale" in missing
    assert "tensor_parallel/layers.py: VocabParallelEmbedding: no such file" in missing


def test_an_unknown_version():
    with pytest.raises(UnsupportedError, match="0.15.0"):
        VERSIONS.require("0.15.0")


def test_the_installed_version_has_every_name():
    core = pytest.importorskip("megatron.core")
    assert VERSIONS.unresolved(pathlib.Path(core.__file__).parent, core.__version__) == []


def test_a_commit_in_the_version_is_not_another_version():
    assert VERSIONS.known("0.19.2+9d061af") == "0.19.2"
    with pytest.raises(UnsupportedError, match="0.20.0"):
        VERSIONS.require("0.20.0+9d061af")


def test_a_forward_that_goes_another_way_is_named(tmp_path):
    """By a name that it no longer calls."""
    path = tmp_path / "models" / "gpt" / "gpt_model.py"
    path.parent.mkdir(parents=True)
    path.write_text("class GPTModel:\n    def forward(self):\n        return self._postprocess()\n")
    problem = "models/gpt/gpt_model.py: GPTModel.forward: has no _preprocess in it"
    assert problem in VERSIONS.unresolved(tmp_path, "0.16.1")
