"""csrc/sm90/gemm/many_rows_tree.cu on a CPU: compiled against tests/ops/cuda_on_cpu, and compared by bytes with the formula of
the contract. Which rows, columns, leaves and sums go where, and who waits for whom, is the same on a GPU; there are no
clusters here."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from alignkit.ops.linear import cuda
from alignkit.testing import assert_bitwise_equal

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "csrc"
BF16, FP32 = torch.bfloat16, torch.float32
PROCESSORS = 3
"""Of the machine of cuda_on_cpu."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernel for the CPU, called in place of that of the GPU."""
    folder = tmp_path_factory.mktemp("on_cpu")
    to = folder / "sm90/gemm"
    to.mkdir(parents=True)
    shutil.copytree(HERE / "cuda_on_cpu", folder / "sm90", dirs_exist_ok=True)
    (folder / "sm90/ptx/cluster.cuh").write_text('#include "../products.h"\n')
    declared = "extern __shared__ uint8_t raw[];"
    for name in ("gemm.cuh", "many_rows_tree.cu"):
        text = (SOURCE / "sm90/gemm" / name).read_text()
        assert declared in text
        text = text.replace(declared, "uint8_t* raw = machine::shared;")
        for line in ("config.gridDim = blocks_of_cluster;", "config.blockDim = kThreads;"):  # names of macros here
            text = text.replace(line, "")
        (to / name).write_text(text)
    library = folder / "kernel.so"
    options = "-O2 -std=c++20 -ffp-contract=off -fPIC -shared -w -U_FORTIFY_SOURCE -x c++"
    subprocess.run(["c++", *options.split(), str(to / "many_rows_tree.cu"), "-o", str(library)], check=True)
    lib = ctypes.CDLL(str(library))

    def call(name, _device, *args):
        passed = [
            ctypes.c_void_p(None if a is None else a.data_ptr()) if a is None or isinstance(a, torch.Tensor) else a
            for a in args
        ]
        assert getattr(lib, name)(*passed, None) == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda.cuda, "call", call)
        yield cuda


def chain(a, b):
    """A step is 16 products, added in double, rounded once, as cuda_on_cpu does."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for begin in range(0, a.shape[1], 16):
        for k in range(begin, begin + 16):
            total = total + a[:, k, None].double() * b[None, :, k].double()
        total = total.float().double()
    return total.float()


def tree(a, b, leaves):
    sums = [chain(*leaf) for leaf in zip(a.chunk(leaves, 1), b.chunk(leaves, 1), strict=True)]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("out_dtype", [FP32, BF16])
@pytest.mark.parametrize("width", [128, 160, 192])
@pytest.mark.parametrize("leaves, leaf", [(2, 144), (4, 16), (8, 64), (8, 80)])
@pytest.mark.parametrize("m, n, pad", [(70, 320, 0), (200, 216, 8), (130, 720, 8)])
def test_trees_of_many_rows(kernels, m, n, pad, leaves, leaf, width, out_dtype):
    """Tiles that are cut off at both edges, leaves that end within a step, whole tiles and tiles that are dealt out."""
    torch.manual_seed(m + leaf)
    k = leaves * leaf
    a, b = (torch.randn(rows, k + pad).bfloat16()[:, :k] for rows in (m, n))
    bias = torch.randn(n).bfloat16() if out_dtype == BF16 else None
    want = tree(a, b, leaves)
    want = (want if bias is None else want + bias.float()).to(out_dtype)
    for parts in (1, 2, 4, 8):
        if parts > leaves:
            continue
        out = torch.full((m, n + pad), float("nan"), dtype=out_dtype)
        kernels.many(leaves, kernels.Many(width, 1, parts), PROCESSORS, a, b, bias, out[:, :n])
        assert_bitwise_equal(out[:, :n], want, f"{parts} parts")
        assert out[:, n:].isnan().all(), "what lies between rows"


def test_the_last_round_alone_is_dealt_out(kernels):
    """132 multiprocessors, and clusters of two."""
    many, of = kernels.Many, kernels.round_of
    assert of(1053, 4096, many(128, 1, 4), 132) == (264, 24)
    assert of(1053, 4096, many(128, 1, 1), 132) == (288, 0)
    assert of(1053, 4096, many(192, 2, 8), 132) == (66, 33)
    assert of(100, 192, many(192, 2, 2), 132) == (0, 1)
