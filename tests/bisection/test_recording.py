"""Bisect recordings and their comparison, with random values in place of engines.

Malformed recording files must be rejected with the name of the fault.
"""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from alignkit.bisect import comparison as comparing
from alignkit.bisect import job as jobs
from alignkit.bisect import recording
from alignkit.bisect.points import points
from alignkit.convert import Architecture
from alignkit.errors import InputError

ARCH = Architecture("qwen3", 2, 16, 4, 2, 8, 24, 40, 64, 1e-6, 1e4, False)
SEQUENCES = [[1, 2, 3], [4, 5]]
ROWS = 5


def outputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(ROWS, p.width, generator=g) for p in points(ARCH)}


def record(tmp_path, values, tp=1, keep=None, index=None, **about):
    """Return a recording of `values`, recorded in shards on `tp` ranks and merged."""
    parts = []
    for rank in range(tp):
        recorder = recording.Recorder(ARCH, ROWS, keep, tp)
        recorder.index = np.arange(ROWS) if index is None else np.array(index)
        for p in points(ARCH):
            value = values[rank][p.name] if isinstance(values, list) else values[p.name]
            value = value.chunk(tp, 1)[rank] if p.sharded else value
            recorder.put(p.name, value if index is None else value[np.maximum(recorder.index, 0)])
        parts.append(tmp_path / f"part{rank}")
        recorder.save(parts[-1])
    about = {
        "engine": "e",
        "contract": "stock",
        "architecture": vars(ARCH),
        "weights": "w",
        "sequences": SEQUENCES,
        "settings": {},
    } | about
    return recording.merge(parts, None, ARCH, **about)


def test_row_order_padding_and_ranks_do_not_matter(tmp_path):
    values = outputs()
    one = record(tmp_path, values)
    for other in (record(tmp_path, values, tp=2), record(tmp_path, values, index=[3, -1, 0, 2, 4, -1, 1])):
        c = comparing.compare(one, other)
        assert c.suspect is None and not c.missing
        assert c.compared == ROWS * len(points(ARCH)) == ROWS * 38


def test_the_first_differing_point_has_tokens_and_ulps(tmp_path):
    values, changed = outputs(), outputs()
    bits = changed["layers.1.up"][3, 20:21].view(torch.int32)
    bits += 3
    changed["logprob"][1] += 1.0
    a, b = (record(tmp_path, v, keep={p.name: list(range(ROWS)) for p in points(ARCH)}) for v in (values, changed))
    c = comparing.compare(a, b)
    assert c.suspect.point == "layers.1.up" and c.suspect.op == "linear"
    assert c.tokens == [(1, 0)] and c.suspect.differing == 1 and c.suspect.pieces == [1]
    v = c.suspect.values
    assert v.max_ulps == v.median_ulps == 3 and v.where == (1, 0, 20)
    assert v.relative == pytest.approx(abs(v.a - v.b) / values["layers.1.up"].norm().item(), rel=1e-4)
    assert [p.point for p in c.points if p.differing] == ["layers.1.up", "logprob"]
    assert {p: m for p, _, m in c.by_position}[1] == pytest.approx(1.0)


MASK = 2**64 - 1


def mix(x):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor & MASK
    return x ^ x >> 31


def digest(values):
    """Return the digest of one piece of a row by its definition, in Python integers."""
    bits = struct.unpack(f"<{len(values)}i", struct.pack(f"<{len(values)}f", *values))
    golden = 0x9E3779B97F4A7C15
    return sum(mix(b * golden + mix(i * golden & MASK) & MASK) for i, b in enumerate(bits, 1)) & MASK


