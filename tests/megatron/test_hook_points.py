"""Every hook point of alignkit/megatron/hook_points.py exists in the sources of every supported Megatron-core version.

The sources come from ALIGNKIT_WHEELS (`make test` sets it); nothing is imported. A missing name means that the patch
would not apply to that version.
"""

import ast
import hashlib
import json
import os
import pathlib
import shutil
import zipfile

import pytest

from alignkit.engines import hook_points
from alignkit.engines.versions import PROVED, UNPROVED, digest, training_check
from alignkit.errors import UnsupportedError
from alignkit.megatron.versions import RELEASES, VALIDATED, VERSIONS
from alignkit.runtime.certificates import Certificate

ROOT = pathlib.Path(__file__).parents[2]


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


@pytest.mark.parametrize("version", RELEASES)
def test_a_validated_version_has_its_names_and_files(version, core):
    """A new hook point changes the hashes: enter those that this test prints."""
    names, facts = VERSIONS.names(core(version))
    assert names.missing == [] and digest(names) == RELEASES[version]
    assert facts.hook == (version >= "0.18")
    assert any(point.file == "models/hybrid/hybrid_model.py" for point in names.hook_points) == (version >= "0.18")


def test_every_validated_version_has_a_run_with_equal_bits():
    """A commit's hash cannot be computed here, since its sources are not on the package index."""
    lines = (ROOT / "benchmarks/results/versions.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "bit_equal" in row]
    equal = {row["files"]["megatron"] for row in rows if row["bit_equal"] == row["tokens"] > 1000 and not row["failed"]}
    assert equal >= set(VALIDATED.values())


ATTENTION = {
    "0.16.1": "76abbe228a274394",
    "0.17.0": "a2eae2d32b8d202a",
    "0.17.1": "a2eae2d32b8d202a",
    "0.18.2": "c558dca7bb988a17",
    "0.19.0": "3c7c8244887f7107",
    "0.19.2": "3c7c8244887f7107",
}
"""Version -> digest of the two functions that `modules.SelfAttention` reimplements, read when it was written."""


@pytest.mark.parametrize("version", RELEASES)
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
    missing = VERSIONS.names(tmp_path)[0].missing
    assert "transformer/mlp: MLP.forward: does not take per_token_scale" in missing
    assert "tensor_parallel/layers: VocabParallelEmbedding: no such file" in missing
    with pytest.raises(UnsupportedError, match="Megatron-core 0.15.0: these names are missing or changed: .*0.19.2"):
        VERSIONS.require(tmp_path, "0.15.0")


def test_the_installed_version_is_validated():
    core = pytest.importorskip("megatron.core")
    root = pathlib.Path(core.__file__).parent
    assert VERSIONS.state(root, core.__version__) == "validated"
    assert VERSIONS.require(root, core.__version__).hook == (core.__version__ >= "0.18")


def test_a_changed_file_is_rejected_until_it_is_proved(core, tmp_path, monkeypatch):
    """One byte in a file with hook points; another file does not matter. The local part of a version is left out."""
    monkeypatch.setenv("ALIGNKIT_CERTIFICATES", str(tmp_path / "certificates"))
    root = tmp_path / "core"
    shutil.copytree(core("0.18.2"), root)
    (root / "package_info.py").write_text("")
    assert VERSIONS.state(root, "0.18.2") == "validated"
    with (root / "transformer/mlp.py").open("a") as file:
        file.write("# changed\n")
    VERSIONS._inspected.clear()
    check = training_check(False, tp=2, sp=True)
    assert check == "training dense tp2-sp ep1 pp1 cp1" and VERSIONS.state(root, "0.18.2") == UNPROVED
    message = "Megatron-core 0.18.2: is neither validated nor proved on this machine .*Run `alignkit prove`"
    with pytest.raises(UnsupportedError, match=message):
        VERSIONS.require(root, "0.18.2+9d061af")

    key = VERSIONS.key(root, "0.18.2+9d061af")
    assert key["megatron-core"] == "0.18.2"
    Certificate("megatron-core", key, {check: 100}).write()
    assert VERSIONS.require(root, "0.18.2", [check]).hook and VERSIONS.state(root, "0.18.2", [check]) == PROVED
    with pytest.raises(UnsupportedError, match="lacks the check 'training moe tp2-sp ep1 pp1 cp1'"):
        VERSIONS.require(root, "0.18.2", [training_check(True, tp=2, sp=True)])
    with (root / "transformer/mlp.py").open("a") as file:
        file.write("# changed again\n")
    VERSIONS._inspected.clear()
    with pytest.raises(UnsupportedError, match="files of megatron-core must be"):
        VERSIONS.require(root, "0.18.2", [check])


def test_forward_without_an_expected_call_is_named(tmp_path):
    path = tmp_path / "models" / "gpt" / "gpt_model.py"
    path.parent.mkdir(parents=True)
    path.write_text("class GPTModel:\n    def forward(self):\n        return self._postprocess()\n")
    problem = "models/gpt/gpt_model.py: GPTModel.forward: its source does not contain _preprocess"
    assert problem in VERSIONS.names(tmp_path)[0].missing


@pytest.mark.parametrize("name", VERSIONS.users)
def test_another_user_of_a_replaced_function_is_named(name, core, tmp_path):
    """A new import of the function would bypass the replacement; a comment does not count."""
    shutil.copytree(core("0.18.2"), tmp_path, dirs_exist_ok=True)
    new = tmp_path / "models/gpt/another.py"
    new.write_text(f"# {name}\n")
    assert VERSIONS.names(tmp_path)[0].missing == []
    new.write_text(f"from megatron.core.somewhere import {name}\n")
    assert VERSIONS.names(tmp_path)[0].missing == [f"{name}: is also used in models/gpt/another.py"]
