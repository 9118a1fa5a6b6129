"""Logprob files: what is written comes back bit for bit; anything else is refused, naming the file."""

import contextlib
import json
import math
import tracemalloc

import pytest
import torch
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
    )


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "a.safetensors", sample())
    return tmp_path / "a.safetensors"


def rewrite(path, tensors=(), metadata=(), drop=()):
    """The file at `path`, with some tensors or metadata replaced or left out."""
    with safe_open(path, framework="pt") as f:
        old_metadata, old = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}
    keep = lambda d: {k: v for k, v in d.items() if k not in drop}  # noqa: E731
    save_file(keep(old | dict(tensors)), path, metadata=keep(old_metadata | dict(metadata)))


def test_round_trip(path):
    want, got = sample(), load(path)
    assert (got.prompts, got.tokens, got.contract, got.meta) == (want.prompts, want.tokens, want.contract, want.meta)
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        assert a.dtype == torch.float32 and a.view(torch.int32).tolist() == b.view(torch.int32).tolist()


def test_no_sequences(tmp_path):
    save(tmp_path / "x", Logprobs([], [], [], "stock"))
    assert load(tmp_path / "x").tokens == []


def test_only_whole_files_and_no_leftovers(path):
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


def test_truncated_anywhere(path):
    whole = path.read_bytes()
    for size in (0, 4, 8, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="a.safetensors: truncated, or not a safetensors file"):
            load(path)


def test_absent(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such file, it should be a logprob file"):
        load(tmp_path / "nowhere")


def test_foreign(tmp_path):
    path = tmp_path / "b"
    path.write_text("a text file, long enough to be mistaken for a header")
    with pytest.raises(InputError, match="b: truncated, or not a safetensors"):
        load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(InputError, match="b: a safetensors file, but not a logprob file"):
        load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(metadata={"format_version": "9"}), "format version '9'"),
        (dict(drop=["contract"]), "the contract id is missing"),
        (dict(metadata={"contract": ""}), "contract: a non-empty string"),
        (dict(metadata={"meta": "{"}), "meta is not JSON"),
        (dict(metadata={"meta": "[]"}), "meta is not a JSON object"),
        (dict(metadata={"meta": "[" * 10**5}), "meta is not JSON"),
        (dict(metadata={"meta": '{"a": ' * 10**5}), "meta is not JSON"),
        (dict(metadata={"meta": '{"n": 3}'}), "meta: 'n' maps to 3"),
        (dict(metadata={"meta": '{"n": ' + "9" * 5000 + "}"}), "meta is not JSON"),
        (dict(metadata={"contract": "x" * 201}), "contract: .*at most 200"),
        (dict(metadata={"contract": "stock\n"}), "contract: .*ASCII"),
        (dict(drop=["tokens"]), "tensor 'tokens' is missing"),
        (dict(tensors={"logprobs": torch.zeros(3).double()}), "tensor 'logprobs' is F64"),
        (dict(tensors={"logprobs": torch.zeros(3, 1)}), r"tensor 'logprobs' is F32 of shape \[3, 1\]"),
        (dict(tensors={"logprobs": torch.zeros(2)}), "'offsets' does not cut the 2 values of 'logprobs'"),
        (dict(tensors={"offsets": torch.tensor([0, 4, 2, 3])}), "'offsets' does not cut"),
        (dict(tensors={"offsets": torch.tensor([0, 2**63 - 1, -(2**63), -1, 3])}), "'offsets' does not cut"),
        (dict(tensors={"offsets": torch.tensor([0, 3])}), "prompts: 3 sequences, but tokens has 1"),
        (dict(tensors={"tokens": torch.tensor([9, -2, 6])}), "tokens: sequence 0 holds something"),
    ],
)
def test_inconsistent(path, change, message):
    rewrite(path, **change)
    with pytest.raises(InputError, match="a.safetensors: .*" + message):
        load(path)


def header(path, text: bytes, size: int):
    """A safetensors file of `size` bytes that begins with this header; sparse, so nothing but the header is written."""
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(size)


def peak_bytes(code) -> int:
    """Most bytes that Python's allocator held while `code` ran, beyond those before."""
    tracemalloc.start()
    try:
        code()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_huge_tensor_is_not_read(tmp_path):
    rows = {
        "prompt_tokens": ("I64", 1),
        "prompt_offsets": ("I64", 2),
        "offsets": ("I64", 2),
        "tokens": ("I64", 2**30),
        "logprobs": ("F32", 2**30),
    }
    entries, end = {}, 0
    for name, (dtype, n) in rows.items():
        begin, end = end, end + n * {"I64": 8, "F32": 4}[dtype]
        entries[name] = {"dtype": dtype, "shape": [n], "data_offsets": [begin, end]}
    entries["__metadata__"] = {"format": files.FORMAT, "format_version": files.FORMAT_VERSION, "contract": "stock"}
    text = json.dumps(entries).encode()
    header(tmp_path / "a", text, 8 + len(text) + end)
    with pytest.raises(InputError, match="a: tensor 'tokens' holds 1073741824 values, more than 67108864"):
        load(tmp_path / "a")


def test_a_huge_header_is_not_read(tmp_path):
    header(tmp_path / "a", b'{"__metadata__": {"meta": "' + b"x" * (50 << 20) + b'"}}', 60 << 20)

    def refused():
        with pytest.raises(InputError, match="a: its header takes 524288[0-9]* bytes"):
            load(tmp_path / "a")

    assert peak_bytes(refused) < 1 << 20


@pytest.mark.parametrize(
    "change, read", [(dict(tensors={"a.weight": torch.zeros(2)}), True), (dict(drop=["tokens"]), False)]
)
def test_only_what_belongs_to_the_format_is_read(path, change, read, monkeypatch):
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
        (dict(prompts=[[1]]), "prompts: 1 sequences"),
        (dict(logprobs=[torch.zeros(2), torch.zeros(1)]), "logprobs: 2 sequences"),
        (dict(logprobs=[torch.zeros(2), torch.zeros(2), torch.zeros(0)]), r"logprobs: sequence 1 has shape \[2\]"),
        (dict(logprobs=[torch.zeros(2).double(), torch.zeros(1), torch.zeros(0)]), "sequence 0 is torch.float64"),
        (dict(logprobs=[[-1.0, -2.0], torch.zeros(1), torch.zeros(0)]), "sequence 0 is list"),
        (dict(tokens=[[9, 2.0], [6], []]), "tokens: sequence 0 holds"),
        (dict(contract=""), "contract: a non-empty string"),
        (dict(contract="Ω"), "contract: .*ASCII"),
        (dict(contract=None), "contract: a non-empty string"),
        (dict(tokens=None), "tokens: expected a list of lists"),
        (dict(prompts=[[3], None, [15]]), "prompts: expected a list of lists"),
        (dict(tokens=[[9, 2**63], [6], []]), "tokens: sequence 0 holds"),
        (dict(tokens=[[9, True], [6], []]), "tokens: sequence 0 holds"),
        (dict(prompts=[[]] * (2**20 + 1)), "prompts: 1048577 sequences, more than the 1048576 of a file"),
        (dict(meta={"n": 3}), "meta: 'n' maps to 3"),
        (dict(meta=None), "meta: a dict of strings"),
        (dict(meta={"n": "x" * 2**16}), "meta: longer than 65536"),
    ],
)
def test_not_saved(tmp_path, change, message):
    logprobs = sample()
    for name, value in change.items():
        setattr(logprobs, name, value)
    with pytest.raises(InputError, match=message):
        save(tmp_path / "x", logprobs)
    assert not list(tmp_path.iterdir())
