"""Logprob files: bitwise round trips, and rejection of malformed files with the name of the fault.

Optional parts (weights, epochs, temperature) are absent from files of version 0.2. Files are damaged by the tests. A
huge tensor or header must be rejected before it is read.
"""

import contextlib
import dataclasses
import json
import math
import tracemalloc

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors import safe_open
from safetensors.torch import save_file

from alignkit.drift import Logprobs, bounded, files, load, save
from alignkit.errors import InputError


def sample() -> Logprobs:
    return Logprobs(
        prompts=[[3, 1, 4], [], [15]],
        tokens=[[9, 2], [6], []],
        logprobs=[torch.tensor([-1.5, -math.inf]), torch.tensor([math.nan]), torch.empty(0)],
        contract="alignkit-3/cpu/v128/k8/kv32/leaf128",
        meta={"engine": "vllm 0.32.0", "mode": "batch"},
        weights="0123456789abcdef01234567",
        epochs=[torch.tensor([3, 2**63 - 1]), torch.tensor([-1]), torch.empty(0, dtype=torch.int64)],
        temperature=0.7,
    )


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "a.safetensors", sample())
    return tmp_path / "a.safetensors"


def rewrite(path, tensors=(), metadata=(), drop=()):
    """Rewrite the file at `path` with some tensors or metadata replaced or dropped."""
    with safe_open(path, framework="pt") as f:
        old_metadata, old = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}
    keep = lambda d: {k: v for k, v in d.items() if k not in drop}  # noqa: E731
    save_file(keep(old | dict(tensors)), path, metadata=keep(old_metadata | dict(metadata)))


def assert_same(got: Logprobs, want: Logprobs):
    """Assert that all fields are equal, tensors by their bits."""
    for name in ("prompts", "tokens", "contract", "meta", "weights", "temperature"):
        assert getattr(got, name) == getattr(want, name), name
    for name, dtype in (("logprobs", torch.float32), ("epochs", torch.int64)):
        rows = getattr(got, name), getattr(want, name)
        if rows[1] is None:
            assert rows[0] is None
            continue
        for a, b in zip(*rows, strict=True):
            assert a.dtype == dtype and a.view(torch.uint8).tolist() == b.view(torch.uint8).tolist(), name


def test_the_default_device_changes_nothing(tmp_path):
    given = sample()
    with torch.device("meta"):
        save(tmp_path / "a", given)
        found = load(tmp_path / "a")
    assert_same(found, given)


def test_a_file_round_trips_bit_for_bit(path):
    assert_same(load(path), sample())


OPTIONAL = {
    "weights": st.none() | st.text("0123456789abcdef", min_size=1, max_size=64),
    "epochs": st.none() | st.integers(-1, 2**62),
    "temperature": st.none() | st.floats(2.0**-100, 2.0**100),
}


