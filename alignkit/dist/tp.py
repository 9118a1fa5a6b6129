"""A thin view of a tensor-parallel process group: fixed-order sums and verdicts that all ranks reach together."""

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
from .agreement import told

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12


def strict() -> bool:
    """Whether ``ALIGNKIT_STRICT=1``: values on a GPU are looked at before they are used, although that waits for it."""
    return config.strict


class TP:
    """The ranks that share one layer. `TP(None)` is a single rank; otherwise `group` is a torch process group
    whose rank order is the shard order. Its tensors' collectives may be captured in a CUDA graph.

    agreed: the caller has made sure that all ranks make the same calls, with what fits together: they do not tell each
    other again. So it is inside a model whose ranks agreed on it and on its input when its forward began.
    called: what the group is in errors.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, agreed: bool = False, called: str = "tensor-parallel"
    ):
        self.group = group
        self.agreed = agreed
        self.called = called
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def __repr__(self) -> str:
        return f"TP(rank={self.rank}, size={self.size})"

    def all_gather(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank, in rank order; shapes must agree."""
        if self.size == 1:
            return [t]
        return list(self.gather(t[None]).unbind(0))

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks along dim 0, in rank order; shapes must agree."""
        if self.size == 1:
            return t
        t = t.contiguous()
        out = t.new_empty((self.size * t.shape[0], *t.shape[1:]))
        _all_gather(out.view(-1), t.view(-1), group=self.group)
        return out

    def height(self, rows: int) -> int:
        """How many rows each rank brings to a `gather` if this one has `rows`: as many, where shapes agree. Ranks of an engine
        with other numbers pad theirs."""
        return rows

    def begin_gather(self, t: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`gather`, of which the result is asked for later: what is computed until then takes place beside the transfer."""
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
        """Sum over ranks by the balanced tree of rank order (neighbours first), in t's type. An odd rank out
        joins at the next level."""
        return self._sum(t, False)

    def tree_sum_scatter(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's slice along dim 0 of `tree_sum(t)`; only the slices travel. The ranks must divide dim 0."""
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
        """`tree_sum`, or `tree_sum_scatter`, of fp32 [rows, columns] that `product` makes where they are added, which
        takes one copy less; plus bias [columns] in fp32, rounded to `dtype`."""
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
        """The group's, if it takes these sums. On all ranks or none, as their shapes agree."""
        found = None if self.group is None else symmetric.workspace(self.group, device)
        return found if found is not None and found.takes(rows, columns, scatter) else None

    def shard(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's equal slice along dim 0."""
        return t if self.size == 1 else t.chunk(self.size, dim=0)[self.rank]

    def check(self, op: str, checks: Callable[[], Hashable]) -> list[Any]:
        """Run `checks` on this rank and raise on every rank if it failed on any.

        `checks` raises or returns this rank's metadata, made of what pickle takes; the metadata of all ranks is returned. A
        rank that fails alone would leave the others waiting in the op's collectives, so whatever it raises becomes the
        verdict of all. That is so in every call: ranks exchange messages from host to host and remember nothing, since none
        could know what another remembers.
        """
        if self.size == 1 or self.agreed:
            return [checks()] * self.size
        error, said = None, None
        try:
            said = (strict(), None, checks())
            pickle.dumps(said)
        except Exception as e:
            error, said = e, (None, *_as_alignkit(e))
        assert self.group is not None  # there is more than one rank
        answers = told(self.group, said, self.called)
        if error is not None:
            raise error
        for rank, (_, kind, value) in enumerate(answers):
            if kind is not None:
                raise kind(f"{value} (in {op}, on rank {rank} of the {self.called} group)")
        if any(answer[0] != answers[0][0] for answer in answers):
            raise InputError(
                f"ALIGNKIT_STRICT: differs between the ranks of the {self.called} group in {op}: "
                f"{[answer[0] for answer in answers]}"
            )
        return [value for _, _, value in answers]

    def check_same(self, op: str, checks: Callable[[], Mapping[str, Hashable]]) -> None:
        """`check`, and require the returned dict to be the same on every rank; the error names what differs."""
        seen = [dict(items) for items in self.check(op, lambda: tuple(checks().items()))]
        for key in dict.fromkeys(key for one in seen for key in one):
            values = [one.get(key) for one in seen]
            if any(v != values[0] for v in values):
                raise InputError(f"{key}: differs between the ranks of the {self.called} group in {op}: {values}")

    def check_same_values(self, op: str, **tensors: torch.Tensor | None) -> None:
        """Require tensors, whose shapes and types the ranks have agreed on, to hold the same values everywhere.

        On the CPU, and if `strict`, another value raises an InputError that names the tensor, on every rank. On a GPU nothing
        waits: sums of the values travel there, and if they differ the device of every rank stops with that message. A
        difference goes unseen with a probability of 2^-64, about.
        """
        given = {name: t.detach() for name, t in tensors.items() if t is not None and t.numel()}
        if self.size == 1 or self.agreed or not given:
            return
        if strict() or all(families.on_host(t.device) for t in given.values()):
            self.check_same(op, lambda: {f"{name}, its values": _digest(t) for name, t in given.items()})
            return
        sums = torch.stack([_value_sum(t) for t in given.values()])
        seen = torch.stack(self.all_gather(sums))
        for name, same in zip(given, (seen == seen[0]).all(dim=0).unbind(), strict=True):
            torch._assert_async(same, f"{name}: its values differ between the ranks of the {self.called} group in {op}")


def check_same_across(
    groups: Sequence[TP],
    op: str,
    checks: Callable[[], Mapping[str, Hashable]],
    *,
    apart: Sequence[TP] = (),
    alike: Container[str] = (),
) -> None:
    """`check_same` on a grid of ranks, whose rows, columns, ... `groups` are: one after the other, each rank goes through
    all of them, and what was refused anywhere raises everywhere. All ranks of the grid call it.

    apart: groups that join several such grids, each with an input of its own: there only what is named in `alike` must be
    the same."""
    error: Exception | None = None
    facts: dict[str, Hashable] = {}
    try:
        facts = dict(checks())
    except Exception as e:
        error = e

    def said() -> dict[str, Hashable]:
        if error is not None:
            raise error
        return facts

    def said_apart() -> dict[str, Hashable]:
        return {name: value for name, value in said().items() if name in alike}

    for group, say in (*((group, said) for group in groups), *((group, said_apart) for group in apart)):
        try:
            group.check_same(op, say)
        except Exception as e:  # the next group's ranks are to hear of it
            error = error or e
    if error is not None:
        raise error


def check_same_values_across(groups: Sequence[TP], op: str, **tensors: torch.Tensor) -> None:
    """`check_same_values` on a grid of ranks, as `check_same_across`."""
    groups = [group for group in groups if group.size > 1 and not group.agreed]
    if groups and (strict() or all(families.on_host(t.device) for t in tensors.values())):
        check_same_across(groups, op, lambda: {f"{name}, its values": _digest(t) for name, t in tensors.items()})
        return
    for group in groups:
        group.check_same_values(op, **tensors)


def _as_alignkit(error: Exception) -> tuple[type[AlignkitError], str]:
    """What other ranks raise for it."""
    if isinstance(error, AlignkitError):
        return type(error), str(error)
    return AlignkitError, f"{type(error).__name__}: {error}"


def _digest(t: torch.Tensor) -> str:
    """Of a tensor's bytes; short, so that an error that shows it can be read."""
    raw = t.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()


def _value_sum(t: torch.Tensor) -> torch.Tensor:
    """int64 []: the sum of the elements' bits, each times a random odd number of its place."""
    bits = t.reshape(-1)
    if bits.dtype.is_floating_point:
        bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    n = len(bits)
    capturing = torch.cuda.is_current_stream_capturing()  # then memory may be used again by the graph
    make = _place_numbers.__wrapped__ if capturing else _place_numbers
    return (bits.to(torch.int64) * make(1 << (n - 1).bit_length(), t.device)[:n]).sum()


@functools.lru_cache(maxsize=64)
def _place_numbers(n: int, device: torch.device) -> torch.Tensor:
    """int64 [n]: the same on every machine (Steele, Lea, Flood: SplitMix64)."""
    with torch.inference_mode(False), torch.no_grad():
        x = torch.arange(1, n + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
        x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
        x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
        return (x ^ (x >> 31 & (1 << 33) - 1)) | 1


def balanced_tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """Of the ranks' parts, in rank order: the balanced tree, neighbours first."""
    while len(parts) > 1:
        parts = [_add(parts[i], parts[i + 1]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """On a CPU by our kernels, which round and keep denormals in every mode that a thread may be in."""
    return native.add(a, b) if a.dtype in native.DTYPES and _by_kernels(a) else a + b


def finish(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """fp32 sums [M, N] plus bias [N], if there is one, rounded to `dtype`; by the same kernels as `_add`."""
    if _by_kernels(sums):
        y = torch.empty(sums.shape, dtype=dtype, device=sums.device)
        native.round(sums, y, None if bias is None else bias.float().contiguous())
        return y
    return (sums if bias is None else sums + bias.float()).to(dtype)


def _by_kernels(t: torch.Tensor) -> bool:
    return families.on_host(t.device) and native.available()


SINGLE = TP(None)
