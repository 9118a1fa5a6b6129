"""Triton: attention in leaves. Rows of a tile are query positions times the heads of a group, so that each key is read once for
all of them.

`tiles` serves training (packed) and the longer parts of sequences in a rollout (paged), `few` the sequences with few queries,
such as one when decoding; both run `common.visit`, so they differ in who visits which leaves, which changes no bit. Grids
depend on shapes alone and lengths are read on the device, so all of it may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton import JITFunction

from ...runtime.families import SM90
from ...runtime.launch import launch, repeated
from .._common import require
from .._triton import LOG2E, next_power_of_2
from .common import PAD
from .few import _few, _join_leaves
from .gradients import _delta, _grad_kv, _grad_q
from .problem import Again
from .sharing import A_MULTIPROCESSOR, ROWS, kind, share
from .tiles import _tiles

KV = {"KVB": SM90.kv_block, "LEAF": SM90.kv_leaf}
SCHEDULES = {
    "tiles": {"BLOCK_M": 128, "num_warps": 8, "num_stages": 2},
    "few": {"BLOCK_M": ROWS, "num_warps": 4, "num_stages": 2},
    "grad_q": {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    "grad_kv": {"BLOCK_N": 128, "BLOCK_I": 64, "num_warps": 8, "num_stages": 3},
}
"""Launch options of bf16 with heads of up to 128. None of them changes a bit."""
AHEAD = 32
"""States of leaves that a program has on their way at a time, at most, when it joins them."""
OVERLAP = isinstance(_few, JITFunction)
"""Whether kernels of few queries may be launched before their turn: Triton's interpreter does not know of that."""


def _schedule(kernel: str, q: torch.Tensor, group: int, override: dict) -> dict:
    options = dict(SCHEDULES[kernel])
    if q.dtype == torch.float32:  # no tensor core
        options = {name: 16 for name in options if name.startswith("BLOCK")} | {"num_stages": 1}
        options["num_warps"] = 4 if kernel.startswith("grad") else 8
    elif q.shape[2] > 128:
        options = {name: min(value, 64) for name, value in options.items()}
        options["num_stages"] = 2 if kernel == "few" and group <= 32 else 1
    options |= override
    if "BLOCK_M" in options:
        options["BLOCK_M"] = max(options["BLOCK_M"], next_power_of_2(group))
        options["BLOCK_Q"] = options["BLOCK_M"] // group
    return options


def _factor(scale: float) -> float:
    """Of the scores, for powers of 2. The launch rounds it to fp32."""
    return scale * LOG2E.value


def _shape(q, k) -> dict:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "HEADS": q.shape[1],
        "D": q.shape[2],
        "DP": max(16, next_power_of_2(q.shape[2])),
    }


def _pads(tokens: int, seqs: int) -> int:
    """How many times PAD statistics a head has; see `statistics`."""
    return tokens // PAD.value + seqs + 1


