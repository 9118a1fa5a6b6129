"""Build of the native libraries by setup.py, without a GPU: choice of nvcc, incremental builds, builds without nvcc.

Scripts stand in for nvcc where its choice is tested; other tests compile with the real nvcc. The disassembled machine
code must keep the tensor cores busy: no spills, no serialized MMAs, no local memory in an MMA loop. TENSOR_CORES must
match the name of each kernel that uses tensor cores, and no other name.
"""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from setuptools import Distribution, Extension
from setuptools.errors import ExecError

from alignkit import BackendError, _sources, doctor
from alignkit.runtime import built, cuda

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("alignkit_setup", ROOT / "setup.py")
setup = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(setup)
OBJECTS = setup.OBJECTS

TENSOR_CORES = re.compile("attention|head|gemm|delta|gate_up|down|matrix_gradients")
"""Pattern that a kernel's name matches if and only if it uses tensor cores."""
MMA_OPCODES = ("HGMMA", "HMMA")
"""Tensor core opcodes: asynchronous, per warpgroup; synchronous, per warp."""
BAD_KERNEL = """
__global__ void bad_gemm(float* out, unsigned long long a, int n) {
  float d[4] = {}, local[64];
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < 4; ++j) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a + j));
      d[0] += 1.0f;  // serializes the MMAs
    }
    local[(i * n) % 64] = d[1];  // a dynamic index puts the array into local memory
    out[i] = local[n % 64];
  }
  out[n] = d[0] + d[1] + d[2] + d[3];
}
__global__ void idle_gemm(float* out) { *out = 1.0f; }
"""


Code = list[tuple[int, str, str]]
"""A kernel's instructions: address, opcode without modifiers, operands."""


def compiled(ext: Extension) -> tuple[str, dict[str, Code]]:
    """Return nvcc's log and the code of each kernel by mangled name, reusing objects of an earlier build."""
    nvcc = setup.find_nvcc()
    assert nvcc, "no nvcc: the requirements of `make test` hold one"
    disassembler = shutil.which("cuobjdump") or (
        Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin/cuobjdump"
    )

    def one(obj) -> tuple[str, str]:
        if not obj.current():
            obj.compile(partial(setup.nvcc_compile, nvcc))
        sass = subprocess.run([disassembler, "-sass", obj.path], capture_output=True, text=True, check=True).stdout
        return obj.log.read_text(), sass

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        logs, sass = zip(*pool.map(one, setup.cuda_objects(ext, nvcc)), strict=True)
    kernels = {}
    for function in "".join(sass).split("Function : ")[1:]:
        name, _, body = function.partition("\n")
        kernels[name.strip()] = [
            (int(address, 16), opcode, operands)
            for address, opcode, operands in re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?(\w+)([^;]*);", body)
        ]
    return "".join(logs), kernels


def own_names(mangled: list[str]) -> list[str]:
    """Return function names without namespaces, template arguments and parameters."""
    text = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True).stdout
    return [re.match(r"(?:void )?(?:\w+::|\(anonymous namespace\)::)*(\w+)", line)[1] for line in text.splitlines()]


def mma_loops(code: Code) -> list[tuple[int, int]]:
    """Return the first and last address of the innermost loop around each MMA, and of all MMAs."""
    mmas = [address for address, opcode, _ in code if opcode in MMA_OPCODES]
    branches = [
        (int(to[1], 16), address)
        for address, opcode, operands in code
        if opcode == "BRA" and (to := re.search(r"0x([0-9a-f]+)", operands))
    ]
    enclosing = [[(begin, end) for begin, end in branches if begin <= mma <= end] for mma in mmas]
    loops = {min(loops, key=lambda loop: loop[1] - loop[0]) for loops in enclosing if loops}
    return [*loops, (mmas[0], mmas[-1])] if mmas else []


def faults(log: str, kernels: dict[str, Code]) -> list[str]:
    """Return the faults of the kernels: spills and, for tensor core kernels, serialized MMAs and local memory."""
    found = [line for line in log.splitlines() if re.search("Potential Performance Loss|serialized|setmaxnreg", line)]
    spills = {
        name: (stores, loads)
        for name, stores, loads in re.findall(
            r"Function properties for (\S+)\n.*, (\d+) bytes spill stores, (\d+) bytes spill loads", log
        )
    }
    assert kernels and spills.keys() >= kernels.keys()
    for mangled, name in zip(kernels, own_names(list(kernels)), strict=True):
        if spills[mangled] != ("0", "0"):
            found.append("{}: {} bytes of spill stores, {} of loads".format(mangled, *spills[mangled]))
        if not TENSOR_CORES.search(name):
            continue
        loops = mma_loops(kernels[mangled])
        if not loops:
            found.append(f"{mangled}: no MMAs")
        if any(
            opcode in ("LDL", "STL") and any(begin <= address <= end for begin, end in loops)
            for address, opcode, _ in kernels[mangled]
        ):
            found.append(f"{mangled}: local memory in an MMA loop")
    return found


