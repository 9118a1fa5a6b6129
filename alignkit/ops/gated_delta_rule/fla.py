"""Integration with flash-linear-attention: a drop-in function, and `register`, which makes its layers call alignkit.

The drop-in function has the parameters of fla-core 0.6. A change of their names or order breaks the layers that call
it. `register` is public (docs/api/ops.md).
"""

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
    """Compute `alignkit.ops.gated_delta_rule.chunk_gated_delta_rule_bwd_dhu` from the arguments of fla-core 0.6.

    Args:
        q: [B, T, H, K]; this and all other tensors as in the op, but g, gk and dht may also be fp16 or bf16.
        k: [B, T, H, K].
        w: [B, T, HV, K].
        do: [B, T, HV, V].
        dv: [B, T, HV, V].
        g: None, or [B, T, HV].
        gk: None, or [B, T, HV, K].
        h0: None, or the initial states; if given, dh0 is returned. Its values are not read.
        dht: None, or [N, HV, K, V].
        scale: factor of q; None: ``K ** -0.5``.
        state_v_first: states are [..., V, K] instead of [..., K, V].
        cu_seqlens: None, or int32 or int64 [N + 1].
        chunk_size: must be 64.
        chunk_indices: None, or a tensor with one row per chunk of the packed sequences, which saves a synchronization.
        chunk_offsets: ignored.
        use_graph: ignored; calls with chunk_indices, and dense ones, can always be captured in a CUDA graph.
        use_exp2: gates are logarithms to base 2. Callers written for fla-core before 0.6, whose default is False, must
            pass it.
        transpose_state_layout: the name of state_v_first in fla-core before 0.6.

    Returns:
        dh, dh0 or None, and dv2, as the op.

    Raises:
        InputError: an argument is invalid for the op, or chunk_size is not 64.
    """
    require(check_int("chunk_size", chunk_size) == CHUNK, f"chunk_size: must be {CHUNK}, got {chunk_size}")
    base2, v_first = check_flag("use_exp2", use_exp2), check_flag("state_v_first", state_v_first)
    v_first = check_flag("transpose_state_layout", transpose_state_layout) or v_first
    num_chunks = None
    if cu_seqlens is not None and chunk_indices is not None:
        check_plain("chunk_indices", chunk_indices)
        require(chunk_indices.numel() > 0, f"chunk_indices: must not be empty, got shape {tuple(chunk_indices.shape)}")
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


def _unsupported(q: torch.Tensor, do: torch.Tensor, chunk_size: int = CHUNK, **_) -> str | None:
    """Return why alignkit's kernels do not support a call, or None if they do."""
    try:
        dispatch.backend_of(q.device)
    except BackendError as e:
        return str(e)
    if q.dtype not in TYPES:
        return f"q: dtype must be one of {', '.join(map(str, TYPES))}, got {q.dtype}"
    for name, t in (("q", q), ("do", do)):
        if t.shape[-1] not in DIMS:
            return f"{name}: head dimension must be one of {', '.join(map(str, DIMS))}, got {t.shape[-1]}"
    return None if chunk_size == CHUNK else f"chunk_size: must be {CHUNK}, got {chunk_size}"


def register() -> None:
    """Register alignkit's kernels as a backend of flash-linear-attention, whose layers then call them.

    flash-linear-attention keeps its own kernels for unsupported calls (other devices, head dimensions, dtypes or chunk
    sizes) and logs the reason. Invalid arguments raise an InputError.

    Raises:
        UnsupportedError: flash-linear-attention is not installed, or is older than 0.6 and cannot dispatch this
            function; call `chunk_gated_delta_rule_bwd_dhu` of this module instead.
    """
    if importlib.util.find_spec("fla") is None:
        raise UnsupportedError("fla: must be installed. Run `pip install flash-linear-attention`")
    if importlib.util.find_spec("fla.backends") is None:
        raise UnsupportedError(
            "fla-core: must be 0.6 or newer, got a version without fla.backends. Upgrade it, or call "
            "alignkit.ops.gated_delta_rule.fla.chunk_gated_delta_rule_bwd_dhu directly"
        )
    from fla import backends as theirs  # pyright: ignore[reportAttributeAccessIssue] - another module named fla
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu as function

    arguments = inspect.signature(function)

    class Backend(theirs.BaseBackend):  # pyright: ignore[reportAttributeAccessIssue] - another module named fla
        backend_type = "alignkit"
        priority = -1

        def chunk_gated_delta_rule_bwd_dhu_verifier(self, *args, **kwargs):
            reason = _unsupported(**arguments.bind(*args, **kwargs).arguments)
            return reason is None, reason

        def chunk_gated_delta_rule_bwd_dhu(self, *args, **kwargs):
            return chunk_gated_delta_rule_bwd_dhu(**arguments.bind(*args, **kwargs).arguments)

    theirs.register("common")(Backend)  # pyright: ignore[reportAttributeAccessIssue] - another module named fla
