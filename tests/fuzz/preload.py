"""Modules that torch imports lazily, imported before workers are forked, so that no call's timeout includes an import.

pool.py and pair.py name this module for the fork server (tests/forks.py).
"""

import warnings

import torch

from . import judge, modes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for mode in (modes.SAFE | modes.FORWARD | modes.ODD).values():
        with mode():
            pass
    with torch.autograd.forward_ad.dual_level():
        pass
    torch.func.vmap(torch.sin)(torch.func.grad(torch.sin)(torch.ones(()))[None])
    torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)
assert judge
