"""Triton attention: launches of the kernels in tiles.py, few.py and gradients.py.

`_tiles` computes training (packed sequences) and paged prefill, `_decode` sequences with few queries. Both run
`common.attend` and differ only in the assignment of leaves to programs, which changes no bit. Grids depend on shapes
alone and lengths are read on the device, so all launches can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton import JITFunction

from ...errors import UnsupportedError
from ...runtime import families
from ...runtime.families import SM90
from ...runtime.launch import launch, launch_repeatable
from ...runtime.operands import dtype_name
from .._common import require
from .._triton import LOG2E, next_power_of_2
from .common import PAD
from .few import _decode, _merge_leaves
from .gradients import _delta, _grad_kv, _grad_q
from .problem import Relaunch
from .sharing import PROGRAMS_PER_SM, ROWS, share, variant
from .tiles import _tiles

KV = {"KVB": SM90.kv_block, "LEAF": SM90.kv_leaf}  # contract: keys per block and per leaf (runtime.families)
SCHEDULES = {
    "tiles": {"BLOCK_M": 128, "num_warps": 8, "num_stages": 2},
    "decode": {"BLOCK_M": ROWS, "num_warps": 4, "num_stages": 2},
    "grad_q": {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    "grad_kv": {"BLOCK_N": 128, "BLOCK_I": 64, "num_warps": 8, "num_stages": 3},
}
"""schedule: launch options for bf16 and head_dim up to 128."""
AHEAD = 32
"""schedule: the largest number of leaf states that a program of the merge kernel loads at a time."""


def _schedule(kernel: str, q: torch.Tensor, group: int, override: dict) -> dict:
    """Return the launch options of a kernel for q's dtype and head_dim, with `override` applied."""
    options = dict(SCHEDULES[kernel])
    if q.dtype == torch.float32:  # no tensor core
        options = {name: 16 for name in options if name.startswith("BLOCK")} | {"num_stages": 1}
        options["num_warps"] = 4 if kernel.startswith("grad") else 8
    elif q.shape[2] > 128:
        options = {name: min(value, 64) for name, value in options.items()}
        options["num_stages"] = 2 if kernel == "decode" and group <= 32 else 1
    options |= override
    if "BLOCK_M" in options:
        options["BLOCK_M"] = max(options["BLOCK_M"], next_power_of_2(group))
        options["BLOCK_Q"] = options["BLOCK_M"] // group
    return options


def _score_factor(scale: float) -> float:
    """Return the factor of the scores for exponents of 2; the launch rounds it to fp32."""
    return scale * LOG2E.value


def _shape(q, k) -> dict:
    """Return the constexpr shape parameters shared by the kernels."""
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "HEADS": q.shape[1],
        "D": q.shape[2],
        "DP": max(16, next_power_of_2(q.shape[2])),
    }


def _pads(tokens: int, seqs: int) -> int:
    """Return the size of a head's statistics in units of PAD; see `statistics_offset`."""
    return tokens // PAD.value + seqs + 1


