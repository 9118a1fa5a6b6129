"""Sums of several tensors by one call of bit_sums; the tests of all ops cover one tensor."""

import pytest
import torch

from alignkit.errors import InputError
from alignkit.ops import bit_sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("first", [0, 5], ids=["aligned", "unaligned"])
def test_each_tensor_has_the_sums_that_it_has_alone(dtype, first):
    x = torch.randn(60, 700).to(dtype)
    weights = torch.randint(-(2**63), 2**63 - 1, (700,))[first:]
    tensors = [x[:20, first:], x[20:40, first:], x[40:, first:]]
    sums = bit_sums(tensors, weights)
    assert sums.shape == (3, 20)
    assert all(torch.equal(found, bit_sums(t, weights)) for found, t in zip(sums, tensors, strict=True))
    assert bit_sums([x[:0]] * 2, torch.ones(700, dtype=torch.int64)).shape == (2, 0)


@pytest.mark.parametrize("dtype, ints", [(torch.bfloat16, torch.int16), (torch.float32, torch.int32)])
@pytest.mark.parametrize("bits, weight", [(-1, 0x7F7F7F7F7F7F7F7F), (0, -(2**63)), (-1, -1)])
def test_long_rows_of_extreme_values(dtype, ints, bits, weight):
    """Products of bytes and digits are largest in magnitude and have one sign, in rows of more than 2^17 bytes."""
    columns, size = 70_000, torch.finfo(dtype).bits
    x = torch.full((3, columns), bits, dtype=ints).view(dtype)
    wanted = columns * (bits % 2**size) * weight % 2**64
    sums = bit_sums(x, torch.full((columns,), weight))
    assert [total % 2**64 for total in sums.tolist()] == [wanted] * 3


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x[:3], r"x: tensor 1: must have the shape, stride and dtype of tensor 0, \(4, 8\)"),
        (lambda x: x.t().contiguous().t(), r"x: tensor 1: must have the shape, stride"),
        (lambda x: x.half(), r"x: tensor 1: must have .* got .* torch.float16"),
        (lambda x: x[0], r"x: tensor 1: expected 2 dimensions"),
    ],
    ids=["shape", "stride", "dtype", "dimensions"],
)
def test_different_tensors_are_rejected(change, message):
    x, weights = torch.zeros(4, 8), torch.ones(8, dtype=torch.int64)
    with pytest.raises(InputError, match=message):
        bit_sums([x, change(x)], weights)
    with pytest.raises(InputError, match="x: must be one tensor or more"):
        bit_sums([], weights)
