"""A thin wrapper of a tensor-parallel process group: fixed-order sums and collective checks.

Public: names and signatures are documented in docs/api/dist.md. The tree of ranks in `balanced_tree` is the contract's.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..config import config
from ..errors import AlignkitError, InputError
from ..runtime import families, native
from . import symmetric
from .agreement import all_gather_objects

_all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # the function name before torch 2.12


def strict() -> bool:
    """Return whether ``ALIGNKIT_STRICT=1``, i.e. values on a GPU are validated before use (synchronizes)."""
    return config.strict


class TP:
    """The ranks that share one layer.

    Sums over ranks use the balanced tree of rank order in fp32, so their bits depend on the number of ranks alone.
    Tensor collectives may be captured in a CUDA graph. The collective checks (`check*`) exchange messages between
    hosts and cannot be captured, except `check_same_values` of GPU tensors.

    Attributes:
        group: Process group; None for a single rank.
        agreed: True if the collective checks are skipped.
        label: Name of the group in errors.
        rank: Rank in the group; also the index of its shard.
        size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, agreed: bool = False, label: str = "tensor-parallel"):
        """Wrap a process group.

        Args:
            group: torch process group whose rank order is the shard order; None for a single rank.
            agreed: Skip the collective checks. The caller guarantees that all ranks make the same calls with
                matching arguments, e.g. inside a model whose forward has checked its input on all ranks.
            label: Name of the group in errors.
        """
        self.group = group
        self.agreed = agreed
        self.label = label
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def __repr__(self) -> str:
        return f"TP(rank={self.rank}, size={self.size})"

    def all_gather(self, t: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order.

        Args:
            t: Tensor of any dtype; the same shape and dtype on every rank.

        Returns:
            `size` tensors like t; [t] itself for a single rank. Not differentiable.
        """
        if self.size == 1:
            return [t]
        return list(self.gather(t[None]).unbind(0))

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated along dim 0 in rank order.

        Args:
            t: [R, ...], any dtype; the same shape and dtype on every rank. Copied if not contiguous.

        Returns:
            [size * R, ...]; t itself for a single rank. Not differentiable.
        """
        if self.size == 1:
            return t
        t = t.contiguous()
        out = t.new_empty((self.size * t.shape[0], *t.shape[1:]))
        _all_gather(out.view(-1), t.view(-1), group=self.group)
        return out

    def padded_rows(self, rows: int) -> int:
        """Return the rows per rank to pad to before a `gather`.

        The base class assumes equal shapes and returns `rows`. Engine subclasses with different row counts per rank
        return the common padded count.

        Args:
            rows: Rows of this rank.
        """
        return rows

    def begin_gather(self, t: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a `gather` that overlaps with computation.

        Args:
            t: As for `gather`; must not be modified before the returned function is called.

        Returns:
            A function that waits for the transfer and returns the result of `gather`.
        """
        if self.size == 1:
            return lambda: t
        t = t.contiguous()
        out = t.new_empty((self.size * t.shape[0], *t.shape[1:]))
        work = _all_gather(out.view(-1), t.view(-1), group=self.group, async_op=True)

        def gathered() -> torch.Tensor:
            work.wait()
            return out

        return gathered

    def tree_sum(self, t: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks by the balanced tree of rank order, neighbors first (all-reduce).

        A rank without a neighbor at one level enters the next.

        Args:
            t: fp32 for the contract's sums, otherwise summed in its own dtype; the same shape and dtype on every rank.

        Returns:
            A tensor like t, the same bits on every rank; t itself for a single rank. Not differentiable.
        """
        return self._sum(t, False)

    def tree_sum_scatter(self, t: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice along dim 0 of `tree_sum(t)` (reduce-scatter).

        Args:
            t: [R, ...], as for `tree_sum`; `size` divides R.

        Returns:
            [R / size, ...]; t itself for a single rank. Not differentiable.
        """
        return self._sum(t, True)

    def sum_products(
        self,
        product: symmetric.Product,
        rows: int,
        columns: int,
        device: torch.device,
        *,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        scatter: bool = False,
    ) -> torch.Tensor:
        """Return the sum over ranks of GEMM results, plus a bias, rounded to `dtype`.

        The GEMM writes directly to symmetric memory if available, which saves a copy.

        Args:
            product: ``product(rows, out, spare)`` writes this rank's fp32 result of the row slice `rows` to `out`,
                leaving `spare` SMs to concurrent kernels if it can. May be called several times, for parts of the rows.
            rows: Rows of the result before scattering.
            columns: Columns of the result.
            device: Device of the result.
            bias: [columns] or None; added once, after the sum, in fp32.
            dtype: Result dtype; the sum is rounded to it once.
            scatter: Return this rank's slice along dim 0 only; `size` divides `rows`.

        Returns:
            [rows, columns], or [rows / size, columns] with `scatter`. Not differentiable.
        """
        if (shared := self._workspace(device, rows, columns, scatter)) is not None:
            if dtype in symmetric.DTYPES:
                return shared.sum(product, rows, columns, bias, dtype, scatter)
            bias = None if bias is None else bias.float()
            return shared.sum(product, rows, columns, bias, torch.float32, scatter).to(dtype)
        sums = torch.empty(rows, columns, dtype=torch.float32, device=device)
        product(slice(0, rows), sums, 0)
        return finish(self._sum_gathered(sums, scatter), bias, dtype)

    def _sum(self, t: torch.Tensor, scatter: bool) -> torch.Tensor:
        if self.size == 1:
            return t
        rows, columns = (len(t), t[:1].numel()) if scatter else (t.numel(), 1)
        if t.dtype != torch.float32 or (shared := self._workspace(t.device, rows, columns, scatter)) is None:
            return self._sum_gathered(t, scatter)
        flat = t.reshape(rows, columns)
        y = shared.sum(lambda part, out, _: out.copy_(flat[part]), rows, columns, None, t.dtype, scatter)
        return y.view(-1, *t.shape[1:]) if scatter else y.view(t.shape)

    def _sum_gathered(self, t: torch.Tensor, scatter: bool) -> torch.Tensor:
        if not scatter:
            return balanced_tree(self.all_gather(t))
        t = t.contiguous()
        parts = torch.empty_like(t)
        dist.all_to_all_single(parts, t, group=self.group)
        return balanced_tree(list(parts.chunk(self.size, dim=0)))

    def _workspace(self, device: torch.device, rows: int, columns: int, scatter: bool) -> symmetric.Workspace | None:
        """Return the symmetric-memory workspace if it supports this sum; the same decision on all ranks."""
        found = None if self.group is None else symmetric.workspace(self.group, device)
        return found if found is not None and found.supports(rows, columns, scatter) else None

    def shard(self, t: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of t [R, ...] along dim 0, a view of R / size rows; `size` divides R."""
        return t if self.size == 1 else t.chunk(self.size, dim=0)[self.rank]

    def check(self, op: str, checks: Callable[[], Hashable]) -> list[Any]:
        """Run `checks` on every rank and raise on all ranks if it failed on any.

        A rank that failed alone would leave the others waiting in the op's collectives. Ranks exchange messages in
        every call: a cached result could exist on some ranks only.

        Args:
            op: Name of the op in errors.
            checks: Raises, or returns picklable metadata of this rank.

        Returns:
            The metadata of all ranks, in rank order. With `agreed` or a single rank nothing is exchanged.

        Raises:
            AlignkitError: `checks` failed on another rank; of the class raised there.
            InputError: ``ALIGNKIT_STRICT`` differs between the ranks.
            BackendError: the ranks could not exchange messages.
        """
        if self.size == 1 or self.agreed:
            return [checks()] * self.size
        error, message = None, None
        try:
            message = (strict(), None, checks())
            pickle.dumps(message)
        except Exception as e:
            error, message = e, (None, *_as_alignkit(e))
        assert self.group is not None  # size > 1
        answers = all_gather_objects(self.group, message, self.label)
        if error is not None:
            raise error
        for rank, (_, kind, value) in enumerate(answers):
            if kind is not None:
                raise kind(f"{value} (in {op}, on rank {rank} of the {self.label} group)")
        if any(answer[0] != answers[0][0] for answer in answers):
            raise InputError(
                f"ALIGNKIT_STRICT: must be equal on all ranks of the {self.label} group, got "
                f"{[answer[0] for answer in answers]} by rank (in {op})"
            )
        return [value for _, _, value in answers]

    def check_same(self, op: str, checks: Callable[[], Mapping[str, Hashable]]) -> None:
        """Run `check` and require the returned dict to be equal on all ranks.

        Args:
            op: Name of the op in errors.
            checks: Raises, or returns a dict of picklable values.

        Raises:
            AlignkitError: as `check`.
            InputError: a value differs between the ranks; the message names its key.
        """
        seen = [dict(items) for items in self.check(op, lambda: tuple(checks().items()))]
        for key in dict.fromkeys(key for one in seen for key in one):
            values = [one.get(key) for one in seen]
            if any(v != values[0] for v in values):
                raise InputError(
                    f"{key}: must be equal on all ranks of the {self.label} group, got {values} by rank (in {op})"
                )

    def check_same_values(self, op: str, **tensors: torch.Tensor | None) -> None:
        """Require tensors to hold the same values on all ranks; shapes and dtypes were checked before.

        Without ``ALIGNKIT_STRICT=1``, GPU tensors are compared on the device: the ranks all-gather a hash per tensor,
        and a mismatch triggers a device-side assertion on every rank, without a host synchronization. A mismatch goes
        undetected with a probability of about 2^-64.

        Args:
            op: Name of the op in errors.
            **tensors: Tensors by argument name; None and empty tensors are skipped.

        Raises:
            InputError: CPU tensors, or strict mode: values differ; the message names the tensor.
        """
        given = {name: t.detach() for name, t in tensors.items() if t is not None and t.numel()}
        if self.size == 1 or self.agreed or not given:
            return
        if strict() or all(families.on_host(t.device) for t in given.values()):
            self.check_same(op, lambda: {f"{name} (hash of its values)": _digest(t) for name, t in given.items()})
            return
        hashes = torch.stack([_value_hash(t) for t in given.values()])
        gathered = torch.stack(self.all_gather(hashes))
        for name, same in zip(given, (gathered == gathered[0]).all(dim=0).unbind(), strict=True):
            torch._assert_async(same, f"{name}: values must be equal on all ranks of the {self.label} group (in {op})")


def check_same_across(
    groups: Sequence[TP],
    op: str,
    checks: Callable[[], Mapping[str, Hashable]],
    *,
    outer: Sequence[TP] = (),
    shared: Container[str] = (),
) -> None:
    """Run `TP.check_same` on a grid of ranks; a failure on any rank raises on all.

    Args:
        groups: One group per dimension of the grid, in the same order on all ranks. All ranks of the grid call this.
        op: Name of the op in errors.
        checks: As for `TP.check_same`.
        outer: Groups across several such grids, each with its own input.
        shared: Keys that must be equal across `outer` too.

    Raises:
        AlignkitError: as `TP.check_same`.
    """
    error: Exception | None = None
    facts: dict[str, Hashable] = {}
    try:
        facts = dict(checks())
    except Exception as e:
        error = e

    def all_facts() -> dict[str, Hashable]:
        if error is not None:
            raise error
        return facts

    def shared_facts() -> dict[str, Hashable]:
        return {name: value for name, value in all_facts().items() if name in shared}

    for group, get in (*((group, all_facts) for group in groups), *((group, shared_facts) for group in outer)):
        try:
            group.check_same(op, get)
        except Exception as e:  # propagated to the ranks of the next groups
            error = error or e
    if error is not None:
        raise error


def check_same_values_across(groups: Sequence[TP], op: str, **tensors: torch.Tensor) -> None:
    """Run `TP.check_same_values` on a grid of ranks; see `check_same_across`.

    Args:
        groups: One group per dimension of the grid.
        op: Name of the op in errors.
        **tensors: Tensors by argument name.

    Raises:
        InputError: CPU tensors, or strict mode: values differ.
    """
    groups = [group for group in groups if group.size > 1 and not group.agreed]
    if groups and (strict() or all(families.on_host(t.device) for t in tensors.values())):
        check_same_across(
            groups, op, lambda: {f"{name} (hash of its values)": _digest(t) for name, t in tensors.items()}
        )
        return
    for group in groups:
        group.check_same_values(op, **tensors)


def _as_alignkit(error: Exception) -> tuple[type[AlignkitError], str]:
    """Return the class and message of the error that the other ranks raise."""
    if isinstance(error, AlignkitError):
        return type(error), str(error)
    return AlignkitError, f"{type(error).__name__}: {error}"


def _digest(t: torch.Tensor) -> str:
    """Return a short hash of a tensor's bytes, for error messages."""
    raw = t.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()


def _value_hash(t: torch.Tensor) -> torch.Tensor:
    """Return a hash of t's values on its device, int64 []: the sum of element bits times odd pseudorandom factors."""
    bits = t.reshape(-1)
    if bits.dtype.is_floating_point:
        bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    n = len(bits)
    capturing = torch.cuda.is_current_stream_capturing()  # memory allocated during capture belongs to the graph's pool
    make = _hash_factors.__wrapped__ if capturing else _hash_factors
    return (bits.to(torch.int64) * make(1 << (n - 1).bit_length(), t.device)[:n]).sum()


@functools.lru_cache(maxsize=64)
def _hash_factors(n: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudorandom int64 [n], the same on every machine (SplitMix64; Steele, Lea, Flood)."""
    with torch.inference_mode(False), torch.no_grad():
        x = torch.arange(1, n + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
        x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
        x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
        return (x ^ (x >> 31 & (1 << 33) - 1)) | 1


def balanced_tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the parts by the balanced tree, neighbors first."""
    while len(parts) > 1:
        parts = [_add(parts[i], parts[i + 1]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add two tensors; on a CPU by alignkit's kernels, which ignore the thread's rounding and denormal modes."""
    return native.add(a, b) if a.dtype in native.DTYPES and _uses_native(a) else a + b


def finish(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 sums [M, N] plus an optional bias [N], rounded to `dtype`; by the same kernels as `_add`."""
    if _uses_native(sums):
        y = torch.empty(sums.shape, dtype=dtype, device=sums.device)
        native.round(sums, y, None if bias is None else bias.float().contiguous())
        return y
    return (sums if bias is None else sums + bias.float()).to(dtype)


def _uses_native(t: torch.Tensor) -> bool:
    return families.on_host(t.device) and native.available()


SINGLE = TP(None)