def forward(q, k, v, starts, scale, **schedule):
    """`schedule` overrides launch options; tests use it to show that they change no bit."""
    tokens, heads, kv = *q.shape[:2], k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    seqs = starts.shape[0] - 1
    pads = _pads(tokens, seqs)
    shift = torch.full((heads, pads * PAD.value), float("-inf"), dtype=torch.float32, device=q.device)
    if tokens:
        options = _schedule("tiles", q, heads // kv, schedule)
        tiles = tokens // options["BLOCK_Q"] + seqs + 1
        values = starts, starts, starts, _factor(scale), tokens, seqs, tiles, pads, 0, 0, 0, 0
        _run(_tiles, tiles * kv, (q, k, v, out, shift, *values), q, k, v, {"PAGE": 0} | KV | options)
    return out, shift


def paged(q, k, v, block_table, starts, seq_lens, page, scale, out, short=None, **schedule) -> Again:
    """`short` and `schedule` override the launch options of few queries, see `few`, and of tiles."""
    tokens, seqs = q.shape[0], block_table.shape[0]
    if not tokens:
        return lambda *_: None
    alone = tokens <= seqs  # most likely one query each; `few` takes any number, one tile after the other
    options = {"all_of_them": alone} | (short or {})
    most, of_few = few(q, k, v, block_table, starts, seq_lens, page, scale, out, **options)
    if alone:
        return of_few
    of_many = many(q, k, v, block_table, starts, seq_lens, page, scale, out, most, **schedule)

    def again(*tensors):
        of_few(*tensors)
        of_many(*tensors)

    return again


def many(q, k, v, block_table, starts, seq_lens, page, scale, out, most: int, **schedule) -> Again:
    """The sequences that are not `few`'s."""
    tokens, heads, kv = *q.shape[:2], k.shape[1]
    seqs, width = block_table.shape
    options = _schedule("tiles", q, heads // kv, schedule)
    tiles = tokens // options["BLOCK_Q"] + seqs
    lengths = starts, seq_lens, block_table, _factor(scale), tokens, seqs
    pages = k.shape[0] // page, width, block_table.stride(0), most
    args = q, k, v, out, out, *lengths, tiles, 0, *pages
    return _run(_tiles, tiles * kv, args, q, k, v, {"PAGE": page} | KV | options)


def few(
    q,
    k,
    v,
    block_table,
    starts,
    seq_lens,
    page,
    scale,
    out,
    all_of_them=False,
    a_multiprocessor=A_MULTIPROCESSOR,
    programs=0,
    overlap=OVERLAP,
    **schedule,
) -> tuple[int, Again]:
    """The sequences of few queries, or all of them, and the rows that hold no query or whose sequence does not fit. Returns up
    to how many queries are few, and what does it again. `programs`: among about how many the leaves are shared, 0:
    `a_multiprocessor` on each; as many for each head of keys. `overlap`: kernels are put on the GPU before the one ahead of them
    is done, and wait there."""
    tokens, heads, kv = *q.shape[:2], k.shape[1]
    (seqs, width), dim, group = block_table.shape, q.shape[2], heads // kv
    require(k.shape[0] < 2**31, f"k_cache: {k.shape[0]} rows are too many")
    options = _schedule("few", q, group, schedule)
    if all_of_them:  # of one query most likely, and so are the states
        options["BLOCK_Q"] = 1
    shared = share(q.shape, kv, options["BLOCK_Q"], width * page, a_multiprocessor, programs)
    of = kind(seqs, tokens, all_of_them, kv, shared)
    if of.alone and q.dtype == torch.bfloat16 and dim <= 128:  # with more keys on their way
        options["num_stages"] = schedule.get("num_stages", 3)
    programs = shared.parts * kv
    memory = shared.memory(kv, q.device)
    most = tokens if all_of_them else options["BLOCK_Q"]
    lengths = starts, seq_lens, block_table, _factor(scale), tokens, seqs, shared.parts, shared.slots
    pages = k.shape[0] // page, width, block_table.stride(0), most
    torn = shared.leaves > 1 and shared.parts > 1
    state = shared.state if torn else 0
    constants = {"PAGE": page, "SEQS": of.at_once, "MORE": of.more, "STATE": state, "OVERLAP": overlap}
    args = q, k, v, out, *memory, *lengths, *pages
    leaves = _run(_few, programs, args, q, k, v, constants | KV | options, changing=6)
    join = None
    if torn:
        # Of a head as many as there are rows, or borders between programs.
        joins = min(tokens, shared.parts - 1) if all_of_them else shared.parts - 1
        parts = next_power_of_2(max(shared.parts, SM90.multiprocessors * A_MULTIPROCESSOR // kv))
        shape = _shape(q, k)
        join = repeated(
            _join_leaves,
            (joins * kv, options["BLOCK_Q"] * group),
            (out, *memory, shared.slots, shared.parts),
            {"num_warps": -(-shape["DP"] // 32)} | _overlapping(overlap),  # a thread for each dimension
            changing=3,
            PARTS=parts if of.searched else 0,
            BLOCK_Q=options["BLOCK_Q"],
            LEAF=SM90.kv_leaf,
            STATE=state,
            AHEAD=min(next_power_of_2(shared.leaves - 1), AHEAD),
            OVERLAP=overlap,
            **shape,
        )

    def again(q, k, v, out):
        memory = shared.memory(kv, q.device)  # nobody has it between two calls
        leaves(q, k, v, out, *memory)
        if join is not None:
            join(out, *memory)

    return most, again


def _overlapping(overlap: bool) -> dict:
    """The option of a launch for a kernel that begins with `few._begin`."""
    return {"launch_pdl": True} if overlap else {}


def _run(kernel, programs: int, args: tuple, q, k, v, options: dict, changing: int = 4) -> Callable[..., None]:
    """Launch `kernel`, whose `args` begin with q, k, v and the result, and end where strides of q, k and v begin. Returns what does
    it again with others for the first `changing`."""
    strides = [t.stride() for t in (q, k, v)]
    constants = {name: of[0] for name, of in zip(("sqt", "skt", "svt"), strides, strict=True)}
    constants |= _shape(q, k) | options
    own = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    own |= _overlapping(constants.get("OVERLAP", False))
    return repeated(kernel, (programs,), (*args, *(of[1] for of in strides)), own, changing, **constants)


def sums(out, d_out, starts) -> torch.Tensor:
    """Of d_out times out over each head, by query, where `statistics` says."""
    tokens, heads, dim = out.shape
    seqs = starts.shape[0] - 1
    pads = _pads(tokens, seqs)
    delta = torch.zeros(heads, pads * PAD.value, dtype=torch.float32, device=out.device)
    launch(
        _delta,
        ((tokens // 64 + seqs + 1) * heads,),
        (d_out, out, delta, starts, tokens, seqs, pads),
        {"num_warps": 4},
        HEADS=heads,
        D=dim,
        DP=_shape(out, out)["DP"],
        R=64,
    )
    return delta


def backward(q, k, v, starts, out, shift, d_out, scale, grad_kv=None, **schedule):
    """`schedule` and `grad_kv` override the launch options of `_grad_q` and `_grad_kv`."""
    tokens, heads = q.shape[:2]
    seqs, kv = starts.shape[0] - 1, k.shape[1]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if tokens:
        pads, delta = _pads(tokens, seqs), sums(out, d_out, starts)
        by_query = _schedule("grad_q", q, heads // kv, schedule)
        by_key = _schedule("grad_kv", q, heads // kv, grad_kv or {})

        def values(tiles):
            return starts, _factor(scale), scale, tokens, seqs, tiles, pads

        tiles = tokens // by_query["BLOCK_Q"] + seqs + 1
        _run(_grad_q, tiles * kv, (q, k, v, d_out, shift, delta, dq, *values(tiles)), q, k, v, by_query)
        tiles = tokens // by_key["BLOCK_N"] + seqs + 1
        _run(_grad_kv, tiles * kv, (q, k, v, d_out, shift, delta, dk, dv, *values(tiles)), q, k, v, by_key)
    return dq, dk, dv
