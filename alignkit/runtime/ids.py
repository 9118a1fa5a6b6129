"""The contract id of a device. Logprobs may be compared bit for bit only under the same id.

`contract_id` is public (docs/api/alignkit.md). `Family.contract_id` of `runtime.families` formats the id. Logprob files
and golden_*.json store ids, so another format makes stored files incomparable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    import torch

    from .families import Family


def contract_id(device: torch.device | torch.Tensor | str | None = None) -> str:
    """Return the contract id of a device family, e.g. ``alignkit-3/cpu/v128/k8/kv32/leaf128``.

    For a running engine, use `alignkit.vllm.worker_status(llm)[0]["contract"]` or
    `alignkit.megatron.status(model)["contract"]` instead.

    Args:
        device: Device that computed the numbers: a torch.device or its name (``"cuda"``), a tensor on that device
            (e.g. a weight), or a device family (``"cpu"``, ``"sm90"``). Required; there is no default device.

    Returns:
        The id: contract version, device family and the contract constants.

    Raises:
        InputError: `device` is missing, or is neither a device nor a family.
        BackendError: alignkit has no backend for the device.
    """
    return _family(device).contract_id


def _family(device: torch.device | torch.Tensor | str | None) -> Family:
    import torch  # deferred: `import alignkit` must not import torch

    from . import dispatch, families

    given = device.device if isinstance(device, torch.Tensor) else device
    if isinstance(given, str):
        if given in families.BY_NAME:
            return families.BY_NAME[given]
        try:
            given = torch.device(given)
        except RuntimeError:
            names = ", ".join(map(repr, families.BY_NAME))
            raise InputError(
                f"device: must be the name of a torch device, such as 'cuda:0', or of a device family ({names}), "
                f"got {device!r:.200}"
            ) from None
    if given is None:
        raise InputError(
            "device: required. Pass the device that computed the numbers, such as weight.device or 'cuda', got None"
        )
    if not isinstance(given, torch.device):
        raise InputError(f"device: must be a torch.device, its name, or a tensor, got a {type(given).__name__}")
    return dispatch.family(given)
