"""Imports and distribution of the package.

Importing alignkit imports no engine, and each adapter works without the other engine. The slow tests build the sdist
from the files that git tracks and the wheel from the sdist, and install the wheel into a fresh virtual environment.
They run `alignkit doctor` and examples/first.py there.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.tags import Tag, compatible_tags
from setuptools import Distribution

import alignkit
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
        pytest.param(
            "megatron",
            "import alignkit.vllm\nwith alignkit.patch_vllm():\n    assert alignkit.vllm.status()['patched']",
            marks=pytest.mark.slow,
        ),
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
        if re.match(r"[0-9a-f]+ [WVu] ", line)
        and not re.search(
            r"alignkit::(generic|avx2|avx512)::| (AlignkitTypes<.*>::all|alignkit_struct_\w+)$", line
        )  # data
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
ADDED = {"_cpu.so", "built.json"}
"""Files of an installed package that its sources lack; with nvcc also _sm90.so."""


def build(what: str, sources: Path, out: Path, nvcc: bool = False) -> Path:
    """Run a build hook on `sources`, without build isolation, and return the built file."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, out, "with nvcc" if nvcc else "without nvcc"],
        cwd=sources,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


def tracked() -> list[str]:
    """Return the files of this checkout that git tracks."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("the files of a release are those that git tracks, and this is no git checkout")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def under(folder: str, names: Iterable[str]) -> set[str]:
    """Return the paths below `folder`, relative to it."""
    return {name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/") and name[-1] != "/"}


@dataclass(frozen=True)
class Release:
    """The files of a release, built from a copy of the tracked files."""

    sources: Path
    """The unpacked sdist."""
    wheel: Path
    cuda: bool
    """True if the wheel has the CUDA kernels."""


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Release:
    """Build tracked files -> sdist -> wheel."""
    folder = tmp_path_factory.mktemp("release")
    checkout = folder / "checkout"
    for name in tracked():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    with tarfile.open(build("build_sdist", checkout, folder)) as sdist:
        sdist.extractall(folder / "sdist", filter="data")
    (sources,) = (folder / "sdist").iterdir()
    # nvcc takes minutes, unless the checkout's objects can be reused.
    cuda = (ROOT / "build/objects/csrc/sm90/identity.hash").exists()
    if cuda:
        shutil.copytree(ROOT / "build/objects", sources / "build/objects")
    return Release(sources, build("build_wheel", sources, folder, nvcc=cuda), cuda)


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel and the other packages of the tests' environment."""

    python: Path
    packages: Path
    cuda: bool

    def run(self, *command: str | Path, cwd: Path, ok: bool = True) -> str:
        """Run a Python command and return its output."""
        done = subprocess.run(
            [self.python, *command],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        assert (done.returncode == 0) == ok, done.stdout
        return done.stdout

    def alignkit(self, *arguments: str, cwd: Path) -> str:
        """Run the installed command `alignkit` and return its output."""
        return self.run(self.python.with_name("alignkit"), *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def environment(release, tmp_path_factory) -> Environment:
    """Install the wheel into a virtual environment; all other packages are the tests' own."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True)
    interpreter = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, release.wheel], check=True)
    # Python does not read .pth files of folders that a .pth file adds, so the tests' editable install stays out.
    packages = Path(sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}))
    needed = {str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("torch", "numpy", "click")}
    (packages / "needed.pth").write_text("\n".join(sorted(needed)) + "\n")
    return Environment(interpreter, packages, release.cuda)


@pytest.mark.slow
def test_sdist_has_every_tracked_file_of_the_package_and_its_kernels(release):
    names = tracked()
    present = [file.relative_to(release.sources).as_posix() for file in release.sources.rglob("*") if file.is_file()]
    for folder in ("alignkit", "csrc"):
        assert under(folder, names) and not under(folder, names) - under(folder, present), folder
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"} <= set(present)


@pytest.mark.slow
def test_wheel_has_the_package_and_kernels_for_every_python(release):
    name, version, python_tag, abi, platform = release.wheel.name.removesuffix(".whl").split("-")
    assert (name, version, python_tag, abi) == ("alignkit", alignkit.__version__, "py3", "none")
    assert platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")
    for minor in (11, 12, 13):
        assert Tag(python_tag, abi, platform) in set(compatible_tags((3, minor), platforms=[platform]))
    with zipfile.ZipFile(release.wheel) as opened:
        inside = opened.namelist()
        metadata = opened.read(f"alignkit-{version}.dist-info/METADATA").decode()
        libraries = [opened.extract(n, release.wheel.parent / "libraries") for n in inside if n.endswith(".so")]
    assert f"\nVersion: {version}\n" in metadata and "\nRequires-Python: <3.14,>=3.11\n" in metadata
    # The wheel has all tracked files of the package, what the build adds, and nothing else.
    added = ADDED | ({"_sm90.so"} if release.cuda else set())
    assert under("alignkit", inside) == under("alignkit", tracked()) | added
    assert {n.partition("/")[0] for n in inside} == {"alignkit", f"alignkit-{version}.dist-info"}
    for library in libraries:
        names = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        assert names.stdout and not re.search(r" _?Py", names.stdout), f"{library} uses Python's ABI"


@pytest.mark.slow
def test_installed_wheel_passes_doctor(environment, tmp_path):
    out = environment.alignkit("doctor", cwd=tmp_path)
    assert re.search(rf"^alignkit +{re.escape(alignkit.__version__)}$", out, re.MULTILINE), out
    assert re.search("^CPU kernels +built, ", out, re.MULTILINE), out
    assert ("built for sm_90a" in out) == environment.cuda
    where = environment.run("-c", "import alignkit; print(alignkit.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(environment.packages)


@pytest.mark.slow
def test_installed_wheel_rejects_a_library_of_other_sources(environment, tmp_path):
    """An installed package has no csrc: built.json holds the hashes that its libraries must report."""
    built = environment.packages / "alignkit" / "built.json"
    recorded = built.read_text()
    code = "from alignkit import _sources; print(_sources.of('cpu'), _sources.of('sm90'))"
    assert environment.run("-c", code, cwd=tmp_path) == "None None\n"
    assert json.loads(recorded).keys() == {"cpu", "sm90"}
    built.write_text(json.dumps({"cpu": "0" * 64, "sm90": "0" * 64}))
    try:
        out = environment.run("-c", "from alignkit.runtime import native; native.library()", cwd=tmp_path, ok=False)
    finally:
        built.write_text(recorded)
    assert "_cpu.so: must be built from this alignkit's sources (hash 000000000000)" in out


@pytest.mark.slow
@pytest.mark.engine
def test_first_example_runs_with_the_installed_wheel(environment, tmp_path):
    example = shutil.copy(ROOT / "examples" / "first.py", tmp_path)
    code = f"import runpy, alignkit; runpy.run_path({str(example)!r}); print(alignkit.__file__)"
    *_, result, where = environment.run("-W", "ignore", "-c", code, cwd=tmp_path).splitlines()
    assert result == "16 of 16 logprobs are bit-equal"
    assert Path(where).is_relative_to(environment.packages)


def load_setup():
    """Return setup.py as a module."""
    spec = importlib.util.spec_from_file_location("alignkit_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return setup


def test_wheels_are_tagged_for_one_platform_and_every_python(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    setup = load_setup()
    command = setup.PlatformWheel(Distribution({"name": "alignkit", "version": "0", "ext_modules": [setup.CPU]}))
    command.dist_info_dir = str(tmp_path)
    command.ensure_finalized()
    assert command.get_tag() == ("py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_"))


def test_the_cuda_library_is_in_the_wheel_where_nvcc_is(monkeypatch):
    monkeypatch.chdir(ROOT)
    setup = load_setup()
    for nvcc, libraries in ((None, ["_cpu.so"]), ("nvcc", ["_cpu.so", "_sm90.so"])):
        monkeypatch.setattr(setup, "find_nvcc", lambda nvcc=nvcc: nvcc)
        command = setup.BuildKernels(Distribution({"name": "alignkit", "ext_modules": [setup.CPU, setup.SM90]}))
        command.ensure_finalized()
        assert [Path(path).name for path in command.get_outputs()] == libraries
