"""verl 0.9.1's own functions, called as they are, in a process with the line of a recipe: bits, verl's metrics, refusals."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alignkit.check.model import make_checkpoint
from alignkit.errors import UnsupportedError
from alignkit.testing import Ranks, assert_bitwise_equal
from tests.integrations import in_verl
from tests.vllm.conftest import VllmProcess

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model of 300 ids, beside a tokenizer of 290."""
    return make_checkpoint(tmp_path_factory.mktemp("hf"), dtype=torch.bfloat16, vocab=in_verl.VOCAB, **in_verl.SIZES)


@pytest.fixture(scope="module")
def verl():
    """Runs functions of this module and of `in_verl` in a process that has the line."""
    process = VllmProcess(fork=False)
    yield process
    process.stop()
    process.join()


@pytest.fixture(scope="module")
def engine(verl, path):
    return verl(in_verl.start, path)


def test_what_is_replaced(engine):
    arguments, names = engine
    assert arguments == {"additional_config": {"alignkit_vocab_size": in_verl.TOKENIZER}}
    assert f"{SERVER}.vLLMHttpServer._get_worker_extension_cls" in names


@pytest.mark.parametrize(
    "before", [[], pytest.param(["before"], marks=pytest.mark.slow)], ids=["in the actor", "in both"]
)
def test_what_is_replaced_in_an_actor_of_ray(before, path):
    command = [sys.executable, "-m", "tests.integrations.in_ray", path, *before]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr[-3000:]
    assert json.loads(said.stdout.splitlines()[-1]) == [
        {"additional_config": {"alignkit_vocab_size": in_verl.TOKENIZER}},
        "alignkit.integrations.verl_worker.WorkerExtension",
    ]


@pytest.mark.slow
def test_ranks_that_share_a_gpu(monkeypatch):
    """`benchmarks/verl_grpo.py` with fewer GPUs than ranks, as the processes that Ray and verl start see it."""
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{in_verl.FRAMEWORKS}")
    verl_grpo = importlib.import_module("verl_grpo")
    monkeypatch.setattr(verl_grpo, "gpus", lambda: ["3"])
    overrides, environment = verl_grpo.shared(verl_grpo.LAYOUTS["pp2"])
    command = [sys.executable, "-m", "tests.integrations.in_shared"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)
    assert said.returncode == 0, said.stderr[-3000:]
    *training, server = json.loads(said.stdout.splitlines()[-1])
    assert [(rank["RANK"], rank["CUDA_VISIBLE_DEVICES"]) for rank in training] == [("0", "3"), ("1", "3")]
    assert "LOCAL_RANK" not in training[1] or training[1]["LOCAL_RANK"] == "0"  # the first GPU that it sees
    assert server["CUDA_VISIBLE_DEVICES"] == "3" and server["NCCL_CUMEM_ENABLE"] == "1"

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    ids = next(word for word in overrides if ".device_ids=" in word).partition("=")[2].strip("'")
    asked = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--device_ids", ids])
    assert AsyncEngineArgs.from_cli_args(asked)._resolve_device_ids() == [3, 3]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_verls_own_metrics_are_zero(temperature, verl, engine, path):
    """vLLM's weights through verl's transfer, its logprobs, verl's `forward_step`, verl's metrics."""
    metrics = verl(in_verl.judged, path, temperature)
    assert metrics["training/rollout_probs_diff_valid"] == 1
    for name in ("max", "mean", "std"):
        assert metrics[f"training/rollout_probs_diff_{name}"] == 0, metrics
    divergences = [name for name in metrics if name.startswith("rollout_corr/") and "ppl" not in name]
    assert {"rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token", "rollout_corr/chi2_seq"} <= set(
        divergences
    )
    assert all(metrics[name] == 0 for name in divergences), metrics
    assert metrics["rollout_corr/ppl_ratio"] == 1


def test_padded_rows_are_refused(verl, engine, path):
    with pytest.raises(UnsupportedError, match="attention_mask"):
        verl(in_verl.judged, path, 1.0, False)


def test_verls_own_function_gives_the_same_bits_but_for_the_padding(verl, engine, path):
    """Over aligned logits verl's own logprobs are the same bytes; its entropy counts ids that there are not."""
    ours, theirs = verl(_call, in_verl.stock_on_aligned_logits, path, 0.7)
    for stock in theirs.values():
        for a, b in zip(ours["log_probs"], stock["log_probs"], strict=True):
            assert_bitwise_equal(a, b)
        for a, b in zip(ours["entropy"], stock["entropy"], strict=True):
            assert not torch.equal(a, b)


def test_gradients_are_those_of_the_adapter(verl, engine, path):
    (logp, through), (expected, own) = verl(_call, in_verl.gradients, path)
    assert_bitwise_equal(logp, expected)
    assert through.keys() == own.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(through[name].double(), gradient.double(), rtol=2**-6, atol=2**-8)
        assert gradient.abs().max() > 0


