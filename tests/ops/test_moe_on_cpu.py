"""The kernels of csrc/sm90/experts that clusters compute, on a CPU: compiled against tests/ops/cuda_on_cpu, and compared by bytes with
the formula of the contract. Which block takes which tile, who copies what for whom and who waits for it is the same on a GPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from alignkit.testing import assert_bitwise_equal

from .test_attention_on_cpu import F32, chain, ex2

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "csrc"
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """By name, the libraries of down.cu and gate_up.cu."""
    folder = tmp_path_factory.mktemp("on_cpu")
    for name in ("experts", "gemm"):
        shutil.copytree(SOURCE / "sm90" / name, folder / "sm90" / name)
    shutil.copytree(HERE / "cuda_on_cpu", folder / "sm90", dirs_exist_ok=True)
    for source in [*folder.glob("sm90/*/*.cu"), folder / "sm90/gemm/gemm.cuh"]:
        text = source.read_text()
        source.write_text(text.replace("extern __shared__ uint8_t raw[];", "uint8_t* raw = machine::shared;"))
    libraries = {}
    for name in ("down", "gate_up"):
        source, library = folder / f"sm90/experts/{name}.cu", folder / f"{name}.so"
        # Fortified sources forbid jumps to other stacks, and each library has a machine of its own.
        options = "-O2 -std=c++20 -ffp-contract=off -fPIC -shared -U_FORTIFY_SOURCE -fno-gnu-unique"
        subprocess.run(["c++", *options.split(), "-x", "c++", str(source), "-o", str(library)], check=True)
        libraries[name] = ctypes.CDLL(str(library))
    return libraries


def drawn(*shape):
    return torch.randn(*shape).to(BF16)


def rounded(values) -> np.ndarray:
    return torch.from_numpy(values).to(BF16).float().numpy()


def products(a, b):
    return chain(a.float().numpy(), b.float().numpy(), np.zeros((len(a), len(b)), F32))


def pointer(t):
    return None if t is None else ctypes.c_void_p(t.data_ptr())


def ends(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def tree(parts):
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def maps(library, name: str, matrices: torch.Tensor):
    """Of matrices that lie apart."""
    found = torch.zeros(len(matrices), 128, dtype=torch.uint8)
    for to, matrix in zip(found, matrices, strict=True):
        n, k = matrix.shape
        assert getattr(library, name)(pointer(to), pointer(matrix), ctypes.c_int64(k), n, k) == 0
    return found


COUNTS = [[300, 0, 129, 5], [64, 257, 1], [0, 0, 700]]
"""Rows of each expert: tiles of rows in pairs, and one that is left, full and not."""


@pytest.mark.parametrize(
    "counts,n,k,leaves",
    [
        (COUNTS[0], 136, 768, 8),
        (COUNTS[1], 520, 128, 8),
        (COUNTS[1], 264, 208, 1),
        (COUNTS[2], 128, 96, 2),
        (COUNTS[0], 384, 448, 4),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_down(kernels, counts, n, k, leaves, listed):
    torch.manual_seed(k)
    offsets, total = ends(counts), sum(counts)
    a, weights = drawn(total + 7, k), drawn(len(counts), n, k)
    want = []
    for e, count in enumerate(counts):
        rows = a[offsets[e] :][:count]
        parts = zip(rows.chunk(leaves, 1), weights[e].chunk(leaves, 1), strict=True)
        want.append(torch.from_numpy(tree([products(x, w) for x, w in parts])))
    each = maps(kernels["down"], "alignkit_experts_down_map", weights) if listed else None
    for dtype in (BF16, torch.float32):
        out = torch.full((total + 7, n), 7.0, dtype=dtype)
        got = kernels["down"].alignkit_experts_down(
            pointer(a),
            ctypes.c_int64(k),
            pointer(None if listed else weights),
            ctypes.c_int64(k),
            pointer(each),
            pointer(offsets),
            len(counts),
            pointer(out),
            ctypes.c_int64(n),
            int(dtype == BF16),
            total + 7,
            n,
            k,
            leaves,
            None,
        )
        assert got == 0
        assert_bitwise_equal(out[:total], torch.cat(want).to(dtype), f"{dtype}")
        assert bool((out[total:] == 7.0).all())


@pytest.mark.parametrize("counts,features,k", [(COUNTS[0], 200, 64), (COUNTS[1], 136, 136), (COUNTS[2], 264, 32)])
@pytest.mark.parametrize("keep", [False, True])
def test_gate_and_up(kernels, counts, features, k, keep):
    """Gates near 0, and as far from it as silu's sum or quotient leave the range."""
    torch.manual_seed(k)
    offsets, total = ends(counts), sum(counts)
    x, row = drawn(40, k), torch.randint(40, (total + 7,))
    x[5] = 0.0
    x[6] *= 40.0
    x[7] *= 2.0**-90
    weights = drawn(len(counts), 2 * features, k)
    h = torch.full((total + 7, 2 * features), 7.0, dtype=BF16) if keep else None
    y = torch.full((total + 7, features), 7.0, dtype=BF16)
    got = kernels["gate_up"].alignkit_experts_gate_up(
        pointer(x),
        ctypes.c_int64(k),
        pointer(row),
        pointer(weights),
        ctypes.c_int64(k),
        None,
        pointer(offsets),
        len(counts),
        pointer(h),
        pointer(y),
        total + 7,
        features,
        k,
        None,
    )
    assert got == 0
    for e, count in enumerate(counts):
        here = slice(int(offsets[e]), int(offsets[e]) + count)
        if not count:
            continue
        both = rounded(products(x[row[here]], weights[e]))
        gate, up = both[:, :features], both[:, features:]
        with np.errstate(all="ignore"):
            want = gate / (F32(1) + ex2(-gate * F32(1.4426950408889634))) * up
        assert_bitwise_equal(y[here], torch.from_numpy(want).to(BF16), f"expert {e}")
        if h is not None:
            assert_bitwise_equal(h[here], torch.from_numpy(both).to(BF16), f"gate and up of expert {e}")
    assert bool((y[total:] == 7.0).all())
