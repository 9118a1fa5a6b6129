"""Every name of vLLM that alignkit patches or imports exists in the sources of every supported version.

The sources come from ALIGNKIT_WHEELS (`make test` sets it) and from the installed vLLM. A missing name means that the
patch would not apply to that version; alignkit/vllm declares the names where it uses them.
"""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from alignkit.engines import hook_points
from alignkit.engines.closed_world import unknown_users
from alignkit.engines.versions import Names, digest, rollout_check
from alignkit.errors import UnsupportedError
from alignkit.runtime.certificates import RUNNING, Certificate
from alignkit.runtime.families import CPU, SM90
from alignkit.vllm.versions import VALIDATED, VERSIONS, derive, resolve
from tests.fetch_engines import versions
from tests.vllm.overlay import make_overlay


def installed():
    return Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


def wheel_root(version, unpack_into):
    """Return the vllm package of `version` from ALIGNKIT_WHEELS, which holds folders vllm-VERSION and wheels."""
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


def names_of(root, family):
    """Return the names that alignkit relies on in a vLLM package on devices of `family`, and the facts."""
    names = Names(root, VERSIONS.declared)
    facts = derive(names, family)
    return names, facts


@pytest.mark.parametrize("version", VALIDATED)
def test_a_validated_version_has_its_names_and_files(version, tmp_path):
    """A new hook point changes the hashes: enter those that this test prints."""
    number, _, device = version.partition(" on ")
    names, facts = names_of(wheel_root(number, tmp_path), SM90 if device == "cuda" else CPU)
    assert names.missing == [] and unknown_users(names.root, VERSIONS.users) == []
    assert digest(names) == VALIDATED[version] and facts.family.device_type == device
    assert facts.replicas == (number >= "0.26") and facts.scores == f"compute_topk_{_function(number)}"


def _function(version):
    return "scores" if version >= "0.26" else "logprobs"


@pytest.mark.parametrize("family", [CPU, SM90], ids=lambda f: f.name)
@pytest.mark.parametrize("version", [v for v in versions("vllm") if f"{v} on cuda" not in VALIDATED])
def test_a_version_that_is_not_validated_has_every_hook_point(version, family, tmp_path):
    names, facts = names_of(wheel_root(version, tmp_path), family)
    assert names.missing == [] and unknown_users(names.root, VERSIONS.users) == []
    assert facts.client_error == "vllm.exceptions:VLLMClientError" and digest(names) not in VALIDATED.values()


def test_imports_are_hook_points(tmp_path):
    found = names_of(installed(), CPU)[0].hook_points
    assert hook_points.HookPoint("v1/attention/backends/registry", "register_backend") in found
    assert hook_points.HookPoint("model_executor/custom_op", "op_registry_oot") in found, "attribute of a module"
    layout = hook_points.HookPoint("v1/kv_cache_layout", "KVCacheLayout")
    assert layout in found, "in a function of 0.32"
    assert layout not in names_of(wheel_root("0.26.0", tmp_path), SM90)[0].hook_points


@pytest.mark.parametrize("version", ["0.26.0", "installed"])
def test_supported_versions_have_their_classes(version, tmp_path):
    root, family = (installed(), CPU) if version == "installed" else (wheel_root(version, tmp_path), SM90)
    facts = names_of(root, family)[1]
    for path in (facts.worker, facts.client_error):
        module, _, name = path.partition(":")
        if module == "builtins":
            assert issubclass(resolve(path), Exception)
        else:
            file = module.removeprefix("vllm.").replace(".", "/")
            assert hook_points.unresolved(root, [hook_points.HookPoint(file, name)]) == []


ATTENTION = """
def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    q_by_head = q.view(*q.shape[:-1], q.shape[-1] // self.head_dim, self.head_dim)
    q_by_head = self.q_norm(q_by_head)
    q = q_by_head.view(q.shape)
    k_by_head = k.view(*k.shape[:-1], k.shape[-1] // self.head_dim, self.head_dim)
    k_by_head = self.k_norm(k_by_head)
    k = k_by_head.view(k.shape)
    q, k = self.rotary_emb(positions, q, k)
    attn_output = self.attn(q, k, v)
    output, _ = self.o_proj(attn_output)
    return output
"""