@st.composite
def random_logprobs(draw) -> Logprobs:
    """Return logprobs of random lengths and bits, each with or without the optional parts."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=4))
    fields = {name: draw(values) for name, values in OPTIONAL.items()}
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if (first := fields["epochs"]) is not None:
        fields["epochs"] = [first + torch.randint(0, 2**40, (n,), generator=g) for n in lengths]
    return Logprobs(
        prompts=[torch.randint(0, 2**40, (n // 2,), generator=g).tolist() for n in lengths],
        tokens=[torch.randint(0, 2**40, (n,), generator=g).tolist() for n in lengths],
        logprobs=[
            torch.randint(-(2**31), 2**31, (n,), generator=g, dtype=torch.int32).view(torch.float32) for n in lengths
        ],
        contract=draw(st.sampled_from(["stock", "alignkit-3/cpu/v128/k8/kv32/leaf128"])),
        **fields,
    )


@given(logprobs=random_logprobs())
def test_random_logprobs_round_trip_bit_for_bit(tmp_path, logprobs):
    save(tmp_path / "x", logprobs)
    assert_same(load(tmp_path / "x"), logprobs)


@given(logprobs=random_logprobs(), text=st.text(max_size=70))
def test_damaged_optional_parts_are_rejected_by_name(tmp_path, logprobs, text):
    save(tmp_path / "x", logprobs)
    total = sum(map(len, logprobs.tokens))
    damages = [("epochs", {"tensors": {"epochs": torch.zeros(total + 1, dtype=torch.int64)}})]
    damages += [("epochs", {"tensors": {"epochs": torch.zeros(total)}})]
    if total:
        damages += [("epochs", {"tensors": {"epochs": torch.full((total,), -2)}})]
    if not 0 < len(text) <= 64 or set(text) - set("0123456789abcdef"):
        damages += [("weights", {"metadata": {"weights": text}})]
    damages += [("temperature", {"metadata": {"temperature": "x" + text}})]
    whole = (tmp_path / "x").read_bytes()
    for name, change in damages:
        (tmp_path / "x").write_bytes(whole)
        rewrite(tmp_path / "x", **change)
        with pytest.raises(InputError, match=f"x: (tensor )?'?({name}|offsets)"):
            load(tmp_path / "x")


def test_files_without_the_optional_parts_are_read_as_unknown(path):
    rewrite(path, drop=["weights", "temperature", "epochs"])
    want = dataclasses.replace(sample(), weights=None, epochs=None, temperature=None)
    assert_same(load(path), want)
    with safe_open(path, framework="pt") as f:
        stored = set(f.keys()) | set(f.metadata())
    save(path, want)
    with safe_open(path, framework="pt") as f:
        assert set(f.keys()) | set(f.metadata()) == stored and f.metadata()["format_version"] == "1"


def test_unknown_parts_are_ignored(path):
    """A later release may add optional parts, as weights, epochs and temperature were added to version 1."""
    rewrite(path, tensors={"later": torch.zeros(3)}, metadata={"later": "x"})
    assert_same(load(path), sample())


def test_a_file_may_have_no_sequences(tmp_path):
    save(tmp_path / "x", Logprobs([], [], [], "stock"))
    assert load(tmp_path / "x").tokens == []


def test_saving_leaves_no_temporary_files(path):
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


def test_a_truncated_file_is_rejected(path):
    whole = path.read_bytes()
    for size in (0, 4, 8, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="a.safetensors: cannot be read as a safetensors file"):
            load(path)


def test_a_missing_file_is_rejected(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such file, expected a logprob file"):
        load(tmp_path / "nowhere")


def test_a_file_of_another_format_is_rejected(tmp_path):
    path = tmp_path / "b"
    path.write_text("a text file, long enough to be mistaken for a header")
    with pytest.raises(InputError, match="b: cannot be read as a safetensors file"):
        load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(
        InputError, match="b: expected a logprob file with the metadata format = 'alignkit-logprobs', got none"
    ):
        load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(metadata={"format_version": "9"}), "format_version: .*, got '9'"),
        (dict(drop=["contract"]), "contract is missing from the metadata"),
        (dict(metadata={"contract": ""}), "contract: expected a string of 1 to 200"),
        (dict(metadata={"meta": "{"}), "meta: must be JSON"),
        (dict(metadata={"meta": "[]"}), "meta: must be a JSON object, got a list"),
        (dict(metadata={"meta": "[" * 10**5}), "meta: must be JSON"),
        (dict(metadata={"meta": '{"a": ' * 10**5}), "meta: must be JSON"),
        (dict(metadata={"meta": '{"n": 3}'}), "meta: keys and values must be strings, got 'n': 3"),
        (dict(metadata={"meta": '{"n": ' + "9" * 5000 + "}"}), "meta: must be JSON"),
        (dict(metadata={"contract": "x" * 201}), "contract: expected a string of 1 to 200 .*, got 'x"),
        (dict(metadata={"contract": "stock\n"}), "contract: .*ASCII"),
        (dict(drop=["tokens"]), "tensor 'tokens' is missing"),
        (dict(tensors={"logprobs": torch.zeros(3).double()}), "tensor 'logprobs': expected F32 .*, got F64"),
        (
            dict(tensors={"logprobs": torch.zeros(3, 1)}),
            r"tensor 'logprobs': expected F32 of one dimension, got F32 of shape \[3, 1\]",
        ),
        (dict(tensors={"logprobs": torch.zeros(2)}), "'offsets': must end with 2, the number of 'logprobs', got 3"),
        (
            dict(tensors={"offsets": torch.tensor([0, 4, 2, 3])}),
            "'offsets': must not decrease, got 4 then 2 at index 1",
        ),
        (dict(tensors={"offsets": torch.tensor([0, 2**63 - 1, -(2**63), -1, 3])}), "'offsets': must not decrease"),
        (dict(tensors={"offsets": torch.tensor([0, 3])}), "prompts: expected 1 sequences as in tokens, got 3"),
        (dict(tensors={"tokens": torch.tensor([9, -2, 6])}), "tokens: sequence 0: every token id must be"),
        (dict(metadata={"weights": ""}), "weights: expected a digest of 1 to 64 hexadecimal .*, got ''"),
        (dict(metadata={"weights": "A" * 24}), "weights: expected a digest .* in lower case"),
        (dict(metadata={"weights": "a" * 65}), "weights: expected a digest of 1 to 64"),
        (dict(metadata={"weights": "a\n"}), "weights: expected a digest"),
        (dict(metadata={"temperature": "warm"}), "temperature: must be a number, got 'warm'"),
        (dict(metadata={"temperature": "0.0"}), "temperature: must be positive and finite in fp32, got 0.0"),
        (dict(metadata={"temperature": "nan"}), "temperature: must be positive and finite in fp32, got nan"),
        (dict(metadata={"temperature": "1e39"}), "temperature: must be positive and finite in fp32, got 1e"),
        (dict(tensors={"epochs": torch.zeros(3)}), "tensor 'epochs': expected I64 .*, got F32"),
        (dict(tensors={"epochs": torch.zeros(3, 1).long()}), "tensor 'epochs': expected I64 of one dimension"),
        (dict(tensors={"epochs": torch.zeros(2).long()}), "'offsets': must end with 2, the number of 'epochs', got 3"),
        (
            dict(tensors={"epochs": torch.tensor([0, -2, 0])}),
            r"epochs: sequence 0: must be at least -1 \(mixed\), got -2",
        ),
    ],
)
def test_an_inconsistent_file_is_rejected(path, change, message):
    rewrite(path, **change)
    with pytest.raises(InputError, match="a.safetensors: .*" + message):
        load(path)


def write_sparse_file(path, text: bytes, size: int):
    """Write a sparse safetensors file of `size` bytes that contains only this header."""
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(size)


def peak_bytes(code) -> int:
    """Return the peak of Python's allocated bytes while `code` runs."""
    tracemalloc.start()
    try:
        code()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("huge", [("tokens", "logprobs"), ("epochs",)])
