"""The verl integration: verl 0.9.1's unmodified functions in a process with alignkit as external_lib.

Both engines are real, on a CPU; `in_verl.py` holds the functions that run in the process. Needs ALIGNKIT_FRAMEWORKS,
which `make test` sets.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from alignkit.errors import UnsupportedError
from alignkit.jobs.model import make_checkpoint
from alignkit.testing import Ranks, assert_bitwise_equal
from tests.integrations import in_verl
from tests.vllm.conftest import VllmProcess

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return a model with a vocabulary of 300 for a tokenizer of 290."""
    return make_checkpoint(tmp_path_factory.mktemp("hf"), dtype=torch.bfloat16, vocab=in_verl.VOCAB, **in_verl.SIZES)


@pytest.fixture(scope="module")
def verl():
    """Yield a process for functions of this module and of `in_verl`."""
    process = VllmProcess(fork=False)
    yield process
    process.stop()
    process.join()


@pytest.fixture(scope="module")
def engine(verl, path):
    return verl(in_verl.start, path)


def test_the_patch_replaces_verl_functions(engine):
    arguments, names = engine
    assert arguments == {"additional_config": {"alignkit_vocab_size": in_verl.TOKENIZER}}
    assert f"{SERVER}.vLLMHttpServer._get_worker_extension_cls" in names


@pytest.mark.parametrize(
    "before", [[], pytest.param(["before"], marks=pytest.mark.matrix)], ids=["in the actor", "in both"]
)
def test_the_patch_reaches_a_ray_actor(before, path):
    command = [sys.executable, "-m", "tests.integrations.in_ray", path, *before]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [
        {"additional_config": {"alignkit_vocab_size": in_verl.TOKENIZER}},
        "alignkit.integrations.verl_worker.WorkerExtension",
    ]


