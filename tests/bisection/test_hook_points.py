"""Source lines of vLLM on which the bisect recorder depends exist in every supported version.

The sources come from ALIGNKIT_WHEELS (`make test` sets it) and from the installed vLLM. A missing line means that
alignkit/bisect/vllm_worker.py would record another value.
"""

import re

import pytest

from alignkit.vllm.versions import VALIDATED
from tests.vllm.test_hook_points import installed, wheel_root

RUNNER = (
    r"self\.query_start_loc\.np\[1 : num_reqs \+ 1\] = ",
    r"self\.requests\b",
    r"self\.input_batch\.req_ids",
    r"sample_hidden_states = hidden_states\[logits_indices\]",
    r"prompt_hidden_states = hidden_states\[offset : offset \+ num_logits\]",
    r"self\.model\.compute_logits\(",
    r"def get_model\(",
    r"\binput_ids=input_ids,\s+positions=positions,",
)
ATTENTION = (
    r"qkv, _ = self\.qkv_proj\(hidden_states\)",
    r"q, k, v = qkv\.split\(\[self\.q_size, self\.kv_size, self\.kv_size\], dim=-1\)",
    r"q, k = self\.rotary_emb\(positions, q, k\)",
    r"self\.attn\(q, k, v\)",
    r"output, _ = self\.o_proj\(attn_output\)",
)
LAYER = (
    r"hidden_states, residual = self\.input_layernorm\(hidden_states, residual\)",
    r"hidden_states, residual = self\.post_attention_layernorm\(hidden_states, residual\)",
)
MODEL = (
    r"= self\.gate_up_proj\(x\)",
    r"x, _ = self\.down_proj\(x\)",
    r"hidden_states, _ = self\.norm\(hidden_states, residual\)",
    r"self\.embed_tokens\b",
    r"self\.logits_processor\(self\.lm_head, hidden_states",
)
FILES = {
    "v1/worker/gpu_model_runner.py": RUNNER,
    "model_executor/models/llama.py": ATTENTION + LAYER + MODEL,
    "model_executor/models/qwen2.py": ATTENTION + LAYER + MODEL,
    "model_executor/models/qwen3.py": (
        *ATTENTION,
        *LAYER,
        r"q_by_head = self\.q_norm\(q_by_head\)",
        r"k_by_head = self\.k_norm\(k_by_head\)",
    ),
}


SUPPORTED_VERSIONS = [version.partition(" ")[0] for version in VALIDATED]


@pytest.mark.parametrize("version", ["installed", *SUPPORTED_VERSIONS])
@pytest.mark.parametrize("file", FILES)
def test_vllm_computes_what_the_hooks_record(file, version, tmp_path):
    root = installed() if version == "installed" else wheel_root(version, tmp_path)
    source = (root / file).read_text()
    assert not [pattern for pattern in FILES[file] if not re.search(pattern, source)]
