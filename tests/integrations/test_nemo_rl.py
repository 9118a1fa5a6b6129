"""The NeMo-RL integration, with a fake package of the same structure, as NeMo-RL is on no package index.

The processes run `in_nemo_rl.py` with real Megatron-core. `TestSources` runs NeMo-RL's own functions if
ALIGNKIT_NEMO_RL names a checkout of https://github.com/NVIDIA-NeMo/RL at 7ea279a and ALIGNKIT_FRAMEWORKS a folder with
Ray; no make target sets the first.
"""

import ast
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alignkit.integrations import functions, startup
from alignkit.jobs.model import make_checkpoint
from alignkit.testing import assert_bitwise_equal

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[2]
SOURCES = os.environ.get("ALIGNKIT_NEMO_RL")
FRAMEWORKS = [folder for folder in [os.environ.get("ALIGNKIT_FRAMEWORKS")] if folder]
"""Folder with Ray, which NeMo-RL's own modules import."""
MODEL_UTILS = """\
class DistributedLogprob:
    @staticmethod
    def forward(ctx, logits, target, start, end, group, inference_only=False):
        raise AssertionError("stock")


class ChunkedDistributedLogprob:
    @staticmethod
    def forward(ctx, logits, target, start, end, chunk_size, tp_group, inference_only=False):
        raise AssertionError("stock")


DistributedLogprobWithSampling = ChunkedDistributedLogprobWithSampling = None


def from_parallel_logits_to_logprobs(
    logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None, chunk_size=None
):
    shards = (vocab_start_index, vocab_end_index)
    target = target.roll(-1, -1)
    if chunk_size is None:
        return DistributedLogprob.apply(logits, target, *shards, tp_group, inference_only)[:, :-1]
    return ChunkedDistributedLogprob.apply(logits, target, *shards, chunk_size, tp_group, inference_only)[:, :-1]


def from_parallel_logits_to_logprobs_packed_sequences(logits, target, cu_seqlens, length, group, **rest):
    rows = target.reshape(len(cu_seqlens) - 1, length)
    return from_parallel_logits_to_logprobs(logits.reshape(*rows.shape, -1), rows, tp_group=group, **rest)
"""
SETUP = """\
from types import SimpleNamespace


def setup_model_and_optimizer(policy_cfg, megatron_cfg):
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = GPTModel.__new__(GPTModel)
    __import__("torch").nn.Module.__init__(model)
    return SimpleNamespace(model=model, draft_model=None)
"""

POLICY = """\
class MegatronPolicyWorkerImpl:
    def prepare_refit_info(self):
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self._iter_params_with_optional_kv_scales()}

    def _iter_params_with_optional_kv_scales(self, kv_scales=None, conversion_tasks=None):
        yield from self.weights

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes=0, kv_scales=None):
        return list(self._iter_params_with_optional_kv_scales())

    def broadcast_weights_for_collective(self, kv_scales=None, *, buffer_size_bytes=None, num_buffers=None):
        return list(self._iter_params_with_optional_kv_scales())
"""
BACKEND = """\
import contextlib


def packed_broadcast_consumer(iterator, group, src, post_unpack_func):
    raise AssertionError("the test replaces it")


class VllmInternalWorkerExtension:
    def prepare_refit_info(self, state_dict_info):
        self.state_dict_info = state_dict_info

    def _load_weights(self, weights):
        self.model_runner.model.load_weights(weights=weights)

    @contextlib.contextmanager
    def _weight_update_lifecycle(self, transport):
        yield lambda: None

    def update_weights_via_ipc_zmq(self):
        return self.update_weights_from_collective()

    def update_weights_from_collective(self):
        try:
            with self._weight_update_lifecycle("collective") as finalize:
                packed_broadcast_consumer(
                    iter(self.state_dict_info.items()), self.model_update_group, 0, self._load_weights
                )
                finalize()
        except Exception:
            return False
        return True

    def nccl_reshard_refit(self):
        raise AssertionError("stock")

    def update_weights_from_decoded_sparse_payload(self, *payloads):
        raise AssertionError("stock")


class VllmInternalWorkerExtensionWithCheckpointEngine(VllmInternalWorkerExtension):
    def update_weights_from_checkpoint_engine(self):
        raise AssertionError("stock")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return a folder with a fake package of NeMo-RL's structure."""
    folder = tmp_path_factory.mktemp("nemo")
    for file, text in {
        "nemo_rl/__init__.py": "__version__ = '0'\n",
        "nemo_rl/distributed/__init__.py": "",
        "nemo_rl/distributed/model_utils.py": MODEL_UTILS,
        "nemo_rl/models/__init__.py": "",
        "nemo_rl/models/megatron/__init__.py": "",
        "nemo_rl/models/generation/__init__.py": "",
        "nemo_rl/models/generation/vllm/__init__.py": "",
        "nemo_rl/models/generation/vllm/vllm_backend.py": BACKEND,
        "nemo_rl/models/megatron/setup.py": SETUP,
        "nemo_rl/models/policy/__init__.py": "",
        "nemo_rl/models/policy/workers/__init__.py": "",
        "nemo_rl/models/policy/workers/megatron_policy_worker.py": POLICY,
    }.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def install_known_table(folder):
    """Write a user's sitecustomize that replaces alignkit's table of known functions by the fake package's."""
    table = {
        name: {hashlib.sha256(source(folder, name).encode()).hexdigest(): ["0"]}
        for name in json.loads(functions.FILE.read_text())["NeMo-RL"]
        if "temperature" not in name
    }
    (folder / "known.json").write_text(json.dumps({"NeMo-RL": table}))
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(f"""\
            import pathlib
            import sys

            class Finder:
                def find_spec(self, name, path=None, target=None):
                    if name == "alignkit.integrations.nemo_rl":
                        sys.meta_path.remove(self)
                        from alignkit.integrations import functions

                        functions.FILE = pathlib.Path({str(folder / "known.json")!r})

            sys.meta_path.insert(0, Finder())
            """)
    )


