"""The ways to compute a product, all with the same bits: the one that is chosen, and the others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from alignkit.ops.linear.problem import Product
from alignkit.runtime import cuda as library
from alignkit.runtime import dispatch, families

SUGGESTIONS = 64
"""How many algorithms cuBLASLt is asked for."""
TREE_ROWS = 1024
"""With more, k-trees are not dealt out to the blocks of few rows."""
TILES = {
    16: ((16, 32, 128), (16, 64, 128), (64, 32, 128)),
    64: ((16, 64, 128), (64, 32, 128), (64, 64, 64)),
    256: ((64, 32, 128), (64, 64, 64), (128, 128, 64)),
}
"""By rows up to which they are tried, Triton's tiles; with more rows they are behind."""

Way = Callable[..., object]
"""A function of a, b, the bias and out that computes a product."""


def _cublaslt(says: dict[str, int]) -> str:
    return "cublaslt " + " ".join(
        f"{name}={value}" for name, value in says.items() if name not in ("split_k", "reduction")
    )


def _tree(how) -> str:
    return f"tree parts={how.parts}" + ("" if how.parts == 1 else f" {how.width}{' below' if how.same_outputs else ''}")


def cut_named(cut) -> str:
    """hopper.py's way, with that cut."""
    return f"hopper {f'kept={cut.kept}' if cut.tiles else 'whole'}"


def _tiles(tile: dict) -> str:
    return f"tiles {tile['BLOCK_M']}x{tile['BLOCK_N']}x{tile['BLOCK_K']} parts={tile['parts']}"


def chosen(p: Product) -> str:
    """Which kernel computes it, and how."""
    for kernel in dispatch.kernels("linear", p.backend):
        if kernel.refuses(p) is not None:
            continue
        if kernel.name == "cublaslt":
            from alignkit.ops.linear import cublaslt

            if (says := cublaslt.chosen(p)) is None:
                continue
            return _cublaslt(says)
        if kernel.name == "tree":
            from alignkit.ops.linear import cuda

            how = cuda.dealt(p)
            assert how is not None
            return _tree(how)
        if kernel.name == "hopper":
            from alignkit.ops.linear import hopper

            return cut_named(hopper.cut_of(p))
        if kernel.name == "tiles":
            from alignkit.ops.linear import triton

            return _tiles(triton.schedule(p.m, p.n, p.k, p.leaves, p.a[2]))
        return kernel.name
    raise AssertionError(p)


def ways(p: Product) -> dict[str, Way]:
    """By what tells them apart, all that are known and can compute it. On the GPU, where algorithms of cuBLASLt are tried."""
    if p.backend not in families.SM90.backends:
        module = dispatch.sole("linear", p.backend)
        assert module is not None
        return {p.backend: lambda a, b, bias, out: module.matmul(a, b, p.leaves, bias, out, p.accumulate)}
    from alignkit.ops.linear import cublaslt, cuda, hopper, triton

    found: dict[str, Way] = {}
    if p.backend == families.CUDA:
        if cuda.tree_unfit(p) is None and p.m <= TREE_ROWS:
            for how in cuda.deals(p.m, p.leaves):
                found[_tree(how)] = partial(cuda.tree, p.leaves, how)
        if cuda.few_refuses(p) is None:
            found["few"] = cuda.few
        if cuda.narrow_unfit(p) is None:
            found["narrow"] = cuda.narrow
        if p.bias is None and cuda.unfit(p) is None and p.k % (16 * p.leaves) == 0:
            found["experts.down"] = _by_experts("alignkit_experts_down", p)
            if p.m <= 64:
                found["experts.few"] = _by_experts("alignkit_experts_few_down", p)
    if cublaslt.refuses(p) is None:
        for says, way in cublaslt.proven(p, SUGGESTIONS):
            found[_cublaslt(says)] = way
    if hopper.unfit(p) is None:
        for cut in hopper.ways(p):
            found[cut_named(cut)] = hopper.prepare_cut(p, cut)
    tile = triton.schedule(p.m, p.n, p.k, p.leaves, p.a[2])
    few = next((tiles for rows, tiles in TILES.items() if p.m <= rows), ()) if not p.accumulate else ()
    several = [parts for parts in (1, 2, 4, 8) if parts <= p.leaves]
    for m, n, k in few:
        for parts in several:
            shape = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "parts": parts, "num_warps": 4, "num_stages": 4}
            found[_tiles(shape)] = _by_tiles(p, shape)
    if not found or p.m <= 256:
        found[_tiles(tile)] = _by_tiles(p, tile)
    return found


def _by_tiles(p: Product, tile: dict) -> Way:
    from alignkit.ops.linear import triton

    return lambda a, b, bias, out: triton.tiles(a, b, p.leaves, bias, out, p.accumulate, **tile)


def _by_experts(function: str, p: Product) -> Way:
    """As the one expert of all rows."""
    offsets = torch.tensor([0, p.m], device=torch.device("cuda", p.device or 0))

    def way(a, b, bias, out):
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

    return way
