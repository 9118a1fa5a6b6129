"""The loaded C++ and CUDA libraries belong to this source tree, and describe every function and struct.

The tests load copies of the real libraries with changed bytes, and small libraries that they compile.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alignkit import BackendError, _sources, doctor
from alignkit.runtime import built, cuda, dispatch, families, native

PACKAGE = families.PACKAGE
PARTS = {"cpu": native, "sm90": cuda}


def with_other_hash(library: Path, part: str, folder: Path) -> Path:
    """Return a copy of the library whose source hash is another."""
    content, sources = library.read_bytes(), _sources.of(part).encode()
    assert content.count(sources) == 1
    copy = folder / library.name
    copy.write_bytes(content.replace(sources, sources[::-1]))
    return copy


@pytest.fixture
def load(monkeypatch):
    """Return a function that sets a module's library file and clears the state of the loaded one."""

    def place(module, library: Path) -> None:
        monkeypatch.setattr(module, "LIBRARY", library)
        monkeypatch.setattr(module, "library", module.library.__wrapped__)
        if module is cuda:
            monkeypatch.setattr(cuda, "available", cuda.available.__wrapped__)
        monkeypatch.setattr(dispatch, "_backends", {})

    return place


@pytest.mark.parametrize("part", PARTS)
def test_library_built_from_other_sources_is_rejected(part, load, tmp_path, monkeypatch):
    if not PARTS[part].LIBRARY.exists():
        pytest.skip(f"the kernels of {part} are not built")
    module = PARTS[part]
    load(module, with_other_hash(module.LIBRARY, part, tmp_path))
    message = f"{module.LIBRARY.name}: must be built from this alignkit's sources .*; reinstall alignkit"
    for call in (module.library, module.available):
        with pytest.raises(BackendError, match=message):
            call()
    kernels = {"cpu": "CPU kernels", "sm90": "CUDA kernels"}[part]
    prefix = f"{kernels:<15} unusable: {module.LIBRARY.name}: must be built"
    assert any(line.startswith(prefix) for line in doctor.facts())
    if part == "cpu":  # no other backend replaces it
        with pytest.raises(BackendError, match=message):
            dispatch.select("linear", "cpu")
        monkeypatch.setattr(doctor, "_tensor_parallel", lambda: None)
        _, (name, problem), _ = doctor.self_test()
        assert name.startswith("golden bits on cpu") and "must be built from this alignkit's sources" in problem


def test_library_without_a_source_hash_is_rejected(load, tmp_path):
    library = tmp_path / "_cpu.so"
    subprocess.run(["c++", "-shared", "-x", "c++", "-", "-o", library], input=b"int nothing;", check=True)
    load(native, library)
    with pytest.raises(
        BackendError, match=r"_cpu.so: must be built from this alignkit's sources .*, got a library without a hash"
    ):
        native.library()


def test_file_that_is_not_a_library_is_rejected(load, tmp_path):
    library = tmp_path / "_cpu.so"
    library.write_text("no library")
    load(native, library)
    with pytest.raises(BackendError, match="_cpu.so: cannot be loaded .*; reinstall alignkit"):
        native.available()


def test_unknown_instruction_set_is_rejected(load, monkeypatch):
    monkeypatch.setenv("ALIGNKIT_CPU_ISA", "sse9")
    load(native, native.LIBRARY)
    with pytest.raises(BackendError, match="ALIGNKIT_CPU_ISA: must be one of generic, avx2, avx512, got 'sse9'"):
        dispatch.backend_of("cpu")


def test_installed_package_reads_the_expected_hashes_from_built_json(tmp_path):
    """built.json of an installed package holds the source hashes; libraries of other names are ignored."""
    package = shutil.copytree(PACKAGE, tmp_path / "alignkit", ignore=shutil.ignore_patterns("_sm90.so", "__pycache__"))
    (package / "_cpu.cpython-300-x86_64-linux-gnu.so").write_text("of another Python and time")

    def isa() -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from alignkit.runtime import native; print(native.isa())"],
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.stdout

    assert "built.json: must hold the hash of the cpu kernels' sources" in isa()
    (package / "built.json").write_text(json.dumps({"cpu": "0" * 64}))
    assert "_cpu.so: must be built from this alignkit's sources" in isa()
    (package / "built.json").write_text(json.dumps({"cpu": _sources.of("cpu")}))
    assert isa().strip() == native.isa()


