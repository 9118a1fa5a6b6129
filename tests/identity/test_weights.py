"""Fingerprints of weights (alignkit/identity/weights.py): sums of blocks, replicas, and files."""

import json
import random

import pytest
import torch

from alignkit.errors import InputError
from alignkit.identity import of_checkpoint, weights
from alignkit.identity.weights import Run, Shard, Sums, parts, whole
from alignkit.jobs.model import make_checkpoint


def exact(x: torch.Tensor) -> int:
    """Return the sum of a matrix by Python's integers, from the formula."""

    def factor(seed, i):
        z = (seed + i) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) | 1

    size = 8 * x.element_size()
    bits = x.view({16: torch.int16, 32: torch.int32}[size]).tolist()
    return (
        sum(
            (b % 2**size) * factor(0x243F6A8885A308D3, i) * factor(0x13198A2E03707344, j)
            for i, row in enumerate(bits)
            for j, b in enumerate(row)
        )
        % 2**64
    )


def of(x, dtype=None):
    shard = Shard(x if dtype is None else x.to(dtype), ("w",), [Run(0, 0, len(x))])
    return whole([parts([shard])], {"w": tuple(x.shape)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_follow_the_formula(dtype):
    x = torch.randn(7, 13).to(dtype)
    assert of(x).tensors["w"] == (str(dtype).removeprefix("torch."), (7, 13), exact(x))


@pytest.mark.parametrize("seed", range(20))
def test_blocks_in_any_order_give_the_sum_of_the_whole(seed):
    rng = random.Random(seed)
    rows, columns = rng.randint(1, 60), rng.randint(1, 60)
    x = torch.randn(rows, columns, dtype=torch.bfloat16 if rng.random() < 0.5 else torch.float32)
    cut = rng.randint(0, columns)
    ranks = []
    for first, last in ((0, cut), (cut, columns)):
        order = torch.tensor(rng.sample(range(rows), rows))
        for some in order.split(rng.randint(1, rows)):
            padded = torch.cat([x[some, first:last], torch.zeros(3, last - first, dtype=x.dtype)])
            ranks.append(parts([Shard(padded, ("w",), [Run(0, row, 1) for row in some.tolist()], first)]))
    assert whole(ranks, {"w": (rows, columns)}) == of(x)


@pytest.mark.parametrize("at_once", [1, 5, 2**21])
def test_rows_of_several_tensors_may_alternate(at_once, monkeypatch):
    monkeypatch.setattr(weights, "ROWS_AT_ONCE", at_once)
    a, b = torch.randn(4, 5), torch.randn(6, 5)
    x = torch.cat([a[:2], b[3:], a[2:], b[:3]])
    runs = [Run(0, 0, 2), Run(1, 3, 3), Run(0, 2, 2), Run(1, 0, 3)]
    held = [Shard(x, ("a", "b"), runs), Shard(a, ("c",), [Run(0, 0, 4)]), Shard(b, ("d",), [Run(0, 0, 6)])]
    found = whole([parts(held)], {"a": (4, 5), "b": (6, 5), "c": (4, 5), "d": (6, 5)})
    assert found.tensors == {name: of(x).tensors["w"] for name, x in zip("abcd", (a, b, a, b), strict=True)}


def test_sums_are_of_the_tensors_that_they_are_given():
    x, y = torch.randn(2, 3, 4, device="cpu")
    sums = Sums([Shard(x, ("w",), [Run(0, 0, 3)])])
    assert [sums.parts([t]) for t in (y, x, y)] == [parts([Shard(t, ("w",), [Run(0, 0, 3)])]) for t in (y, x, y)]
    assert sums.fit([y])
    assert not any(sums.fit([t]) for t in (y[:2], y.T.contiguous().T, y.bfloat16()))
    assert not sums.fit([])


def test_every_flipped_bit_is_found():
    rng = random.Random(0)
    for dtype, ints in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        x = torch.randn(50, 70).to(dtype)
        before = of(x)
        for _ in range(100):
            i, j, bit = rng.randrange(50), rng.randrange(70), rng.randrange(8 * x.element_size())
            y = x.clone()
            y.view(ints)[i, j] ^= torch.tensor(1).to(ints) << bit
            assert before.difference(of(y)).startswith("w: the weights differ")
    assert before.difference(of(x)) is None


def test_accidents_are_found():
    """Swapped rows, columns and elements, a row of another step, negative zeros, another dtype or shape."""
    x = torch.randn(6, 8)
    x[0, 0] = 0.0
    changed = [x[[1, 0, 2, 3, 4, 5]], x[:, [1, 0, *range(2, 8)]], x.t().reshape(6, 8), x.clone(), x.clone()]
    changed[3][0, 0] = -0.0
    changed[4][2] = changed[4][3]
    for y in changed:
        assert of(x).difference(of(y)).startswith("w: the weights differ")
    assert of(x).difference(of(x, torch.bfloat16)) == "w: dtype float32 and bfloat16"
    assert of(x).difference(of(x.reshape(8, 6))) == "w: shape (6, 8) and (8, 6)"
    assert of(x).digest != of(changed[0]).digest


@pytest.mark.parametrize(
    "ranks, message",
    [
        ([(0, 2), (0, 2)], "must hold 20 elements, got 10"),
        ([(0, 2)], "must hold 20 elements, got 10"),
        ([(0, 3), (2, 4)], "must hold 20 elements, got 25"),
    ],
    ids=["twice", "half", "overlap"],
)
def test_missing_and_overlapping_rows_are_rejected(ranks, message):
    x = torch.randn(4, 5)
    held = [parts([Shard(x[a:b], ("w",), [Run(0, a, b - a)])]) for a, b in ranks]
    with pytest.raises(InputError, match=f"w: the ranks {message}"):
        whole(held, {"w": (4, 5)})


def test_replicas_must_be_equal():
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    held = [parts([Shard(t, ("w",), [Run(0, 0, 4)])]) for t in (x, y)]
    with pytest.raises(InputError, match="w: rows 0 to 3 must be equal on all ranks that hold them, but differ"):
        whole(held, {"w": (4, 5)})
    assert whole([held[0], held[0]], {"w": (4, 5)}) == of(x)


def test_a_checkpoint_has_a_fingerprint(tmp_path):
    sizes = dict(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, vocab=130)
    one, same, other = (
        of_checkpoint(make_checkpoint(tmp_path / name, dtype=torch.bfloat16, seed=seed, **sizes))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert one == same and one.digest == same.digest and len(one.digest) == weights.DIGITS
    assert one.difference(other) and one.digest != other.digest
    assert of_checkpoint(tmp_path / "a", torch.float32).tensors["model.norm.weight"][0] == "float32"


def test_a_checkpoint_must_have_the_layers_of_its_config(tmp_path):
    path = make_checkpoint(tmp_path / "a", "llama", torch.bfloat16)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**31 - 1}))
    with pytest.raises(InputError, match="no tensor 'model.layers.4.input_layernorm.weight'"):
        of_checkpoint(path)
