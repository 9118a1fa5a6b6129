"""The families of models that alignkit keeps aligned, each a file of data. Neither engine is imported."""

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
"""By `model_type`."""

ARCHITECTURES: dict[str, Family] = {family.architecture: family for family in FAMILIES.values()}
"""By the name in `architectures`."""