def test_source_hash_covers_every_source_and_setup_py(tmp_path, monkeypatch):
    """Editor backup files do not count."""
    (tmp_path / "csrc").mkdir()
    for part in PARTS:
        shutil.copytree(_sources.ROOT / "csrc" / part, tmp_path / "csrc" / part)
    (tmp_path / "alignkit/runtime").mkdir(parents=True)
    for file in ("setup.py", "csrc/interface.h", "alignkit/runtime/kernels.h"):
        shutil.copy(_sources.ROOT / file, tmp_path / file)
    before = {part: _sources.of(part) for part in PARTS}
    monkeypatch.setattr(_sources, "ROOT", tmp_path)
    for part, hashed in before.items():
        (tmp_path / "csrc" / part / ".kernels.inl.swp").write_text("x")
        assert _sources.of(part) == hashed
        files = _sources.files(part)
        kinds = {"cpu": {".cpp", ".inl"}, "sm90": {".cu", ".cuh"}}[part]
        assert {file.suffix for file in files} >= {".py", ".h"} | kinds
        for file in files:
            content = file.read_text()
            file.write_text(content + "\n")
            assert _sources.of(part) != hashed, file
            file.write_text(content)
    (tmp_path / "csrc/cpu/new.h").touch()
    assert _sources.of("cpu") != before["cpu"]


SMALL = """
#include "csrc/interface.h"
struct Inner { int64_t n; };
ALIGNKIT_STRUCT(Inner, n)
struct Outer { const void* p; int i, j; Inner inner; float x[3]; };
ALIGNKIT_STRUCT(Outer, p, i, j, inner, x)
static int sum(const Outer& o, uint64_t n, double d, const char* s) {
    return int(*static_cast<const float*>(o.p) + o.i + o.j + o.inner.n + o.x[2] + n + d + s[0]);
}
ALIGNKIT_FUNCTION(sum)
"""


def compiled(text: str, folder: Path) -> built.Library:
    """Return the library of a C++ text."""
    library = folder / "small.so"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{_sources.ROOT}", "-x", "c++", "-", "-o", library]
    subprocess.run(command, input=text, text=True, check=True)
    return built.Library(library)


def test_library_describes_its_functions_and_structs(tmp_path):
    lib = compiled(SMALL, tmp_path)
    value = torch.tensor([100.0])
    inner = lib.constructor("Inner")(n=2**40)
    outer = lib.constructor("Outer")(p=value, i=1, j=2, inner=inner, x=(0, 0, 3))
    outer.inner.n = 4
    assert lib.sum(ctypes.byref(outer), 10, 0.5, b"\x01") == 100 + 1 + 2 + 4 + 3 + 10 + 1
    assert inner.n == 2**40


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lib, o: lib.sum(o, 1, 1.0), "sum: must have 4 arguments, got 3"),
        (lambda lib, o: lib.sum(o, 1, 1.0, b"", 0), "sum: must have 4 arguments, got 5"),
        (lambda lib, o: lib.sum(o, 1, o, b""), "argument 3"),
        (lambda lib, o: lib.sum(o, 1.0, 1.0, b""), "argument 2"),
        (lambda lib, o: lib.sum(o, torch.zeros(1), 1.0, b""), "argument 2"),
        (lambda lib, o: lib.sum(4096, 1, 1.0, b""), "argument 1: TypeError: pointer: must be a tensor, None or"),
        (lambda lib, o: lib.constructor("Inner")(), r"Inner\(\) missing 1 required keyword-only argument: 'n'"),
        (lambda lib, o: lib.constructor("Inner")(n=1, m=1), r"Inner\(\) got an unexpected keyword argument 'm'"),
        (lambda lib, o: lib.constructor("Inner")(n=1.5), "integer"),
        (lambda lib, o: lib.constructor("Inner")(n=torch.zeros(1)), "integer"),
        (lambda lib, o: setattr(lib.constructor("Inner")(n=1), "m", 1), "no attribute 'm'"),
    ],
)
def test_wrong_arguments_and_fields_are_rejected(tmp_path, call, message):
    lib = compiled(SMALL, tmp_path)
    outer = lib.constructor("Outer")(p=None, i=1, j=2, inner=lib.constructor("Inner")(n=1), x=(0, 0, 3))
    with pytest.raises((TypeError, AttributeError, ctypes.ArgumentError), match=message):
        call(lib, ctypes.byref(outer))


