"""`alignkit bisect` on GPUs: ``python -m pytest tests/bisection/test_cuda.py``."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from alignkit.check import run as checks
from alignkit.check.machine import most_ranks
from alignkit.check.model import make_checkpoint
from alignkit.drift import bisect
from alignkit.drift.bisect import run as runs
from tests.bisection.test_engines import between, every_op_exchanged, names, run_faulty

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LENGTHS = (5, 33, 130, 257)
SIZES = {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 512, "vocab": 2048}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **SIZES)


@pytest.fixture(autouse=True)
def small_and_side_by_side(monkeypatch):
    monkeypatch.setattr(runs, "LENGTHS", LENGTHS)
    monkeypatch.setattr(checks, "execute", partial(checks.execute, per_gpu=4))


def run(model, tmp_path, a, b, **options):
    """Both sides' every point was recorded and compared, of every token."""
    result = bisect.bisect(bisect.Options(a, b, tmp_path / "out", model=model, timeout=200.0, **options))
    c = result.comparison
    assert c.missing == [] and [p.point for p in c.points] == names(model)
    rows = sum(map(len, result.a.sequences))
    unknown = len(LENGTHS)  # the last token's logprob; with decode all of that token, which vLLM never runs
    expected = {rows - unknown} if options.get("decode") else {rows, rows - unknown}
    assert {p.compared for p in c.points} == expected
    assert c.points[0].point == "embedding" and c.points[0].differing == 0
    return result


def test_stock_against_stock(model, tmp_path):
    result = run(model, tmp_path, "stock-vllm", "stock-megatron", swap="rms_norm")
    assert result.comparison.suspect is not None
    by_name = {p.point: p for p in result.swapped.points}
    assert by_name["layers.0.input_norm"].differing == 0  # both are alignkit's, of the same embedding
    assert result.a.settings["versions"]["vllm"] and result.a.settings["device"] == torch.cuda.get_device_name()


def test_vllms_batch_invariance_against_hugging_face(model, tmp_path):
    result = run(model, tmp_path, "stock-vllm:batch_invariant=1", "hf")
    assert result.comparison.suspect is not None and result.a.settings["batch_invariant"]


def test_aligned_against_aligned_nothing_differs(model, tmp_path):
    """vLLM in chunks, then decoding; Megatron packed."""
    result = run(model, tmp_path, "aligned-vllm:chunk=64", "aligned-megatron:mode=packed", decode=3)
    assert result.comparison.suspect is None and result.a.contract == result.b.contract != "stock"


@several
@pytest.mark.parametrize("kind", ["aligned", "stock"])
def test_on_two_ranks(kind, model, tmp_path):
    result = run(model, tmp_path, f"{kind}-vllm:tp=2", f"{kind}-megatron:tp=2")
    assert result.a.settings["tp"] == result.b.settings["tp"] == 2
    assert (result.comparison.suspect is None) is (kind == "aligned")
    if kind == "aligned":
        alone = bisect.bisect(
            bisect.Options(str(tmp_path / "out/recordings/a"), "aligned-megatron", tmp_path / "alone", model=model)
        )
        assert alone.comparison.suspect is None and alone.comparison.compared == result.comparison.compared


def test_with_every_op_exchanged_stock_vllm_is_aligned_up_to_the_logprob(model, tmp_path):
    every_op_exchanged(model, tmp_path, LENGTHS)


@pytest.fixture(scope="module")
def products(model, tmp_path_factory):
    """Recordings after changes to how products are computed, by type and engine."""
    root, fp32 = tmp_path_factory.mktemp("products"), tmp_path_factory.mktemp("fp32")
    fp32 = make_checkpoint(fp32, "qwen3", torch.float32, **SIZES)
    sample = list(range(32))  # tokens whose values are looked at
    asked = {
        "bfloat16-stock": (model, {"patched": False}),
        "float32-stock": (fp32, {"patched": False, "dtype": "float32"}),
        "float32-aligned": (fp32, {"patched": True, "dtype": "float32"}),
    }

    def record(name):
        path, job = asked[name]
        (root / name).mkdir()
        return run_faulty(path, root / name, engine="megatron", what="products", lengths=LENGTHS, sample=sample, **job)

    with ThreadPoolExecutor() as pool:
        return dict(zip(asked, pool.map(record, asked), strict=True))


def test_tf32_is_found_in_the_first_product(products, tmp_path):
    at = products["float32-stock"]
    c = between(at / "good", at / "tf32", tmp_path)
    assert c.suspect.point == "layers.0.q" and c.suspect.differing == c.suspect.compared
    assert c.suspect.values.relative < 1e-2


def test_tf32_changes_nothing_in_an_aligned_engine(products, tmp_path):
    at = products["float32-aligned"]
    c = between(at / "good", at / "tf32", tmp_path)
    assert c.suspect is None and c.missing == [] and c.compared > 0


def test_another_algorithm_in_one_layer_is_found_there(products, tmp_path):
    for kind in ("bfloat16-stock", "float32-stock"):
        at = products[kind]
        assert between(at / "good", at / "split", tmp_path).suspect.point == "layers.1.down", kind


def test_another_library_changes_products_if_anything(products, tmp_path):
    for name in ("bfloat16", "float32"):
        for library in ("cublas", "cublaslt"):
            at = products[f"{name}-stock"]
            suspect = between(at / "good", at / library, tmp_path).suspect
            assert suspect is None or suspect.op in ("linear", "attention", "head"), (name, library)
    at = products["float32-aligned"]
    assert between(at / "good", at / "cublaslt", tmp_path).suspect is None


@pytest.mark.skipif(most_ranks() < 2, reason="needs two GPUs")
def test_planted_faults_of_ranks_are_found(model, tmp_path):
    at = run_faulty(model, tmp_path, engine="megatron", patched=True, tp=2, lengths=LENGTHS)
    expected = {"norm-weight": "layers.1.post_norm", "rope-base": "layers.0.q_rope", "stale-shard": "layers.1.q"}
    found = {name: between(at / "good", at / name, tmp_path).suspect for name in expected}
    assert {name: suspect.point for name, suspect in found.items()} == expected
    assert found["stale-shard"].pieces == [1]  # the second rank's KV head
    assert between(at / "stale-shard", at / "lost-patch", tmp_path).suspect is None
