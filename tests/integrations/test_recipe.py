"""`alignkit recipe`: parsing of verl, NeMo-RL and slime recipes, and the verdict on each setting.

The recipes are written here. A new form of script that must parse needs a case here.
"""

import pytest

from alignkit.errors import InputError, UnsupportedError
from alignkit.integrations import recipe as recipes
from alignkit.integrations.recipe import ADD, SUPPORTED, UNKNOWN, UNSUPPORTED
from tests.cli.conftest import alignkit  # noqa: F401

VERL = """\
#!/usr/bin/env bash
set -x
export TP=${TP:-2}
MODEL_PATH=${MODEL_PATH:-"Qwen/Qwen3-8B"}
# actor_rollout_ref.model.lora_rank=8
ACTOR=(
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP}
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    actor_rollout_ref.model.path="$MODEL_PATH"
)
python3 -m verl.trainer.main_ppo model_engine=megatron \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.temperature=0.7 \\
    actor_rollout_ref.rollout.calculate_log_probs=True \\
    actor_rollout_ref.model.external_lib=alignkit.integrations.verl trainer.logger='["console","wandb"]' \\
    "${ACTOR[@]}" $@
"""

NEMO = """\
defaults: parent.yaml
policy:
  megatron_cfg:
    context_parallel_size: 2
    mtp_num_layers: 2
  generation:
    top_p: 0.95
"""
NEMO_PARENT = """\
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  precision: bfloat16
  megatron_cfg: {enabled: true, pipeline_dtype: "${policy.precision}"}
  generation:
    backend: vllm
    top_p: 1.0
    vllm_cfg: {precision: "${policy.precision}", tensor_parallel_size: 2}
"""


def write(path, text):
    path.write_text(text)
    return path


def examine(recipe):
    """Return (verdict, line number) by key."""
    return {f.setting.key: (f.verdict, f.setting.where.rpartition(":")[2]) for f in recipes.examine(recipe)}


def test_a_verl_script_is_parsed(tmp_path):
    recipe = recipes.read(write(tmp_path / "run.sh", VERL))
    assert recipe.framework == "verl"
    assert recipe.get("actor_rollout_ref.model.path") == "Qwen/Qwen3-8B"
    assert recipe.get("trainer.logger") == ["console", "wandb"]
    assert "actor_rollout_ref.model.lora_rank" not in recipe.settings  # a comment
    verdicts = examine(recipe)
    assert {verdict for verdict, _ in verdicts.values()} == {SUPPORTED}
    assert verdicts["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"] == (SUPPORTED, "7")
    assert verdicts["actor_rollout_ref.rollout.temperature"] == (SUPPORTED, "12")
    assert verdicts["model_engine"] == (SUPPORTED, "11")


@pytest.mark.parametrize(
    "setting, reason",
    [
        ("actor_rollout_ref.rollout.name=sglang", "only vLLM"),
        ("actor_rollout_ref.rollout.top_p=0.9", "from the tokens alone"),
        ("actor_rollout_ref.rollout.temperature=0", "positive"),
        ("actor_rollout_ref.rollout.logprobs_mode=raw_logprobs", "temperature 1"),
        ("actor_rollout_ref.rollout.logprobs_mode=raw_logits", "logprobs_mode"),
        ("actor_rollout_ref.rollout.data_parallel_size=2", "data parallelism"),
        ("actor_rollout_ref.rollout.quantization=fp8", "quantization"),
        ("actor_rollout_ref.rollout.full_determinism=True", "VLLM_BATCH_INVARIANT"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded", "not compared with the trainer"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method=ngram", "speculative"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8", "KV cache"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.no_such_argument=1", "unknown argument"),
        ("actor_rollout_ref.model.lora_rank=8", "LoRA"),
        ("actor_rollout_ref.model.use_remove_padding=False", "mask"),
        ("actor_rollout_ref.model.mtp.enable=True", "multi-token"),
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct", "multimodal"),
        ("actor_rollout_ref.model.path=deepseek-ai/DeepSeek-V3", "not supported"),
        ("actor_rollout_ref.actor.megatron.dtype=float16", "fp16"),
        ("actor_rollout_ref.actor.megatron.use_megatron_fsdp=True", "sharded"),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.fp8=hybrid", "fp8"),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.mtp_num_layers=1", "multi-token"),
        ("actor_rollout_ref.ref.megatron.override_transformer_config.multi_latent_attention=True", "latent"),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.no_such_field=7", "no_such_field"),
        ("algorithm.adv_estimator=optimal_token_baseline", "not aligned"),
        ("distillation.enabled=True", "distillation"),
        ("model_engine=fsdp", "only Megatron-core"),
    ],
)
def test_unsupported_verl_settings_are_named(setting, reason, tmp_path):
    text = VERL.replace(
        "model_engine=megatron", setting if setting.startswith("model_engine") else "model_engine=megatron"
    )
    path = write(tmp_path / "run.sh", text.replace('"${ACTOR[@]}"', f'"${{ACTOR[@]}}" {setting}'))
    rejected = [f for f in recipes.examine(recipes.read(path)) if f.verdict == UNSUPPORTED]
    assert len(rejected) == 1 and reason in rejected[0].why, rejected
    assert str(rejected[0]).startswith(f"{path}:")


