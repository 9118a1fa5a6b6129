"""The trainer's fingerprint in the stream of a weight sync (alignkit/identity/sync.py)."""

import pytest
import torch

from alignkit.errors import InputError
from alignkit.identity import sync
from alignkit.identity.weights import Run, Shard, parts, whole

SHAPES = {"b.weight": (4, 5), "a.weight": (3,)}


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}


def held(tensors):
    """Return the parts of a worker that holds whole tensors."""
    return parts(Shard(t, (name,), [Run(0, 0, len(t))]) for name, t in tensors.items())


def stream(tensors):
    return list(sync.append(tensors.items(), whole([held(tensors)], SHAPES), "cpu"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
def test_the_fingerprint_passes_through_a_stream(dtype):
    """Transports may cast all tensors, and may send them in any buckets."""
    sent = [(name, tensor.to(dtype) if name == sync.NAME else tensor) for name, tensor in stream(weights())]
    assert sync.take(sent[:-1]) == (sent[:-1], None)
    rest, packed = sync.take(sent[1:])
    assert [name for name, _ in rest] == ["a.weight"]
    assert packed is not None and sync.unpack(packed, SHAPES) == whole([held(weights())], SHAPES)
    assert sync.take([]) == ([], None)


def test_the_length_depends_on_the_shapes_alone():
    (_, one), (_, other) = stream(weights(0))[-1], stream(weights(1))[-1]
    assert one.shape == other.shape == (12 + 9 * len(SHAPES),) and not torch.equal(one, other)


@pytest.mark.parametrize(
    "shapes", [{"b.weight": (4, 5)}, {"b.weight": (5, 4), "a.weight": (3,)}, {"b": (4, 5), "a": (3,)}]
)
def test_another_architecture_is_rejected(shapes):
    _, packed = sync.take(stream(weights()))
    assert packed is not None
    with pytest.raises(InputError, match="must have the HF tensors of the rollout's config.json"):
        sync.unpack(packed, shapes)


def test_every_worker_must_have_the_weights_of_its_trainer():
    old, new = weights(0), weights(1)
    _, packed = sync.take(stream(new))
    _, stale = sync.take(stream(old))
    sync.require_equal([(packed, held(new))], SHAPES)
    sync.require_equal([(packed, held(new)), (packed, held(new))], SHAPES)
    halves = [held({"a.weight": new["a.weight"]}), held({"b.weight": new["b.weight"]})]
    sync.require_equal([(packed, half) for half in halves], SHAPES)
    mixed = new | {"b.weight": old["b.weight"]}
    for workers, message in (
        ([(packed, held(mixed))], "must have the trainer's weights: b.weight: the weights differ"),
        ([(packed, held(old))], "must have the trainer's weights: a.weight: the weights differ"),
        ([(packed, held(new)), (packed, held(mixed))], "must hold one model: b.weight: rows 0 to 3 must be equal"),
        ([(packed, half) for half in halves[:1]], "must hold one model: b.weight: the ranks must hold 20 elements"),
        ([(packed, half) for half in (halves[0], held(mixed))], "b.weight: the weights differ"),
        ([(packed, held(new)), (stale, held(new))], "a.weight: the weights differ"),
        ([(packed, held(new)), (None, held(new))], "must end with the trainer's fingerprint"),
        ([(packed, held({name: t.float() for name, t in new.items()}))], "a.weight: dtype bfloat16 and float32"),
    ):
        with pytest.raises(InputError, match=f"weight sync: .*{message}"):
            sync.require_equal(workers, SHAPES)
