#!/usr/bin/env bash
# GRPO with verl: colocated Megatron-core training and vLLM rollout with bit-equal logprobs.
#
#   MODEL_PATH=Qwen/Qwen3-0.6B TRAIN=train.parquet bash examples/verl/grpo.sh [overrides of verl's configuration]
#
# ALIGNED holds all settings that bit-equal logprobs need; LAYOUT and TASK may be changed freely. Without external_lib
# this is a plain verl recipe. To check the recipe before a run: alignkit recipe examples/verl/grpo.sh
# benchmarks/verl_grpo.py runs this file: it sets the variables below and appends the settings of its own toy task.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
TRAIN=${TRAIN:-train.parquet}
GPUS=${GPUS:-1}
TRAIN_TP=${TRAIN_TP:-1}
TRAIN_PP=${TRAIN_PP:-1}
TRAIN_CP=${TRAIN_CP:-1}
ROLLOUT_TP=${ROLLOUT_TP:-1}
STEPS=${STEPS:-20}

# The first setting enables alignkit, the next three select what it supports, the last one makes verl log the drift.
ALIGNED=(
    actor_rollout_ref.model.external_lib=alignkit.integrations.verl
    model_engine=megatron
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.rollout.calculate_log_probs=True
)

# Ranks and memory.
LAYOUT=(
    trainer.n_gpus_per_node="$GPUS" trainer.nnodes=1
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TRAIN_TP"
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$TRAIN_PP"
    actor_rollout_ref.actor.megatron.context_parallel_size="$TRAIN_CP"
    actor_rollout_ref.actor.megatron.use_distributed_optimizer=True
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4
)

# Model, data, algorithm and logging.
TASK=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    data.train_files="$TRAIN" data.val_files="$TRAIN"
    data.train_batch_size=16 data.max_prompt_length=256 data.max_response_length=256
    algorithm.adv_estimator=grpo
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.rollout.n=4
    trainer.total_training_steps="$STEPS" trainer.total_epochs=1000
    trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
    trainer.logger='["console"]'
)

python3 -m verl.trainer.main_ppo "${LAYOUT[@]}" "${TASK[@]}" "${ALIGNED[@]}" "$@"