MOE = NEMO_PARENT.replace("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B").replace(
    "enabled: true,", "enabled: true, expert_model_parallel_size: 8, moe_token_dispatcher_type: alltoall,"
)


@pytest.mark.parametrize(
    "model, more, rejected",
    [
        ("Qwen/Qwen3-30B-A3B", "", None),
        ("Qwen/Qwen3-30B-A3B", "expert_parallel_size: 2", None),
        ("Qwen/Qwen3-30B-A3B", "expert_parallel_size: 8", "data parallelism inside vLLM"),
        (
            "Qwen/Qwen3-30B-A3B",
            "expert_model_parallel_size: 6",
            "power of two that divides num_moe_experts = 128, got 6",
        ),
        (
            "mistralai/Mixtral-8x7B-v0.1",
            "expert_model_parallel_size: 16",
            "power of two that divides num_moe_experts = 8, got 16",
        ),
        ("Qwen/Qwen3-30B-A3B", "moe_enable_routing_replay: true", "routing replay"),
        ("Qwen/Qwen3-8B", "moe_enable_routing_replay: true", None),  # dense models ignore it
    ],
)
def test_moe_settings_are_checked(model, more, rejected, tmp_path):
    text = MOE.replace("Qwen/Qwen3-30B-A3B", model)
    if more.startswith("expert_parallel_size"):
        text = text.replace("tensor_parallel_size", f"{more}, tensor_parallel_size")
    elif more.startswith("expert_model"):
        text = text.replace("expert_model_parallel_size: 8", more)
    elif more:
        text = text.replace("enabled: true,", f"enabled: true, {more},")
    recipe = recipes.read(write(tmp_path / "run.yaml", text))
    found = [f.why for f in recipes.examine(recipe) if f.verdict == UNSUPPORTED]
    assert not found if rejected is None else len(found) == 1 and rejected in found[0], found


def test_missing_required_settings_are_named(tmp_path):
    text = VERL.replace("actor_rollout_ref.model.external_lib=alignkit.integrations.verl", "")
    verdicts = examine(
        recipes.read(write(tmp_path / "run.sh", text.replace("calculate_log_probs=True", "calculate_log_probs=False")))
    )
    assert verdicts["actor_rollout_ref.model.external_lib"][0] == ADD
    assert verdicts["actor_rollout_ref.rollout.calculate_log_probs"][0] == ADD


@pytest.mark.parametrize(
    "name, supported",
    [
        ("zai-org/GLM-4.5-Air", True),
        ("zai-org/GLM-4.6", True),
        ("zai-org/GLM-4.5-Air-Base", True),
        ("zai-org/GLM-4.5-FP8", False),
        ("zai-org/GLM-4.5V", False),
        ("zai-org/glm-4-9b", False),
    ],
)
def test_glm_models_and_settings_are_checked(name, supported, tmp_path):
    """GLM-4.5's Megatron-core settings pass, except multi-token prediction."""
    config = "actor_rollout_ref.actor.megatron.override_transformer_config."
    settings = {
        "moe_layer_freq": "[0,1,1]",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": "True",
        "moe_router_topk_scaling_factor": "2.5",
        "mtp_num_layers": "1",
    }
    more = " ".join(f"{config}{field}={value}" for field, value in settings.items())
    text = VERL.replace("Qwen/Qwen3-8B", name).replace('"${ACTOR[@]}"', f'"${{ACTOR[@]}}" {more}')
    verdicts = examine(recipes.read(write(tmp_path / "run.sh", text)))
    assert verdicts["actor_rollout_ref.model.path"][0] == (SUPPORTED if supported else UNSUPPORTED)
    assert {field: verdicts[config + field][0] for field in settings} == dict.fromkeys(settings, SUPPORTED) | {
        "mtp_num_layers": UNSUPPORTED
    }


def test_an_unrecognized_model_name_is_unknown(tmp_path):
    verdicts = examine(recipes.read(write(tmp_path / "run.sh", VERL.replace("Qwen/Qwen3-8B", "/models/policy"))))
    assert verdicts["actor_rollout_ref.model.path"][0] == UNKNOWN


