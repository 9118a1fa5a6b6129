"""Checks of a forward's arguments in a model, its decoder and its head: tokens, masks, labels, temperature.

No numerics. `supported` checks the model itself, `policy` its configuration. The checks return the facts that all ranks
must agree on. tests/megatron/test_arguments.py and test_rejections.py match the messages.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable

import torch

from alignkit.dist import CP, strict
from alignkit.errors import AlignkitError, InputError, UnsupportedError
from alignkit.ops._common import check_constant
from alignkit.runtime.families import on_host

from .state import device_of


def _require(holds: torch.Tensor, kind: type[AlignkitError], message: str, offender: Callable[[], str]) -> None:
    """Raise kind(message), with the description by `offender`, unless the boolean tensor `holds` is true.

    On a GPU, outside of strict mode, the check is asynchronous: a device-side assertion prints `message` alone and
    stops all further work of the process.
    """
    if not on_host(holds.device) and not strict():
        torch._assert_async(holds, message)
    elif not holds:
        raise kind(f"{message}, got {offender()}")


def _first(wrong: torch.Tensor) -> int:
    """Return the index of the first true value of a vector."""
    return int(wrong.nonzero()[0])


def _check_tensor(
    name: str, t, dtypes: tuple[torch.dtype, ...], shape: tuple, device: torch.device | None = None
) -> None:
    """Raise InputError unless `t` is a plain tensor of these dtypes, this shape (None: any size) and device."""
    kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    wanted = f"expected {kinds} [{', '.join('any' if n is None else str(n) for n in shape)}]"
    if not isinstance(t, torch.Tensor):
        raise InputError(f"{name}: {wanted}, got {'None' if t is None else type(t).__name__}")
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        raise InputError(f"{name}: expected a plain torch.Tensor, got a {type(t).__name__}")
    if t.layout != torch.strided:
        raise InputError(f"{name}: expected a dense tensor, got layout {t.layout}")
    if t.is_nested:
        raise InputError(f"{name}: expected a dense tensor, got a nested one")
    if (
        t.dtype not in dtypes
        or t.dim() != len(shape)
        or any(size not in (None, n) for size, n in zip(shape, t.shape, strict=True))
    ):
        raise InputError(f"{name}: {wanted}, got {str(t.dtype).removeprefix('torch.')} {list(t.shape)}")
    if device is not None and t.device != device:
        raise InputError(f"{name}: must be on the model's device, {device}, got {t.device}")


def check_input(
    model,
    vocab_size: int,
    *,
    input_ids=None,
    position_ids=None,
    decoder_input=None,
    inference_context=None,
    packed_seq_params=None,
    padding_mask=None,
    **_,
) -> dict:
    """Check the arguments of GPTModel._preprocess; return the facts that ranks must agree on."""
    if inference_context is not None or _inferring():
        name = "InferenceMode: must be inactive" if inference_context is None else "inference_context: must be None"
        raise UnsupportedError(f"{name}, because Megatron's inference is not supported")
    if _quantizing():
        raise UnsupportedError("fp8_autocast: must be off, because TransformerEngine's fp8 and fp4 are not supported")
    device, config = device_of(model), model.config
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    given = "input_ids"
    if not model.pre_process:
        if decoder_input is not None:
            raise UnsupportedError(
                "decoder_input: must be None on pipeline stages after the first, which receive their input by "
                f"set_input_tensor(), got a {type(decoder_input).__name__}"
            )
        given, decoder_input = "input_tensor", model.decoder.input_tensor
    elif decoder_input is not None:
        given = "decoder_input"
    if given == "input_ids":
        _check_tensor("input_ids", input_ids, (torch.int64, torch.int32), (None, None), device)
        b, s = input_ids.shape
    else:
        _check_tensor(given, decoder_input, (config.params_dtype,), (None, None, config.hidden_size), device)
        s, b = decoder_input.shape[0] * ranks, decoder_input.shape[1]
    if not s or not b:
        raise InputError(f"{given}: must not be empty, got {b} sequences of {s} tokens")
    if s % (2 if config.context_parallel_size > 1 else 1):
        raise InputError(
            f"{given}: must have an even number of tokens per sequence on each context-parallel rank, got {s}"
        )
    if s % ranks:
        raise InputError(
            f"{given}: the number of tokens per sequence must be a multiple of tensor_model_parallel_size = {ranks} "
            f"with sequence parallelism, got {s}"
        )
    if given == "input_ids":
        low, high = input_ids.aminmax()
        # Under tensor parallelism Megatron silently embeds an id outside of the vocabulary as zeros.
        _require(
            (low >= 0) & (high < vocab_size),
            InputError,
            f"input_ids: must be in [0, {vocab_size})",
            lambda: f"ids from {low.item()} to {high.item()}",
        )
    if position_ids is not None and given == "input_ids":
        _check_tensor("position_ids", position_ids, (torch.int64, torch.int32), (None, s))
        if position_ids.shape[0] not in (1, b):
            raise InputError(
                f"position_ids: dim 0 must be 1 or {b}, the batch size of input_ids, got {position_ids.shape[0]}"
            )
    if padding_mask is not None:
        _check_tensor("padding_mask", padding_mask, (torch.bool,), (b, s), device)
    packed = None if packed_seq_params is None else _check_packed(packed_seq_params, s, b, device, model)
    return {given: (b, s), "packed_seq_params": packed, "padding_mask": padding_mask is None}


def _inferring() -> bool:
    """Return whether Megatron's InferenceMode (since 0.18) is active."""
    utils = sys.modules.get("megatron.core.inference.utils")
    return hasattr(utils, "InferenceMode") and utils.InferenceMode.is_active()


