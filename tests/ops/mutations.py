"""Mutations of kernels, and the golden cases that notice them: the proof that the self-test can fail.

``python -m tests.ops.mutations cpu`` mutates the C++ kernels and the reference; ``python -m tests.ops.mutations cuda``
mutates the Triton kernels, on a GPU. Each mutation is a change of text in a copy of the package. The command prints a
table, and fails if a case that must notice a mutation does not. test_mutations.py runs the CPU's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from pathlib import Path
from alignkit.ops import golden
from alignkit.runtime import built, dispatch, native, validated
device, backend, library = sys.argv[1:]
if library:
    lib = built.Library(Path(library))
    assert lib.alignkit_choose_isa(b"generic")
    native.library = lambda: lib
found = {}
with dispatch.use(backend), validated.unchecked():
    for case, (record, _) in golden.CASES.items():
        if case.startswith(("rounding_", "subnormal_")) and not (backend == "reference" and record.slow):
            found[case] = golden.hashes(case, device)
print(json.dumps(found))
"""
"""Program that prints the hashes of the cases whose sums round; it runs in a folder with a copy of the package."""
OTHERS = """#include "prelude.h"
namespace alignkit {
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
}
"""
"""Source that replaces the kernels of other instruction sets."""
OPTIONS = "-O1 -std=c++17 -ffp-contract=off -fno-strict-aliasing -fopenmp -fPIC -shared -mfma"
CPP, TRITON = "csrc/cpu/kernels.inl", "triton_backend.py"


@dataclass(frozen=True)
class Mutation:
    """A change of one file's text, and the golden functions that must notice it."""

    name: str
    backend: str
    file: str
    old: str
    new: str
    noticed: tuple[str, ...]

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        text = path.read_text()
        assert self.old in text, f"{self.name}: {self.file} must contain {self.old!r}"
        path.write_text(text.replace(self.old, self.new))


def of_cpp(name: str, old: str, new: str, *noticed: str) -> Mutation:
    return Mutation(name, "cpu", CPP, old, new, noticed)


def of_python(name: str, backend: str, file: str, old: str, new: str, *noticed: str) -> Mutation:
    return Mutation(name, backend, f"alignkit/ops/{file}", old, new, noticed)


