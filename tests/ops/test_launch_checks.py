"""Host functions of the CUDA library reject by error code what their kernels cannot compute. No kernel runs.

Each case has arguments that the function accepts. Without a GPU, these give another error than invalid arguments; with
a GPU, only the rejections are tested.
"""

import ctypes

import pytest
import torch

from alignkit.runtime import cuda

pytestmark = pytest.mark.skipif(not cuda.LIBRARY.exists(), reason="the CUDA kernels are not built")
INVALID = 1
"""cudaErrorInvalidValue."""
MEMORY = torch.zeros(1024)
WORDS = (ctypes.c_uint64 * 8)()

NORM = {"rows": 4, "heads": 1, "h": 2048, "zero_centered": 0}
NORM_WRONG = [{"rows": 0}, {"rows": 2**27 + 8}, {"heads": 0}, {"h": 2052}, {"h": 2**14 + 8}]
HEADS = {"tokens": 4, "heads": 4, "kv_heads": 2, "dim": 128}
HEADS_WRONG = [{"tokens": -1}, {"tokens": 2**28}, {"kv_heads": 0}, {"kv_heads": 3}, {"dim": 80}]
DELTA = {
    "key_dim": 128,
    "value_dim": 64,
    "heads": 4,
    "key_heads": 2,
    "sequences": 1,
    "batch": 1,
    "rows": 64,
    "chunks": 1,
}
DELTA_WRONG = [{"key_dim": 96}, {"value_dim": 512}, {"columns": 48}, {"key_heads": 0}, {"key_heads": 3}]
STRUCTS = {
    "alignkit_rms_norm": ("AlignkitNorm", NORM, [*NORM_WRONG, {"h": 1024}]),
    "alignkit_rms_norm_grad": ("AlignkitNormGrad", NORM, [*NORM_WRONG, {"h": 32}]),
    "alignkit_attention_backward": ("AlignkitAttentionBackward", HEADS, HEADS_WRONG),
    "alignkit_attention_backward_256": ("AlignkitAttentionBackward", HEADS | {"dim": 256}, HEADS_WRONG),
    "alignkit_attention_forward": (
        "AlignkitAttention",
        HEADS | {"together": 1, "page": 32},
        [*HEADS_WRONG, {"page": 8}, {"together": 3}, {"heads": 256, "kv_heads": 2, "together": 128}],
    ),
    "alignkit_delta_back": ("AlignkitDelta", DELTA, DELTA_WRONG),
}
"""Function -> its struct, valid fields, invalid changes."""