def _quantizing() -> bool:
    """Return whether TransformerEngine's fp8 or fp4 autocast is active."""
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):  # fp8: before 2.8
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None:
            return bool(manager.is_fp8_enabled())
    return False


def check_request(model, vocab_size: int, hidden: torch.Tensor, labels, requested) -> dict:
    """Check `labels` and a LogProbsRequest; return the facts that ranks must agree on.

    hidden: the decoder's output ``[s, b, h]``, or this rank's part of it under sequence parallelism.
    """
    ranks = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
    shape, device = (hidden.shape[1], hidden.shape[0] * ranks), hidden.device
    check_labels(vocab_size, shape, device, labels, requested)
    given = requested.temperature
    return {
        "labels": shape,
        "ignore_index": int(requested.ignore_index),
        "return_entropy": bool(requested.return_entropy),
        "temperature": "on a device"
        if isinstance(given, torch.Tensor) and not _reads_values(given.device)
        else "one for each label"
        if isinstance(given, torch.Tensor) and given.dim()
        else float(given),
    }


def check_labels(vocab_size: int, shape: tuple[int, int], device: torch.device, labels, requested) -> None:
    """Raise InputError unless `labels` and the LogProbsRequest match a micro-batch of `shape` [b, s]."""
    if isinstance(requested.ignore_index, bool) or not isinstance(requested.ignore_index, numbers.Integral):
        raise InputError(f"ignore_index: must be an integer, got {requested.ignore_index!r}")
    if not isinstance(requested.return_entropy, (bool, int)):
        raise InputError(f"return_entropy: must be True or False, got {requested.return_entropy!r}")
    _check_temperature(requested.temperature, shape, device)
    _check_tensor("labels", labels, (torch.int64,), shape, device)
    if _reads_values(device):
        wrong = ((labels < 0) | (labels >= vocab_size)) & (labels != requested.ignore_index)
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise InputError(
                f"labels: must be in [0, {vocab_size}) or equal ignore_index = {requested.ignore_index}, got "
                f"{labels[row, column].item()} at [{row}, {column}]"
            )


def _check_temperature(given, shape: tuple[int, int], device: torch.device) -> None:
    """Raise InputError unless the temperature is a positive number, a 0-d tensor, or an fp32 tensor of `shape`."""
    if isinstance(given, torch.Tensor):
        check_constant("temperature", given)
        if given.dim():
            _check_tensor("temperature", given, (torch.float32,), shape, device)
        else:
            _check_tensor(
                "temperature",
                given,
                (torch.float32, torch.float64, torch.bfloat16),
                (),
                None if on_host(given.device) else device,
            )
    elif isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise InputError(f"temperature: must be a number or a tensor, got {given!r}")
    if not isinstance(given, torch.Tensor) or _reads_values(given.device):
        try:
            values = torch.as_tensor(given, dtype=torch.float32, device="cpu").reshape(-1)
        except (OverflowError, RuntimeError):
            raise InputError(f"temperature: must be positive and finite, got {given!r:.200}") from None
        wrong = values[~((values > 0) & (values < math.inf))]
        if wrong.numel():
            raise InputError(f"temperature: must be positive and finite, got {wrong[0].item()}")


