"""`alignkit explain`: the selected kernel and the reasons against others, without a GPU.

The last test compares with tests/ops/choices.json, which tests/ops/test_dispatch.py documents.
"""

import json
from pathlib import Path

import pytest

from alignkit.explain import MEANINGS, _names, explain
from alignkit.runtime import dispatch

pytest.importorskip("triton")
LINEAR = ["rows=64", "k=4096", "n=6144"]


def kernels(lines, what):
    return [line.split()[len(what.split())] for line in lines if line.strip().startswith(what)]


def test_the_command_lists_selected_skipped_and_valid_kernels(alignkit):
    status, out, _ = alignkit("explain", "linear", *LINEAR, "leaves=8", "dtype=bf16", "family=sm90")
    lines = out.splitlines()
    assert status == 0 and lines[0].startswith(
        "linear: family=sm90 backend=cuda rows=64 k=4096 n=6144 dtype=bf16 leaves=8"
    )
    assert "  selected    tree       alignkit.ops.linear.cuda_backend" in lines
    assert "  skipped     cublaslt   leaves: must be 1, got 8" in lines
    assert "  also valid  tiles      slower than tree" in lines


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
def test_linear_selects_a_kernel_by_options(words, runs):
    assert kernels(explain("linear", LINEAR + words), "selected") == [runs]


def test_linear_selects_a_kernel_by_size():
    def runs(*words):
        return kernels(explain("linear", words), "selected")

    assert runs("rows=1", "k=4096", "n=151936", "out_dtype=fp32") == ["few"]
    assert runs("rows=8", "k=4096", "n=1024") == ["narrow"]
    assert runs("rows=512", "k=4096", "n=1024", "leaves=8") == ["hopper"]


def test_the_fallback_kernel_is_named():
    lines = list(explain("linear", LINEAR))
    assert kernels(lines, "also valid") == ["tiles"]
    assert "in a trial on the GPU" in next(line for line in lines if "selected  " in line)
    assert next(line for line in lines if "also valid" in line).endswith("used if cublaslt's trial fails")


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
            (runs,) = kernels(explain(op, [*needed.get(op, []), f"family={family}"]), "selected")
            if family == "sm90" and op not in ("linear", "linear_resume"):
                others = {
                    "moe_products": "few",
                    "moe_gated": "grouped",
                    "moe_gradients": "many",
                    "moe_combine": "vectors",
                    "bit_sums": "products",
                }
                assert runs == ("cuda" if op in fused else others.get(op, "triton"))


@pytest.mark.parametrize(
    "op,words,why",
    [
        ("attention", ["head_dim=80"], "head_dim: must be 64, 96, 128 or 256, got 80"),
        ("attention", ["dtype=fp32"], "q: dtype must be bf16, got fp32"),
        ("attention", ["aligned=no"], "q: address must be a multiple of 16 bytes (TMA)"),
        ("attention", ["heads=65", "kv_heads=1"], "heads / kv_heads: must be at most 64, got 65"),
        ("attention", ["rows=67108864"], "rows * heads: must be in [1, 1073741824), got 67108864 * 16 = 1073741824"),
        ("attention", ["rows=64", "heads=2"], None),
        ("attention_backward", ["head_dim=96"], None),
        ("attention_backward", ["head_dim=32"], "head_dim: must be 64, 96, 128 or 256, got 32"),
        ("attention_backward", ["rows=64", "heads=2"], None),
        ("paged_attention", ["page=1"], "page: the cache's block_size must be a multiple of 16, got 1"),
        ("paged_attention", ["page=48"], None),
        ("paged_attention", ["page=16", "head_dim=256"], None),
        ("paged_attention", ["page=16", "pages=0"], "k: number of rows must be in [1, 2^31), got 0"),
    ],
)
def test_attention_selects_tma_if_its_requirements_hold(op, words, why):
    """`why` is the reason to skip the CUDA kernel; None means that this kernel is selected."""
    arguments = {"rows": 64, "heads": 16, "kv_heads": 1, "head_dim": 64, "dtype": "bf16"}
    arguments |= {"seqs": 2, "pages": 10} if op == "paged_attention" else {}
    arguments |= dict(word.split("=") for word in words)
    lines = list(explain(op, [*(f"{name}={value}" for name, value in arguments.items()), "family=sm90"]))
    if why is None:
        assert kernels(lines, "selected") == ["cuda"]
    else:
        assert kernels(lines, "selected") == ["triton"] and why in next(line for line in lines if "skipped" in line)


def test_few_rows_per_expert_select_grouped():
    lines = list(explain("moe_gated", ["rows=512", "k=2048", "n=1536", "experts=8"]))
    assert kernels(lines, "skipped") == ["many"] and kernels(lines, "selected") == ["grouped"]
    assert any("rows / experts: must be more than 64, got 512 / 8 = 64" in line for line in lines)


