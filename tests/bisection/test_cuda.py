"""`alignkit bisect` with real vLLM and Megatron-core on one or two Hopper GPUs; part of `make gpu-test`.

Stock engines must differ, aligned engines must not, and planted faults (`faulty.py`) must be found at their point.
Helpers are in `test_engines.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from alignkit import bisect
from alignkit.bisect import run as runs
from alignkit.jobs.execute import execute
from alignkit.jobs.model import make_checkpoint
from alignkit.runtime.machine import most_ranks
from tests.bisection.test_engines import (
    assert_aligned_with_all_ops_swapped,
    compare_recordings,
    point_names,
    run_faulty,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LENGTHS = (5, 33, 130, 257)
SIZES = {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 512, "vocab": 2048}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **SIZES)


@pytest.fixture(autouse=True)
def short_sequences_and_concurrent_engines(monkeypatch):
    monkeypatch.setattr(runs, "LENGTHS", LENGTHS)
    monkeypatch.setattr(runs, "execute", partial(execute, per_gpu=4))


def run(model, tmp_path, a, b, **options):
    """Run bisect and assert that both sides recorded and compared every point of every token."""
    result = bisect.bisect(bisect.Options(a, b, tmp_path / "out", model=model, timeout=200.0, **options))
    c = result.comparison
    assert c.missing == [] and [p.point for p in c.points] == point_names(model)
    rows = sum(map(len, result.a.sequences))
    # The last token of each sequence has no logprob. With decode, vLLM never runs that token, so none of its points are
    # compared.
    unknown = len(LENGTHS)
    expected = {rows - unknown} if options.get("decode") else {rows, rows - unknown}
    assert {p.compared for p in c.points} == expected
    assert c.points[0].point == "embedding" and c.points[0].differing == 0
    return result


def test_stock_engines_differ_and_swapped_norms_agree(model, tmp_path):
    result = run(model, tmp_path, "stock-vllm", "stock-megatron", swap="rms_norm")
    assert result.comparison.suspect is not None
    by_name = {p.point: p for p in result.swapped.points}
    assert by_name["layers.0.input_norm"].differing == 0  # both sides use alignkit's op on equal embeddings
    assert result.a.settings["versions"]["vllm"] and result.a.settings["device"] == torch.cuda.get_device_name()


def test_batch_invariant_vllm_differs_from_hugging_face(model, tmp_path):
    result = run(model, tmp_path, "stock-vllm:batch_invariant=1", "hf")
    assert result.comparison.suspect is not None and result.a.settings["batch_invariant"]


def test_aligned_engines_do_not_differ(model, tmp_path):
    """Compare chunked prefill and decode in vLLM with packed sequences in Megatron."""
    result = run(model, tmp_path, "aligned-vllm:chunk=64", "aligned-megatron:mode=packed", decode=3)
    assert result.comparison.suspect is None and result.a.contract == result.b.contract != "stock"


@two_gpus
@pytest.mark.parametrize("kind", ["aligned", "stock"])
def test_only_stock_engines_differ_on_two_ranks(kind, model, tmp_path):
    result = run(model, tmp_path, f"{kind}-vllm:tp=2", f"{kind}-megatron:tp=2")
    assert result.a.settings["tp"] == result.b.settings["tp"] == 2
    assert (result.comparison.suspect is None) is (kind == "aligned")
    if kind == "aligned":
        single_gpu = bisect.bisect(
            bisect.Options(str(tmp_path / "out/recordings/a"), "aligned-megatron", tmp_path / "single", model=model)
        )
        assert single_gpu.comparison.suspect is None and single_gpu.comparison.compared == result.comparison.compared


def test_stock_vllm_with_all_ops_swapped_is_aligned_up_to_the_logprob(model, tmp_path):
    assert_aligned_with_all_ops_swapped(model, tmp_path, LENGTHS)


@pytest.fixture(scope="module")
def gemms(model, tmp_path_factory):
    """Return a directory of recordings with changed GEMMs for each dtype and kind of engine."""
    root = tmp_path_factory.mktemp("gemms")
    fp32 = make_checkpoint(tmp_path_factory.mktemp("fp32"), "qwen3", torch.float32, **SIZES)
    sample = list(range(32))  # tokens whose values are recorded
    jobs = {
        "bfloat16-stock": (model, {"patched": False}),
        "float32-stock": (fp32, {"patched": False, "dtype": "float32"}),
        "float32-aligned": (fp32, {"patched": True, "dtype": "float32"}),
    }

    def record(name):
        path, job = jobs[name]
        (root / name).mkdir()
        return run_faulty(path, root / name, engine="megatron", what="gemms", lengths=LENGTHS, sample=sample, **job)

    with ThreadPoolExecutor() as pool:
        return dict(zip(jobs, pool.map(record, jobs), strict=True))


def test_tf32_is_found_in_the_first_gemm(gemms, tmp_path):
    folder = gemms["float32-stock"]
    c = compare_recordings(folder / "good", folder / "tf32", tmp_path)
    assert c.suspect.point == "layers.0.q" and c.suspect.differing == c.suspect.compared
    assert c.suspect.values.relative < 1e-2


def test_tf32_changes_nothing_in_an_aligned_engine(gemms, tmp_path):
    folder = gemms["float32-aligned"]
    c = compare_recordings(folder / "good", folder / "tf32", tmp_path)
    assert c.suspect is None and c.missing == [] and c.compared > 0


def test_another_gemm_algorithm_is_found_in_its_layer(gemms, tmp_path):
    for kind in ("bfloat16-stock", "float32-stock"):
        folder = gemms[kind]
        assert compare_recordings(folder / "good", folder / "split", tmp_path).suspect.point == "layers.1.down", kind


def test_another_blas_library_changes_at_most_gemms(gemms, tmp_path):
    for name in ("bfloat16", "float32"):
        for library in ("cublas", "cublaslt"):
            folder = gemms[f"{name}-stock"]
            suspect = compare_recordings(folder / "good", folder / library, tmp_path).suspect
            assert suspect is None or suspect.op in ("linear", "attention", "head"), (name, library)
    folder = gemms["float32-aligned"]
    assert compare_recordings(folder / "good", folder / "cublaslt", tmp_path).suspect is None


@pytest.mark.skipif(most_ranks() < 2, reason="needs two GPUs")
def test_planted_faults_on_ranks_are_found(model, tmp_path):
    folder = run_faulty(model, tmp_path, engine="megatron", patched=True, tp=2, lengths=LENGTHS)
    expected = {"norm-weight": "layers.1.post_norm", "rope-base": "layers.0.q_rope", "stale-shard": "layers.1.q"}
    found = {name: compare_recordings(folder / "good", folder / name, tmp_path).suspect for name in expected}
    assert {name: suspect.point for name, suspect in found.items()} == expected
    assert found["stale-shard"].pieces == [1]  # the second rank's KV head
    assert compare_recordings(folder / "stale-shard", folder / "lost-patch", tmp_path).suspect is None
