"""The contract id of each device family; it follows from an explicit device, and files are saved under it.

IDS change only with docs/contract.md and the golden hashes (CONTRIBUTING.md, "Rules").
"""

import pytest
import torch

import alignkit
from alignkit import contract_id
from alignkit.drift import Logprobs, files, load, save
from alignkit.errors import BackendError, InputError
from alignkit.runtime import dispatch

from ..conftest import DEVICE
from .helpers import CPU

IDS = {"cpu": "alignkit-3/cpu/v128/k8/kv32/leaf128", "sm90": "alignkit-6/sm90/v128/k8/kv128/leaf512"}
"""Ids change only with docs/contract.md and the golden hashes (CONTRIBUTING.md, "Rules")."""


def test_contract_id_of_each_device():
    expected = IDS[dispatch.family(DEVICE).name]
    for device in (DEVICE, torch.device(DEVICE), torch.empty(1, device=DEVICE), dispatch.family(DEVICE).name):
        assert contract_id(device) == alignkit.contract_id(device) == expected
    assert contract_id(torch.empty(1, device="cpu")) == IDS["cpu"]
    assert {family: contract_id(family) for family in IDS} == IDS


@pytest.mark.parametrize("device", [(), (None,), (3,), ("hopper",), ("",), (["cpu"],)])
def test_contract_id_has_no_default_device(device):
    with pytest.raises(InputError, match="device: "):
        contract_id(*device)


def test_device_without_a_backend_has_no_contract_id():
    with pytest.raises(BackendError, match="device: .*'meta'"):
        contract_id("meta")


def test_values_of_another_device_are_not_saved(tmp_path, monkeypatch):
    if CPU:  # stands in for a GPU's id
        monkeypatch.setattr(files, "contract_id", lambda device: IDS["sm90"])
    values = [torch.zeros(2, device="meta" if CPU else DEVICE)]
    message = f"so contract must be '{IDS['sm90']}' or 'stock', got '{IDS['cpu']}'"
    with pytest.raises(InputError, match=f"contract: sequence 0's logprobs are on (meta|cuda:?[0-9]*), {message}"):
        save(tmp_path / "a", Logprobs([[1]], [[5, 6]], values, IDS["cpu"]))
    assert not list(tmp_path.iterdir())
    if not CPU:
        for contract in (IDS["sm90"], contract_id(values[0]), "stock"):
            save(tmp_path / "a", Logprobs([[1]], [[5, 6]], values, contract))
            assert load(tmp_path / "a").contract == contract
