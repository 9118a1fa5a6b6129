"""cuBLASLt: the chain at the speed of the vendor's library, by those of its algorithms that give the chain's bits.

An algorithm that takes all of k in one block of threads feeds the tensor core in ascending k, as the Triton kernel
does. That is no promise of cuBLASLt's, so three things are asked for. No workspace: with it go the algorithms whose
blocks hand partial sums to each other. No split of k and no reduction scheme in the algorithm's configuration. And
proof: before its first use at a k, an algorithm computes a trial of that k, whose bytes must be the chain's; one that
fails is refused, and the next of cuBLASLt's suggestions takes its place. Where none is left, `prepare` declines.

Having no workspace also means that calls share nothing: any stream will do, and a CUDA graph may be captured.
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

from ...runtime.cuda import fail, stream
from ...runtime.operands import Operand
from . import waves
from .problem import Product

_log = logging.getLogger(__name__)

# Values of cuBLAS's enums, the same in its versions 12 and 13.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_FP32 = 68
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_ADD_BIAS = 4
_MAX_WORKSPACE, _REDUCTION_MASK, _MIN_ALIGNMENT = 1, 3, (5, 6, 7, 8)
_CONFIG = {"id": 0, "tile": 1, "stages": 6, "cluster": 8, "swizzle": 4, "custom": 5, "split_k": 2, "reduction": 3}
_NOT_SUPPORTED = 15
_SUGGESTIONS = 16
"""How many algorithms cuBLASLt is asked for."""
_TRIAL_OUTPUTS, _FEWEST_OUTPUTS = (512, 2048), (128, 512)
"""Rows and columns of a trial at most, and of one with the longest k."""
_TRIAL_VALUES = 1 << 26
"""Of both operands of a trial."""
_MANY = 256
"""With more rows, suggestions are taken in the order of waves.py."""
_ALIGNMENT = 16
"""Bytes; pointers and rows that start elsewhere are left to the Triton kernel."""

_Opaque = ctypes.c_uint64 * 8
"""cublasLtMatmulAlgo_t and cublasLtMatrixLayoutOpaque_t."""


Launcher = Callable[[int, int, int, int, int], int]
"""A function of the addresses of a, b, the bias (0: none) and out, and of the stream, that launches and returns the status."""


class _Suggestion(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", _Opaque),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Problem(NamedTuple):
    """Everything that decides which algorithm may be used: out [m, n] = a [m, k] . b [n, k]^T, plus out if `accumulate`,
    or a bias of its type if `bias`. `a_by_k`: k is a's contiguous dimension, and `lda` elements lie between its rows; else
    its columns."""

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
    """Up to a multiple of 8: 16 bytes of bf16."""
    return elements + -elements % (_ALIGNMENT // 2)


def _layout(t: Operand) -> tuple[bool, int] | None:
    """Of t [R, K]: whether k is contiguous, and the elements between its rows (else columns). None: neither fits."""
    (rows, k), (row_stride, k_stride), _, _ = t
    if k_stride == 1:
        by_k, length, ld = True, k, row_stride if rows > 1 else k
    elif row_stride == 1:
        by_k, length, ld = False, rows, k_stride if k > 1 else rows
    else:
        return None
    return (by_k, ld) if ld >= length and ld == _aligned(ld) else None


def refuses(p: Product) -> str | None:
    if p.leaves > 1:
        return f"{p.leaves} leaves: it computes chains"
    (_, _, a_type, _), (_, _, b_type, _), (_, _, out_type, _) = p.a, p.b, p.out
    if a_type not in (torch.bfloat16, torch.float16) or b_type != a_type or out_type not in (a_type, torch.float32):
        return "types other than bf16 or fp16 in and that or fp32 out"
    if p.bias is not None and p.accumulate:
        return "a bias where it adds to what out holds"
    if p.bias is not None and (p.bias[2] != out_type or not p.bias_is_dense):
        return "a bias that is not contiguous or of another type than out"
    if not p.k:
        return "no k"
    layouts = _layout(p.a), _layout(p.b), _layout(p.out)
    if None in layouts or not layouts[2][0]:
        return "strides that it could only take slowly"
    if not all(t is None or t[3] for t in (p.a, p.b, p.bias, p.out)):
        return f"addresses that are no multiples of {_ALIGNMENT}"
    return None


def problem(p: Product) -> Problem:
    """What a product that it does not refuse asks of cuBLASLt."""
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
    """libcublasLt, which torch has loaded by this name already."""
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        warnings.warn(f"{name} cannot be loaded ({error}); Triton computes all products: same bits, slower")
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
        fail(f"cublasLt{function} failed with status {status}")


@functools.cache
def _handle(device: int) -> int | None:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("Create", ctypes.byref(handle))
    return handle.value


@functools.cache
def _operation(transpose_a: bool, transpose_b: bool, bias: bool) -> int | None:
    """A descriptor: fp32 sums, alpha and beta on the host. One with a bias is used by one thread at a time, under `_lock`."""
    operation = ctypes.c_void_p()
    _call("MatmulDescCreate", ctypes.byref(operation), _COMPUTE_FP32, _TYPES[torch.float32])
    for attribute, value in (
        (_TRANSA, transpose_a),
        (_TRANSB, transpose_b),
        *([(_EPILOGUE, _ADD_BIAS)] if bias else []),
    ):
        _call("MatmulDescSetAttribute", operation, attribute, ctypes.byref(ctypes.c_int32(value)), 4)
    if bias:
        _set_bias(operation.value, 256)  # an aligned address; nothing reads it while algorithms are asked for
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
    """A problem in cuBLASLt's terms. Its matrices are column-major, so ours are transposed there: out^T = b . a^T."""

    def __init__(self, p: Problem):
        def layout(dtype, rows, columns, ld):
            made = _Opaque()
            _call("MatrixLayoutInit_internal", made, ctypes.sizeof(made), dtype, rows, columns, ld)
            return made

        self.problem, self.handle = p, _handle(p.device)
        self.operation = _operation(p.b_by_k, not p.a_by_k, p.bias)
        self.b = layout(_TYPES[p.dtype], *((p.k, p.n) if p.b_by_k else (p.n, p.k)), p.ldb)
        self.a = layout(_TYPES[p.dtype], *((p.k, p.m) if p.a_by_k else (p.m, p.k)), p.lda)
        self.c = layout(_TYPES[p.out_dtype], p.n, p.m, p.ldc)
        self.one, self.beta = ctypes.c_float(1.0), ctypes.c_float(float(p.accumulate))

    def suggestions(self, most: int = _SUGGESTIONS) -> list[bytes]:
        """The algorithms that cuBLASLt proposes without a workspace, best first."""
        found, count = (_Suggestion * most)(), ctypes.c_int()
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.operation, self.b, self.a, self.c, self.c, _preference(), most, found, ctypes.byref(count)
        )
        if status == _NOT_SUPPORTED:
            return []
        if status:
            fail(f"cublasLtMatmulAlgoGetHeuristic failed with status {status}")
        return [bytes(s.algorithm) for s in found[: count.value] if s.state == 0 and s.workspace == 0]

    def takes(self, algorithm: bytes) -> bool:
        """Whether an algorithm suggested for a product of other rows will do this one too."""
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
        run, kept = _library().cublasLtMatmul, (self, _Opaque.from_buffer_copy(algorithm))
        operation, handle = self.operation, self.handle
        one, beta = ctypes.addressof(self.one), ctypes.addressof(self.beta)
        la, lb, lc, chosen = (ctypes.addressof(x) for x in (self.a, self.b, self.c, kept[1]))

        def launch(a: int, b: int, bias: int, out: int, stream: int, kept=kept) -> int:
            return run(handle, operation, one, b, lb, a, la, beta, out, lc, out, lc, chosen, None, 0, stream)

        def launch_with_bias(a: int, b: int, bias: int, out: int, stream: int) -> int:
            with _lock:
                _set_bias(operation, bias)
                return launch(a, b, bias, out, stream)

        return launch_with_bias if self.problem.bias else launch