def test_a_huge_tensor_is_not_read(tmp_path, huge):
    rows = {
        "prompt_tokens": ("I64", 1),
        "prompt_offsets": ("I64", 2),
        "offsets": ("I64", 2),
        "tokens": ("I64", 1),
        "logprobs": ("F32", 1),
        "epochs": ("I64", 1),
    }
    rows |= {name: (rows[name][0], 2**30) for name in huge}
    entries, end = {}, 0
    for name, (dtype, n) in rows.items():
        begin, end = end, end + n * {"I64": 8, "F32": 4}[dtype]
        entries[name] = {"dtype": dtype, "shape": [n], "data_offsets": [begin, end]}
    entries["__metadata__"] = {"format": files.FORMAT, "format_version": files.FORMAT_VERSION, "contract": "stock"}
    text = json.dumps(entries).encode()
    write_sparse_file(tmp_path / "a", text, 8 + len(text) + end)
    with pytest.raises(
        InputError, match=f"a: tensor '{huge[0]}': at most 67108864 values are supported, got 1073741824"
    ):
        load(tmp_path / "a")


def test_a_huge_header_is_not_read(tmp_path):
    write_sparse_file(tmp_path / "a", b'{"__metadata__": {"meta": "' + b"x" * (50 << 20) + b'"}}', 60 << 20)

    def assert_rejected():
        with pytest.raises(
            InputError, match="a: the safetensors header of a logprob file must have at most .* bytes, got 524288[0-9]*"
        ):
            load(tmp_path / "a")

    assert peak_bytes(assert_rejected) < 1 << 20


