"""What a GPTModel, its decoder and its head may be called with: tokens, masks, packed sequences, labels, temperature."""

from __future__ import annotations

import math
import numbers
import sys

import torch

from alignkit.dist import CP, strict
from alignkit.errors import AlignkitError, InputError, UnsupportedError
from alignkit.runtime.families import on_host

from .look import device_of


def _demand(holds: torch.Tensor, kind: type[AlignkitError], message: str, *values: torch.Tensor) -> None:
    """Raises kind(message), with the `values` that were found, unless the tensor `holds` is true.

    On a device nothing is waited for, unless in strict mode: there a device-side assertion stops all further work
    of the process and prints `message`."""
    if not on_host(holds.device) and not strict():
        torch._assert_async(holds, message)
    elif not holds:
        found = [str(v) for t in values for v in t.reshape(-1).tolist()]
        raise kind(message + (f", not {', '.join(found)}" if found else ""))


def _tensor(name: str, t, dtypes: tuple[torch.dtype, ...], shape: tuple, device: torch.device | None = None) -> None:
    """InputError unless `t` is a plain tensor of this type, shape (None: any size) and device."""
    kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    wanted = f"expected {kinds} [{', '.join('any' if n is None else str(n) for n in shape)}]"
    if not isinstance(t, torch.Tensor):
        raise InputError(f"{name}: {wanted}, got {type(t).__name__}")
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided or t.is_nested:
        raise InputError(f"{name}: {wanted}, got a {type(t).__name__} of layout {t.layout}")
    if (
        t.dtype not in dtypes
        or t.dim() != len(shape)
        or any(asked not in (None, n) for asked, n in zip(shape, t.shape, strict=True))
    ):
        raise InputError(f"{name}: {wanted}, got {str(t.dtype).removeprefix('torch.')} {list(t.shape)}")
    if device is not None and t.device != device:
        raise InputError(f"{name}: on {t.device}, but the model is on {device}")


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
    """Checks what GPTModel._preprocess is called with, and returns what must agree between ranks."""
    if inference_context is not None or _inferring():
        raise UnsupportedError("inference_context: Megatron's inference is not supported")
    if _quantizing():
        raise UnsupportedError("fp8_autocast: TransformerEngine's fp8 and fp4 are not supported")
    device, config = device_of(model), model.config
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    given = "input_ids"
    if not model.pre_process:
        if decoder_input is not None:
            raise UnsupportedError(
                "decoder_input: a pipeline stage after the first takes what set_input_tensor gave it"
            )
        given, decoder_input = "input_tensor", model.decoder.input_tensor
    elif decoder_input is not None:
        given = "decoder_input"
    if given == "input_ids":
        _tensor("input_ids", input_ids, (torch.int64, torch.int32), (None, None), device)
        b, s = input_ids.shape
    else:
        _tensor(given, decoder_input, (config.params_dtype,), (None, None, config.hidden_size), device)
        s, b = decoder_input.shape[0] * ranks, decoder_input.shape[1]
    if not s or not b:
        raise InputError(f"{given}: an empty micro-batch, {b} rows of {s} tokens")
    if s % (2 if config.context_parallel_size > 1 else 1):
        raise InputError(f"{given}: {s} tokens in a row are not two chunks of one length (context parallelism)")
    if s % ranks:
        raise InputError(f"{given}: {s} tokens in a row do not divide over {ranks} ranks (sequence parallelism)")
    if given == "input_ids":
        low, high = input_ids.aminmax()
        # With tensor parallelism Megatron embeds a token outside the vocabulary as zeros.
        _demand(
            (low >= 0) & (high < vocab_size),
            InputError,
            f"input_ids: the lowest and highest id must be in [0, {vocab_size})",
            low,
            high,
        )
    if position_ids is not None and given == "input_ids":
        _tensor("position_ids", position_ids, (torch.int64, torch.int32), (None, s))
        if position_ids.shape[0] not in (1, b):
            raise InputError(f"position_ids: {position_ids.shape[0]} rows for {b} of input_ids")
    if padding_mask is not None:
        _tensor("padding_mask", padding_mask, (torch.bool,), (b, s), device)
    packed = None if packed_seq_params is None else _check_packed(packed_seq_params, s, b, device, model)
    return {given: (b, s), "packed_seq_params": packed, "padding_mask": padding_mask is None}


