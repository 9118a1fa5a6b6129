"""cuBLASLt backend: chains, computed by the cuBLASLt algorithms that give the chain's bits.

An algorithm that reduces all of k in one CTA feeds the tensor core in ascending k, as the Triton kernel does. cuBLASLt
does not guarantee this, so an algorithm must meet three conditions:

- No workspace, which excludes algorithms whose CTAs exchange partial sums.
- No split-K and no reduction scheme in its configuration.
- A passed trial: before its first use at a k, it computes a GEMM with that k whose bytes must equal the chain's.

Algorithms that fail are skipped; if none is left, `prepare` declines. Without a workspace, calls share no state, so
they may run on any stream and in CUDA graphs.

The three conditions protect bits; the choice among passed algorithms affects speed alone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...runtime.cuda import CUBLASLT, fail, stream
from ...runtime.operands import Operand, dtype_name
from . import waves
from .problem import Product

_log = logging.getLogger(__name__)

# Enum values of the cuBLASLt API, equal in cuBLAS 12 and 13.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # hardware: cudaDataType_t
_COMPUTE_FP32 = 68  # hardware: cublasComputeType_t
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8  # hardware: cublasLtMatmulDescAttributes_t
_ADD_BIAS = 4  # hardware: cublasLtEpilogue_t
_MAX_WORKSPACE, _REDUCTION_MASK, _MIN_ALIGNMENT = 1, 3, (5, 6, 7, 8)  # hardware: cublasLtMatmulPreferenceAttributes_t
# hardware: cublasLtMatmulAlgoConfigAttributes_t
_CONFIG = {"id": 0, "tile": 1, "stages": 6, "cluster": 8, "swizzle": 4, "custom": 5, "split_k": 2, "reduction": 3}
_NOT_SUPPORTED = 15  # hardware: CUBLAS_STATUS_NOT_SUPPORTED
_SUGGESTIONS = 16
"""schedule: number of algorithms requested from cuBLASLt's heuristic."""
_TRIAL_OUTPUTS, _FEWEST_OUTPUTS = (512, 2048), (128, 512)
"""schedule: maximum rows and columns of a trial, and those for the longest k."""
_TRIAL_VALUES = 1 << 26
"""schedule: maximum elements of both operands of a trial."""
_MANY = 256
"""schedule: rows above which suggestions are sorted by waves.py."""
_ALIGNMENT = 16
"""hardware: required alignment of addresses and rows in bytes; the Triton kernel handles others."""

_Opaque = ctypes.c_uint64 * 8
"""hardware: the types cublasLtMatmulAlgo_t and cublasLtMatrixLayoutOpaque_t."""


Launcher = Callable[[int, int, int, int, int], int]
"""``launch(a, b, bias, out, stream)``, with addresses (bias 0 for none); returns the cuBLAS status."""