@pytest.mark.slow
def test_machine_code_of_this_library_has_no_faults(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setup, "OBJECTS", OBJECTS)
    log, kernels = compiled(setup.SM90)
    assert any(TENSOR_CORES.search(name) for name in own_names(list(kernels)))
    assert not faults(log, kernels)


def test_machine_code_faults_are_found(tmp_path):
    source = tmp_path / "bad.cu"
    source.write_text(BAD_KERNEL)
    found = "\n".join(faults(*compiled(Extension(setup.SM90.name, [str(source)]))))
    assert "serialized" in found
    assert re.search(r"bad_gemm\w+: local memory in an MMA loop", found)
    assert re.search(r"idle_gemm\w+: no MMAs", found)


def test_cuda_library_of_this_checkout_is_available():
    assert cuda.available()
    assert f"{'CUDA kernels':<15} built for sm_90a" in doctor.facts()
    with pytest.raises(BackendError, match="alignkit_head_statistics: .*invalid argument"):
        cuda.check(1, "alignkit_head_statistics")


def nvcc(folder: Path, version: str) -> str:
    """Write a script that prints nvcc's version line; return its path."""
    folder.mkdir(parents=True)
    program = folder / "nvcc"
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.61'\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return a folder for fake nvccs in the places that a user can choose; initially no place has one."""
    for variable in ("CUDACXX", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/bin")
    every = setup.nvcc_places()
    assert every[-2:] == ["/usr/local/cuda/bin/nvcc", f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin/nvcc"]
    monkeypatch.setattr(setup, "nvcc_places", lambda places=setup.nvcc_places: places()[:-2])
    assert setup.find_nvcc() is None
    return tmp_path


def test_nvcc_search_order(places, monkeypatch):
    on_path = nvcc(places / "path", "13.0")
    assert setup.find_nvcc() == on_path
    of_home = nvcc(places / "home/bin", "12.8")
    monkeypatch.setenv("CUDA_HOME", f"{places}/home")
    assert setup.find_nvcc() == of_home
    named = nvcc(places / "named", "12.10")
    monkeypatch.setenv("CUDACXX", named)
    assert setup.find_nvcc() == named


@pytest.mark.parametrize("version", ["11.8", "12.7", "12", ""])
def test_unsupported_nvcc_is_skipped(places, monkeypatch, version):
    monkeypatch.setenv("CUDACXX", nvcc(places / "named", version))
    assert setup.find_nvcc() is None
    newer = nvcc(places / "path", "12.8")
    assert setup.find_nvcc() == newer


@pytest.fixture(autouse=True)
def objects(tmp_path, monkeypatch) -> Path:
    """Use an empty object folder instead of the checkout's."""
    monkeypatch.setattr(setup, "OBJECTS", tmp_path / "objects")
    return setup.OBJECTS


def build(sources: list[Path], folder: Path) -> Path:
    """Run build_ext with these CUDA sources; return the path of the library."""
    sources = [str(source) for source in sources]
    command = setup.BuildKernels(Distribution({"ext_modules": [Extension(setup.SM90.name, sources)]}))
    command.build_lib = str(folder)
    command.ensure_finalized()
    command.run()
    return folder / "alignkit/_sm90.so"


def test_build_without_nvcc_removes_a_stale_library(places, monkeypatch, capsys):
    stale = places / "alignkit/_sm90.so"
    stale.parent.mkdir()
    stale.write_text("of an earlier build")
    library = build([], places)
    assert library == stale and not library.exists()
    assert "nvcc 12.8 or newer not found; the CUDA kernels are not built" in capsys.readouterr().out

    monkeypatch.setattr(cuda, "LIBRARY", library)
    for function in (cuda.library, cuda.available):
        monkeypatch.setattr(cuda, function.__name__, function.__wrapped__)
    assert f"{'CUDA kernels':<15} not built: {cuda.ABSENT}" in doctor.facts()
    with pytest.raises(BackendError, match="CUDA kernels were not built: no nvcc 12.8 or newer"):
        cuda.library()


def test_cuda_library_is_rebuilt_when_its_hash_changes(tmp_path, monkeypatch):
    """File times do not matter."""
    source = tmp_path / "identity.cu"
    source.write_text(f'#include "{ROOT}/csrc/interface.h"\nALIGNKIT_IDENTITY\n')
    library = build([source], tmp_path)
    built.load(library, "sm90")
    hashes = json.loads(library.with_name("built.json").read_text())
    assert hashes == {part: _sources.of(part) for part in ("cpu", "sm90")}
    built_at = library.stat().st_mtime_ns
    build([source], tmp_path)
    assert library.stat().st_mtime_ns == built_at

    monkeypatch.setattr(setup.hashes, "of", lambda part: f"1e{part}0")
    build([source], tmp_path)
    assert library.stat().st_mtime_ns > built_at and b"1esm900" in library.read_bytes()
    built_at = library.stat().st_mtime_ns
    build([source], tmp_path)
    assert library.stat().st_mtime_ns == built_at


def test_cpu_library_is_rebuilt_when_its_hash_changes(tmp_path, monkeypatch):
    """One library serves every Python; a newer library with another hash is replaced."""
    source, package = tmp_path / "identity.cpp", tmp_path / "alignkit"
    source.write_text(f'#include "{ROOT}/csrc/interface.h"\nALIGNKIT_IDENTITY\n')
    package.mkdir()
    library = package / "_cpu.so"

    def build():
        distribution = Distribution(
            {
                "ext_modules": [Extension(setup.CPU.name, [str(source)])],
                "packages": ["alignkit"],
                "package_dir": {"alignkit": str(package)},
            }
        )
        command = setup.BuildKernels(distribution)
        command.inplace, command.build_lib, command.build_temp = True, str(tmp_path / "lib"), str(tmp_path / "temp")
        command.ensure_finalized()
        command.run()
        return library.stat().st_mtime_ns

    monkeypatch.setattr(setup, "find_nvcc", lambda: None)
    built_at = build()
    built.load(library, "cpu")
    assert build() == built_at and not (package / "built.json").exists()
    library.write_text("of other sources, and newer than what is built of these")
    build()
    built.load(library, "cpu")
    monkeypatch.setattr(setup.hashes, "of", lambda part: f"1e{part}0")
    build()
    assert b"1ecpu0" in library.read_bytes()


def test_nvcc_error_fails_the_build(tmp_path, capfd):
    source = tmp_path / "kernel.cu"
    source.write_text("no C++")
    with pytest.raises(ExecError, match="nvcc"):
        build([source], tmp_path)
    assert "kernel.cu(1): error" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "extension,suffix", [(setup.CPU, "cpp"), pytest.param(setup.SM90, "cu", marks=pytest.mark.slow)]
)
def test_only_changed_files_are_recompiled(extension, suffix, objects, tmp_path, monkeypatch, capfd):
    """A changed header, flag or compiler counts too; the identity file is recompiled on every change."""
    sources = {name: tmp_path / f"{name}.{suffix}" for name in ("one", "two", "identity")}
    header = tmp_path / "a header.h"
    header.write_text("inline int three() { return 3; }\n")
    sources["one"].write_text('extern "C" int one() { return 1; }\n')
    sources["two"].write_text('#include "a header.h"\nextern "C" int two() { return three(); }\n')
    sources["identity"].write_text(f'#include "{ROOT}/csrc/interface.h"\nALIGNKIT_IDENTITY\n')
    counter = iter(range(100))

    def compiled(force: bool = False) -> set[str]:
        hashed = f"{next(counter)}of{suffix}"
        monkeypatch.setattr(setup.hashes, "of", lambda part: hashed)
        command = setup.BuildKernels(
            Distribution({"ext_modules": [Extension(extension.name, [*map(str, sources.values())], language="c++")]})
        )
        command.build_lib, command.force = str(tmp_path / "lib"), force
        command.ensure_finalized()
        command.run()
        library = tmp_path / f"lib/alignkit/_{setup.part(extension)}.so"
        assert hashed.encode() in library.read_bytes()
        output = capfd.readouterr().out
        return {name for name, source in sources.items() if f"compiling {source} " in output}

    assert compiled() == {"one", "two", "identity"}
    assert compiled() == {"identity"}
    sources["one"].touch()  # same content
    assert compiled() == {"identity"}
    sources["one"].write_text('extern "C" int one() { return 11; }\n')
    assert compiled() == {"one", "identity"}
    header.write_text("inline int three() { return 33; }\n")
    assert compiled() == {"two", "identity"}
    library = ctypes.CDLL(str(tmp_path / f"lib/alignkit/_{setup.part(extension)}.so"))
    assert (library.one(), library.two()) == (11, 33)
    next(objects.rglob("one.o")).unlink()
    assert compiled() == {"one", "identity"}
    assert compiled(force=True) == {"one", "two", "identity"}
    monkeypatch.setattr(extension, "extra_compile_args", [*extension.extra_compile_args, "-DOTHER"])
    assert compiled() == {"one", "two", "identity"}
    monkeypatch.setattr(setup, "version", lambda compiler, version=setup.version: version(compiler) + "newer")
    assert compiled() == {"one", "two", "identity"}
    assert compiled() == {"identity"}


def test_source_changed_during_compilation_is_recompiled(objects, tmp_path):
    """The object may hold either content."""
    source = tmp_path / "one.cpp"
    source.write_text("int one;\n")
    one = setup.Object(str(source), [], [])

    def compiler(compiled, options, *, meanwhile):
        subprocess.run(["c++", *options, "-c", source, "-o", compiled.path], check=True)
        if meanwhile:
            time.sleep(0.05)  # file timestamps are coarse
            source.write_text(meanwhile)

    one.compile(partial(compiler, meanwhile="int two;\n"))
    assert not one.current()
    one.compile(partial(compiler, meanwhile=None))
    assert one.current()