def test_the_path_of_fused_kernels(verl, engine, path):
    from alignkit.megatron.versions import VERSIONS

    if not VERSIONS.require(importlib.metadata.version("megatron-core")).hook:
        with pytest.raises(UnsupportedError, match="forward"):  # verl replaces the model's own forward there
            verl(_call, in_verl.fused, path)
        return
    plain, fused = verl(_call, in_verl.fused, path)
    for name in ("log_probs", "entropy"):
        for a, b in zip(fused[name], plain[name], strict=True):
            assert_bitwise_equal(a, b, name)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks(sequence_parallel, two, verl, engine, path):
    expected = verl(_call, in_verl.stock_on_aligned_logits, path, 0.7)[0]
    for result in two.run(2, in_verl.on_ranks, path, sequence_parallel):
        for name in ("log_probs", "entropy"):
            for a, b in zip(result[name], expected[name], strict=True):
                assert_bitwise_equal(a, b, name)


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def _call(state, function, *args):
    return function(*args)


def _refused(state, path, name, value):
    in_verl.line()
    made = in_verl.engine(path)
    importlib.import_module(in_verl.TRANSFORMER)
    asked = dict.fromkeys(
        ("calculate_sum_pi_squared", "calculate_entropy", "distillation_use_topk", "distillation_only"), False
    )
    logits = torch.zeros(1, 2, 384, dtype=torch.float32)
    if name == "logits":
        logits = logits.bfloat16()
    else:
        asked[name] = value
    made._lm_head_logits_processor(
        logits,
        torch.zeros(1, 2, dtype=torch.int64),
        torch.ones(1, 2),
        logits_processor_func=None,
        batch=None,
        data_format="thd",
        **asked,
    )


@pytest.mark.parametrize("name", ["calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "logits"])
def test_what_else_is_asked_of_logits_is_refused(name, verl, path):
    with pytest.raises(UnsupportedError, match=name):
        verl(_refused, path, name, True)


def _worker(state, vocab_size, banned):
    state.llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": vocab_size, "banned_token_ids": banned})


def test_a_worker_with_another_vocabulary_is_refused(verl, engine):
    with pytest.raises(Exception, match="vocab_size: 200, but the engine was made for 290 ids"):
        verl(_worker, 200, None)
    with pytest.raises(Exception, match="pictures"):
        verl(_worker, in_verl.TOKENIZER, [5])


def _extension(state, path):
    made = in_verl.server(path)
    stock = in_verl.verls_own("_get_worker_extension_cls")
    wrapped = state.line.worker_extension(lambda self: stock(self) + "Mine")
    wrapped(made)


def test_another_worker_extension_is_refused(verl, engine, path):
    with pytest.raises(UnsupportedError, match="vLLMColocateWorkerExtensionMine is not supported"):
        verl(_extension, path)


def _registry(state, model_type, backend):
    in_verl.line()
    from verl.workers.engine.base import EngineRegistry

    EngineRegistry.new(model_type, backend)


def test_training_by_another_engine_is_refused(verl):
    with pytest.raises(UnsupportedError, match="strategy: 'fsdp'"):
        verl(_registry, "language_model", "fsdp")
    with pytest.raises(Exception, match="registered|registed|Unknown|argument"):  # verl's own: a critic may be of any
        verl(_registry, "value_model", "nothing")


def _trainer(state, overrides):
    in_verl.line()
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["model_engine=megatron", *overrides])
    RayPPOTrainer.init_workers(SimpleNamespace(config=config))


def test_a_recipe_is_refused_before_a_worker_starts(verl):
    recipe = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=Qwen/Qwen3-8B"]
    with pytest.raises(AttributeError):  # verl's own function goes on, with what is no trainer
        verl(_trainer, recipe)
    with pytest.raises(UnsupportedError, match=r"actor_rollout_ref\.rollout\.top_p=0\.9: refused"):
        verl(_trainer, [*recipe, "actor_rollout_ref.rollout.top_p=0.9"])


def _changed(state):
    in_verl.line()
    from alignkit.integrations.functions import require_known

    module = importlib.import_module(in_verl.TRANSFORMER)
    require_known("verl", in_verl.verls_own("_lm_head_logits_processor"))
    require_known("verl", module.MegatronEngineWithLMHead.forward_step)


def test_a_function_that_is_not_as_it_was_is_refused(verl):
    with pytest.raises(UnsupportedError, match="forward_step"):
        verl(_changed)


def _undone(state):
    line = in_verl.line()
    live = line.Patch.live()
    module = importlib.import_module(in_verl.TRANSFORMER)
    live.undo()
    from alignkit.megatron import status

    source = inspect.getsource(module.MegatronEngineWithLMHead._lm_head_logits_processor)
    return "vocab_parallel_entropy" in source, status()["patched"], line.Patch.live() is None


def test_undo_restores_verl_and_the_engines(verl):
    """Comes last: the process has no line any more."""
    stock, patched, gone = verl(_undone)
    assert stock and not patched and gone