def _reads_values(device: torch.device) -> bool:
    """Return whether to check values on `device` from the host. Otherwise the ops check them on the GPU."""
    return on_host(device) or strict()


_BLOCK_ARGUMENTS = frozenset({"rotary_pos_emb", "packed_seq_params", "padding_mask"})
"""Supported arguments of a TransformerBlock in addition to its input and mask."""


def check_call(s: int, b: int, cp: CP, attention_mask, **arguments) -> dict:
    """Check the arguments of a TransformerBlock; return the facts that ranks must agree on.

    s, b: tokens in a row and rows of the micro-batch; under context parallelism (`cp`), tokens of this rank.
    arguments: all arguments but the input and the mask.
    """
    for name, value in arguments.items():
        if name not in _BLOCK_ARGUMENTS and value is not None:
            raise UnsupportedError(
                f"{name}: must be None, because the aligned decoder does not support it, got a {type(value).__name__}"
            )
    if attention_mask is not None:
        if arguments.get("packed_seq_params") is not None:
            raise UnsupportedError("attention_mask: must be None with packed_seq_params")
        _check_causal(attention_mask, s, b, cp)
    return {"micro-batch": (s, b), "attention_mask": attention_mask is None}


def packed_cu_seqlens(params) -> torch.Tensor:
    """Return ``cu_seqlens`` ``[B+1]`` of a packed micro-batch, padding of each sequence included."""
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded


def _check_packed(params, s: int, b: int, device: torch.device, model) -> tuple[int, ...]:
    """Check the PackedSeqParams of a micro-batch of which this rank has `s` tokens.

    Return the facts that ranks must agree on: the values of ``cu_seqlens`` if the host may read them, else its shape.
    """
    fields = (
        "qkv_format",
        "cu_seqlens_q",
        "cu_seqlens_kv",
        "cu_seqlens_q_padded",
        "cu_seqlens_kv_padded",
        "max_seqlen_q",
        "max_seqlen_kv",
    )
    for name in fields:
        if not hasattr(params, name):
            raise InputError(f"packed_seq_params: expected Megatron's PackedSeqParams, got {type(params).__name__}")
    if params.qkv_format != "thd":
        raise UnsupportedError(f"packed_seq_params.qkv_format: must be 'thd', got {params.qkv_format!r}")
    if b != 1:
        raise UnsupportedError(f"packed_seq_params: must be None unless the micro-batch size is 1, got size {b}")
    ranks = model.config.context_parallel_size
    group = getattr(params, "cp_group", None)
    if group not in (None, getattr(model.pg_collection, "cp", None)) and max(ranks, group.size()) > 1:
        raise UnsupportedError(
            f"packed_seq_params.cp_group: must be None or the model's context-parallel group of {ranks} ranks, got "
            f"another group of {group.size()} ranks"
        )
    if getattr(params, "local_cp_size", None) not in (None, ranks):
        raise UnsupportedError(
            f"packed_seq_params.local_cp_size: must be None or context_parallel_size = {ranks}, got "
            f"{params.local_cp_size}"
        )
    s *= ranks
    for name in fields[1:5]:
        if (value := getattr(params, name)) is not None:
            _check_tensor(f"packed_seq_params.{name}", value, (torch.int32, torch.int64), (None,), device)
    longest = 0
    for name in fields[5:]:
        value = getattr(params, name)
        if isinstance(value, torch.Tensor) and value.dim() == 0 and on_host(value.device):
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"packed_seq_params.{name}: must be a nonnegative integer, got {value!r}")
        longest = max(longest, value)
    padded = "" if params.cu_seqlens_q_padded is None and params.cu_seqlens_kv_padded is None else "_padded"
    q, kv = (getattr(params, f"cu_seqlens_{side}{padded}") for side in ("q", "kv"))
    of_q, of_kv = (f"packed_seq_params.cu_seqlens_{side}{padded}" for side in ("q", "kv"))
    for name, given, other in ((of_q, q, of_kv), (of_kv, kv, of_q)):
        if given is None:
            raise InputError(f"{name}: must be given and equal {other}, got None")
        if not given.numel():
            raise InputError(f"{name}: must not be empty")
    if q.shape != kv.shape:
        raise InputError(f"{of_kv}: must equal {of_q}, which has {len(q)} values, got {len(kv)} values")
    if kv is not q:
        _require((q == kv).all(), InputError, f"{of_kv}: must equal {of_q}", lambda: _unequal(q, kv))
    lengths = q.diff()
    _require(
        (q[0] == 0) & (q[-1] == s) & (lengths >= 0).all(),
        InputError,
        f"{of_q}: must begin with 0, not decrease, and end at {s}, the number of tokens"
        + (" of all context-parallel ranks" if ranks > 1 else ""),
        lambda: _not_ascending(q, lengths),
    )
    if ranks > 1:
        _require(
            (q % (2 * ranks) == 0).all(),
            InputError,
            f"{of_q}: must contain only multiples of 2 * context_parallel_size = {2 * ranks}",
            lambda: f"{q[i := _first(q % (2 * ranks) != 0)].item()} at index {i}",
        )
    _require(
        (lengths <= longest).all(),
        InputError,
        f"packed_seq_params: each sequence must have at most max(max_seqlen_q, max_seqlen_kv) = {longest} tokens",
        lambda: f"{lengths[i := _first(lengths > longest)].item()} tokens in sequence {i}",
    )
    return tuple(q.tolist()) if _reads_values(q.device) else tuple(q.shape)


