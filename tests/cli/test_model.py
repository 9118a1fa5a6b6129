"""Random-weight checkpoints (alignkit/jobs/model.py) of every model family.

transformers must load them. Their softmax must be neither flat nor saturated, so that comparisons detect drift.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from alignkit.convert import read_architecture
from alignkit.errors import InputError
from alignkit.jobs.model import make_checkpoint
from alignkit.models import FAMILIES

SMALL = dict(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=200)


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checkpoint_has_the_requested_architecture(tmp_path, arch, tied, dtype):
    assert make_checkpoint(tmp_path / "m", arch, dtype, tied, **SMALL) == tmp_path / "m"
    architecture = read_architecture(tmp_path / "m")
    assert (architecture.family, architecture.tied, architecture.vocab) == (arch, tied, 200)
    weights = load_file(tmp_path / "m" / "model.safetensors")
    expert_bias = {name: weights[name] for name in weights if name.endswith("e_score_correction_bias")}
    assert {w.dtype for name, w in weights.items() if name not in expert_bias} == {dtype}
    assert {w.dtype for w in expert_bias.values()} == ({torch.float32} if arch == "glm4_moe" else set())
    assert ("lm_head.weight" in weights) is not tied
    assert any("q_norm" in name for name in weights) is arch.startswith(("qwen3", "glm4"))
    assert any("q_proj.bias" in name for name in weights) is arch.startswith(("qwen2", "glm4"))
    assert any("shared_expert" in name for name in weights) is (arch in ("qwen2_moe", "glm4_moe"))
    for name, weight in weights.items():
        assert weight.float().std() > 0, name  # a dropped weight would change the output


def test_a_seed_determines_the_weights(tmp_path):
    a, b, c = (
        load_file(make_checkpoint(tmp_path / str(i), seed=s, **SMALL) / "model.safetensors")
        for i, s in enumerate((0, 0, 1))
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_softmax_is_neither_flat_nor_saturated(tmp_path, arch, tied):
    transformers = pytest.importorskip("transformers")
    path = make_checkpoint(tmp_path / "m", arch, torch.float32, tied)
    assert transformers.AutoConfig.from_pretrained(path).model_type == arch
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.randint(2000, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logp = model(tokens).logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    assert 0.3 * math.log(2000) < entropy.mean() < 0.8 * math.log(2000)
    assert logp.max() < math.log(0.999)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(arch="gpt2"), "arch: .*, got 'gpt2'"),
        (dict(dtype=torch.float16), "dtype: .*, got torch.float16"),
        (dict(heads=4, kv_heads=3), "heads: must be a multiple of kv_heads = 3, got 4"),
        (dict(arch="qwen2", head_dim=32), r"head_dim: heads \* head_dim must equal hidden = .* for qwen2"),
        (dict(arch="qwen3_moe", top_k=17), r"top_k: must be in \[1, 16\] for 16 experts, got 17"),
        (dict(arch="mixtral", normalize_top_k=False), "normalize_top_k: .*, got False"),
        (dict(arch="mixtral", dense_layers=[0]), "dense_layers: must be None or empty for mixtral, got .0."),
        (
            dict(arch="glm4_moe", layers=3, dense_layers=[1]),
            r"dense_layers: must be the first layers \(0, 1, ...\) for glm4_moe, got .1.",
        ),
        (dict(arch="glm4_moe", options=["bias"]), "options: may contain only .* for glm4_moe, got bias"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path, kwargs, message):
    with pytest.raises(InputError, match=message):
        make_checkpoint(tmp_path / "m", **(SMALL | kwargs))
    assert not (tmp_path / "m").exists()


def test_config_json_has_no_end_token(tmp_path):
    config = json.loads((make_checkpoint(tmp_path, **SMALL) / "config.json").read_text())
    assert config["eos_token_id"] is None
