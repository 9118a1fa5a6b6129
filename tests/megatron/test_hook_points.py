"""Every hook point that alignkit/megatron declares exists in the sources of every supported Megatron-core version.

The sources come from ALIGNKIT_WHEELS (`make test` sets it); nothing is imported. A missing name means that the patch
would not apply to that version.
"""

import ast
import hashlib
import os
import pathlib
import zipfile

import pytest

from alignkit.engines import hook_points
from alignkit.engines.hook_points import unresolved
from alignkit.errors import UnsupportedError
from alignkit.megatron.versions import VERSIONS


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Return a function from a version to its ``megatron/core`` folder; $ALIGNKIT_WHEELS has wheels, packed or not."""
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
def test_version_has_every_hook_point(version, core):
    assert VERSIONS.unresolved(core(version), version) == []


@pytest.mark.parametrize("version", [v for v, row in VERSIONS.rows.items() if row.runs and not row.runs.hook])
def test_version_listed_without_output_processor_lacks_it(version, core):
    declared = VERSIONS.declared["output_processor"]
    assert len(unresolved(core(version), declared)) == len(declared) > 0


ATTENTION = {
    "0.16.1": "76abbe228a274394",
    "0.17.1": "a2eae2d32b8d202a",
    "0.18.2": "c558dca7bb988a17",
    "0.19.2": "3c7c8244887f7107",
}
"""Version -> digest of the two functions that `modules.SelfAttention` reimplements, read when it was written."""


@pytest.mark.parametrize("version", VERSIONS.rows)
def test_the_reimplemented_attention_is_unchanged_in_megatron(version, core):
    tree, sources = ast.parse((core(version) / "transformer" / "attention.py").read_text()), []
    for cls, name in (("Attention", "forward"), ("SelfAttention", "get_query_key_value_tensors")):
        function = hook_points.find(hook_points.find(tree, cls), name)
        function.body = function.body[1:]  # without the docstring
        sources.append(ast.unparse(function))
    assert hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16] == ATTENTION[version]


def test_missing_hook_points_are_named(tmp_path):
    path = tmp_path / "transformer" / "mlp.py"
    path.parent.mkdir()
    path.write_text("class MLP:\n    def forward(self, hidden_states):\n        pass\n")
    missing = VERSIONS.unresolved(tmp_path, "0.19.2")
    assert "transformer/mlp: MLP.forward: does not take per_token_scale" in missing
    assert "tensor_parallel/layers: VocabParallelEmbedding: no such file" in missing


def test_unknown_version_is_rejected():
    with pytest.raises(UnsupportedError, match="0.15.0"):
        VERSIONS.require("0.15.0")


def test_installed_version_has_every_hook_point():
    core = pytest.importorskip("megatron.core")
    assert VERSIONS.unresolved(pathlib.Path(core.__file__).parent, core.__version__) == []


def test_local_version_label_is_ignored():
    assert VERSIONS.known("0.19.2+9d061af") == "0.19.2"
    with pytest.raises(UnsupportedError, match="0.20.0"):
        VERSIONS.require("0.20.0+9d061af")


def test_forward_without_an_expected_call_is_named(tmp_path):
    path = tmp_path / "models" / "gpt" / "gpt_model.py"
    path.parent.mkdir(parents=True)
    path.write_text("class GPTModel:\n    def forward(self):\n        return self._postprocess()\n")
    problem = "models/gpt/gpt_model.py: GPTModel.forward: its source does not contain _preprocess"
    assert problem in VERSIONS.unresolved(tmp_path, "0.16.1")