def _unequal(q: torch.Tensor, kv: torch.Tensor) -> str:
    i = _first(q != kv)
    return f"{kv[i].item()} instead of {q[i].item()} at index {i}"


def _not_ascending(starts: torch.Tensor, lengths: torch.Tensor) -> str:
    """Describe the first value of `cu_seqlens` that is wrong: the first, a smaller one, or the last."""
    if starts[0] != 0:
        return f"the first value {starts[0].item()}"
    if (lengths < 0).any():
        i = _first(lengths < 0)
        return f"{starts[i + 1].item()} after {starts[i].item()} at index {i + 1}"
    return f"the last value {starts[-1].item()}"


def _check_causal(mask, s: int, b: int, cp: CP) -> None:
    """Raise UnsupportedError unless a mask (True hides) is causal for each sequence, with padding on the right.

    The mask has one row for each token of this rank and one column for each token of the whole sequence.
    """
    if (
        type(mask) is not torch.Tensor
        or mask.is_nested
        or mask.layout != torch.strided
        or mask.device.type == "meta"
        or mask.dtype != torch.bool
        or mask.dim() != 4
        or mask.shape[0] not in (1, b)
        or mask.shape[1:] != (1, s, s * cp.size)
    ):
        given = f"a {type(mask).__name__}"
        if isinstance(mask, torch.Tensor):
            given = "a nested tensor" if mask.is_nested else f"{mask.dtype} {list(mask.shape)} on {mask.device}"
        raise UnsupportedError(
            f"attention_mask: expected a dense bool tensor [1 or {b}, 1, {s}, {s * cp.size}] or None, got {given}"
        )
    mask, positions = mask[:, 0], cp.positions(s, None, mask.device)
    token = ~mask.gather(2, positions.expand(len(mask), s)[:, :, None])[:, :, 0]
    causal = torch.arange(s * cp.size, device=mask.device) > positions[:, None]
    on_the_right = (token[:, 1:] <= token[:, :-1]).all()
    # Rank 0 has each sequence's first token. Other ranks may have only padding, which must be causal too.
    on_the_right &= token[:, 0].all() if cp.rank == 0 else (mask | ~causal).all()
    other = (mask ^ causal) & token[:, :, None]
    _require(
        on_the_right & ~other.any(),
        UnsupportedError,
        "attention_mask: must be causal for each sequence, with padding only on the right",
        lambda: f"another value at {other.nonzero()[0].tolist()}" if other.any() else "padding on the left",
    )
