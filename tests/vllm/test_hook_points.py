"""Every name of vLLM that alignkit patches or imports exists in the sources of every supported version.

The sources come from ALIGNKIT_WHEELS (`make test` sets it) and from the installed vLLM. A missing name means that the
patch would not apply to that version; alignkit/vllm declares the names where it uses them.
"""

import ast
import importlib.util
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from alignkit.engines import hook_points
from alignkit.errors import UnsupportedError
from alignkit.vllm.versions import VERSIONS, resolve


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


def test_the_installed_version_has_every_hook_point():
    assert VERSIONS.unresolved(installed(), "0.32.0") == []


@pytest.mark.parametrize("version", ["0.24.0", "0.25.1", "0.26.0", "0.33.0"])
def test_other_known_versions_have_every_hook_point(version, tmp_path):
    root = wheel_root(version, tmp_path)
    assert VERSIONS.unresolved(root, version) == []


def test_imports_are_hook_points():
    found = VERSIONS.hook_points("0.32.0")
    assert hook_points.HookPoint("v1/attention/backends/registry", "register_backend") in found
    assert hook_points.HookPoint("model_executor/custom_op", "op_registry_oot") in found, "attribute of a module"
    assert hook_points.HookPoint("v1/kv_cache_layout", "KVCacheLayout") in found, "in a function of 0.32"
    assert hook_points.HookPoint("v1/kv_cache_layout", "KVCacheLayout") not in VERSIONS.hook_points("0.26.0")


@pytest.mark.parametrize("version", ["0.26.0", "installed"])
def test_supported_versions_have_their_classes(version, tmp_path):
    root = installed() if version == "installed" else wheel_root(version, tmp_path)
    runs = VERSIONS.require("0.32.0" if version == "installed" else version)
    for path in (runs.worker, runs.client_error):
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


def test_a_missing_hook_point_is_named(tmp_path):
    tmp_path /= "vllm"
    shutil.copytree(installed(), tmp_path, copy_function=os.symlink)
    assert VERSIONS.unresolved(tmp_path, "0.32.0") == []

    sampler = tmp_path / "v1/sample/sampler.py"
    text = sampler.read_text()
    sampler.unlink()
    sampler.write_text(text.replace("def compute_logprobs(logits", "def compute_logprobs(scores"))
    (tmp_path / "v1/kv_cache_layout.py").unlink()
    lost = VERSIONS.unresolved(tmp_path, "0.32.0")
    assert len(lost) == 3, lost
    assert any("Sampler.compute_logprobs: does not take logits" in line for line in lost)
    assert any("kv_cache_layout.py: KVCacheLayout.LBNHC: no such file" in line for line in lost)
    with pytest.raises(UnsupportedError, match="vLLM 0.32.0: .*does not take logits"):
        VERSIONS.require_hook_points(tmp_path, "0.32.0")


@pytest.mark.parametrize(
    "version",
    ["0.33.0", "0.23.0", "0.31.1", "1.0.0rc1"],  # 0.33.0 has hook points, but has not been validated
)
def test_unsupported_versions_are_rejected(version):
    supported = "0.24.x on cuda, 0.25.x on cuda, 0.26.x on cuda, 0.32.x on cpu"
    with pytest.raises(UnsupportedError, match=f"vLLM {version}: not supported. Install one of: {supported}"):
        VERSIONS.require(version)


@pytest.mark.parametrize(
    "version, device",
    [("0.32.0", "cpu"), ("0.32.1+cpu", "cpu"), ("0.24.0", "cuda"), ("0.25.1", "cuda"), ("0.26.1+cu129", "cuda")],
)
def test_patch_releases_of_a_version_are_supported(version, device):
    assert VERSIONS.require(version).family.device_type == device