@pytest.mark.parametrize(
    "change, read", [(dict(tensors={"a.weight": torch.zeros(2)}), True), (dict(drop=["tokens"]), False)]
)
def test_only_tensors_of_the_format_are_read(path, change, read, monkeypatch):
    rewrite(path, **change)
    seen = []

    class Recorded:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *exc):
            return self.file.__exit__(*exc)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            seen.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(bounded, "safe_open", Recorded)
    with contextlib.nullcontext() if read else pytest.raises(InputError):
        load(path)
    assert sorted(seen) == (sorted(files._DTYPES) if read else [])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompts=[[1]]), "prompts: expected 3 sequences as in tokens, got 1"),
        (dict(logprobs=[torch.zeros(2), torch.zeros(1)]), "logprobs: expected 3 sequences as in tokens, got 2"),
        (
            dict(logprobs=[torch.zeros(2), torch.zeros(2), torch.zeros(0)]),
            r"logprobs: sequence 1: expected shape \[1\], got \[2\]",
        ),
        (
            dict(logprobs=[torch.zeros(2).double(), torch.zeros(1), torch.zeros(0)]),
            "sequence 0: expected a torch.float32 tensor, got torch.float64",
        ),
        (
            dict(logprobs=[[-1.0, -2.0], torch.zeros(1), torch.zeros(0)]),
            "sequence 0: expected a torch.float32 tensor, got list",
        ),
        (dict(tokens=[[9, 2.0], [6], []]), "tokens: sequence 0: every token id must be"),
        (dict(contract=""), "contract: expected a string"),
        (dict(contract="Ω"), "contract: .*ASCII"),
        (dict(contract=None), "contract: expected a string .*, got None"),
        (dict(tokens=None), "tokens: expected a list of lists"),
        (dict(prompts=[[3], None, [15]]), "prompts: sequence 1: expected a list of token ids, got NoneType"),
        (dict(tokens=[[9, 2**63], [6], []]), "tokens: sequence 0: every token id must be"),
        (dict(tokens=[[9, True], [6], []]), "tokens: sequence 0: every token id must be"),
        (dict(prompts=[[]] * (2**20 + 1)), "prompts: a file holds at most 1048576 sequences, got 1048577"),
        (dict(meta={"n": 3}), "meta: keys and values must be strings, got 'n': 3"),
        (dict(meta=None), "meta: expected a dict of strings, got NoneType"),
        (dict(meta={"n": "x" * 2**16}), "meta: must have at most 65536 characters"),
        (dict(weights=b"ab"), "weights: expected a digest .* or None, got b'ab'"),
        (dict(weights="0xab"), "weights: expected a digest"),
        (dict(temperature=0), "temperature: must be positive and finite in fp32, got 0"),
        (dict(temperature=True), "temperature: must be positive and finite in fp32, got True"),
        (dict(temperature="1"), "temperature: must be positive and finite in fp32, got '1'"),
        (dict(temperature=1e-60), "temperature: must be positive and finite in fp32, got 1e-60"),
        (dict(epochs=torch.zeros(3).long()), "epochs: expected a list of tensors or None, got Tensor"),
        (dict(epochs=[]), "epochs: expected 3 sequences as in tokens, got 0"),
        (dict(epochs=[[0, 0], [0], []]), "epochs: sequence 0: expected a torch.int64 tensor, got list"),
        (
            dict(epochs=[torch.zeros(2).int(), torch.zeros(1).int(), torch.zeros(0).int()]),
            "epochs: sequence 0: expected a torch.int64 tensor, got torch.int32",
        ),
        (
            dict(epochs=[torch.zeros(2).long(), torch.zeros(2).long(), torch.zeros(0).long()]),
            r"epochs: sequence 1: expected shape \[1\], got \[2\]",
        ),
        (
            dict(epochs=[torch.tensor([1, -2]), torch.zeros(1).long(), torch.zeros(0).long()]),
            r"epochs: sequence 0: must be at least -1 \(mixed\), got -2",
        ),
    ],
)
def test_invalid_logprobs_are_not_saved(tmp_path, change, message):
    logprobs = sample()
    for name, value in change.items():
        setattr(logprobs, name, value)
    with pytest.raises(InputError, match=message):
        save(tmp_path / "x", logprobs)
    assert not list(tmp_path.iterdir())
