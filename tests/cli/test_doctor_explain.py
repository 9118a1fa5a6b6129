"""`alignkit doctor --explain`: which kernel computes a problem, and why others do not, without a GPU."""

import json
from pathlib import Path

import pytest

from alignkit.explain import explain
from alignkit.runtime import dispatch

pytest.importorskip("triton")
LINEAR = ["rows=64", "k=4096", "n=6144"]


def kernels(lines, what):
    return [line.split()[len(what.split())] for line in lines if line.strip().startswith(what)]


def test_of_the_command(alignkit):
    status, out, _ = alignkit("doctor", "--explain", "linear", *LINEAR, "leaves=8", "dtype=bf16", "family=sm90")
    lines = out.splitlines()
    assert status == 0 and lines[0].startswith(
        "linear: family=sm90 backend=cuda rows=64 k=4096 n=6144 dtype=bf16 leaves=8"
    )
    assert "  runs         tree       alignkit.ops.linear.cuda" in lines
    assert "  passed over  cublaslt   8 leaves: it computes chains" in lines
    assert "  right too    tiles      after tree, which is faster" in lines


@pytest.mark.parametrize(
    "words,runs",
    [
        ([], "cublaslt"),
        (["leaves=8"], "tree"),
        (["leaves=8", "aligned=no"], "tiles"),
        (["dtype=fp32"], "tiles"),
        (["dtype=fp16"], "cublaslt"),
        (["family=cpu"], "cpu"),
        (["family=cpu", "backend=reference"], "reference"),
        (["backend=triton", "leaves=8"], "tiles"),
    ],
)
def test_linear(words, runs):
    assert kernels(explain("linear", LINEAR + words), "runs") == [runs]


def test_sizes_of_a_product():
    def runs(*words):
        return kernels(explain("linear", words), "runs")

    assert runs("rows=1", "k=4096", "n=151936", "out_dtype=fp32") == ["few"]
    assert runs("rows=8", "k=4096", "n=1024") == ["narrow"]
    assert runs("rows=512", "k=4096", "n=1024", "leaves=8") == ["hopper"]


def test_what_runs_where_the_chosen_declines():
    told = list(explain("linear", LINEAR))
    assert kernels(told, "right too") == ["tiles"]
    assert "in a trial on the GPU" in next(line for line in told if "runs  " in line)
    assert next(line for line in told if "right too" in line).endswith("runs if cublaslt declines")


def test_each_op_has_a_kernel_on_each_family():
    attention = ["rows=64", "heads=32", "kv_heads=8", "head_dim=128"]
    needed = {
        "attention": attention,
        "attention_backward": attention,
        "paged_attention": [*attention, "seqs=4", "pages=100"],
        "linear": LINEAR,
        "rms_norm": ["rows=4", "h=8192"],
        "rms_norm_backward": ["rows=4", "h=64"],
        **{f"head_{what}": ["rows=512", "ids=8448", "k=64"] for what in ("statistics", "gradient", "products")},
        **{f"moe_{what}": [*LINEAR, "experts=8"] for what in ("products", "gated", "gradients")},
        "moe_pairs": ["rows=4", "top_k=8", "experts=128"],
        "moe_combine": ["rows=4", "h=2048", "top_k=8"],
    }
    fused = {"rms_norm", "rms_norm_backward", "head_statistics", "head_gradient", "head_products", "gated_delta_rule"}
    fused |= {"attention", "attention_backward", "paged_attention"}
    for op in dispatch.OPS:
        for family in ("cpu", "sm90"):
            (runs,) = kernels(explain(op, [*needed.get(op, []), f"family={family}"]), "runs")
            if family == "sm90" and op not in ("linear", "linear_resume"):
                others = {
                    "moe_products": "few",
                    "moe_gated": "grouped",
                    "moe_gradients": "many",
                    "moe_combine": "vectors",
                }
                assert runs == ("cuda" if op in fused else others.get(op, "triton"))


@pytest.mark.parametrize(
    "op,words,why",
    [
        ("attention", ["head_dim=80"], "heads of 80, of 64, 96, 128 or 256"),
        ("attention", ["dtype=fp32"], "tensors that are not bf16"),
        ("attention", ["aligned=no"], "tensors that are not bf16 that the copy engine reads"),
        ("attention", ["heads=65", "kv_heads=1"], "groups of 65 heads, of at most 64"),
        ("attention", ["rows=67108864"], "67108864 rows of 16 heads"),
        ("attention", ["rows=64", "heads=2"], None),
        ("attention_backward", ["head_dim=96"], None),
        ("attention_backward", ["head_dim=32"], "heads of 32"),
        ("attention_backward", ["rows=64", "heads=2"], None),
        ("paged_attention", ["page=1"], "pages of 1 rows, not of a multiple of 16"),
        ("paged_attention", ["page=48"], None),
        ("paged_attention", ["page=16", "head_dim=256"], None),
        ("paged_attention", ["page=16", "pages=0"], "over 0, of 1 to"),
    ],
)
def test_attention_by_the_copy_engine(op, words, why):
    """`why`: what is said of the CUDA kernel, which is chosen where there is nothing to say."""
    usual = {"rows": 64, "heads": 16, "kv_heads": 1, "head_dim": 64, "dtype": "bf16"}
    usual |= {"seqs": 2, "pages": 10} if op == "paged_attention" else {}
    usual |= dict(word.split("=") for word in words)
    told = list(explain(op, [*(f"{name}={value}" for name, value in usual.items()), "family=sm90"]))
    if why is None:
        assert kernels(told, "runs") == ["cuda"]
    else:
        assert kernels(told, "runs") == ["triton"] and why in next(line for line in told if "passed over" in line)


