"""Model families that alignkit supports, each a file of data, and the readers of HF directories. Imports no engine.

`family` is the schema of the data, `config` reads config.json, `checkpoint` reads the weights, and `fields` lists the
fields of config.json. CONTRIBUTING.md, "Adding a dense model family", lists what a new family changes.
"""

from alignkit.models.family import Family
from alignkit.models.glm4_moe import GLM4_MOE
from alignkit.models.llama import LLAMA
from alignkit.models.mistral import MISTRAL
from alignkit.models.mixtral import MIXTRAL
from alignkit.models.qwen2 import QWEN2
from alignkit.models.qwen2_moe import QWEN2_MOE
from alignkit.models.qwen3 import QWEN3
from alignkit.models.qwen3_moe import QWEN3_MOE

_FAMILIES = (QWEN3, QWEN2, LLAMA, MISTRAL, QWEN3_MOE, QWEN2_MOE, MIXTRAL, GLM4_MOE)

FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}
"""Families keyed by `model_type` of config.json."""

ARCHITECTURES: dict[str, Family] = {family.architecture: family for family in FAMILIES.values()}
"""Families keyed by the name in `architectures` of config.json."""
