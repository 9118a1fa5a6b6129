"""Imports and distribution of the package.

Importing alignkit imports no engine, and each adapter works without the other engine. One slow test builds the sdist
and the wheel, installs the wheel into a fresh virtual environment and runs `alignkit doctor`.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from setuptools import Distribution

from alignkit.runtime import native

ROOT = Path(__file__).parents[1]
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_importing_alignkit_imports_no_engine():
    python(
        "import sys, alignkit, alignkit.ops, alignkit.drift, alignkit.vllm, alignkit.cli, alignkit.doctor\n"
        "engines = {'vllm', 'megatron', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not engines, engines"
    )


def test_submodules_are_imported_on_first_use():
    python(
        "import inspect, sys, alignkit\n"
        "assert {'drift', 'ops', 'patch_vllm'} <= set(dir(alignkit)) and 'alignkit.ops' not in sys.modules\n"
        "assert 'alignkit.dist' not in sys.modules and 'dist' in dir(alignkit)\n"
        "assert alignkit.dist.TP(None).size == 1\n"
        "assert alignkit.drift.compare_tensors and alignkit.ops.linear and alignkit.integrations\n"
        "assert not alignkit.vllm.status()['patched'] and not alignkit.megatron.status()['patched']\n"
        "for half in (alignkit.vllm, alignkit.megatron):\n"
        "    name = f\"patch_{half.__name__.partition('.')[2]}\"\n"
        "    ours, theirs = (inspect.signature(getattr(m, name)).parameters.values() for m in (alignkit, half))\n"
        "    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]\n"
        "assert not hasattr(alignkit, 'nothing')"
    )


@pytest.mark.parametrize(
    "blocked,code",
    [
        ("megatron", "import alignkit.vllm\nwith alignkit.patch_vllm():\n    assert alignkit.vllm.status()['patched']"),
        (
            "vllm",
            "import alignkit.megatron\nwith alignkit.patch_megatron(2000):\n"
            "    assert alignkit.megatron.status()['patched']",
        ),
    ],
)
def test_each_half_works_without_the_other_engine(blocked, code):
    python(BLOCK.format(blocked=blocked) + "import alignkit\n" + code)


def test_a_missing_engine_is_named():
    for blocked, call in (("vllm", "alignkit.patch_vllm()"), ("megatron", "alignkit.patch_megatron(2000)")):
        out = python(
            BLOCK.format(blocked=blocked) + f"import alignkit\ntry:\n    {call}\n"
            "except (alignkit.UnsupportedError, ModuleNotFoundError) as e:\n    print(e)"
        )
        assert blocked in out.lower(), out


def test_kernels_of_this_checkout_are_built():
    assert native.available()


def test_no_code_is_shared_between_instruction_sets():
    """A function that the linker merges runs on every CPU, but was compiled for one instruction set."""
    symbols = subprocess.run(["nm", "--demangle", native.LIBRARY], capture_output=True, text=True, check=True).stdout
    shared = [
        line
        for line in symbols.splitlines()
        if re.match(r"[0-9a-f]+ [WVu] ", line) and not re.search(r"alignkit::(generic|avx2|avx512)::", line)
    ]
    assert not shared, shared


# Calls a build hook in the current folder; argument 3 hides nvcc.
BUILD = """
import shutil, sys
which = shutil.which
if sys.argv[3] == "without nvcc":
    shutil.which = lambda name, *args, **kwargs: None if name.endswith("nvcc") else which(name, *args, **kwargs)
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def build(what: str, sources: Path, out: Path, nvcc: bool = False) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, out, "with nvcc" if nvcc else "without nvcc"],
        cwd=sources,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_wheel_from_the_sdist_passes_doctor_without_a_checkout(tmp_path):
    """Checkout -> sdist -> wheel -> an environment with alignkit's dependencies only."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "alignkit", checkout / "alignkit", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "csrc", checkout / "csrc")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    with tarfile.open(build("build_sdist", checkout, tmp_path)) as sdist:
        sdist.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    # nvcc takes minutes, unless the checkout's objects can be reused.
    cuda = (ROOT / "build/objects/csrc/sm90/identity.hash").exists()
    if cuda:
        shutil.copytree(ROOT / "build/objects", unpacked / "build/objects")
    wheel = build("build_wheel", unpacked, tmp_path, nvcc=cuda)
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "alignkit/_cpu.so",
        "alignkit/py.typed",
        "alignkit/ops/golden_cpu.json",
        "alignkit/check/report.html.j2",
        "alignkit/integrations/functions.json",
        "alignkit/integrations/startup/sitecustomize.py",
    } <= inside
    assert ("alignkit/_sm90.so" in inside) == cuda
    assert not [name for name in inside if name.startswith(("tests", "csrc", "benchmarks", "build"))]

    venv.create(tmp_path / "venv", symlinks=True)
    interpreter = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], check=True)
    # Python does not read .pth files of folders that a .pth file adds, so the tests' editable install stays out.
    folder = Path(sysconfig.get_path("purelib", vars={"base": tmp_path / "venv", "platbase": tmp_path / "venv"}))
    needed = {str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("torch", "numpy", "click")}
    (folder / "needed.pth").write_text("\n".join(sorted(needed)) + "\n")
    done = subprocess.run(
        [interpreter.with_name("alignkit"), "doctor"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("built for sm_90a" in done.stdout) == cuda
    where = subprocess.run(
        [interpreter, "-c", "import alignkit; print(alignkit.__file__)"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert Path(where.stdout.strip()).is_relative_to(folder)


def test_the_cuda_library_is_in_the_wheel_where_nvcc_is(monkeypatch):
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("alignkit_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    for nvcc, libraries in ((None, ["_cpu.so"]), ("nvcc", ["_cpu.so", "_sm90.so"])):
        monkeypatch.setattr(setup, "find_nvcc", lambda nvcc=nvcc: nvcc)
        command = setup.BuildKernels(Distribution({"name": "alignkit", "ext_modules": [setup.CPU, setup.SM90]}))
        command.ensure_finalized()
        assert [Path(path).name for path in command.get_outputs()] == libraries