EXPERTS_WRONG = [{"experts": 0}, {"experts": 1025}]
GROUPED = {"a": 0, "pitch": 64, "w": 0, "w_pitch": 64, "each": 0, "offsets": 0, "experts": 4, "out": 0, "out_pitch": 64}
GROUPED |= {"round": 1, "pairs": 8, "n": 64, "k": 64, "leaves": 2}
GROUPED_WRONG = [*EXPERTS_WRONG, {"leaves": 3}, {"k": 48}]
TREE = {"a": 0, "pitch": 64, "b": 0, "b_pitch": 64, "bias": None, "out": 0, "out_pitch": 64, "bf16": 0, "sums": 0}
TREE |= {"sums_pitch": 256, "parts": 2, "width": 64, "multicast": 0, "m": 8, "n": 64, "k": 64, "leaves": 2}
SUM = {"memory": WORDS, "ranks": 2, "rank": 0, "form": 1, "count": 64, "capacity": 1 << 20, "begin": 1 << 20}
SUM |= {"bias": 0, "bf16": 0, "columns": 8, "y": 0, "y_bf16": 0, "order": WORDS, "timeout": 1, "blocks": 8}
FLAT = {
    "alignkit_few_tree": (
        TREE,
        [
            {"m": 0},
            {"m": 65536},
            {"n": 0},
            {"k": 48},
            {"leaves": 0},
            {"leaves": 3},
            {"parts": 3},
            {"sums": None},
            {"sums_pitch": 128},
            {"n": 512},
            {"width": 80},
            {"multicast": 1},
            {"parts": 1, "leaves": 4, "m": 65},
        ],
    ),
    "alignkit_few_product": (dict(zip("aAbBoOmnk", (0, 64, 0, 64, 0, 64, 8, 64, 64), strict=True)), [{"m": 65}]),
    "alignkit_narrow_product": (
        dict(zip("aAbBioOrmnk", (0, 64, 0, 64, 0, 0, 64, 0, 8, 64, 64), strict=True)),
        [{"m": 33}],
    ),
    "alignkit_experts_pairs": (
        {"ids": 0, "narrow": 0, "count": 64, "top_k": 2, "first": 0, "experts": 4}
        | dict.fromkeys(("counts", "row", "choice", "place", "offsets"), 0),
        [*EXPERTS_WRONG, {"count": 0}, {"top_k": 0}],
    ),
    "alignkit_experts_gate_up": (
        {"x": 0, "x_pitch": 64, "row": 0, "w": 0, "pitch": 64, "each": 0, "offsets": 0, "experts": 4, "h": 0, "y": 0}
        | {"pairs": 8, "features": 64, "k": 64},
        [*EXPERTS_WRONG, {"features": 0}, {"features": 68}],
    ),
    "alignkit_experts_down": (GROUPED, GROUPED_WRONG),
    "alignkit_experts_few_down": (GROUPED, GROUPED_WRONG),
    "alignkit_experts_gradients": (
        {"a": 0, "pitch": 64, "b": 0, "b_pitch": 64, "gathers": 1, "row": 0, "offsets": 0, "experts": 4, "out": 0}
        | {"pairs": 8, "n": 64, "k": 64},
        [*EXPERTS_WRONG, {"pairs": 0}, {"n": 60}, {"k": 4}, {"k": 0}],
    ),
    "alignkit_experts_combine": (
        {"y": 0, "bf16": 1, "place": 0, "ids": 0, "narrow": 0, "weights": 0, "out": 0, "to_bf16": 1, "rows": 2, "k": 2}
        | {"columns": 64, "run": 1, "width": 1},
        [{"rows": 0}, {"k": 0}, {"k": 17}, {"columns": 0}, {"columns": 60}, {"run": 0}, {"bf16": 0}],
    ),
    "alignkit_tree_sum": (
        SUM,
        [
            {"form": -1},
            {"form": 3},
            {"rank": 2},
            {"rank": -1},
            {"count": 0},
            {"count": 60},
            {"columns": 0},
            {"blocks": 0},
            {"blocks": 65},
            {"capacity": 40},
        ],
    ),
}
"""Function -> valid arguments in order, where 0 stands for any address; invalid changes."""


def struct(name: str, fields: dict) -> ctypes.Structure:
    """Return a struct with these fields; the others are zero or, if pointers, an address."""
    values = {}
    for field, kind in cuda.library().struct(name)._fields_:
        if field in fields:
            values[field] = fields[field]
        elif kind is ctypes.c_void_p:
            values[field] = MEMORY
        else:
            values[field] = struct(kind.__name__, {}) if issubclass(kind, ctypes.Structure) else kind()
    return cuda.struct(name)(**{k: v.value if isinstance(v, ctypes._SimpleCData) else v for k, v in values.items()})


def call(function: str, arguments: dict) -> int:
    if function in STRUCTS:
        made = struct(STRUCTS[function][0], arguments)
        more = (None, 0) if function == "alignkit_attention_forward" else ()
        return getattr(cuda.library(), function)(ctypes.byref(made), *more, None)
    _, *types = cuda.library().types(function)
    given = [MEMORY if v == 0 and kind == "pointer" else v for v, kind in zip(arguments.values(), types, strict=False)]
    return getattr(cuda.library(), function)(*given, None)


CASES = {name: (valid, wrong) for name, (_, valid, wrong) in STRUCTS.items()} | FLAT


@pytest.mark.parametrize("function", CASES)
def test_arguments_that_a_kernel_cannot_compute_are_rejected(function):
    valid, wrong = CASES[function]
    assert torch.cuda.is_available() or call(function, valid) not in (0, INVALID)
    for change in wrong:
        assert call(function, valid | change) == INVALID, change