def configuration(algorithm: bytes) -> dict[str, int]:
    """What an algorithm says of itself."""
    opaque, value, written = _Opaque.from_buffer_copy(algorithm), ctypes.c_int32(), ctypes.c_size_t()
    result = {}
    for name, attribute in _CONFIG.items():
        value.value = 0  # some attributes are 16 bits wide
        size = 2 if name == "cluster" else 4
        _call("MatmulAlgoConfigGetAttribute", opaque, attribute, ctypes.byref(value), size, ctypes.byref(written))
        result[name] = value.value
    return result


def _trial_of(p: Problem) -> Problem:
    """A problem of p's kind with its k and fewer outputs. What an algorithm does along k may depend on k, by a limit that
    only a long one reaches. On m and n it does not depend: its tile is a part of its configuration, and if it cut k at
    all, it would where tiles are too few to keep the device busy, as here. Operands grow with k, so beyond 26214 there
    are fewer outputs, down to 128 x 512, which are several tiles of cuBLASLt's still: 128 MiB of operands until k is
    104857, and never more than twice p's own."""
    most_m, most_n = _TRIAL_OUTPUTS
    while (most_m + most_n) * p.k > _TRIAL_VALUES and (most_m, most_n) != _FEWEST_OUTPUTS:
        most_m, most_n = most_m // 2, most_n // 2
    m, n = (min(1 << (size - 1).bit_length(), most) for size, most in ((p.m, most_m), (p.n, most_n)))
    return p._replace(
        m=m, n=n, lda=_aligned(p.k if p.a_by_k else m), ldb=_aligned(p.k if p.b_by_k else n), ldc=_aligned(n)
    )