class _Suggestion(ctypes.Structure):
    """The struct cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", _Opaque),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Problem(NamedTuple):
    """The GEMM properties that determine the algorithm: out [m, n] = a [m, k] . b [n, k]^T.

    `accumulate` adds the result to out; `bias` adds a bias of out's dtype. `a_by_k` means that k is a's contiguous
    dimension and `lda` its row stride; otherwise `lda` is its column stride. The same holds for b.
    """

    device: int
    m: int
    n: int
    k: int
    a_by_k: bool
    lda: int
    b_by_k: bool
    ldb: int
    ldc: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    accumulate: bool
    bias: bool


def _aligned(elements: int) -> int:
    """Round up to a multiple of 8 elements (16 bytes of bf16)."""
    return elements + -elements % (_ALIGNMENT // 2)


def _layout(t: Operand) -> tuple[bool, int] | None:
    """Return (k is contiguous, leading dimension) of t [R, K], or None for an unsupported layout."""
    (rows, k), (row_stride, k_stride), _, _ = t
    if k_stride == 1:
        by_k, length, ld = True, k, row_stride if rows > 1 else k
    elif row_stride == 1:
        by_k, length, ld = False, rows, k_stride if k > 1 else rows
    else:
        return None
    return (by_k, ld) if ld >= length and ld == _aligned(ld) else None


def rejects(p: Product) -> str | None:
    """Return why cuBLASLt is not used for a GEMM, or None."""
    if (why := p.needs_hopper()) is not None:  # elsewhere the trial was never validated
        return why
    if p.leaves > 1:
        return f"leaves: must be 1, got {p.leaves}"
    (_, _, a_type, _), (_, _, b_type, _), (_, _, out_type, _) = p.a, p.b, p.out
    if a_type not in (torch.bfloat16, torch.float16):
        return f"x: dtype must be bf16 or fp16, got {dtype_name(a_type)}"
    if b_type != a_type:
        return f"weight: dtype must be x's {dtype_name(a_type)}, got {dtype_name(b_type)}"
    if out_type not in (a_type, torch.float32):
        return f"out_dtype: must be x's {dtype_name(a_type)} or fp32, got {dtype_name(out_type)}"
    if p.bias is not None and p.accumulate:
        return "bias: must be no if accumulate is yes, got yes"
    if p.bias is not None and p.bias[2] != out_type:
        return f"bias: dtype must be out's {dtype_name(out_type)}, got {dtype_name(p.bias[2])}"
    if p.bias is not None and not p.bias_is_dense:
        return f"bias: stride must be 1, got {p.bias[1][0]}"
    if not p.k:
        return "k: must be at least 1, got 0"
    for name, t in (("x", p.a), ("weight", p.b), ("out", p.out)):
        if _layout(t) is None:
            return (
                f"{name}: one stride must be 1, the other a multiple of {_ALIGNMENT // 2} and at least the length of "
                f"the dimension with stride 1, got strides {tuple(t[1])} for shape {tuple(t[0])}"
            )
    if p.out[1][1] != 1:
        return f"out: stride of the last dimension must be 1, got {p.out[1][1]}"
    for name, t in (("x", p.a), ("weight", p.b), ("bias", p.bias), ("out", p.out)):
        if t is not None and not t[3]:
            return f"{name}: address must be a multiple of {_ALIGNMENT} bytes"
    return None


def problem(p: Product) -> Problem:
    """Return the `Problem` of an accepted GEMM."""
    a_layout, b_layout, c_layout = _layout(p.a), _layout(p.b), _layout(p.out)
    assert a_layout is not None and b_layout is not None and c_layout is not None
    return Problem(
        p.device,  # pyright: ignore[reportArgumentType]
        p.out[0][0],
        p.out[0][1],
        p.k,
        *a_layout,
        *b_layout,
        c_layout[1],
        p.a[2],
        p.out[2],
        p.accumulate,
        p.bias is not None,
    )


def _address(bias: torch.Tensor | None) -> int:
    return 0 if bias is None else bias.data_ptr()


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return libcublasLt, which torch has already loaded under this name; warn and return None if it is missing."""
    try:
        library = ctypes.CDLL(CUBLASLT)
    except OSError as error:
        warnings.warn(f"{CUBLASLT}: cannot be loaded ({error}); GEMMs fall back to Triton: same bits, slower")
        return None
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for function, arguments in {
        "Create": [pointer],
        "MatmulDescCreate": [pointer, integer, integer],
        "MatmulDescSetAttribute": [pointer, integer, pointer, size],
        "MatrixLayoutInit_internal": [pointer, size, integer, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
        "MatmulPreferenceCreate": [pointer],
        "MatmulPreferenceSetAttribute": [pointer, integer, pointer, size],
        "MatmulAlgoGetHeuristic": [pointer] * 7 + [integer, pointer, pointer],
        "MatmulAlgoCheck": [pointer] * 8,
        "MatmulAlgoConfigGetAttribute": [pointer, integer, pointer, size, pointer],
        "Matmul": [pointer] * 14 + [size, pointer],
    }.items():
        getattr(library, f"cublasLt{function}").argtypes = arguments
    return library


def _call(function: str, *args) -> None:
    status = getattr(_library(), f"cublasLt{function}")(*args)
    if status:
        fail(f"cublasLt{function}: failed with cublasStatus_t {status}")


@functools.cache
def _handle(device: int) -> int | None:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("Create", ctypes.byref(handle))
    return handle.value


@functools.cache
def _operation(transpose_a: bool, transpose_b: bool, bias: bool) -> int | None:
    """Return a matmul descriptor: fp32 compute, host alpha and beta. With a bias, use it under `_lock` only."""
    operation = ctypes.c_void_p()
    _call("MatmulDescCreate", ctypes.byref(operation), _COMPUTE_FP32, _TYPES[torch.float32])
    for attribute, value in (
        (_TRANSA, transpose_a),
        (_TRANSB, transpose_b),
        *([(_EPILOGUE, _ADD_BIAS)] if bias else []),
    ):
        _call("MatmulDescSetAttribute", operation, attribute, ctypes.byref(ctypes.c_int32(value)), 4)
    if bias:
        _set_bias(operation.value, 256)  # any aligned address; the heuristic does not dereference it
    return operation.value


_lock = threading.Lock()


def _set_bias(operation: int | None, address: int) -> None:
    _call("MatmulDescSetAttribute", operation, _BIAS_POINTER, ctypes.byref(ctypes.c_void_p(address)), 8)


@functools.cache
def _preference() -> int | None:
    preference = ctypes.c_void_p()
    _call("MatmulPreferenceCreate", ctypes.byref(preference))
    _call("MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(ctypes.c_uint64(0)), 8)
    for attribute, value in ((_REDUCTION_MASK, 0), *((operand, _ALIGNMENT) for operand in _MIN_ALIGNMENT)):
        _call("MatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(ctypes.c_uint32(value)), 4)
    return preference.value


class _Product:
    """cuBLASLt descriptors of a `Problem`. cuBLASLt is column-major, so it computes out^T = b . a^T."""

    def __init__(self, p: Problem):
        def layout(dtype, rows, columns, ld):
            descriptor = _Opaque()
            _call("MatrixLayoutInit_internal", descriptor, ctypes.sizeof(descriptor), dtype, rows, columns, ld)
            return descriptor

        self.problem, self.handle = p, _handle(p.device)
        self.operation = _operation(p.b_by_k, not p.a_by_k, p.bias)
        self.b = layout(_TYPES[p.dtype], *((p.k, p.n) if p.b_by_k else (p.n, p.k)), p.ldb)
        self.a = layout(_TYPES[p.dtype], *((p.k, p.m) if p.a_by_k else (p.m, p.k)), p.lda)
        self.c = layout(_TYPES[p.out_dtype], p.n, p.m, p.ldc)
        self.one, self.beta = ctypes.c_float(1.0), ctypes.c_float(float(p.accumulate))

    def suggestions(self, most: int = _SUGGESTIONS) -> list[bytes]:
        """Return the algorithms that cuBLASLt suggests without a workspace, best first."""
        found, count = (_Suggestion * most)(), ctypes.c_int()
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.operation, self.b, self.a, self.c, self.c, _preference(), most, found, ctypes.byref(count)
        )
        if status == _NOT_SUPPORTED:
            return []
        if status:
            fail(f"cublasLtMatmulAlgoGetHeuristic: failed with cublasStatus_t {status} for {self.problem}")
        return [bytes(s.algorithm) for s in found[: count.value] if s.state == 0 and s.workspace == 0]

    def supports(self, algorithm: bytes) -> bool:
        """Return whether an algorithm that was suggested for another number of rows supports this problem."""
        found = _Suggestion()
        status = _library().cublasLtMatmulAlgoCheck(
            self.handle,
            self.operation,
            self.b,
            self.a,
            self.c,
            self.c,
            _Opaque.from_buffer_copy(algorithm),
            ctypes.byref(found),
        )
        return status == 0 and found.workspace == 0

    def launcher(self, algorithm: bytes) -> Launcher:
        """Return a launcher of the algorithm; it keeps the descriptors alive."""
        run, alive = _library().cublasLtMatmul, (self, _Opaque.from_buffer_copy(algorithm))
        operation, handle = self.operation, self.handle
        one, beta = ctypes.addressof(self.one), ctypes.addressof(self.beta)
        la, lb, lc, chosen = (ctypes.addressof(x) for x in (self.a, self.b, self.c, alive[1]))

        def launch(a: int, b: int, bias: int, out: int, stream: int, alive=alive) -> int:
            return run(handle, operation, one, b, lb, a, la, beta, out, lc, out, lc, chosen, None, 0, stream)

        def launch_with_bias(a: int, b: int, bias: int, out: int, stream: int) -> int:
            with _lock:
                _set_bias(operation, bias)
                return launch(a, b, bias, out, stream)

        return launch_with_bias if self.problem.bias else launch


def configuration(algorithm: bytes) -> dict[str, int]:
    """Return the configuration attributes of an algorithm."""
    opaque, value, written = _Opaque.from_buffer_copy(algorithm), ctypes.c_int32(), ctypes.c_size_t()
    result = {}
    for name, attribute in _CONFIG.items():
        value.value = 0  # some attributes are 16 bits wide
        size = 2 if name == "cluster" else 4
        _call("MatmulAlgoConfigGetAttribute", opaque, attribute, ctypes.byref(value), size, ctypes.byref(written))
        result[name] = value.value
    return result


def _trial_of(p: Problem) -> Problem:
    """Return a trial problem with p's k and fewer outputs.

    An algorithm's order along k may depend on k, e.g. beyond a limit. It does not depend on m and n: the tile is part
    of the configuration, and a hidden split of k would occur when tiles are few, as here. Operands grow with k, so from
    k = 26215 on the trial has fewer outputs, down to 128 x 512, which still span several tiles. Operands take at most
    128 MiB up to k = 104857, and never more than twice p's own.
    """
    most_m, most_n = _TRIAL_OUTPUTS
    while (most_m + most_n) * p.k > _TRIAL_VALUES and (most_m, most_n) != _FEWEST_OUTPUTS:
        most_m, most_n = most_m // 2, most_n // 2
    m, n = (min(1 << (size - 1).bit_length(), most) for size, most in ((p.m, most_m), (p.n, most_n)))
    return p._replace(
        m=m, n=n, lda=_aligned(p.k if p.a_by_k else m), ldb=_aligned(p.k if p.b_by_k else n), ldc=_aligned(n)
    )


def _trial_operands(p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return random a, b, bias and out of a trial.

    For every other row of b, the products over k come in pairs of opposite sign at random positions. The exact sum is
    0, so the result consists of rounding errors alone, and any other order shows, in bf16 too.
    """
    device = torch.device("cuda", p.device)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape, dtype=p.dtype):
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def laid_out(t, by_k, ld):
        rows, columns = t.shape if by_k else t.shape[::-1]
        buffer = torch.empty(rows, ld, dtype=t.dtype, device=device)[:, :columns]
        return (buffer if by_k else buffer.t()).copy_(t)

    order = torch.randperm(p.k, device=device, generator=generator)
    half = p.k // 2
    first, second = order[:half], order[half : 2 * half]
    a = random(p.m, p.k)
    a[:, second] = a[:, first]
    a[:, order[2 * half :]] *= 2.0**-20
    a = laid_out(a, p.a_by_k, p.lda)
    b = random(p.n, p.k)
    b[::2, second] = -b[::2, first]
    b = laid_out(b, p.b_by_k, p.ldb)
    out = random(p.m, p.ldc, dtype=p.out_dtype)[:, : p.n]
    # The bias must not hide sums that are rounding errors alone; for the others it checks that the sum is rounded once.
    bias = random(p.n, dtype=p.out_dtype) if p.bias else None
    if bias is not None:
        bias[::2] *= 2.0**-20
    return a, b, bias, out


class _Trial:
    """The operands of a trial and the chain's result, shared by several algorithms."""

    def __init__(self, p: Problem, chain: Callable):
        self.problem = p
        with torch.cuda.device(p.device):
            self.a, self.b, self.bias, self.before = _trial_operands(p)
            self.expected = self.before.clone()
            chain(self.a, self.b, self.bias, self.expected, p.accumulate)

    def passes(self, algorithm: bytes) -> bool:
        """Return whether the algorithm's bytes equal the chain's; synchronizes."""
        p = self.problem
        with torch.cuda.device(p.device):
            out = self.before.clone()
            status = _Product(p).launcher(algorithm)(
                self.a.data_ptr(), self.b.data_ptr(), _address(self.bias), out.data_ptr(), stream(p.device)
            )
            if status not in (0, _NOT_SUPPORTED):
                fail(
                    f"cublasLtMatmul: failed with cublasStatus_t {status} in the trial of {configuration(algorithm)} "
                    f"for {p}"
                )
            as_bits = torch.int32 if out.dtype == torch.float32 else torch.int16
            return status == 0 and torch.equal(out.view(as_bits), self.expected.view(as_bits))


_verdicts: dict[tuple[bytes, Problem], bool] = {}
"""Passed or failed, by algorithm and trial problem (and so by k)."""
_algorithms: dict[Problem, bytes | None] = {}
"""Chosen algorithm by problem, at `round_up_rows` of its rows."""
_launchers: dict[Problem, Launcher | None] = {}
"""Launcher by problem; None if every suggestion failed."""
_CACHE_SIZE = 16384
"""schedule: cache size. Servers produce new row counts and packed training new k without end."""


def _admitted(p: Problem, suggestions: list[bytes], chain: Callable) -> Iterator[bytes]:
    """Yield the suggestions that pass their trial, running trials as needed."""
    trial, operands = _trial_of(p), None
    for algorithm in suggestions:
        config = configuration(algorithm)
        if config["split_k"] not in (0, 1) or config["reduction"]:
            continue
        if (algorithm, trial) not in _verdicts:
            if len(_verdicts) >= _CACHE_SIZE:
                _verdicts.clear()
            operands = operands or _Trial(trial, chain)
            _verdicts[algorithm, trial] = operands.passes(algorithm)
            if not _verdicts[algorithm, trial]:
                _log.info("cuBLASLt algorithm %s failed the trial %s: its bits differ from the chain's", config, trial)
        if _verdicts[algorithm, trial]:
            yield algorithm


def round_up_rows(rows: int) -> int:
    """Round up a number of rows, so that warm-up covers all values with few trials.

    Rows are rounded to multiples of up to 8, beyond 512 rows by up to a 32nd. Coarser steps could cost an additional
    wave of tiles.
    """
    bits = (rows - 1).bit_length()
    step = 1 << max(bits - 6, min(bits - 4, 3), 0)
    return -(-rows // step) * step


def warmup_rows(max_rows: int) -> list[int]:
    """Return row counts from 1 to `max_rows` for warm-up; launching these decides for all counts in between."""
    rows = [1]
    while rows[-1] < max_rows:
        rows.append(min(round_up_rows(rows[-1] + 1), max_rows))
    return rows


def _modelled(p: Problem) -> bool:
    """Return whether waves.py models the problem: forward GEMMs and input gradients with many rows."""
    return p.m > _MANY and p.a_by_k and p.out_dtype == p.dtype


def _ordered(p: Problem, algorithms: list[bytes]) -> list[bytes]:
    """Return the algorithms, fastest first by waves.py if all tiles are known, else in cuBLASLt's order."""
    if not _modelled(p):
        return algorithms
    us = {each: waves.microseconds(p.m, p.n, p.k, configuration(each).get("tile", 0)) for each in algorithms}
    return algorithms if None in us.values() else sorted(algorithms, key=us.__getitem__)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _algorithm(p: Problem, product: _Product, chain: Callable) -> bytes | None:
    """Return the algorithm for a problem, or None.

    A trial takes milliseconds and synchronizes, so trials run for `round_up_rows(m)` rows, which takes few values. A
    problem uses the best suggestion for its own rows if that has already passed, and else the algorithm found for the
    rounded rows. If waves.py models the problem, it uses the fastest algorithm that has passed.
    """
    m = round_up_rows(p.m)
    like = p._replace(m=m, lda=p.lda if p.a_by_k else max(p.lda, _aligned(m)))
    if like not in _algorithms:
        _algorithms[like] = next(_admitted(like, _ordered(like, _Product(like).suggestions()), chain), None)
    algorithm = _algorithms[like]
    if algorithm is None or like == p:
        return algorithm
    suggestions, trial = _ordered(p, product.suggestions()), _trial_of(p)
    likely = [each for each in suggestions if _verdicts.get((each, trial)) is not False]
    passed = [each for each in (likely if _modelled(p) else likely[:1]) if _verdicts.get((each, trial))]
    if product.supports(algorithm):
        passed.append(algorithm)
    return _ordered(p, passed)[0] if passed else next(_admitted(p, suggestions, chain), None)


def _decide(p: Problem, chain: Callable) -> Launcher | None:
    product = _Product(p)
    algorithm = _algorithm(p, product, chain)
    return None if algorithm is None else product.launcher(algorithm)


def chosen(product: Product) -> dict[str, int] | None:
    """Return the configuration of the algorithm for an accepted GEMM, or None if no algorithm passes."""
    p = problem(product)
    algorithm = _algorithm(p, _Product(p), _chain())
    return None if algorithm is None else configuration(algorithm)


def proven(product: Product, most: int) -> Iterator[tuple[dict[str, int], Callable]]:
    """Yield (configuration, launcher) of the algorithms that pass among cuBLASLt's first `most` suggestions."""
    p = problem(product)
    descriptors = _Product(p)
    for algorithm in _admitted(p, descriptors.suggestions(most), _chain()):
        yield configuration(algorithm), functools.partial(_run, p, descriptors.launcher(algorithm))


def prepare(product: Product) -> Callable | None:
    """Return a launcher of an algorithm that passed its trial.

    Returns None if no algorithm passes, or if the problem is new during CUDA graph capture (a trial synchronizes).
    """
    if _library() is None:
        return None
    p = problem(product)
    if p.device != torch.cuda.current_device():  # cuBLASLt launches on the current device
        with torch.cuda.device(p.device):
            return prepare(product)
    try:
        launch = _launchers[p]
    except KeyError:
        if torch.cuda.is_current_stream_capturing():
            return None
        if len(_launchers) >= _CACHE_SIZE:
            _launchers.clear()
            _algorithms.clear()
        launch = _launchers[p] = _decide(p, _chain())
    return None if launch is None else functools.partial(_run, p, launch)


def _chain() -> Callable:
    """Return the reference of the trials: chain(a, b, bias, out, accumulate) of triton_backend.py."""
    from .triton_backend import chain

    return chain


def _run(
    p: Problem, launch: Launcher, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Compute out [M, N] = a [M, K] . b [N, K]^T, plus bias [N], or plus `out` if p.accumulate."""
    if p.device != torch.cuda.current_device():  # cuBLASLt launches on the current device
        with torch.cuda.device(p.device):
            _run(p, launch, a, b, bias, out)
        return
    status = launch(a.data_ptr(), b.data_ptr(), _address(bias), out.data_ptr(), stream(p.device))
    if status:
        fail(f"cublasLtMatmul: failed with cublasStatus_t {status} for {p}")