SUMS = ("rounding_linears", "rounding_attention", "rounding_head", "rounding_mixtures")
LANES = ("rounding_norms", "rounding_rotations", "rounding_mixtures")
MUTATIONS = (
    of_cpp(
        "k reversed",
        "for (i64 p = 0; p < k; ++p) {\n            vf",
        "for (i64 p = k - 1; p >= 0; --p) {\n            vf",
        *SUMS,
    ),
    of_cpp(
        "one chain instead of the k-tree",
        "i64 step = k / leaves;",
        "leaves = 1;\n    i64 step = k;",
        "rounding_linears",
        "rounding_mixtures",
    ),
    of_cpp(
        "leaves added in order",
        "for (i64 n = leaf; n & 1; n >>= 1, ++d)",
        "for (i64 n = leaf > 0; n; n = 0, d = 0)",
        "rounding_linears",
        "rounding_mixtures",
    ),
    of_cpp(
        "k split into two chains",
        "i64 step = k / leaves;",
        "if (leaves == 1 && k % 2 == 0) leaves = 2;\n    i64 step = k / leaves;",
        "rounding_linears",
        "rounding_head",
        "rounding_mixtures",
    ),
    of_cpp(
        "multiply-add not fused",
        "return __builtin_fmaf(a, b, c);",
        "return a * b + c;",
        *SUMS,
        *LANES,
        "rounding_elementwise",
    ),
    of_cpp(
        "subnormal numbers flushed",
        "        DefaultRounding guard;\n#pragma omp for",
        "        DefaultRounding guard;\n        _mm_setcsr(_mm_getcsr() | 0x8040);\n#pragma omp for",
        "subnormal_linears",
        "rounding_attention",
        "rounding_norms",
        "rounding_rotations",
        "rounding_elementwise",
        "rounding_mixtures",
    ),
    of_cpp(
        "operands rounded to tf32",
        "out[p * width + i] = load(s + p * x.col);",
        "{ uint32_t bits = float_bits(load(s + p * x.col)) & ~0x1fffu; std::memcpy(out + p * width + i, &bits, 4); }",
        "rounding_linears",
        "rounding_head",
        "rounding_mixtures",
    ),
    of_cpp(
        "rounded before the bias",
        "store(o + j, p[j] + bias[j]);",
        "{ bf16 t; store(&t, p[j]); store(o + j, load(&t) + bias[j]); }",
        "rounding_linears",
    ),
    of_cpp("lanes added by neighbors", "s[i] += s[i + h];", "s[i] = s[2 * i] + s[2 * i + 1];", *LANES),
    of_cpp(
        "one lane instead of 16",
        "{ float v = load(p + j + l); s[l] = fma1(v, v, s[l]); }",
        "{ float v = load(p + j + l); s[0] = fma1(v, v, s[0]); }",
        "rounding_norms",
        "rounding_rotations",
    ),
    of_cpp("norm multiplied by weight first", "load(p + j) * rs * w[j]", "load(p + j) * (rs * w[j])", "rounding_norms"),
    of_cpp(
        "gradient of the norm's weight from the last row",
        "for (i64 r = 0; r < rows; ++r)\n            for (i64 j = j0",
        "for (i64 r = rows - 1; r >= 0; --r)\n            for (i64 j = j0",
        "rounding_norms",
    ),
    of_cpp("rotation not fused", "fma1(a, c, -(b * s))", "a * c - b * s", "rounding_elementwise", "rounding_rotations"),
    of_cpp(
        "sigmoid by a reciprocal",
        "v / (1.f + exp1(-v)) * load",
        "v * (1.f / (1.f + exp1(-v))) * load",
        "rounding_elementwise",
        "rounding_mixtures",
    ),
    of_cpp(
        "gate rounded",
        "store(y + r * n + j, s * load(x + r * n + j))",
        "store(y + r * n + j, round_to<T>(s) * load(x + r * n + j))",
        "rounding_mixtures",
    ),
    of_cpp(
        "another tree over experts",
        "memory[i] = memory[2 * i] + memory[2 * i + 1];",
        "memory[i] = memory[i] + memory[i + n / 2];",
        "rounding_mixtures",
    ),
    of_cpp(
        "experts added in order",
        "leaf[alive[remaining - 1]] >> level == leaf[alive[i]] >> level",
        "level",
        "rounding_mixtures",
    ),
    of_cpp(
        "weighted outputs rounded",
        "term[j] = w * load(p + j);",
        "term[j] = round_to<O>(w * load(p + j));",
        "rounding_mixtures",
    ),
    of_cpp(
        "probabilities added unrounded",
        "l[r] += pr[j * MR] = round_to<T>(sr[j]);",
        "{ pr[j * MR] = round_to<T>(sr[j]); l[r] += sr[j]; }",
        "rounding_attention",
    ),
    of_cpp("attention leaves of 256", "constexpr i64 LEAF = 128;", "constexpr i64 LEAF = 256;", "rounding_attention"),
    of_cpp(
        "leaves merged without fma",
        "acc_all[r * DP + d] = fma1(acc[r * DP + d], after, acc_all[r * DP + d] * before);",
        "acc_all[r * DP + d] = acc[r * DP + d] * after + acc_all[r * DP + d] * before;",
        "rounding_attention",
    ),
    of_cpp("temperature by a reciprocal", "o[j] /= t;", "o[j] *= 1.f / t;", "rounding_head"),
    of_cpp(
        "log-sum-exp rounded before the difference",
        "float(double(load(z + r * ldz + j) / t) - lse[r])",
        "load(z + r * ldz + j) / t - float(lse[r])",
        "rounding_head",
    ),
    of_python(
        "k reversed",
        "reference",
        "linear/reference.py",
        "for k in range(a.shape[1]):",
        "for k in reversed(range(a.shape[1])):",
        "rounding_linears",
        "rounding_head",
        "rounding_mixtures",
    ),
    of_python(
        "another k-tree",
        "reference",
        "linear/reference.py",
        "zip(parts[::2], parts[1::2], strict=True)",
        "zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)",
        "rounding_linears",
        "rounding_mixtures",
    ),
    of_python(
        "k reversed",
        "triton",
        f"linear/{TRITON}",
        "a, b, s * BLOCK_K, K, sak",
        "a, b, (STEPS - 1 - s) * BLOCK_K, K, sak",
        "rounding_linears",
        "rounding_head",
    ),
    of_python(
        "operands rounded to tf32",
        "triton",
        f"linear/{TRITON}",
        'input_precision="ieee"',
        'input_precision="tf32"',
        "rounding_linears",
        "rounding_head",
    ),
    of_python(
        "another k-tree", "triton", f"linear/{TRITON}", "acc = two + acc\n", "acc = acc + one\n", "rounding_linears"
    ),
    of_python(
        "one chain instead of the k-tree",
        "triton",
        "linear/__init__.py",
        "leaves=row_leaves or 1, bias",
        "leaves=1, bias",
        "rounding_linears",
    ),
    of_python(
        "another tree",
        "triton",
        "_triton.py",
        "tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2",
        "tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), axis=1",
        "rounding_norms",
        "rounding_rotations",
    ),
    of_python(
        "multiply-adds fused",
        "triton",
        "../runtime/launch.py",
        '"enable_fp_fusion": False',
        '"enable_fp_fusion": True',
        "rounding_norms",
    ),
)
"""All mutations. Those of "reference" and "cpu" run on a CPU, those of "triton" on a GPU."""


