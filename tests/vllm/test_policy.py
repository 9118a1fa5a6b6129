"""Completeness of alignkit/vllm/policy.py: each field of vLLM's configuration and requests is in a table or AT_DEFAULT.

The fields are read from the sources of each supported version (ALIGNKIT_WHEELS). A new version's field fails here until
it is classified.
"""

import ast

import pytest

from alignkit.vllm.policy import PARTS, REQUEST
from alignkit.vllm.versions import VALIDATED
from tests.fetch_engines import versions
from tests.vllm.test_hook_points import installed, wheel_root

FILES = {"": ("vllm", "VllmConfig"), "compilation_config.pass_config": ("compilation", "PassConfig")} | {
    f"{part}_config": (part, f"{part.capitalize()}Config")
    for part in ("model", "parallel", "cache", "scheduler", "attention", "compilation")
}
AT_DEFAULT = {
    "engram_config",
    "override_attention_dtype",
    "enable_hc_sp",
    "calculate_kv_scales",
    "kv_cache_dtype_skip_layers",
    "kv_sharing_fast_prefill",
    "use_non_causal",
}
"""Fields that change numerics, are in no table, and are off by default in vLLM."""

VLLM = versions("vllm")


def fields(file, name):
    """Return the names of the class's fields from the source."""
    tree = ast.parse(file.read_text())
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    kinds = ("ClassVar", "InitVar")
    return {
        n.target.id for n in body if isinstance(n, ast.AnnAssign) and not ast.unparse(n.annotation).startswith(kinds)
    }


@pytest.mark.parametrize("version", [*(v for v in VLLM if f"{v} on cuda" in VALIDATED), "installed"])
def test_every_configuration_field_is_classified(version, tmp_path):
    assert {part for part, _ in PARTS} == FILES.keys()
    root, unknown = installed() if version == "installed" else wheel_root(version, tmp_path), set()
    for part, table in PARTS:
        file, name = FILES[part]
        names = fields(root / "config" / f"{file}.py", name)
        assert len(names) > 10, part
        unknown |= {row.field for row in table.rows_for(names, lambda _: None)} - table.fields
    assert unknown <= AT_DEFAULT


@pytest.mark.parametrize("version", [*VLLM, "installed"])
def test_every_field_of_a_request_is_classified(version, tmp_path):
    """A new field of SamplingParams fails here until it is known to leave logprobs as they are, or is labeled."""
    root = installed() if version == "installed" else wheel_root(version, tmp_path)
    names = fields(root / "sampling_params.py", "SamplingParams")
    assert len(names) > 30 and names <= REQUEST.fields
    rows = {row.field for row in REQUEST.rows_for(names, lambda _: None)} - REQUEST.restricted
    assert rows == names & {"prompt_logprob_token_ids", "prompt_logprob_start", "trace_decode_token_ids"}