def _trial_operands(p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Random a, b, bias and out. For every other row of b the products come in pairs of opposite sign at random places: their
    sum is 0, so what is computed is the rounding of each partial sum, and any other order shows, in bf16 too."""
    device = torch.device("cuda", p.device)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape, dtype=p.dtype):
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def laid_out(t, by_k, ld):
        rows, columns = t.shape if by_k else t.shape[::-1]
        made = torch.empty(rows, ld, dtype=t.dtype, device=device)[:, :columns]
        return (made if by_k else made.t()).copy_(t)

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
    # Where the sum is nothing but rounding, so is the bias, which would hide it; elsewhere their sum must be rounded once.
    bias = random(p.n, dtype=p.out_dtype) if p.bias else None
    if bias is not None:
        bias[::2] *= 2.0**-20
    return a, b, bias, out


class _Trial:
    """The operands of a trial and the chain's bytes, for several algorithms."""

    def __init__(self, p: Problem, chain: Callable):
        self.problem = p
        with torch.cuda.device(p.device):
            self.a, self.b, self.bias, self.before = _trial_operands(p)
            self.want = self.before.clone()
            chain(self.a, self.b, self.bias, self.want, p.accumulate)

    def passes(self, algorithm: bytes) -> bool:
        """Whether the algorithm's bytes are the chain's. Waits for the device."""
        p = self.problem
        with torch.cuda.device(p.device):
            out = self.before.clone()
            status = _Product(p).launcher(algorithm)(
                self.a.data_ptr(), self.b.data_ptr(), _address(self.bias), out.data_ptr(), stream(p.device)
            )
            if status not in (0, _NOT_SUPPORTED):
                fail(f"cublasLtMatmul failed with status {status} in the trial of {configuration(algorithm)}")
            as_bits = torch.int32 if out.dtype == torch.float32 else torch.int16
            return status == 0 and torch.equal(out.view(as_bits), self.want.view(as_bits))


_verdicts: dict[tuple[bytes, Problem], bool] = {}
"""By algorithm and trial, and so by k."""
_algorithms: dict[Problem, bytes | None] = {}
"""By problem of `_rounded` rows."""
_launchers: dict[Problem, Launcher | None] = {}
"""By problem; None where every suggestion was refused."""
_MOST = 16384
"""Of each; then they are looked up anew: a server meets ever new numbers of rows, and packed training ever new k."""


def _admitted(p: Problem, suggestions: list[bytes], chain: Callable) -> Iterator[bytes]:
    trial, made = _trial_of(p), None
    for algorithm in suggestions:
        says = configuration(algorithm)
        if says["split_k"] not in (0, 1) or says["reduction"]:
            continue
        if (algorithm, trial) not in _verdicts:
            if len(_verdicts) >= _MOST:
                _verdicts.clear()
            made = made or _Trial(trial, chain)
            _verdicts[algorithm, trial] = made.passes(algorithm)
            if not _verdicts[algorithm, trial]:
                _log.info("cuBLASLt algorithm %s is refused for %s: its bits are not the chain's", says, trial)
        if _verdicts[algorithm, trial]:
            yield algorithm


def rounded(rows: int) -> int:
    """Up, so that few numbers of rows are asked for before work begins: to a multiple of 8, as tiles have, or to less; where
    that would be a 64th, by up to a 32nd. By more, an algorithm may take a round of tiles more than one for these rows."""
    bits = (rows - 1).bit_length()
    step = 1 << max(bits - 6, min(bits - 4, 3), 0)
    return -(-rows // step) * step


def ladder(most: int) -> list[int]:
    """Numbers of rows, 1 to `most`: who has met these has decided for all between them."""
    rows = [1]
    while rows[-1] < most:
        rows.append(min(rounded(rows[-1] + 1), most))
    return rows


def _modelled(p: Problem) -> bool:
    """Whether waves.py is for it: forward products and gradients of rows, of many rows."""
    return p.m > _MANY and p.a_by_k and p.out_dtype == p.dtype


def _ordered(p: Problem, algorithms: list[bytes]) -> list[bytes]:
    """The fastest first, as far as it is known."""
    if not _modelled(p):
        return algorithms
    us = {each: waves.microseconds(p.m, p.n, p.k, configuration(each).get("tile", 0)) for each in algorithms}
    return algorithms if None in us.values() else sorted(algorithms, key=us.__getitem__)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _algorithm(p: Problem, product: _Product, chain: Callable) -> bytes | None:
    """The algorithm for a problem. A trial takes milliseconds and waits for the device, and a server meets ever new numbers of
    rows. So the suggestions are tried at rounded ones, of which there are few. At its own rows a product takes the best
    suggestion if that has passed already, and else what was found at the rounded ones; where it is known how long they take,
    the fastest of those that have passed. All of these have the chain's bits."""
    m = rounded(p.m)
    like = p._replace(m=m, lda=p.lda if p.a_by_k else max(p.lda, _aligned(m)))
    if like not in _algorithms:
        _algorithms[like] = next(_admitted(like, _ordered(like, _Product(like).suggestions()), chain), None)
    algorithm = _algorithms[like]
    if algorithm is None or like == p:
        return algorithm
    suggestions, trial = _ordered(p, product.suggestions()), _trial_of(p)
    likely = [each for each in suggestions if _verdicts.get((each, trial)) is not False]
    passed = [each for each in (likely if _modelled(p) else likely[:1]) if _verdicts.get((each, trial))]
    if product.takes(algorithm):
        passed.append(algorithm)
    return _ordered(p, passed)[0] if passed else next(_admitted(p, suggestions, chain), None)


def _decide(p: Problem, chain: Callable) -> Launcher | None:
    product = _Product(p)
    algorithm = _algorithm(p, product, chain)
    return None if algorithm is None else product.launcher(algorithm)


def chosen(product: Product) -> dict[str, int] | None:
    """What the algorithm for a product that it does not refuse says of itself; None: there is none."""
    p = problem(product)
    algorithm = _algorithm(p, _Product(p), _chain())
    return None if algorithm is None else configuration(algorithm)


def proven(product: Product, most: int) -> Iterator[tuple[dict[str, int], Callable]]:
    """Of the first `most` algorithms that cuBLASLt proposes those with the chain's bits: what each says of itself, and what
    launches it."""
    p = problem(product)
    made = _Product(p)
    for algorithm in _admitted(p, made.suggestions(most), _chain()):
        yield configuration(algorithm), functools.partial(_run, p, made.launcher(algorithm))


def prepare(product: Product) -> Callable | None:
    """By an algorithm that passed its trial. None where there is none, or where the problem is new while a CUDA graph is being
    captured (a trial waits for the device)."""
    if _library() is None:
        return None
    p = problem(product)
    if p.device != torch.cuda.current_device():  # where cuBLASLt would launch it
        with torch.cuda.device(p.device):
            return prepare(product)
    try:
        launch = _launchers[p]
    except KeyError:
        if torch.cuda.is_current_stream_capturing():
            return None
        if len(_launchers) >= _MOST:
            _launchers.clear()
            _algorithms.clear()
        launch = _launchers[p] = _decide(p, _chain())
    return None if launch is None else functools.partial(_run, p, launch)


def _chain() -> Callable:
    """The computation whose bits count, of (a, b, bias, out, accumulate)."""
    from .triton import chain

    return chain


def _run(
    p: Problem, launch: Launcher, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out [M, N] = a [M, K] . b [N, K]^T, plus bias [N], or `out` if `accumulate`."""
    if p.device != torch.cuda.current_device():  # where cuBLASLt would launch it
        with torch.cuda.device(p.device):
            _run(p, launch, a, b, bias, out)
        return
    status = launch(a.data_ptr(), b.data_ptr(), _address(bias), out.data_ptr(), stream(p.device))
    if status:
        fail(f"cublasLtMatmul failed with status {status} for {p}")