def test_digests_match_their_definition(monkeypatch):
    rows = torch.randn(5, 24)
    rows[0, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    expected = [[digest(piece) for piece in row.view(3, 8).tolist()] for row in rows]
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for chunk in (1, 50, 10**6):  # chunk sizes for one row, some rows and all rows
            monkeypatch.setattr(recording, "_CHUNK_CPU", chunk)
            monkeypatch.setattr(recording, "_CHUNK_GPU", chunk)
            found = recording.digests(rows.to(device), 3)
            assert found.dtype == np.int64 and (found.view(np.uint64) == np.array(expected, dtype=np.uint64)).all()


def test_a_digest_depends_on_values_and_positions():
    row = torch.randn(64)
    others = [row.roll(1), row.flip(0), -row, torch.zeros(64)]
    others += [torch.where(torch.arange(64) == i, torch.nextafter(row, row + 1), row) for i in range(64)]
    found = recording.digests(torch.stack([row, *others]), 1)
    assert len(set(found.flatten().tolist())) == 69


def test_sampled_values_come_with_all_digests(tmp_path):
    recorder = recording.Recorder(ARCH, ROWS, None, sample=[1, 4])
    for index in ([2, 4, -1], [0, 1, 3]):
        recorder.index = np.array(index)
        for name, value in outputs().items():
            recorder.put(name, value[np.maximum(recorder.index, 0)])
    recorder.save(tmp_path / "part")
    whole = record(tmp_path, outputs())
    sampled = recording.merge(
        [tmp_path / "part"], None, ARCH, **{k: getattr(whole, k) for k in recording._ABOUT if k != "dtypes"}
    )
    assert comparing.compare(whole, sampled).compared == ROWS * len(points(ARCH))
    for name, value in outputs().items():
        rows = [0, 1, 2, 3, 4] if name == "logprob" else [1, 4]
        assert sampled.kept[name].tolist() == rows and sampled.values[name].equal(value[rows])


def test_different_dtypes_are_compared_by_value(tmp_path):
    values = {k: v.bfloat16() for k, v in outputs().items()}
    a, b = record(tmp_path, values), record(tmp_path, {k: v.float() for k, v in values.items()})
    c = comparing.compare(a, b)
    assert c.suspect is None and c.points[0].dtypes == ("bfloat16", "float32")


def test_ranks_that_disagree_are_a_difference(tmp_path):
    other = outputs()
    other["layers.0.post_norm"][2, 0] += 1
    a, b = record(tmp_path, outputs(), tp=2), record(tmp_path, [outputs(), other], tp=2)
    c = comparing.compare(a, b)
    assert c.suspect.point == "layers.0.post_norm" and c.suspect.ranks == 1 and c.tokens == [(0, 2)]


def test_ulps_of_known_pairs():
    x = torch.tensor([1.0, -1.0, 0.0, 1.0, -(2.0**-126)])
    y = torch.tensor([1.0 + 2**-23, -1.0 - 2**-22, -0.0, 1.0, 2.0**-126])
    assert comparing.ulps(x, y).tolist() == [1, 2, 0, 0, 2 * 2**23]
    assert comparing.ulps(x[:1], torch.tensor([1.0 + 2**-7]).bfloat16()).tolist() == [1]


def test_chosen_values_stay_within_the_budget(tmp_path):
    changed = {k: v + 1 for k, v in outputs().items()}
    a, b = record(tmp_path, outputs()), record(tmp_path, changed)
    c = comparing.compare(a, b)
    for budget in (16 * 4, 2000, 10**6):
        chosen = comparing.choose(c, a, budget)
        width = {p.name: p.width for p in points(ARCH)}
        assert next(iter(chosen)) == "embedding" and chosen["embedding"][0] == 0
        assert sum(4 * width[n] * len(rows) for n, rows in chosen.items()) <= max(budget, 64)
    assert len(chosen) == len(points(ARCH))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("weights", "x", "weights"),
        ("sequences", [[1, 2, 3], [4, 6]], "tokens"),
        ("architecture", vars(ARCH) | {"rope_base": 5.0}, r"architecture: .*rope_base = .* \(A\) and 5.0 \(B\)"),
    ],
)
def test_mismatched_recordings_are_rejected(tmp_path, field, value, message):
    with pytest.raises(InputError, match=message):
        comparing.compare(record(tmp_path, outputs()), record(tmp_path, outputs(), **{field: value}))


def test_two_aligned_sides_must_have_one_contract(tmp_path):
    a, b = (record(tmp_path, outputs(), contract=c) for c in ("one", "two"))
    with pytest.raises(InputError, match="contract"):
        comparing.compare(a, b)
    comparing.compare(a, record(tmp_path, outputs()))