def _inferring() -> bool:
    """Whether Megatron's own mode of inference is on, which versions since 0.18 have."""
    utils = sys.modules.get("megatron.core.inference.utils")
    return hasattr(utils, "InferenceMode") and utils.InferenceMode.is_active()


def _quantizing() -> bool:
    """Whether TransformerEngine's autocast to fp8 or fp4 is on."""
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):  # the latter before 2.8
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None:
            return bool(manager.is_fp8_enabled())
    return False


def check_request(model, vocab_size: int, hidden: torch.Tensor, labels, asked) -> dict:
    """Checks what the logprobs of `labels` are `asked` with (a LogProbsRequest), in the caller's terms, and returns
    what must agree between ranks. hidden: what the trunk gave, ``[s, b, h]``, with sequence parallelism a part."""
    ranks = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
    shape, device = (hidden.shape[1], hidden.shape[0] * ranks), hidden.device
    check_labels(vocab_size, shape, device, labels, asked)
    given = asked.temperature
    return {
        "labels": shape,
        "ignore_index": int(asked.ignore_index),
        "return_entropy": bool(asked.return_entropy),
        "temperature": "on a device"
        if isinstance(given, torch.Tensor) and not _looks(given.device)
        else "one for each label"
        if isinstance(given, torch.Tensor) and given.dim()
        else float(given),
    }


def check_labels(vocab_size: int, shape: tuple[int, int], device: torch.device, labels, asked) -> None:
    """InputError unless `labels` and the LogProbsRequest fit a micro-batch of `shape` [b, s]."""
    if isinstance(asked.ignore_index, bool) or not isinstance(asked.ignore_index, numbers.Integral):
        raise InputError(f"ignore_index: {asked.ignore_index!r} is not an integer")
    if not isinstance(asked.return_entropy, (bool, int)):
        raise InputError(f"return_entropy: {asked.return_entropy!r} is not True or False")
    _check_temperature(asked.temperature, shape, device)
    _tensor("labels", labels, (torch.int64,), shape, device)
    if _looks(device):
        wrong = ((labels < 0) | (labels >= vocab_size)) & (labels != asked.ignore_index)
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise InputError(
                f"labels: id {labels[row, column].item()} at [{row}, {column}] is neither in "
                f"[0, {vocab_size}) nor the ignored one, {asked.ignore_index}"
            )


def _check_temperature(given, shape: tuple[int, int], device: torch.device) -> None:
    """InputError unless it is a positive number, also as a tensor without dimensions, or an fp32 tensor of `shape`."""
    if isinstance(given, torch.Tensor):
        if given.dim():
            _tensor("temperature", given, (torch.float32,), shape, device)
        else:
            _tensor(
                "temperature",
                given,
                (torch.float32, torch.float64, torch.bfloat16),
                (),
                None if on_host(given.device) else device,
            )
    elif isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise InputError(f"temperature: {given!r} is not a number or a tensor")
    if not isinstance(given, torch.Tensor) or _looks(given.device):
        try:
            values = torch.as_tensor(given, dtype=torch.float32, device="cpu").reshape(-1)
        except (OverflowError, RuntimeError):
            raise InputError(f"temperature: {given} is not positive and finite") from None
        wrong = values[~((values > 0) & (values < math.inf))]
        if wrong.numel():
            raise InputError(f"temperature: {wrong[0].item()} is not positive and finite")


def _looks(device: torch.device) -> bool:
    """Whether values on `device` are looked at before they are used; on a GPU the op checks them there."""
    return on_host(device) or strict()


_BLOCK = frozenset({"rotary_pos_emb", "packed_seq_params", "padding_mask"})
"""Arguments of a TransformerBlock beside its input and mask that it may have."""


def check_call(s: int, b: int, cp: CP, attention_mask, **arguments) -> dict:
    """Checks what a TransformerBlock is called with, and returns what must agree between ranks.

    s, b: length and size of the whole micro-batch, or of this rank's part of its sequences (`cp`). arguments: all but the input and the mask.
    """
    for name, value in arguments.items():
        if name not in _BLOCK and value is not None:
            raise UnsupportedError(f"{name}: a TransformerBlock with it is not supported")
    if attention_mask is not None:
        if arguments.get("packed_seq_params") is not None:
            raise UnsupportedError("packed_seq_params: needs a micro-batch of one row and no attention_mask")
        _check_causal(attention_mask, s, b, cp)
    return {"micro-batch": (s, b), "attention_mask": attention_mask is None}


