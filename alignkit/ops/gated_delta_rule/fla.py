"""For users of flash-linear-attention: its function by this name with its arguments, and `register`, after which its
layers call it."""

from __future__ import annotations

import importlib.util
import inspect

import torch

from ...errors import BackendError, InputError, UnsupportedError
from ...runtime import dispatch
from .._common import WITH_FP16, check_flag, check_int, check_plain, check_tensor, require
from . import CHUNK, DIMS
from . import chunk_gated_delta_rule_bwd_dhu as _back

TYPES = (torch.bfloat16, torch.float16)


def chunk_gated_delta_rule_bwd_dhu(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    do: torch.Tensor,
    dv: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    h0: torch.Tensor | None = None,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = CHUNK,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    use_graph: bool = False,
    *,
    use_exp2: bool = True,
    transpose_state_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`alignkit.ops.gated_delta_rule.chunk_gated_delta_rule_bwd_dhu` by the arguments of fla-core 0.6, in their order.

    Args:
        h0: None, or the initial states: then dh0 is returned.
        chunk_size: 64.
        chunk_indices: of packed sequences, as long as they have chunks; with it nothing waits for the device.
        chunk_offsets, use_graph: not needed. Every call can be captured in a CUDA graph, if chunk_indices is given.
        use_exp2: of fla-core before 0.6, where False is the default: gates are logarithms to base e. Give it there.
        transpose_state_layout: of fla-core before 0.6: state_v_first.

    Returns:
        dh, dh0 or None, dv2.

    Raises:
        InputError: as the op does, and for another chunk_size.
    """
    require(check_int("chunk_size", chunk_size) == CHUNK, f"chunk_size: {chunk_size} is not {CHUNK}")
    base2, v_first = check_flag("use_exp2", use_exp2), check_flag("state_v_first", state_v_first)
    v_first = check_flag("transpose_state_layout", transpose_state_layout) or v_first
    num_chunks = None
    if cu_seqlens is not None and chunk_indices is not None:
        check_plain("chunk_indices", chunk_indices)
        require(chunk_indices.numel() > 0, "chunk_indices: empty")
        num_chunks = len(chunk_indices)
    for name, t in (("g", g), ("gk", gk), ("dht", dht)):
        if t is not None:
            check_tensor(name, t, dtypes=WITH_FP16)
    g, gk, dht = (t if t is None else t.float() for t in (g, gk, dht))
    try:
        return _back(
            q,
            k,
            w,
            do,
            dv,
            g,
            gk,
            dht=dht,
            scale=scale,
            cu_seqlens=cu_seqlens,
            num_chunks=num_chunks,
            state_v_first=v_first,
            base2=base2,
            need_dh0=h0 is not None,
        )
    except InputError as e:
        if not str(e).startswith("num_chunks: "):
            raise
        raise InputError(f"chunk_indices: {str(e).removeprefix('num_chunks: ')}") from None


def _refused(q: torch.Tensor, do: torch.Tensor, chunk_size: int = CHUNK, **_) -> str | None:
    """Why a call is not for this project's kernels, or None."""
    try:
        dispatch.name(q.device)
    except BackendError as e:
        return str(e)
    if q.dtype not in TYPES:
        return f"q: dtype {q.dtype} is none of {', '.join(map(str, TYPES))}"
    if q.shape[-1] not in DIMS or do.shape[-1] not in DIMS:
        return f"head dimensions {q.shape[-1]}, {do.shape[-1]} are not all among {', '.join(map(str, DIMS))}"
    return None if chunk_size == CHUNK else f"chunk_size {chunk_size} is not {CHUNK}"


def register() -> None:
    """From now on flash-linear-attention's layers call this project's kernels, by its backend dispatch.

    Calls that they are not for (other devices, head dimensions or types, chunks of another size) go to
    flash-linear-attention's own kernels as before; it logs that. Wrong arguments raise an InputError.

    Raises:
        UnsupportedError: flash-linear-attention is not installed, or older than 0.6, which does not dispatch this
            function: call the one above in its place.
    """
    if importlib.util.find_spec("fla") is None:
        raise UnsupportedError("flash-linear-attention is not installed")
    if importlib.util.find_spec("fla.backends") is None:
        raise UnsupportedError(
            "fla-core before 0.6 does not dispatch this function: call "
            "alignkit.ops.gated_delta_rule.fla.chunk_gated_delta_rule_bwd_dhu in its place"
        )
    from fla import backends as theirs  # pyright: ignore[reportAttributeAccessIssue] - it is not this file
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu as function

    arguments = inspect.signature(function)

    class Backend(theirs.BaseBackend):  # pyright: ignore[reportAttributeAccessIssue] - it is not this file
        backend_type = "alignkit"
        priority = -1

        def chunk_gated_delta_rule_bwd_dhu_verifier(self, *args, **kwargs):
            reason = _refused(**arguments.bind(*args, **kwargs).arguments)
            return reason is None, reason

        def chunk_gated_delta_rule_bwd_dhu(self, *args, **kwargs):
            return chunk_gated_delta_rule_bwd_dhu(**arguments.bind(*args, **kwargs).arguments)

    theirs.register("common")(Backend)  # pyright: ignore[reportAttributeAccessIssue] - it is not this file