def of_device(device: str) -> list[Mutation]:
    return [each for each in MUTATIONS if (each.backend == "triton") == (device == "cuda")]


def hashes(mutation: Mutation | None, backend: str, device: str) -> dict[str, list[str]]:
    """Return the hashes of the golden cases whose sums round, with a mutation, in a copy of the package."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ignored = shutil.ignore_patterns(
            "__pycache__", *(("_cpu.so",) if mutation and mutation.backend == "cpu" else ())
        )
        for part in ("alignkit", "csrc"):
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        shutil.copy(ROOT / "setup.py", folder)  # part of the sources' hash
        if mutation is not None:
            mutation.apply(folder)
        library = ""
        if mutation is not None and mutation.backend == "cpu":
            library = str(folder / "mutated.so")
            (folder / "csrc/cpu/others.cpp").write_text(OTHERS)
            sources = [str(folder / "csrc/cpu" / f"{name}.cpp") for name in ("api", "isa_generic", "others")]
            subprocess.run(["c++", *OPTIONS.split(), f"-I{folder}", *sources, "-o", library], check=True)
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, device, backend, library],
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return json.loads(done.stdout)


def noticed(mutation: Mutation, before: dict[str, list[str]], device: str) -> dict[str, str]:
    """Return the cases that notice a mutation, each with its number of different tensors."""
    after = hashes(mutation, mutation.backend, device)
    changed = {case: sum(a != b for a, b in zip(after[case], before[case], strict=True)) for case in after}
    return {case: f"{n} of {len(after[case])}" for case, n in changed.items() if n}


def missing(mutation: Mutation, found: dict[str, str]) -> list[str]:
    """Return the golden functions that must notice a mutation and do not, with any dtype."""
    return [case for case in mutation.noticed if not any(each.startswith(case + " ") for each in found)]


def row(mutation: Mutation, found: dict[str, str]) -> str:
    """Return a row of the table; cases that must notice the mutation and do not are marked."""
    cases = [f"{case} {n}" for case, n in found.items()] + [f"**NOT by {case}**" for case in missing(mutation, found)]
    return f"| {mutation.backend} | {mutation.name} | {'; '.join(cases)} |"


def main(device: str) -> int:
    """Print the table of a device's mutations; return 1 if a mutation is not noticed."""
    failed, before = False, {}
    print("| backend | mutation | noticed by (different tensors) |\n|---|---|---|")
    for mutation in of_device(device):
        if mutation.backend not in before:
            before[mutation.backend] = hashes(None, mutation.backend, device)
        found = noticed(mutation, before[mutation.backend], device)
        failed |= bool(missing(mutation, found))
        print(row(mutation, found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