def test_few_rows_an_expert_are_for_other_tiles():
    told = list(explain("moe_gated", ["rows=512", "k=2048", "n=1536", "experts=8"]))
    assert kernels(told, "passed over") == ["many"] and kernels(told, "runs") == ["grouped"]
    assert any("512 rows for 8 experts, of more than 64 each" in line for line in told)


def test_ids_of_more_experts_than_are_counted():
    told = list(explain("moe_pairs", ["rows=4096", "top_k=8", "experts=2000", "family=sm90"]))
    assert kernels(told, "passed over") == ["many", "triton"] and kernels(told, "runs") == ["torch"]
    few = explain("moe_pairs", ["rows=512", "top_k=8", "experts=2000", "family=sm90"])
    assert kernels(few, "runs") == ["triton"]


def test_experts_whose_matrices_lie_apart():
    told = list(explain("moe_products", [*LINEAR, "experts=8", "scattered=yes"]))
    assert kernels(told, "passed over") == ["many", "few", "grouped"] and kernels(told, "runs") == ["each"]
    assert any("the experts' matrices differ in strides or alignment" in line for line in told)


@pytest.mark.parametrize(
    "op,words,said",
    [
        ("matmul", [], "op: 'matmul' is none of "),
        ("linear", ["rows=64", "k=64"], "n: needed, as in n=64"),
        ("rms_norm", [], "rows, h: needed, as in rows=64"),
        ("linear", ["leaves=3"], "rows, k, n: needed"),
        ("linear", ["rows=99999999999", "k=64", "n=64"], "rows: 99999999999 is too large"),
        ("linear", ["rows=9999999999", "k=9999999999", "n=64"], "linear: a problem of this size cannot be described"),
        ("attention", ["rows=64", "heads=32", "kv_heads=7", "head_dim=128"], "kv_heads: 7 do not divide 32 heads"),
        ("attention", ["rows=64", "heads=32", "kv_heads=0", "head_dim=128"], "kv_heads: 0 do not divide 32 heads"),
        ("moe_experts", [], "op: 'moe_experts' is made of moe_pairs, moe_products"),
        ("linear", [*LINEAR, "h=3"], "h: linear takes family, backend, rows"),
        ("linear", [*LINEAR, "rows=3"], "rows: 'rows=3' is not one name=value"),
        ("linear", [*LINEAR, "aligned"], "aligned: 'aligned' is not one name=value"),
        ("linear", [*LINEAR, "dtype=int8"], "dtype: 'int8' is none of bf16, fp16, fp32"),
        ("linear", [*LINEAR, "leaves=3"], "leaves: 3 do not divide k = 4096"),
        ("linear", ["rows=-1", "k=64", "n=64"], "rows: '-1' is not a number from 0 on"),
        ("silu_mul", ["family=sm80"], "family: 'sm80' is none of cpu, sm90"),
        ("silu_mul", ["family=cpu", "backend=cuda"], "backend: 'cuda' is none of cpu, reference"),
        ("silu_mul", ["rows=3"], "rows: silu_mul takes family, backend"),
    ],
)
def test_words_that_are_refused(alignkit, op, words, said):
    status, _, err = alignkit("doctor", "--explain", op, *words)
    assert status == 3 and said in err


def test_an_op_of_parts_names_them():
    assert "head_statistics, head_gradient, head_products" in [*explain("linear_logp", [])][-1]
    assert "depend" not in "".join(explain("silu_mul", []))


def test_sizes_without_an_op_are_a_mistake(alignkit):
    status, _, err = alignkit("doctor", "rows=64")
    assert status == 2 and "only with --explain" in err


def test_explanations_are_choices():
    """Of products in rows that follow each other, by the table of choices."""
    table = json.loads((Path(__file__).parents[1] / "ops/choices.json").read_text())["linear"]
    told = 0
    for p in table:
        (m, k), (n, _) = p["a"][0], p["b"][0]
        dense = all(p[t][1] == [p[t][0][1], 1] and p[t][3] for t in ("a", "b", "out"))
        if dense and p["bias"] is None and p["a"][2] == p["b"][2] and p["proven"]:
            words = [f"rows={m}", f"k={k}", f"n={n}", f"leaves={p['leaves']}", f"dtype={p['a'][2]}"]
            words += [f"out_dtype={p['out'][2]}", f"accumulate={int(p['accumulate'])}", f"backend={p['backend']}"]
            assert kernels(explain("linear", words), "runs") == [p["answer"]]
            told += 1
    assert told > 50