def test_moe_pairs_selects_torch_for_too_many_experts():
    lines = list(explain("moe_pairs", ["rows=4096", "top_k=8", "experts=2000", "family=sm90"]))
    assert kernels(lines, "skipped") == ["many", "triton"] and kernels(lines, "selected") == ["torch"]
    few = explain("moe_pairs", ["rows=512", "top_k=8", "experts=2000", "family=sm90"])
    assert kernels(few, "selected") == ["triton"]


def test_scattered_expert_matrices_select_each():
    lines = list(explain("moe_products", [*LINEAR, "experts=8", "scattered=yes"]))
    assert kernels(lines, "skipped") == ["many", "few", "grouped"] and kernels(lines, "selected") == ["each"]
    assert any("scattered: must be no (all experts' matrices with equal strides" in line for line in lines)


@pytest.mark.parametrize(
    "op,words,message",
    [
        ("matmul", [], "op: must be one of "),
        ("linear", ["rows=64", "k=64"], "n: required, for example n=64. linear requires rows, k, n; optional names"),
        ("rms_norm", [], "rows, h: required, for example rows=64"),
        ("linear", ["leaves=3"], "rows, k, n: required"),
        ("linear", ["rows=99999999999", "k=64", "n=64"], "rows: must have at most 10 digits, got 99999999999"),
        ("linear", ["rows=9999999999", "k=9999999999", "n=64"], "linear: the sizes must be those of a possible tensor"),
        ("attention", ["rows=64", "heads=32", "kv_heads=7", "head_dim=128"], "kv_heads: must divide heads = 32, got 7"),
        ("attention", ["rows=64", "heads=32", "kv_heads=0", "head_dim=128"], "kv_heads: must divide heads = 32, got 0"),
        ("moe_experts", [], "op: must be one of the parts of moe_experts (moe_products, moe_gated"),
        ("linear", [*LINEAR, "h=3"], "NAME: must be one that linear takes (family, backend, rows"),
        ("linear", [*LINEAR, "rows=3"], "rows: given more than once, as 64 and 3"),
        ("linear", [*LINEAR, "aligned"], "NAME=VALUE: expected the form NAME=VALUE, such as rows=64, got 'aligned'"),
        ("linear", [*LINEAR, "aligned="], "aligned: value is missing, got 'aligned='"),
        ("linear", [*LINEAR, "dtype=int8"], "dtype: must be one of bf16, fp16, fp32, got 'int8'"),
        ("linear", [*LINEAR, "leaves=3"], "leaves: must divide k = 4096, got 3"),
        ("linear", ["rows=-1", "k=64", "n=64"], "rows: must be an integer >= 0, got '-1'"),
        ("silu_mul", ["family=sm80"], "family: must be one of cpu, sm90, got 'sm80'"),
        ("silu_mul", ["family=cpu", "backend=cuda"], "backend: must be one of cpu, reference, got 'cuda'"),
        ("silu_mul", ["rows=3"], "NAME: must be one that silu_mul takes (family, backend"),
    ],
)
def test_invalid_arguments_are_rejected(alignkit, op, words, message):
    status, _, err = alignkit("explain", op, *words)
    assert status == 3 and message in err


def test_a_composite_op_names_its_parts():
    assert "head_statistics, head_gradient, head_products" in [*explain("linear_logp", [])][-1]
    assert "depend" not in "".join(explain("silu_mul", []))


def test_list_prints_the_names_of_each_op():
    lines = list(explain("list", []))
    border = lines.index("")
    assert [line.split()[0] for line in lines[:border]] == list(dispatch.OPS)
    used = {name for op in dispatch.OPS for names in _names(op) for name in names}
    assert used == MEANINGS.keys() == {line.split()[0] for line in lines[border + 1 :]}
    assert any(line.split()[1:] == "rows, h; optional: dtype, aligned, family, backend".split() for line in lines)


def test_sizes_without_an_op_are_a_usage_error(alignkit):
    status, _, err = alignkit("doctor", "rows=64")
    assert status == 2 and "requires --explain OP" in err


def test_explanations_match_the_recorded_choices():
    """Compare explanations of contiguous GEMMs with the recorded table of choices."""
    table = json.loads((Path(__file__).parents[1] / "ops/choices.json").read_text())["linear"]
    checked = 0
    for p in table:
        (m, k), (n, _) = p["a"][0], p["b"][0]
        dense = all(p[t][1] == [p[t][0][1], 1] and p[t][3] for t in ("a", "b", "out"))
        if dense and p["bias"] is None and p["a"][2] == p["b"][2] and p["proven"]:
            words = [f"rows={m}", f"k={k}", f"n={n}", f"leaves={p['leaves']}", f"dtype={p['a'][2]}"]
            words += [f"out_dtype={p['out'][2]}", f"accumulate={int(p['accumulate'])}", f"backend={p['backend']}"]
            assert kernels(explain("linear", words), "selected") == [p["answer"]]
            checked += 1
    assert checked > 50


def test_the_option_of_doctor_is_an_alias(alignkit):
    words = ("linear", *LINEAR)
    assert alignkit("doctor", "--explain", *words) == alignkit("explain", *words)
    assert alignkit("doctor", "--explain", "no_op")[0] == alignkit("explain", "no_op")[0] == 3
