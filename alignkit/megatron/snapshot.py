"""Snapshot of a model's checked modules, which skips repeated checks while nothing has changed. No numerics.

Any part of a model can be replaced after it was built, so every forward validates the model, in well under a
millisecond. The slow checks run again only if a fast comparison with the snapshot finds a change.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch

from .hooks import watch_hooks

CHECKED = frozenset(
    {
        "_modules",
        "_parameters",
        "_buffers",
        "_forward_hooks",
        "_forward_pre_hooks",
        "training",
        "config",
        "p",
        "eps",
        "bias",
        "weight",
        "sequence_parallel",
        "gather_output",
        "input_is_parallel",
        "is_expert",
        "disable_grad_reduce",
        "gtp_remat_size",
        "attn_mask_type",
        "attention_dropout",
        "tp_group",
        "tp_size",
        "self_attn_bda",
        "mlp_bda",
        "bias_dropout_add_exec_handler",
        "off_interface",
        "topk",
        "score_function",
        "routing_type",
        "enable_expert_bias",
        "router_replay",
        "ep_group",
        "num_local_experts",
        "use_shared_expert",
        "use_shared_expert_gate",
    }
)
"""Module attributes that `supported` and `fingerprint` read. Classes in `te` add theirs by `required`.

A missing attribute lets its later changes pass unchecked.
"""


def device_of(model) -> torch.device:
    """Return a model's device: the current CUDA device for a pipeline stage without parameters."""
    first = next(model.parameters(), None)
    return torch.device(torch.cuda.current_device()) if first is None else first.device


class Snapshot:
    """Record of a model's modules at a check: identities, classes, checked attributes, parameters and buffers.

    facts: the caller's results for these modules. A snapshot references the whole model, so only the model may own it.
    """

    def __init__(self, model: torch.nn.Module, facts: dict[str, str]):
        self.facts = facts
        self.named_modules = list(model.named_modules())
        self._modules = [module for _, module in self.named_modules]
        self._classes = list(map(type, self._modules))
        self._vars = list(map(vars, self._modules))
        self._getters = [
            operator.itemgetter(*CHECKED.union(getattr(cls, "required", ())).intersection(own))
            for cls, own in zip(self._classes, self._vars, strict=True)
        ]
        self._values = list(self._checked())
        dicts = [own[name] for own in self._vars for name in ("_modules", "_parameters", "_buffers")]
        self._dicts = self._vars + dicts
        self._lengths = list(map(len, self._dicts))
        self._last = list(map(next, map(reversed, self._vars)))
        self._nonempty = [d for d in dicts if d]
        self._contents = list(self._content())
        self._tensors = [
            t for own in self._vars for name in ("_parameters", "_buffers") for t in own[name].values() if t is not None
        ]
        self._facts = tensor_facts(self._tensors)
        self._hooks = [own[name] for own in self._vars for name in ("_forward_pre_hooks", "_forward_hooks")]

    def _checked(self) -> Iterator[Any]:
        values = map(operator.call, self._getters, self._vars)  # pyright: ignore[reportArgumentType] - any callable
        return itertools.chain.from_iterable(values)

    def _content(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._nonempty))

    def is_current(self) -> bool:
        """Return whether nothing has changed; takes about 0.4 ms for 36 layers.

        Attributes, modules and parameters are compared by identity. Tensors are also compared by dtype, shape and
        device, which ``model.float()`` changes in place. A dictionary of the same size with the same last key has no
        new keys.
        """
        is_ = operator.is_
        try:
            return (
                all(map(is_, map(type, self._modules), self._classes))
                and all(map(is_, map(vars, self._modules), self._vars))
                and list(map(len, self._dicts)) == self._lengths
                and list(map(next, map(reversed, self._vars))) == self._last
                and all(map(is_, self._checked(), self._values))
                and all(map(is_, self._content(), self._contents))
                and tensor_facts(self._tensors) == self._facts
            )
        except KeyError:  # an attribute has been removed
            return False

    def watch_hooks(self) -> None:
        """Wrap the forward hooks of all modules; see `hooks.watch_hooks`."""
        if any(self._hooks):
            for path, module in self.named_modules:
                watch_hooks(path, module)


_tensor_getters = [operator.attrgetter(name) for name in ("dtype", "shape", "device")]


def tensor_facts(tensors: list[torch.Tensor]) -> list[list]:
    """Return classes, dtypes, shapes, devices and sequence_parallel marks of tensors."""
    return [
        list(map(type, tensors)),
        *(list(map(getter, tensors)) for getter in _tensor_getters),
        [t.__dict__.get("sequence_parallel") for t in tensors],
    ]