def test_a_nemo_rl_recipe_inherits_from_its_parent(tmp_path):
    write(tmp_path / "parent.yaml", NEMO_PARENT)
    recipe = recipes.read(write(tmp_path / "child.yaml", NEMO))
    assert recipe.framework == "NeMo-RL"
    assert recipe.get("policy.generation.vllm_cfg.precision") == "bfloat16"
    verdicts = examine(recipe)
    assert verdicts["policy.megatron_cfg.mtp_num_layers"] == (UNSUPPORTED, "5")
    assert verdicts["policy.generation.top_p"] == (UNSUPPORTED, "7")
    assert verdicts["policy.megatron_cfg.context_parallel_size"] == (SUPPORTED, "4")
    assert verdicts["policy.megatron_cfg.enabled"] == (SUPPORTED, "4")
    assert recipe.settings["policy.megatron_cfg.enabled"].where.startswith(str(tmp_path / "parent.yaml"))


def test_slime_rollouts_are_unsupported(tmp_path):
    (tmp_path / "models").mkdir()
    write(tmp_path / "models" / "m.sh", "MODEL_ARGS=(\n   --num-experts 128\n)\n")
    text = (
        'source "${SCRIPT_DIR}/models/m.sh"\n'
        "ARGS=(\n   --tensor-model-parallel-size 2\n   --hf-checkpoint /models/m\n)\n"
    )
    verdicts = examine(recipes.read(write(tmp_path / "run.sh", text)))
    assert verdicts["rollout"][0] == UNSUPPORTED
    assert verdicts["--num-experts"] == (SUPPORTED, "2")
    assert verdicts["--tensor-model-parallel-size"] == (SUPPORTED, "3")


def test_a_composed_configuration_is_checked():
    config = {
        "actor_rollout_ref": {
            "actor": {"strategy": "megatron", "megatron": {"use_megatron_fsdp": False}},
            "rollout": {"name": "vllm", "top_p": 1, "temperature": 1.0},
        }
    }
    recipes.check("verl", config)
    config["actor_rollout_ref"]["rollout"]["name"] = "sglang"
    with pytest.raises(UnsupportedError, match=r"actor_rollout_ref\.rollout\.name=sglang: unsupported"):
        recipes.check("verl", config)


def test_the_command_checks_files_and_folders(tmp_path, alignkit):  # noqa: F811
    good, bad = write(tmp_path / "good.sh", VERL), write(tmp_path / "bad.sh", VERL.replace("name=vllm", "name=sglang"))
    status, out, _ = alignkit("recipe", good)
    assert status == 0 and "0 unsupported" in out
    status, out, _ = alignkit("recipe", bad)
    assert status == 3 and f"{bad}:12: actor_rollout_ref.rollout.name=sglang: unsupported: only vLLM" in out
    write(tmp_path / "notes.yaml", "a: 1\n")
    write(tmp_path / "fsdp.sh", VERL.replace("model_engine=megatron", "model_engine=dp"))
    status, out, _ = alignkit("recipe", tmp_path)
    assert status == 3
    assert out.splitlines()[-1] == "1 of 2 Megatron-core recipes are supported; 1 recipes use other training backends"
    bad.unlink()
    assert alignkit("recipe", tmp_path)[0] == 0


def test_a_recipe_without_external_lib_is_reported(tmp_path, alignkit):  # noqa: F811
    line = "actor_rollout_ref.model.external_lib=alignkit.integrations.verl"
    bare = VERL.replace(f"{line} ", "").replace(line, "")
    file = write(tmp_path / "bare.sh", bare)
    status, out, _ = alignkit("recipe", file)
    assert status == 0 and out.splitlines()[-1] == f"without {line} the run is not aligned"
    status, out, _ = alignkit("recipe", tmp_path)
    assert out.splitlines()[0] == f"bare.sh: supported; add {line}"
    write(tmp_path / "bare.sh", bare + f" {line}")
    assert "not aligned" not in alignkit("recipe", file)[1]


def test_a_folder_without_recipes_is_rejected(tmp_path, alignkit):  # noqa: F811
    status, _, err = alignkit("recipe", tmp_path)
    assert status == 3 and "contains no recipes of verl, NeMo-RL or slime" in err


@pytest.mark.parametrize(
    "name, text", [("a.yaml", "a: [1"), ("a.yaml", "a: 1"), ("a.sh", "echo"), ("missing.sh", None)]
)
def test_invalid_recipes_are_rejected(name, text, tmp_path):
    path = tmp_path / name
    if text is not None:
        write(path, text)
    with pytest.raises(InputError, match="recipe:"):
        recipes.read(path)


def test_the_option_of_doctor_is_an_alias(alignkit, tmp_path):  # noqa: F811
    recipe = tmp_path / "run.sh"
    recipe.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=sglang\n")
    assert alignkit("doctor", "--recipe", recipe) == alignkit("recipe", recipe)
