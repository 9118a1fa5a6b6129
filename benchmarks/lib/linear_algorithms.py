"""The algorithms that compute a GEMM with the same bits: the chosen one and its alternatives.

``matmul.py`` stores their names in its result files, as ``by`` and ``ways``; ``fit_linear.py`` parses them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from alignkit.ops.linear.problem import Product
from alignkit.runtime import cuda as library
from alignkit.runtime import dispatch, families

SUGGESTIONS = 64
"""Number of algorithms requested from cuBLASLt's heuristic."""
TREE_ROWS = 1024
"""Largest M at which skinny_split_k.cu's splits of k-trees are candidates."""
TILES = {
    16: ((16, 32, 128), (16, 64, 128), (64, 32, 128)),
    64: ((16, 64, 128), (64, 32, 128), (64, 64, 64)),
    256: ((64, 32, 128), (64, 64, 64), (128, 128, 64)),
}
"""Triton tile shapes to try, by largest M; beyond the last M they are slower than the other algorithms."""

Algorithm = Callable[..., object]
"""A function of a, b, bias and out that computes a GEMM."""


def _cublaslt_name(config: dict[str, int]) -> str:
    return "cublaslt " + " ".join(
        f"{name}={value}" for name, value in config.items() if name not in ("split_k", "reduction")
    )


def _tree_name(split) -> str:
    return f"tree parts={split.parts}" + (
        "" if split.parts == 1 else f" {split.width}{' below' if split.same_outputs else ''}"
    )


def cut_name(cut) -> str:
    """Return the name of hopper.py's kernel with this split."""
    return f"hopper {f'kept={cut.kept}' if cut.tiles else 'whole'}"


def _tiles_name(tile: dict) -> str:
    return f"tiles {tile['BLOCK_M']}x{tile['BLOCK_N']}x{tile['BLOCK_K']} parts={tile['parts']}"


def chosen(p: Product) -> str:
    """Return the name of the algorithm that alignkit chooses for a GEMM."""
    for kernel in dispatch.kernels("linear", p.backend):
        if kernel.rejects(p) is not None:
            continue
        if kernel.name == "cublaslt":
            from alignkit.ops.linear import cublaslt

            if (config := cublaslt.chosen(p)) is None:
                continue
            return _cublaslt_name(config)
        if kernel.name == "tree":
            from alignkit.ops.linear import cuda_backend

            split = cuda_backend.split_of(p)
            assert split is not None
            return _tree_name(split)
        if kernel.name == "hopper":
            from alignkit.ops.linear import hopper

            return cut_name(hopper.cut_of(p))
        if kernel.name == "tiles":
            from alignkit.ops.linear import triton_backend

            return _tiles_name(triton_backend.schedule(p.m, p.n, p.k, p.leaves, p.a[2]))
        return kernel.name
    raise AssertionError(p)


def algorithms(p: Product) -> dict[str, Algorithm]:
    """Return all algorithms that can compute a GEMM, by name; cuBLASLt's are tried on the GPU first."""
    if p.backend not in families.SM90.backends:
        module = dispatch.static_kernel("linear", p.backend)
        assert module is not None
        return {p.backend: lambda a, b, bias, out: module.matmul(a, b, p.leaves, bias, out, p.accumulate)}
    from alignkit.ops.linear import cublaslt, cuda_backend, hopper, triton_backend

    found: dict[str, Algorithm] = {}
    if p.backend == families.CUDA:
        if cuda_backend.tree_unsupported(p) is None and p.m <= TREE_ROWS:
            for split in cuda_backend.splits(p.m, p.leaves):
                found[_tree_name(split)] = partial(cuda_backend.tree, p.leaves, split)
        if cuda_backend.few_rejects(p) is None:
            found["few"] = cuda_backend.few
        if cuda_backend.narrow_unsupported(p) is None:
            found["narrow"] = cuda_backend.narrow
        if p.bias is None and cuda_backend.unsupported(p) is None and p.k % (16 * p.leaves) == 0:
            found["experts.down"] = _expert("alignkit_experts_down", p)
            if p.m <= 64:
                found["experts.few"] = _expert("alignkit_experts_few_down", p)
    if cublaslt.rejects(p) is None:
        for config, algorithm in cublaslt.proven(p, SUGGESTIONS):
            found[_cublaslt_name(config)] = algorithm
    if hopper.unsupported(p) is None:
        for cut in hopper.ways(p):
            found[cut_name(cut)] = hopper.prepare_cut(p, cut)
    tile = triton_backend.schedule(p.m, p.n, p.k, p.leaves, p.a[2])
    shapes = next((tiles for rows, tiles in TILES.items() if p.m <= rows), ()) if not p.accumulate else ()
    part_counts = [parts for parts in (1, 2, 4, 8) if parts <= p.leaves]
    for m, n, k in shapes:
        for parts in part_counts:
            schedule = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "parts": parts, "num_warps": 4, "num_stages": 4}
            found[_tiles_name(schedule)] = _triton(p, schedule)
    if not found or p.m <= 256:
        found[_tiles_name(tile)] = _triton(p, tile)
    return found


def _triton(p: Product, tile: dict) -> Algorithm:
    from alignkit.ops.linear import triton_backend

    return lambda a, b, bias, out: triton_backend.tiles(a, b, p.leaves, bias, out, p.accumulate, **tile)


def _expert(function: str, p: Product) -> Algorithm:
    """Return the grouped GEMM of a single expert that has all rows."""
    offsets = torch.tensor([0, p.m], device=torch.device("cuda", p.device or 0))

    def run(a, b, bias, out):
        library.call(
            function,
            a.device,
            a,
            ctypes.c_int64(a.stride(0)),
            b,
            ctypes.c_int64(b.stride(0)),
            None,
            offsets,
            1,
            out,
            ctypes.c_int64(out.stride(0)),
            int(out.dtype == torch.bfloat16),
            *out.shape,
            p.k,
            p.leaves,
        )

    return run