def test_unknown_functions_and_structs_are_rejected(tmp_path):
    lib = compiled(SMALL, tmp_path)
    for call in (lambda: lib.other, lambda: lib.struct("Other")):
        with pytest.raises(
            BackendError,
            match="^small.so: must be of the same version .*without (other_function|alignkit_struct_Other)",
        ):
            call()


@pytest.mark.parametrize(
    ("before", "after"),
    [("int i, j;", "int i, j, k;"), ("int i, j;", "char i; int j;"), ("(sum)", "(other)"), ("double d", "short d")],
)
def test_incomplete_description_does_not_compile(tmp_path, before, after):
    assert before in SMALL
    with pytest.raises(subprocess.CalledProcessError):
        compiled(SMALL.replace(before, after), tmp_path)


def test_struct_with_a_layout_unlike_that_of_ctypes_is_rejected(tmp_path):
    packed = SMALL.replace("struct Outer {", "struct __attribute__((packed)) Outer { float f;")
    lib = compiled(packed.replace("(Outer, p", "(Outer, f, p"), tmp_path)
    with pytest.raises(BackendError, match="^small.so: struct Outer must have the layout of ctypes"):
        lib.struct("Outer")


@pytest.mark.parametrize("part", PARTS)
def test_every_exported_function_is_described(part):
    """The description is the only way to call a function, and its types load."""
    if not PARTS[part].LIBRARY.exists():
        pytest.skip(f"the kernels of {part} are not built")
    lib = PARTS[part].library()
    out = subprocess.run(["nm", "-D", "--defined-only", lib.path], capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1] for line in out.splitlines()}
    described = {name.removesuffix("_function") for name in symbols if name.endswith("_function")}
    structs = {name.removeprefix("alignkit_struct_") for name in symbols if name.startswith("alignkit_struct_")}
    assert {name for name in symbols if name.startswith("alignkit_") and not name.endswith("_function")} <= (
        described | {f"alignkit_struct_{name}" for name in structs}
    )
    assert all(callable(getattr(lib, name)) for name in described) and all(lib.struct(name) for name in structs)
    assert "alignkit_sources" in described


def test_ctypes_structs_of_the_libraries_are_not_written_by_hand():
    found = {name for file in PACKAGE.rglob("*.py") for name in _classes(file)}
    assert found == {"_Function", "_Field", "_Suggestion"}  # the descriptions themselves; a cuBLASLt struct


def _classes(file: Path) -> list[str]:
    return re.findall(r"^class (\w+)\(ctypes\.Structure\):", file.read_text(), re.MULTILINE)


def test_reading_the_instruction_set_does_not_select_one():
    best = native.isa()
    with native.use_isa("generic"):
        assert native.isa() == native.isa() == "generic"
        assert f"{'CPU kernels':<15} built, generic" in doctor.facts()
        assert native.isa() == "generic"
        with (
            pytest.raises(
                BackendError, match="isa: must be avx512, avx2 or generic, and supported by this machine, got 'sse9'"
            ),
            native.use_isa("sse9"),
        ):
            pytest.fail("the unknown instruction set was accepted")
        assert native.isa() == "generic"
    assert native.isa() == best


def test_doctor_tests_the_selected_instruction_set():
    """ALIGNKIT_CPU_ISA applies to doctor's facts, the golden bits and the op tests."""
    code = (
        "import itertools\n"
        "from alignkit import doctor\nfrom alignkit.ops import golden\n"
        "from alignkit.runtime import native\n"
        "seen = set()\n"
        "exact = native.gemm\n"
        "native.gemm = lambda *a: (seen.add(native.isa()), exact(*a))\n"
        "doctor.ENGINES = {}\n"
        "golden.CASES = {'linears float32': golden.CASES['linears float32']}\n"
        "print([line for line in doctor.facts() if 'CPU kernels' in line])\n"
        "assert all(problem is None for _, problem in itertools.islice(doctor.self_test(), 3))\n"
        "print(seen)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ALIGNKIT_CPU_ISA": "generic"},
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.splitlines() == [str([f"{'CPU kernels':<15} built, generic"]), "{'generic'}"]