def source(folder, name):
    """Return the source of the function with a dotted name, from the file that has it below `folder`."""
    parts = name.split(".")
    module = parts[: next(i for i in range(1, len(parts)) if folder.joinpath(*parts[:i]).with_suffix(".py").is_file())]
    text = folder.joinpath(*module).with_suffix(".py").read_text()
    scope = ast.parse(text)
    for part in parts[len(module) :]:
        scope = next(node for node in scope.body if getattr(node, "name", None) == part)
    first = min([scope.lineno, *(each.lineno for each in scope.decorator_list)])
    return "".join(text.splitlines(True)[first - 1 : scope.end_lineno])


def run(package, *arguments):
    """Run `in_nemo_rl` with the startup hook; return its output."""
    startup_folder = Path(startup.__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (startup_folder, package, ROOT, *FRAMEWORKS))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.in_nemo_rl", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = dict(hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512)
    return make_checkpoint(tmp_path_factory.mktemp("hf"), dtype=torch.bfloat16, vocab=300, **sizes)


def test_unknown_functions_are_rejected(package, path):
    assert "DistributedLogprob.forward" in run(package, "replaced", path)["error"]


def test_the_startup_hook_aligns_a_process(package, path):
    """The hook also runs the user's sitecustomize, which it shadows."""
    install_known_table(package)
    found = run(package, "replaced", "setup", "sampling", "bits", path)
    assert found["kind"] == "SimpleNamespace"
    assert "nemo_rl.distributed.model_utils.ChunkedDistributedLogprob" in found["names"]
    assert found["vocab_size"] == 300
    assert "top_p" in found["error"]
    assert found["of"] == 117
    assert set(found["differing"].values()) == {0} and found["has_gradient"], found


def check_syncs(found):
    for transport in ("update_weights_via_ipc_zmq", "update_weights_from_collective"):
        right, no_error = found[f"{transport}, right"]
        assert right == [True] and no_error is None, found
        for fault, named in {
            "flipped bit": "model.layers.1.self_attn.k_proj.weight: the weights differ",
            "older step": "lm_head.weight: the weights differ",
            "no fingerprint": "alignkit.fingerprint",
            "not loaded": "failed and may have changed some of the weights",
        }.items():
            failed, error = found[f"{transport}, {fault}"]
            assert failed == [False] and named in error, (transport, fault, failed, error)
    for transport in ("nccl_reshard_refit", "update_weights_from_decoded_sparse_payload", "the trainer"):
        assert "policy.generation.refit_transport: must be null" in found[transport]


def test_a_sync_is_verified(package, path):
    install_known_table(package)
    found = run(package, "replaced", "refit", path)
    assert "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension._load_weights" in found["names"]
    check_syncs(found)


def test_a_trainer_beside_an_old_engine_is_rejected(package, tmp_path):
    """The trainer imports the module that starts vLLM's workers, and never vLLM."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise AssertionError('imported')")
    metadata = tmp_path / "vllm-0.20.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.0\n")
    path = os.pathsep.join(map(str, (Path(startup.__file__).parent, package, tmp_path, ROOT)))
    code = "import nemo_rl, nemo_rl.models.generation.vllm"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode and "UnsupportedError: vLLM 0.20.0: these names are missing or changed" in done.stderr


def test_the_startup_hook_imports_nothing_without_nemo_rl():
    startup_folder = Path(startup.__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (startup_folder, ROOT)))}
    code = "import sys; print({'torch', 'alignkit'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()" and not done.stderr


def test_the_startup_module_prints_its_folder():
    done = subprocess.run(
        [sys.executable, "-m", "alignkit.integrations.startup"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == Path(startup.__file__).parent


def test_temperature_divides_the_logits(monkeypatch):
    monkeypatch.setenv("ALIGNKIT_VLLM", "")
    from alignkit.integrations import nemo_rl

    with nemo_rl.Patch.live():
        logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
        expected = logits / torch.full((1,), 0.7)
        assert_bitwise_equal(nemo_rl.scaled(logits.clone(), SimpleNamespace(temperature=0.7)), expected)
        assert_bitwise_equal(nemo_rl.scaled(logits.clone(), SimpleNamespace(temperature=1.0)), logits)
        assert_bitwise_equal(nemo_rl.scaled(logits.clone(), None), logits)


@pytest.mark.skipif(not SOURCES, reason="ALIGNKIT_NEMO_RL is not set")
class TestSources:
    def test_nemo_rl_functions_give_alignkits_bits(self, path):
        found = run(SOURCES, "bits", path)
        assert found["of"] == 117
        assert set(found["differing"].values()) == {0} and found["has_gradient"], found

    def test_every_function_has_a_known_digest(self):
        """Parse the sources, as some modules cannot be imported without Megatron-Bridge."""
        for name, digests in json.loads(functions.FILE.read_text())["NeMo-RL"].items():
            assert hashlib.sha256(source(Path(SOURCES), name).encode()).hexdigest() in digests, name

    def test_nemo_rl_workers_verify_a_sync(self, path):
        """NeMo-RL's worker extension is real; its transports are stand-ins, as they need a GPU."""
        check_syncs(run(SOURCES, "refit", path))
