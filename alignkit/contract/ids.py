"""The contract's id. Two logprobs may be compared bit for bit only if they carry the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    import torch

    from ..runtime.families import Family


def contract_id(device: torch.device | torch.Tensor | str | None = None) -> str:
    """Identity of the contract on a device family, e.g. ``alignkit-3/cpu/v128/k8/kv32/leaf128``.

    device: what computed the numbers: a device or its name (``"cuda"``), a tensor that lies where they were computed,
        such as a weight, or a family (``"cpu"``, ``"sm90"``). Of a running engine ask the engine instead:
        `alignkit.vllm.worker_status(llm)[0]["contract"]`, `alignkit.megatron.status(model)["contract"]`.

    Raises InputError without a device, for there is none that is right by default, and BackendError for one on which
    alignkit has no backend.
    """
    return _family(device).contract_id


def _family(device: torch.device | torch.Tensor | str | None) -> Family:
    import torch  # not by those who merely import alignkit

    from ..runtime import dispatch, families

    given = device.device if isinstance(device, torch.Tensor) else device
    if isinstance(given, str):
        if given in families.BY_NAME:
            return families.BY_NAME[given]
        try:
            given = torch.device(given)
        except RuntimeError:
            raise InputError(
                f"device: {device!r} is neither a device nor one of {', '.join(families.BY_NAME)}"
            ) from None
    if not isinstance(given, torch.device):
        raise InputError(
            f"device: {given!r}; contract_id needs the device that computed the numbers, such as "
            "weight.device or 'cuda'"
        )
    return dispatch.family(given)