def forward(q, k, v, starts, scale, **schedule):
    """Return the output and the statistics for the backward pass; `schedule` overrides launch options."""
    tokens, heads, kv = *q.shape[:2], k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    seqs = starts.shape[0] - 1
    pads = _pads(tokens, seqs)
    shift = torch.full((heads, pads * PAD.value), float("-inf"), dtype=torch.float32, device=q.device)
    if tokens:
        options = _schedule("tiles", q, heads // kv, schedule)
        tiles = tokens // options["BLOCK_Q"] + seqs + 1
        values = starts, starts, starts, _score_factor(scale), tokens, seqs, tiles, pads, 0, 0, 0, 0
        _run(_tiles, tiles * kv, (q, k, v, out, shift, *values), q, k, v, {"PAGE": 0} | KV | options)
    return out, shift


def paged(q, k, v, block_table, starts, seq_lens, page, scale, out, decode_options=None, **schedule) -> Relaunch:
    """Compute paged attention into `out`; decode_options and `schedule` override options of `decode` and `prefill`."""
    tokens, seqs = q.shape[0], block_table.shape[0]
    if not tokens:
        return lambda *_: None
    decode_all = tokens <= seqs  # most likely one query per sequence; `decode` takes any number, tile by tile
    options = {"decode_all": decode_all} | (decode_options or {})
    max_queries, relaunch_decode = decode(q, k, v, block_table, starts, seq_lens, page, scale, out, **options)
    if decode_all:
        return relaunch_decode
    relaunch_prefill = prefill(q, k, v, block_table, starts, seq_lens, page, scale, out, max_queries, **schedule)

    def relaunch(*tensors):
        relaunch_decode(*tensors)
        relaunch_prefill(*tensors)

    return relaunch


def prefill(q, k, v, block_table, starts, seq_lens, page, scale, out, max_queries: int, **schedule) -> Relaunch:
    """Compute the sequences that `decode` leaves, those that are not `common.is_decode`."""
    tokens, heads, kv = *q.shape[:2], k.shape[1]
    seqs, width = block_table.shape
    options = _schedule("tiles", q, heads // kv, schedule)
    tiles = tokens // options["BLOCK_Q"] + seqs
    lengths = starts, seq_lens, block_table, _score_factor(scale), tokens, seqs
    pages = k.shape[0] // page, width, block_table.stride(0), max_queries
    args = q, k, v, out, out, *lengths, tiles, 0, *pages
    return _run(_tiles, tiles * kv, args, q, k, v, {"PAGE": page} | KV | options)


def decode(
    q,
    k,
    v,
    block_table,
    starts,
    seq_lens,
    page,
    scale,
    out,
    decode_all=False,
    programs_per_sm=PROGRAMS_PER_SM,
    programs=0,
    pdl=None,
    **schedule,
) -> tuple[int, Relaunch]:
    """Compute the sequences of few queries into `out`, and the rows of padding and of sequences of invalid length.

    Returns the query count up to which any sequence is computed here, and the relaunch. decode_all: compute all
    sequences here, in tiles of one query. `programs` (0: programs_per_sm per SM): the approximate number of programs
    that share the leaves. pdl: use programmatic dependent launch; None: if the GPU supports it. `schedule` overrides
    launch options.
    """
    if pdl is None:
        pdl = isinstance(_decode, JITFunction) and families.gpu(q.device).pdl  # Triton's interpreter lacks it
    tokens, heads, kv = *q.shape[:2], k.shape[1]
    (seqs, width), dim, group = block_table.shape, q.shape[2], heads // kv
    require(k.shape[0] < 2**31, f"k_cache: num_blocks * block_size must be below 2^31, got {k.shape[0]}")
    options = _schedule("decode", q, group, schedule)
    if decode_all:  # most likely one query per sequence, so tiles and states have one
        options["BLOCK_Q"] = 1
    shared = share(q.shape, kv, options["BLOCK_Q"], width * page, programs_per_sm, programs)
    batch = variant(seqs, tokens, decode_all, kv, shared)
    if batch.one_per_sm and q.dtype == torch.bfloat16 and dim <= 128:  # room for a deeper pipeline
        options["num_stages"] = schedule.get("num_stages", 3)
    programs = shared.parts * kv
    memory = shared.memory(kv, q.device)
    max_queries = tokens if decode_all else options["BLOCK_Q"]
    lengths = starts, seq_lens, block_table, _score_factor(scale), tokens, seqs, shared.parts, shared.slots
    pages = k.shape[0] // page, width, block_table.stride(0), max_queries
    splits = shared.leaves > 1 and shared.parts > 1
    state = shared.state if splits else 0
    constants = {"PAGE": page, "SEQS": batch.chunk, "MORE": batch.more, "STATE": state, "PDL": pdl}
    args = q, k, v, out, *memory, *lengths, *pages
    launch_decode = _run(_decode, programs, args, q, k, v, constants | KV | options, changing=6)
    launch_merge = None
    if splits:
        # Per KV head, one program for each row or for each boundary between programs, whichever is fewer.
        merges = min(tokens, shared.parts - 1) if decode_all else shared.parts - 1
        parts = next_power_of_2(max(shared.parts, SM90.sm_count * PROGRAMS_PER_SM // kv))
        shape = _shape(q, k)
        launch_merge = launch_repeatable(
            _merge_leaves,
            (merges * kv, options["BLOCK_Q"] * group),
            (out, *memory, shared.slots, shared.parts),
            {"num_warps": -(-shape["DP"] // 32)} | _pdl_option(pdl),  # one thread per dimension
            changing=3,
            PARTS=parts if batch.search else 0,
            BLOCK_Q=options["BLOCK_Q"],
            LEAF=SM90.kv_leaf,
            STATE=state,
            AHEAD=min(next_power_of_2(shared.leaves - 1), AHEAD),
            PDL=pdl,
            **shape,
        )

    def relaunch(q, k, v, out):
        memory = shared.memory(kv, q.device)  # allocated per call, free in between
        launch_decode(q, k, v, out, *memory)
        if launch_merge is not None:
            launch_merge(out, *memory)

    return max_queries, relaunch


def _pdl_option(pdl: bool) -> dict:
    """Return the launch option of kernels that begin with `few._pdl_wait`."""
    return {"launch_pdl": True} if pdl else {}


def _run(kernel, programs: int, args: tuple, q, k, v, options: dict, changing: int = 4) -> Callable[..., None]:
    """Launch `kernel`, and return a function that launches it again with other tensors for the first `changing` args.

    `args` begin with q, k, v and the result; the strides of q, k and v follow them.
    """
    strides = [t.stride() for t in (q, k, v)]
    constants = {name: stride[0] for name, stride in zip(("sqt", "skt", "svt"), strides, strict=True)}
    constants |= _shape(q, k) | options
    launch_options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    launch_options |= _pdl_option(constants.get("PDL", False))
    args = *args, *(stride[1] for stride in strides)
    try:
        return launch_repeatable(kernel, (programs,), args, launch_options, changing, **constants)
    except UnsupportedError as e:
        raise UnsupportedError(
            f"q: head_dim {q.shape[2]} in {dtype_name(q.dtype)} with {constants['GROUP']} heads per KV head is "
            f"unsupported on this GPU. {e}"
        ) from None


def compute_delta(out, d_out, starts) -> torch.Tensor:
    """Return delta, the sums of d_out * out per query and head, in the layout of `statistics_offset`.

    R and num_warps determine the order of these sums, so another value may change bits.
    """
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
    """Return dq, dk and dv; `schedule` and grad_kv override the launch options of `_grad_q` and `_grad_kv`."""
    tokens, heads = q.shape[:2]
    seqs, kv = starts.shape[0] - 1, k.shape[1]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if tokens:
        pads, delta = _pads(tokens, seqs), compute_delta(out, d_out, starts)
        by_query = _schedule("grad_q", q, heads // kv, schedule)
        by_key = _schedule("grad_kv", q, heads // kv, grad_kv or {})

        def values(tiles):
            return starts, _score_factor(scale), scale, tokens, seqs, tiles, pads

        tiles = tokens // by_query["BLOCK_Q"] + seqs + 1
        _run(_grad_q, tiles * kv, (q, k, v, d_out, shift, delta, dq, *values(tiles)), q, k, v, by_query)
        tiles = tokens // by_key["BLOCK_N"] + seqs + 1
        _run(_grad_kv, tiles * kv, (q, k, v, d_out, shift, delta, dk, dv, *values(tiles)), q, k, v, by_key)
    return dq, dk, dv