@pytest.mark.parametrize("version", ["0.26.0", "installed"])
@pytest.mark.parametrize("file, name", [("qwen3", "Qwen3Attention"), ("qwen3_moe", "Qwen3MoeAttention")])
def test_the_reimplemented_attention_is_unchanged_in_vllm(file, name, version, tmp_path):
    """`NormedAttention.forward` reimplements these forwards."""
    root = installed() if version == "installed" else wheel_root(version, tmp_path)
    found = hook_points.find(ast.parse((root / f"model_executor/models/{file}.py").read_text()), name)
    assert ast.unparse(hook_points.find(found, "forward")) == ATTENTION.strip()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Return a copy of the installed package whose files may be replaced; no proof of it exists."""
    monkeypatch.setenv("ALIGNKIT_CERTIFICATES", str(tmp_path / "certificates"))
    shutil.copytree(installed(), tmp_path / "vllm", copy_function=os.symlink)
    return tmp_path / "vllm"


def change(file, before, after):
    text = file.read_text()
    assert before in text
    file.unlink()
    file.write_text(text.replace(before, after))


def test_a_missing_hook_point_is_named(copy):
    assert VERSIONS.names(copy)[0].missing == []
    change(copy / "v1/sample/sampler.py", "def compute_logprobs(logits", "def compute_logprobs(scores")
    (copy / "v1/kv_cache_layout.py").unlink()
    lost = VERSIONS.names(copy)[0].missing
    assert len(lost) == 3, lost
    assert any("Sampler.compute_logprobs: does not take logits" in line for line in lost)
    assert any("kv_cache_layout.py: KVCacheLayout.LBNHC: no such file" in line for line in lost)
    with pytest.raises(UnsupportedError, match="vLLM 0.32.0: .*does not take logits.*Validated: 0.24.0 on cuda"):
        VERSIONS.require(copy, "0.32.0+cpu")


def test_a_new_user_of_a_replaced_function_is_rejected(copy):
    """All hook points resolve, but the new caller would bypass the replacement."""
    change(copy / "v1/worker/gpu/warmup.py", "import torch", "import torch\nfrom .logprob import compute_topk_scores")
    assert VERSIONS.names(copy)[0].missing == ["compute_topk_scores: is also used in v1/worker/gpu/warmup.py"]


def test_a_changed_file_is_rejected_until_it_is_proved(copy):
    """A certificate counts for the families and sizes that were run; the rejection names the command."""
    assert VERSIONS.state(copy, "0.32.0") == "validated"
    VERSIONS._inspected.clear()
    change(copy / "v1/sample/sampler.py", "import torch", "import torch  # changed")
    with pytest.raises(UnsupportedError, match="vLLM 0.32.0: is neither validated nor .*Run `alignkit prove`"):
        VERSIONS.require(copy, "0.32.0+cpu")
    check = rollout_check("qwen3", tp=2)
    Certificate("vllm", VERSIONS.key(copy, "0.32.0"), {check: 64}).write()
    assert VERSIONS.require(copy, "0.32.0+cpu", [check]).family is CPU
    for other in (rollout_check("llama", tp=2), rollout_check("qwen3", tp=1), rollout_check("qwen3", tp=2, ep=True)):
        with pytest.raises(UnsupportedError, match=f"lacks the check '{other}'"):
            VERSIONS.require(copy, "0.32.0+cpu", [other])


def test_a_proof_that_has_ended_admits_nothing(copy, tmp_path, monkeypatch):
    """ALIGNKIT_PROOF admits an engine while its file says that the proof runs, and no longer."""
    change(copy / "v1/sample/sampler.py", "import torch", "import torch  # changed")
    running = tmp_path / "running"
    monkeypatch.setenv("ALIGNKIT_PROOF", str(running))
    for content in (None, "", "done"):
        running.unlink(missing_ok=True)
        if content is not None:
            running.write_text(content)
        with pytest.raises(UnsupportedError, match="is neither validated nor proved"):
            VERSIONS.require(copy, "0.32.0")
    running.write_text(RUNNING)
    assert VERSIONS.require(copy, "0.32.0").family is CPU


@pytest.mark.parametrize("version", ["0.23.0", "1.0.0rc1"])
def test_a_package_without_the_names_is_rejected(version, tmp_path):
    with pytest.raises(UnsupportedError, match=f"vLLM {version}: these names are missing or changed: .*0.32.0 on cpu"):
        VERSIONS.require(tmp_path, version)


WITHOUT_GPUS = """
import alignkit
from alignkit.vllm import status, versions

with alignkit.patch_vllm():
    print(status()["contract"], versions.installed().worker)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    "version",
    [pytest.param("0.26.0", id="validated", marks=pytest.mark.slow), pytest.param("0.33.0", id="left-to-the-workers")],
)
def test_a_process_without_gpus_patches_a_vllm_for_gpus(version, tmp_path):
    """Ray's driver has no GPU; its workers do, and require the version themselves."""
    overlay = make_overlay(wheel_root(version, tmp_path), version, tmp_path / "overlay", build="")
    path = os.pathsep.join([str(overlay), str(Path(__file__).parents[2])])
    environment = os.environ | {"PYTHONPATH": path, "ALIGNKIT_CERTIFICATES": str(tmp_path), "VLLM_PLUGINS": ""}
    command = [sys.executable, "-c", WITHOUT_GPUS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "None vllm.v1.worker.gpu_worker:Worker"
