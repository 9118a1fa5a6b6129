"""The names alignkit relies on, looked up in the sources of every version it claims; nothing is installed."""

import os
import pathlib
import zipfile

import pytest

from alignkit.errors import UnsupportedError
from alignkit.megatron import seams


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


@pytest.mark.parametrize("version", seams.VERSIONS)
def test_every_name_is_there(version, core):
    assert seams.resolve(core(version), version) == []


@pytest.mark.parametrize("version", sorted(set(seams.VERSIONS) - set(seams.HOOK_VERSIONS)))
def test_versions_said_to_have_no_hook_have_none(version, core, monkeypatch):
    monkeypatch.setattr(seams, "HOOK_VERSIONS", (version,))
    assert any("output_processor" in name for name in seams.resolve(core(version), version))


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "transformer" / "mlp.py"
    path.parent.mkdir()
    path.write_text("class MLP:\n    def forward(self, hidden_states):\n        pass\n")
    missing = seams.resolve(tmp_path, "0.19.2")
    assert "transformer/mlp.py:MLP.forward(per_token_scale)" in missing
    assert "tensor_parallel/layers.py" in missing


def test_an_unknown_version():
    with pytest.raises(UnsupportedError, match="0.15.0"):
        seams.names("0.15.0")


def test_the_installed_version_has_every_name():
    core = pytest.importorskip("megatron.core")
    assert seams.resolve(pathlib.Path(core.__file__).parent, seams.release(core.__version__)) == []


def test_a_commit_in_the_version_is_not_another_version():
    assert seams.release("0.19.2+9d061af") == "0.19.2"
    with pytest.raises(UnsupportedError, match="0.20.0"):
        seams.release("0.20.0+9d061af")
