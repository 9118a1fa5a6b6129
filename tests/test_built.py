"""What is loaded is of this alignkit: its sources, and the fields of its structs."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alignkit import BackendError, _sources, doctor
from alignkit.runtime import built, cuda, dispatch, families, native

PACKAGE = families.PACKAGE
PARTS = {"cpu": native, "sm90": cuda}


def of_other_sources(library: Path, part: str, folder: Path) -> Path:
    """A copy that says it was built from others."""
    content, sources = library.read_bytes(), _sources.of(part).encode()
    assert content.count(sources) == 1
    copy = folder / library.name
    copy.write_bytes(content.replace(sources, sources[::-1]))
    return copy


@pytest.fixture
def load(monkeypatch):
    """Makes a file the library of a module, as in a process that has loaded none."""

    def place(module, library: Path) -> None:
        monkeypatch.setattr(module, "LIBRARY", library)
        monkeypatch.setattr(module, "library", module.library.__wrapped__)
        if module is cuda:
            monkeypatch.setattr(cuda, "available", cuda.available.__wrapped__)
        monkeypatch.setattr(dispatch, "_names", {})

    return place


@pytest.mark.parametrize("part", PARTS)
def test_a_library_of_other_sources_is_refused(part, load, tmp_path, monkeypatch):
    if not PARTS[part].LIBRARY.exists():
        pytest.skip(f"the kernels of {part} are not built")
    module = PARTS[part]
    load(module, of_other_sources(module.LIBRARY, part, tmp_path))
    message = f"{module.LIBRARY.name} was built from other sources .* install alignkit again"
    for call in (module.library, module.available):
        with pytest.raises(BackendError, match=message):
            call()
    kernels = {"cpu": "CPU kernels", "sm90": "CUDA kernels"}[part]
    said = f"{kernels:<15} not for use: {module.LIBRARY.name} was built"
    assert any(line.startswith(said) for line in doctor.facts())
    if part == "cpu":  # and nothing else takes its place
        with pytest.raises(BackendError, match=message):
            dispatch.select("linear", "cpu")
        monkeypatch.setattr(doctor, "_tensor_parallel", lambda: None)
        _, (name, problem), _ = doctor.self_test()
        assert name.startswith("golden bits on cpu") and "was built from other sources" in problem


def test_a_library_that_says_nothing_is_refused(load, tmp_path):
    library = tmp_path / "_cpu.so"
    subprocess.run(["c++", "-shared", "-x", "c++", "-", "-o", library], input=b"int nothing;", check=True)
    load(native, library)
    with pytest.raises(BackendError, match=r"_cpu.so was built from other sources \(unknown\)"):
        native.library()


def test_what_is_no_library_is_refused(load, tmp_path):
    library = tmp_path / "_cpu.so"
    library.write_text("no library")
    load(native, library)
    with pytest.raises(BackendError, match="_cpu.so cannot be loaded .* install alignkit again"):
        native.available()


def test_an_instruction_set_that_is_not_here_is_refused(load, monkeypatch):
    monkeypatch.setenv("ALIGNKIT_CPU_ISA", "sse9")
    load(native, native.LIBRARY)
    with pytest.raises(BackendError, match="ALIGNKIT_CPU_ISA: 'sse9' is none of generic, avx2, avx512"):
        dispatch.name("cpu")


def test_installed_without_sources(tmp_path):
    """A wheel's package: what it was built from is in a file of it. Libraries of other names are not looked at."""
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

    assert "built.json of the package does not say from which sources the kernels of cpu" in isa()
    (package / "built.json").write_text(json.dumps({"cpu": "0" * 64}))
    assert "_cpu.so was built from other sources" in isa()
    (package / "built.json").write_text(json.dumps({"cpu": _sources.of("cpu")}))
    assert isa().strip() == native.isa()


def test_what_decides_a_library_decides_its_hash(tmp_path, monkeypatch):
    """Each source and setup.py; not what an editor leaves there."""
    (tmp_path / "csrc").mkdir()
    for part in PARTS:
        shutil.copytree(_sources.ROOT / "csrc" / part, tmp_path / "csrc" / part)
    for file in ("setup.py", "csrc/interface.h"):
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


