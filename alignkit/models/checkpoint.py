"""Reader for the safetensors of an HF directory; rejects additional weight files that vLLM would load.

`alignkit.convert` re-exports `Checkpoint`. `config` reads config.json; `convert.check_weights` compares the tensors.
"""

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
    """Mapping of tensor names to tensors of an HF directory, read on demand from one file or an indexed set."""

    def __init__(self, model_dir: str | os.PathLike):
        """Open the files and read their headers.

        Args:
            model_dir: HF model directory.

        Raises:
            InputError: If a file is missing or unreadable, or its size contradicts its header.
            UnsupportedError: If vLLM would load a file that the checkpoint does not include, or would quantize.
        """
        root = Path(model_dir)
        index = root / "model.safetensors.index.json"
        weight_map = _weight_map(index) if index.exists() else {}
        files = sorted(set(weight_map.values())) or ["model.safetensors"]
        _refuse_other_files(root, files, bool(weight_map))
        self._files = {}
        for name in files:
            if not (root / name).is_file():
                if weight_map:
                    raise InputError(f"model: {root} has no {name}, which {index.name} lists. Download the file")
                raise InputError(f"model: {root} has no {name} and no {index.name}. Download the checkpoint's weights")
            try:
                file = safe_open(root / name, framework="pt")
            except (OSError, SafetensorError) as e:
                raise InputError(f"model: cannot read {root / name}: {e}") from None
            for tensor in file.keys():
                if tensor in self._files:
                    raise InputError(f"model: {root}: two files contain the tensor {tensor!r}, one of them {name}")
                self._files[tensor] = file
        for tensor in sorted(weight_map.keys() - self._files.keys()):
            raise InputError(f"model: {weight_map[tensor]} has no tensor {tensor!r}, which {index} lists")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return a tensor's type, by safetensors' name, and its shape, without reading the data."""
        tensor = self._files[name].get_slice(name)
        return tensor.get_dtype(), tuple(tensor.get_shape())


def _weight_map(index: Path) -> dict[str, str]:
    """Return the index's map of tensor names to file names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"model: {index}: weight_map must be a nonempty JSON object, got {weight_map!r:.200}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"model: {index}: weight_map[{tensor!r:.200}] must name a file in the same directory, got {name!r:.200}"
            )
    return weight_map


def _refuse_other_files(root: Path, files: list[str], indexed: bool) -> None:
    """Raise UnsupportedError if the directory has other files that change what vLLM loads.

    vLLM prefers consolidated*.safetensors, reads every *.safetensors if there is no index, and quantizes if
    hf_quant_config.json exists.
    """
    for name in sorted(glob.glob("*.safetensors", root_dir=root)):
        if name not in files and (not indexed or name.startswith("consolidated")):
            if indexed:
                raise UnsupportedError(
                    f"model: {root / name}: must not exist, because vLLM prefers consolidated*.safetensors to the "
                    "files of the index, which alignkit loads. Move the file to another directory"
                )
            raise UnsupportedError(
                f"model: {root / name}: without model.safetensors.index.json, vLLM loads every *.safetensors file, but "
                "alignkit only model.safetensors. Download the index, or move files that are not part of the checkpoint"
            )
    if (root / "hf_quant_config.json").exists():
        raise UnsupportedError(
            f"hf_quant_config.json: must not exist, because quantized checkpoints are not supported, found in {root}. "
            "Use an unquantized checkpoint"
        )
