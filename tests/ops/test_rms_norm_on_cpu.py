"""The real .cu kernels of csrc/sm90/rms_norm, run on a CPU, compared bitwise with the contract's formula.

The kernels are compiled against tests/ops/cuda_on_cpu. The distribution of rows, the synchronization and the sums of
dweight are the same as on a GPU. `expected_forward` and `expected_backward` restate docs/contract.md, "RMSNorm", and
change only with it.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from alignkit.ops._common import fma
from alignkit.ops.rms_norm import cuda_backend
from alignkit.runtime import built
from alignkit.testing import assert_bitwise_equal

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "csrc"
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Yield the op's CUDA module with its calls redirected to the kernels compiled for the CPU."""
    folder = tmp_path_factory.mktemp("on_cpu")
    (folder / "sm90/rms_norm").mkdir(parents=True)
    shutil.copy(SOURCE / "interface.h", folder)
    shutil.copytree(HERE / "cuda_on_cpu", folder / "sm90", dirs_exist_ok=True)
    text = (SOURCE / "sm90/rms_norm/rms_norm.cu").read_text()
    declared = "extern __shared__ uint4 shared[];"
    assert declared in text
    text = text.replace(declared, "uint4* shared = reinterpret_cast<uint4*>(machine::shared);")
    text, launches = re.subn(r"(\w+)<<<(.+?), (.+?), \w+, stream>>>\(", r"machine::launch(\1, \2, \3, ", text)
    assert launches == 2
    source = folder / "sm90/rms_norm/rms_norm.cpp"
    source.write_text(text)
    library = folder / "kernel.so"
    # Fortified longjmp rejects jumps to other stacks.
    options = "-O2 -std=c++20 -ffp-contract=off -fPIC -shared -U_FORTIFY_SOURCE"
    subprocess.run(["c++", *options.split(), f"-I{SOURCE.parent}", str(source), "-o", str(library)], check=True)
    lib = built.Library(library)

    def call(name, _device, arguments):
        assert getattr(lib, name)(arguments, None) == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_backend.cuda, "library", lambda: lib)
        patch.setattr(cuda_backend.cuda, "call", call)
        yield cuda_backend


def tree(t, dim):
    """Sum a dimension by a balanced tree; missing leaves are 0."""
    t = t.movedim(dim, 0)
    while len(t) > 1:
        if len(t) % 2:
            t = torch.cat([t, torch.zeros_like(t[:1])])
        t = t[::2] + t[1::2]
    return t[0]


def expected_forward(x, weight, offset):
    v = x.float()
    rstd = 1.0 / (tree(v * v, 1) / v.shape[1] + EPS).double().sqrt().float()
    return (v * rstd[:, None] * (weight.float() + offset)).bfloat16(), rstd


def expected_backward(dy, x, weight, offset, rstd, d_total):
    dy, v, w = dy.float(), x.float(), weight.float() + offset
    c = tree(dy * w * v, 1) / v.shape[1] * rstd * rstd
    dx = (rstd[:, None] * fma(-c[:, None].expand_as(v), v, dy * w)).bfloat16()
    chains = []
    for begin in range(0, len(v), 16):
        dw = torch.zeros(v.shape[1])
        for r in range(begin, min(begin + 16, len(v))):
            dw = fma(dy[r], v[r] * rstd[r], dw)
        chains.append(dw + 0.0)
    return dx if d_total is None else dx + d_total, tree(torch.stack(chains), 0)


def random_bf16(*shape):
    t = torch.randn(*shape)
    return torch.where(torch.rand(shape) < 0.1, torch.where(torch.rand(shape) < 0.5, -0.0, -1e-30), t).bfloat16()


@pytest.mark.parametrize("rows, h", [(3, 2056), (2, 3584), (1, 5120), (1, 16384)])
def test_forward_matches_the_contract(kernels, rows, h):
    torch.manual_seed(h)
    x, weight = random_bf16(rows, h + 16)[:, 8 : 8 + h], random_bf16(h)
    _, y, rstd = kernels.forward(x, weight, EPS, None, zero_centered=rows == 2)
    for name, a, b in zip(
        ("y", "rstd"), (y, rstd), expected_forward(x, weight, 1.0 if rows == 2 else -0.0), strict=True
    ):
        assert_bitwise_equal(a, b, name)


@pytest.mark.parametrize("total", [False, True], ids=["", "total"])
@pytest.mark.parametrize(
    "rows, h",
    [
        (2100, 40),
        (650, 72),
        (300, 136),
        (300, 264),
        (130, 520),
        (70, 2560),
        (210, 3080),
        (40, 4608),
        (35, 6152),
        (20, 8200),
    ],
)
def test_backward_matches_the_contract(kernels, rows, h, total):
    torch.manual_seed(rows + h)
    x, dy, weight, d_total = (
        random_bf16(rows, h + 16)[:, 8 : 8 + h],
        random_bf16(rows, h),
        random_bf16(h),
        random_bf16(rows, h) if total else None,
    )
    _, rstd = expected_forward(x, weight, -0.0)
    dx, dweight = expected_backward(dy, x, weight, -0.0, rstd, d_total)
    for chains in (0, 1, 2, 4, 8, -2, -4, -8):
        got = kernels.backward(dy, x, weight, rstd, d_total, dweight_dtype=FP32, chains=chains)
        for name, a, b in zip(("dx", "dweight"), got, (dx, dweight), strict=True):
            assert_bitwise_equal(a, b, f"{name}, {chains} chains")
    got = kernels.backward(dy, x, weight, rstd, d_total)
    assert_bitwise_equal(got[1], dweight.bfloat16(), "dweight rounded")
