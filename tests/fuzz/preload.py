"""What torch imports at first use, imported once, before processes are forked: no call waits for it."""

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
