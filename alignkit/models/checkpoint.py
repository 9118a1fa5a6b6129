"""The tensors of an HF directory, and that there is nothing beside them that vLLM would read."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from alignkit.errors import InputError, UnsupportedError
from alignkit.models.config import read_json


class Checkpoint(Mapping):
    """The tensors of an HF directory by name, read on demand: one file, or several with an index."""

    def __init__(self, model_dir: str | os.PathLike):
        """Raises InputError naming a file that is missing, unreadable, shorter or longer than its header says, or that
        vLLM would read and alignkit not."""
        root = Path(model_dir)
        index = root / "model.safetensors.index.json"
        weight_map = _weight_map(index) if index.exists() else {}
        files = sorted(set(weight_map.values())) or ["model.safetensors"]
        _refuse_other_files(root, files, bool(weight_map))
        self._where = {}
        for name in files:
            if not (root / name).is_file():
                raise InputError(f"model: {root} has no {name}" + (f", which {index.name} names" if weight_map else ""))
            try:
                file = safe_open(root / name, framework="pt")
            except (OSError, SafetensorError) as e:
                raise InputError(f"model: cannot read {root / name}: {e}") from None
            for tensor in file.keys():
                if tensor in self._where:
                    raise InputError(f"model: {tensor} is in two files of {root}")
                self._where[tensor] = file
        for tensor in sorted(weight_map.keys() - self._where.keys()):
            raise InputError(f"model: {weight_map[tensor]} has no tensor {tensor!r}, which {index} names")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type, as safetensors names it, and shape; nothing of the tensor is read."""
        tensor = self._where[name].get_slice(name)
        return tensor.get_dtype(), tuple(tensor.get_shape())


def _weight_map(index: Path) -> dict[str, str]:
    """Names of the files by tensor."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"model: {index} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"model: {index}: {tensor!r} is in {name!r:.200}, which is not the name of a file")
    return weight_map


def _refuse_other_files(root: Path, files: list[str], indexed: bool) -> None:
    """vLLM prefers consolidated*.safetensors, reads every *.safetensors where there is no index, and quantizes where
    there is a file for it."""
    for name in sorted(glob.glob("*.safetensors", root_dir=root)):
        if name not in files and (not indexed or name.startswith("consolidated")):
            raise UnsupportedError(f"model: {root / name} stands beside {files[0]}, and vLLM would read it")
    if (root / "hf_quant_config.json").exists():
        raise UnsupportedError(f"hf_quant_config.json: {root} is quantized")