@pytest.fixture
def saved(tmp_path):
    record(tmp_path, outputs(), tp=2).save(tmp_path / "r")
    return tmp_path / "r"


def test_a_recording_round_trips(saved, tmp_path):
    read, original = recording.load(saved), record(tmp_path, outputs(), tp=2)
    assert comparing.compare(read, original).suspect is None
    assert read.values["logprob"].equal(original.values["logprob"]) and read.sequences == SEQUENCES


def test_broken_files_are_rejected(saved):
    file = saved / recording.TENSORS
    whole = file.read_bytes()
    for broken in (whole[:-1], whole[:100], b""):
        file.write_bytes(broken)
        with pytest.raises(InputError, match="cannot be read as a safetensors file"):
            recording.load(saved)
    # A header that claims a tensor larger than the limit and the file.
    claimed = {"dtype": "I64", "shape": [2**40, 1], "data_offsets": [0, 2**43]}
    header = json.dumps({"digest/embedding": claimed}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(InputError):
        recording.load(saved)
    file.unlink()
    with pytest.raises(InputError, match="no such file"):
        recording.load(saved)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"digest/embedding": torch.zeros(6, 1, dtype=torch.int64)},
            r"'digest/embedding': must have shape \[5, 1\], got \[6, 1\]",
        ),
        ({"digest/embedding": torch.zeros(5, 1)}, "'digest/embedding': must have dtype I64, got F32"),
        ({"digest/other": torch.zeros(5, 1, dtype=torch.int64)}, "POINT must be a point .*, got 'other'"),
        ({"other/embedding": torch.zeros(5)}, "'other/embedding': name must be KIND/POINT"),
        (
            {"value/logits": torch.zeros(6, 40), "kept/logits": torch.zeros(6, dtype=torch.int64)},
            r"must have shape \[N(, 40)?\] with N <= 5 tokens, got \[6",
        ),
        ({"value/logits": torch.zeros(5, 40)}, "kept/logits"),
        (
            {"value/logits": torch.zeros(1, 40), "kept/logits": torch.tensor([5])},
            r"'kept/logits': rows must be in \[0, 5\), got 5",
        ),
        ({"seen/embedding": None}, "seen/embedding"),
    ],
)
def test_inconsistent_tensors_are_rejected(saved, change, message):
    tensors = {k: v for k, v in (load_file(saved / recording.TENSORS) | change).items() if v is not None}
    save_file(tensors, saved / recording.TENSORS)
    with pytest.raises(InputError, match=message):
        recording.load(saved)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": "other"}, "format: must be .*, got 'other'"),
        ({"format_version": 1}, "version"),
        ({"sequences": [[]]}, "sequences"),
        ({"sequences": [[1, True]]}, r"sequences\[0\]\[1\]: a token id must be an int, got a bool"),
        ({"architecture": {"layers": 1}}, "architecture: fields must be those .*: missing"),
        ({"architecture": vars(ARCH) | {"layers": 10**9}}, "architecture: layers: must be at most"),
        ({"contract": 1}, "contract: must be a JSON string, got 1"),
    ],
)
def test_inconsistent_descriptions_are_rejected(saved, change, message):
    path = saved / recording.JSON
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        recording.load(saved)


def test_a_huge_description_is_not_read(saved, monkeypatch):
    monkeypatch.setattr(recording, "MAX_JSON", 100)
    with pytest.raises(InputError, match="at most 100 bytes"):
        recording.load(saved)


def test_micro_batches_pad_rows_and_shift_targets():
    ((tokens, rows),) = jobs.micro_batches(SEQUENCES, "padded")
    assert tokens.tolist() == [[1, 2, 3], [4, 5, 0]] and rows.tolist() == [[0, 1, 2], [3, 4, -1]]
    labels, known = jobs.targets(tokens, rows, -100)
    assert labels.tolist() == [[2, 3, -100], [5, -100, -100]] and known.tolist() == [[0, 1, -1], [3, -1, -1]]
    assert [r.tolist() for _, r in jobs.micro_batches(SEQUENCES, "one")] == [[[0, 1, 2]], [[3, 4]]]