@pytest.mark.matrix
def test_ranks_can_share_a_gpu(monkeypatch):
    """Check the environments that Ray and verl give to processes of `benchmarks/verl_grpo.py` with one GPU."""
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{in_verl.FRAMEWORKS}")
    verl_grpo = importlib.import_module("verl_grpo")
    monkeypatch.setattr(verl_grpo, "gpus", lambda: ["3"])
    overrides, environment = verl_grpo.shared_gpu_settings(verl_grpo.LAYOUTS["pp2"])
    command = [sys.executable, "-m", "tests.integrations.in_shared"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    *training, server = json.loads(done.stdout.splitlines()[-1])
    assert [(rank["RANK"], rank["CUDA_VISIBLE_DEVICES"]) for rank in training] == [("0", "3"), ("1", "3")]
    assert "LOCAL_RANK" not in training[1] or training[1]["LOCAL_RANK"] == "0"  # its first visible GPU
    assert server["CUDA_VISIBLE_DEVICES"] == "3" and server["NCCL_CUMEM_ENABLE"] == "1"

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    ids = next(word for word in overrides if ".device_ids=" in word).partition("=")[2].strip("'")
    arguments = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--device_ids", ids])
    assert AsyncEngineArgs.from_cli_args(arguments)._resolve_device_ids() == [3, 3]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_verls_own_metrics_are_zero(temperature, verl, engine, path):
    """Cover verl's weight transfer, vLLM's logprobs, verl's `forward_step` and verl's metrics."""
    metrics = verl(in_verl.verl_metrics, path, temperature)
    assert metrics["training/rollout_probs_diff_valid"] == 1
    for name in ("max", "mean", "std"):
        assert metrics[f"training/rollout_probs_diff_{name}"] == 0, metrics
    divergences = [name for name in metrics if name.startswith("rollout_corr/") and "ppl" not in name]
    assert {"rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token", "rollout_corr/chi2_seq"} <= set(
        divergences
    )
    assert all(metrics[name] == 0 for name in divergences), metrics
    assert metrics["rollout_corr/ppl_ratio"] == 1


@pytest.mark.parametrize(
    "fault, named",
    [
        ("flipped bit", r"model\.layers\.1\.self_attn\.k_proj\.weight: the weights differ \(sums \w+ and \w+\)"),
        ("older step", r"lm_head\.weight: the weights differ"),
        ("skipped", r"model\.layers\.1\.mlp\.up_proj\.weight: the weights differ"),
        ("no fingerprint", "must end with the trainer's fingerprint, the tensor 'alignkit.fingerprint', got none"),
        ("older fingerprint", r"lm_head\.weight: the weights differ"),
    ],
)
def test_a_faulty_sync_names_the_tensor(fault, named, verl, engine, path):
    """The engine accepts requests again after a sync without a fault."""
    failed, request, accepted = verl(in_verl.sync, path, fault, 3)
    assert re.match(f"InputError: weight sync: .*{named}", failed), failed
    assert re.search(f"weight sync: failed .*{named}", request), request
    assert accepted


def _update_delta(state):
    state.llm.collective_rpc("update_verl_delta_weights", kwargs={"update_info": {}})


def test_a_sync_of_changed_elements_is_rejected(verl, engine, path):
    with pytest.raises(UnsupportedError, match="checkpoint_engine.backend: must send whole tensors"):
        verl(_update_delta)
    verl(in_verl.send, path)


def _adapters(state, path):
    instance = in_verl.engine(path)
    stock = sys.modules["alignkit.integrations.verl"].with_fingerprint(lambda self: (iter(()), {"r": 8}))
    stock(instance)


def test_lora_adapters_are_rejected(verl, engine, path):
    with pytest.raises(UnsupportedError, match="lora: must be off"):
        verl(_adapters, path)


@pytest.fixture(scope="module")
def two_workers(path):
    """Yield a process with a vLLM engine of two workers."""
    process = VllmProcess(fork=False, fork_workers=True)
    process(in_verl.start_two_workers, path)
    yield process
    process.stop()
    process.join()


def test_one_of_two_workers_with_old_weights_is_named(two_workers, verl, engine, path):
    """Both workers then reject requests, whether the old tensors came with their own fingerprint or the new one."""
    old, new = verl(in_verl.streams, path, None), verl(in_verl.streams, path, 3)
    assert two_workers(in_verl.sync_two_workers, (new, new)) == 4
    norms, shards = (
        [(name, b if ("norm" in name) == which else a) for (name, a), (_, b) in zip(old, new, strict=True)]
        for which in (True, False)
    )
    replica = (
        r"must hold one model: model\.layers\.0\.input_layernorm\.weight: rows 0 to 255 must be equal on all ranks"
    )
    shard = r"must have the trainer's weights: lm_head\.weight: the weights differ"
    for streams, named in (((new, old), replica), ((shards, new), replica), ((new, [*norms[:-1], new[-1]]), shard)):
        with pytest.raises(Exception, match=named):
            two_workers(in_verl.sync_two_workers, streams)
        with pytest.raises(UnsupportedError, match=named):
            two_workers(in_verl.request)
        assert two_workers(in_verl.sync_two_workers, (old, old)) == 4
    with pytest.raises(Exception, match="lost"):
        two_workers(in_verl.fail_sync)
    assert two_workers(in_verl.sync_two_workers, (new, new)) == 4  # each worker's answer belongs to its call


def test_padded_rows_are_rejected(verl, engine, path):
    with pytest.raises(UnsupportedError, match="attention_mask"):
        verl(in_verl.verl_metrics, path, 1.0, False)


def test_verls_own_function_gives_the_same_logprobs_on_aligned_logits(verl, engine, path):
    """On aligned logits, verl's own logprobs are equal. Its entropy differs, as it includes padded ids."""
    ours, theirs = verl(_call, in_verl.stock_on_aligned_logits, path, 0.7)
    for stock in theirs.values():
        for a, b in zip(ours["log_probs"], stock["log_probs"], strict=True):
            assert_bitwise_equal(a, b)
        for a, b in zip(ours["entropy"], stock["entropy"], strict=True):
            assert not torch.equal(a, b)


def test_gradients_match_the_megatron_adapter(verl, engine, path):
    (logp, through), (expected, own) = verl(_call, in_verl.gradients, path)
    assert_bitwise_equal(logp, expected)
    assert through.keys() == own.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(through[name].double(), gradient.double(), rtol=2**-6, atol=2**-8)
        assert gradient.abs().max() > 0


def test_fused_kernels_give_the_same_bits_or_are_rejected(verl, engine, path):
    from alignkit.megatron.versions import installed

    if not installed().hook:
        with pytest.raises(UnsupportedError, match="forward"):  # verl replaces the model's forward
            verl(_call, in_verl.plain_and_fused, path)
        return
    plain, fused = verl(_call, in_verl.plain_and_fused, path)
    for name in ("log_probs", "entropy"):
        for a, b in zip(fused[name], plain[name], strict=True):
            assert_bitwise_equal(a, b, name)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_match_one_rank(sequence_parallel, two_ranks, verl, engine, path):
    expected = verl(_call, in_verl.stock_on_aligned_logits, path, 0.7)[0]
    for result in two_ranks.run(2, in_verl.on_ranks, path, sequence_parallel):
        for name in ("log_probs", "entropy"):
            for a, b in zip(result[name], expected[name], strict=True):
                assert_bitwise_equal(a, b, name)


@pytest.fixture(scope="module")
def two_ranks():
    with Ranks(2) as ranks:
        yield ranks


def _call(state, function, *args):
    return function(*args)


def _process_logits(state, path, name, value):
    in_verl.load_integration()
    instance = in_verl.engine(path)
    importlib.import_module(in_verl.TRANSFORMER)
    arguments = dict.fromkeys(
        ("calculate_sum_pi_squared", "calculate_entropy", "distillation_use_topk", "distillation_only"), False
    )
    logits = torch.zeros(1, 2, 384, dtype=torch.float32)
    if name == "logits":
        logits = logits.bfloat16()
    else:
        arguments[name] = value
    instance._lm_head_logits_processor(
        logits,
        torch.zeros(1, 2, dtype=torch.int64),
        torch.ones(1, 2),
        logits_processor_func=None,
        batch=None,
        data_format="thd",
        **arguments,
    )


@pytest.mark.parametrize("name", ["calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "logits"])
def test_other_logit_computations_are_rejected(name, verl, path):
    with pytest.raises(UnsupportedError, match=name):
        verl(_process_logits, path, name, True)


def _patch_vocabulary(state, vocab_size, banned):
    state.llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": vocab_size, "banned_token_ids": banned})


def test_a_worker_with_another_vocabulary_is_rejected(verl, engine):
    with pytest.raises(Exception, match=r"vocab_size: verl's value must equal vLLM's \(.* = 290\), got 200, "):
        verl(_patch_vocabulary, 200, None)
    with pytest.raises(Exception, match="images"):
        verl(_patch_vocabulary, in_verl.TOKENIZER, [5])


def _extend_worker(state, path):
    instance = in_verl.server(path)
    stock = in_verl.stock_function("_get_worker_extension_cls")
    wrapped = state.integration.worker_extension(lambda self: stock(self) + "Mine")
    wrapped(instance)


def test_another_worker_extension_is_rejected(verl, engine, path):
    with pytest.raises(UnsupportedError, match="got .*vLLMColocateWorkerExtensionMine"):
        verl(_extend_worker, path)


def _new_engine(state, model_type, backend):
    in_verl.load_integration()
    from verl.workers.engine.base import EngineRegistry

    EngineRegistry.new(model_type, backend)


def test_another_training_engine_is_rejected(verl):
    with pytest.raises(UnsupportedError, match="strategy: must be 'megatron', got 'fsdp'"):
        verl(_new_engine, "language_model", "fsdp")
    with pytest.raises(
        Exception, match="registered|registed|Unknown|argument"
    ):  # verl's own error: any critic engine is accepted
        verl(_new_engine, "value_model", "nothing")


def _start_trainer(state, overrides):
    in_verl.load_integration()
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["model_engine=megatron", *overrides])
    RayPPOTrainer.init_workers(SimpleNamespace(config=config))


def test_an_unsupported_recipe_is_rejected_before_a_worker_starts(verl):
    recipe = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=Qwen/Qwen3-8B"]
    with pytest.raises(AttributeError):  # verl's own function runs and fails on the fake trainer
        verl(_start_trainer, recipe)
    with pytest.raises(UnsupportedError, match=r"actor_rollout_ref\.rollout\.top_p=0\.9: unsupported"):
        verl(_start_trainer, [*recipe, "actor_rollout_ref.rollout.top_p=0.9"])


def _start_trainer_beside_an_old_engine(state, package, overrides):
    from alignkit.vllm.versions import VERSIONS

    found = (Path(package), "0.20.0")
    with mock.patch.object(type(VERSIONS), "on_disk", lambda self: found if self is VERSIONS else None):
        _start_trainer(state, overrides)


def test_an_engine_that_alignkit_does_not_fit_is_rejected_before_a_worker_starts(verl, tmp_path):
    (tmp_path / "__init__.py").touch()
    recipe = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=Qwen/Qwen3-8B"]
    with pytest.raises(
        UnsupportedError, match=r"vLLM 0\.20\.0: these names are missing or changed: .* Validated: 0\.24"
    ):
        verl(_start_trainer_beside_an_old_engine, str(tmp_path), recipe)


def _require_tested_functions(state):
    in_verl.load_integration()
    from alignkit.integrations.functions import require_tested

    module = importlib.import_module(in_verl.TRANSFORMER)
    require_tested("verl", in_verl.stock_function("_lm_head_logits_processor"))
    require_tested("verl", module.MegatronEngineWithLMHead.forward_step)


def test_a_changed_function_is_rejected(verl):
    with pytest.raises(UnsupportedError, match="forward_step"):
        verl(_require_tested_functions)


def _undo(state):
    integration = in_verl.load_integration()
    live = integration.Patch.live()
    module = importlib.import_module(in_verl.TRANSFORMER)
    live.undo()
    from alignkit.megatron import status

    source = inspect.getsource(module.MegatronEngineWithLMHead._lm_head_logits_processor)
    return "vocab_parallel_entropy" in source, status()["patched"], integration.Patch.live() is None


def test_undo_restores_verl_and_the_engines(verl):
    """Run this test last: it removes the integration from the process."""
    stock, patched, gone = verl(_undo)
    assert stock and not patched and gone
