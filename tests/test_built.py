"""The loaded C++ and CUDA libraries belong to this source tree: equal source hash, equal layout of structs.

The tests load copies of the real libraries with changed bytes. `structs` must list every ctypes struct that is passed
to the kernels.
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
    from alignkit.ops.attention import cuda_backend as attention
    from alignkit.ops.gated_delta_rule import cuda_backend as delta
    from alignkit.ops.linear_logp import cuda_backend as head
    from alignkit.ops.rms_norm import cuda_backend as norm

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
def test_every_field_mismatch_with_a_c_struct_is_detected():
    """Renamed, swapped, widened, missing and extra fields are detected in each struct passed to the kernels."""
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
            with pytest.raises(  # noqa: PT012 - the second statement names the change that was not detected
                BackendError, match=f"got another layout of the struct {name} "
            ):
                built.check_layout(library, name, other)
                pytest.fail(f"{name}: the struct was accepted with a wrong field: {what}")
    layout = {name: (field.offset, field.size) for name, field in ((f[0], getattr(struct, f[0])) for f in fields)}
    assert layout["rounded"][1] == layout["add"][1]  # two fields of one type, swapped: only their names differ
    swapped = [({"rounded": "add", "add": "rounded"}.get(f[0], f[0]), f[1]) for f in fields]
    with pytest.raises(BackendError, match="AlignkitHeadProducts .*add at"):
        cuda.mirrors("AlignkitHeadProducts")(type("Other", (ctypes.Structure,), {"_fields_": swapped}))
    with pytest.raises(BackendError, match="^_sm90.so: must be of the same version .*without the struct NoSuch"):
        cuda.mirrors("NoSuch")(struct)


def test_every_ctypes_struct_is_compared():
    found = {name for file in PACKAGE.rglob("*.py") for name in _classes(file)}
    compared = {struct.__name__ for _, struct in structs().values()}
    assert compared <= found
    assert found - compared == {"_Field", "_Suggestion"}  # the layout descriptor itself; a cuBLASLt struct


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