def structs():
    pytest.importorskip("triton")
    from alignkit.ops.attention import cuda as attention
    from alignkit.ops.gated_delta_rule import cuda as delta
    from alignkit.ops.linear_logp import cuda as head
    from alignkit.ops.rms_norm import cuda as norm

    return {
        "Attention": (native, native._Attention),
        "Routing": (native, native._Routing),
        "AlignkitInts": (cuda, attention._Ints),
        "AlignkitHeads": (cuda, attention._Heads),
        "AlignkitAttention": (cuda, attention.Arguments),
        "AlignkitAttentionBackward": (cuda, attention.Gradients),
        "AlignkitNormRows": (cuda, norm._Rows),
        "AlignkitNorm": (cuda, norm._Norm),
        "AlignkitNormGrad": (cuda, norm._NormGrad),
        "AlignkitDelta": (cuda, delta._Delta),
        "AlignkitHead": (cuda, head._Head),
        "AlignkitHeadProducts": (cuda, head._Products),
    }


@pytest.mark.skipif(not cuda.LIBRARY.exists(), reason="the CUDA kernels are not built")
def test_every_struct_is_compared():
    """Each that is passed to the kernels; renamed, exchanged, widened and left out fields are noticed."""
    for name, (module, struct) in structs().items():
        library, fields = module.library(), struct._fields_
        built.check_layout(library, name, struct)
        last, kind = fields[-1]
        wide = ctypes.c_int64 if ctypes.sizeof(kind) == 4 else ctypes.c_int
        wrong = {
            "renamed": [("other", fields[0][1]), *fields[1:]],
            "widened": [*fields[:-1], (last, wide)],
            "left out": fields[:-1],
            "one more": [*fields, ("more", ctypes.c_void_p)],
        }
        for what, changed in wrong.items():
            other = type("Other", (ctypes.Structure,), {"_fields_": changed})
            with pytest.raises(  # noqa: PT012 - the second statement names what was not noticed
                BackendError, match=f"^{name}: Python and the library disagree"
            ):
                built.check_layout(library, name, other)
                pytest.fail(f"{name}, {what}")
    alike = {name: (at.offset, at.size) for name, at in ((f[0], getattr(struct, f[0])) for f in fields)}
    assert alike["rounded"][1] == alike["add"][1]  # two of one type, exchanged: only their names tell
    exchanged = [({"rounded": "add", "add": "rounded"}.get(f[0], f[0]), f[1]) for f in fields]
    with pytest.raises(BackendError, match="AlignkitHeadProducts: .*add at"):
        cuda.mirrors("AlignkitHeadProducts")(type("Other", (ctypes.Structure,), {"_fields_": exchanged}))
    with pytest.raises(BackendError, match="^NoSuch: the library does not say"):
        cuda.mirrors("NoSuch")(struct)


def test_no_struct_is_left_out():
    """Of those that say they are a struct of csrc."""
    found = {name for file in PACKAGE.rglob("*.py") for name in _classes(file)}
    compared = {struct.__name__ for _, struct in structs().values()}
    assert compared <= found
    assert found - compared == {"_Field", "_Suggestion"}  # what structs are compared by; cuBLASLt's own


def _classes(file: Path) -> list[str]:
    return re.findall(r"^class (\w+)\(ctypes\.Structure\):", file.read_text(), re.MULTILINE)


def test_asking_for_the_instruction_set_chooses_none():
    best = native.isa()
    with native.use_isa("generic"):
        assert native.isa() == native.isa() == "generic"
        assert f"{'CPU kernels':<15} built, generic" in doctor.facts()
        assert native.isa() == "generic"
        with pytest.raises(BackendError, match="isa: this machine has no 'sse9'"), native.use_isa("sse9"):
            pytest.fail("there is none")
        assert native.isa() == "generic"
    assert native.isa() == best


def test_doctor_tests_the_instruction_set_that_is_chosen():
    """ALIGNKIT_CPU_ISA, from the facts on to the tests: the golden bits and the first ops'."""
    code = (
        "import itertools\n"
        "from alignkit import doctor, golden\n"
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