def packed_cu_seqlens(params) -> torch.Tensor:
    """``cu_seqlens`` ``[B+1]`` of a packed micro-batch, each sequence with its padding."""
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded


def _check_packed(params, s: int, b: int, device: torch.device, model) -> tuple[int, ...]:
    """Checks the `params` of a packed micro-batch, of which this rank has `s` tokens. Returns what ranks must agree on: the values of ``cu_seqlens`` where
    they may be looked at, else how many there are."""
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
        raise UnsupportedError(f"packed_seq_params.qkv_format: {params.qkv_format!r} is not supported")
    if b != 1:
        raise UnsupportedError("packed_seq_params: needs a micro-batch of one row and no attention_mask")
    ranks = model.config.context_parallel_size
    group = getattr(params, "cp_group", None)
    if group not in (None, getattr(model.pg_collection, "cp", None)) and max(ranks, group.size()) > 1:
        raise UnsupportedError("packed_seq_params.cp_group: not the model's own")
    if getattr(params, "local_cp_size", None) not in (None, ranks):
        raise UnsupportedError(
            f"packed_seq_params.local_cp_size: {params.local_cp_size} is not supported, only {ranks}"
        )
    s *= ranks
    for name in fields[1:5]:
        if (value := getattr(params, name)) is not None:
            _tensor(f"packed_seq_params.{name}", value, (torch.int32, torch.int64), (None,), device)
    longest = 0
    for name in fields[5:]:
        value = getattr(params, name)
        if isinstance(value, torch.Tensor) and value.dim() == 0 and on_host(value.device):
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"packed_seq_params.{name}: {value!r} is not a number of tokens")
        longest = max(longest, value)
    q = packed_cu_seqlens(params)
    kv = params.cu_seqlens_kv if params.cu_seqlens_q_padded is None else params.cu_seqlens_kv_padded
    differ = "packed_seq_params: cu_seqlens of queries and of keys differ"
    if q is None or kv is None or q.shape != kv.shape or not q.numel():
        raise InputError(differ)
    if kv is not q:
        _demand((q == kv).all(), InputError, differ)
    lengths = q.diff()
    _demand(
        (q[0] == 0) & (q[-1] == s) & (lengths >= 0).all(),
        InputError,
        f"packed_seq_params: cu_seqlens must begin with 0, not decrease, and end at {s}, the tokens",
        q,
    )
    if ranks > 1:
        _demand(
            (q % (2 * ranks) == 0).all(),
            InputError,
            f"packed_seq_params: cu_seqlens must be multiples of {2 * ranks}, the chunks of a sequence (context parallelism)",
            q,
        )
    _demand(
        (lengths <= longest).all(),
        InputError,
        f"packed_seq_params: no sequence may be longer than max_seqlen, which is {longest}",
        lengths,
    )
    return tuple(q.tolist()) if _looks(q.device) else tuple(q.shape)


def _check_causal(mask, s: int, b: int, cp: CP) -> None:
    """UnsupportedError unless a mask (True hides) is causal for the tokens of each sequence, with padding on the
    right. Its rows are those of this rank's tokens."""
    refusal = "attention_mask: only a causal one, with padding on the right, is supported"
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
        raise UnsupportedError(refusal)
    mask, positions = mask[:, 0], cp.positions(s, None, mask.device)
    token = ~mask.gather(2, positions.expand(len(mask), s)[:, :, None])[:, :, 0]
    causal = torch.arange(s * cp.size, device=mask.device) > positions[:, None]
    on_the_right = (token[:, 1:] <= token[:, :-1]).all()
    # Which rank has a sequence's first token is known; another's may all be padding, but that too sees nothing later.
    on_the_right &= token[:, 0].all() if cp.rank == 0 else (mask | ~causal).all()
    _demand(on_the_right & ~((mask ^ causal) & token[:, :, None]).any(), UnsupportedError, refusal)
