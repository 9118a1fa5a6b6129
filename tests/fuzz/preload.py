"""What torch imports at first use, imported once, before processes are forked: no call waits for it."""

import os
import warnings

# Threads of OpenMP do not live on in what is forked, and who waited for them would hang. A process makes its own later.
os.environ["OMP_NUM_THREADS"] = "1"

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
