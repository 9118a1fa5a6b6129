"""The NeMo-RL integration, with a fake package of the same structure, as NeMo-RL is on no package index.

The processes run `in_nemo_rl.py` with real Megatron-core. `TestSources` runs NeMo-RL's own functions if
ALIGNKIT_NEMO_RL names a checkout of https://github.com/NVIDIA-NeMo/RL at 7ea279a; no make target sets it.
"""

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
        "nemo_rl/models/megatron/setup.py": SETUP,
    }.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def install_known_table(folder):
    """Write a user's sitecustomize that replaces alignkit's table of known functions by the fake package's."""
    classes = MODEL_UTILS.split("\n\n\n")[:2]
    sources = {"Distributed": classes[0], "ChunkedDistributed": classes[1]}
    sources = {name: "\n".join(text.splitlines()[1:]) + "\n" for name, text in sources.items()}
    table = {
        f"nemo_rl.distributed.model_utils.{name}Logprob.forward": {hashlib.sha256(source.encode()).hexdigest(): ["0"]}
        for name, source in sources.items()
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


def run(package, *arguments):
    """Run `in_nemo_rl` with the startup hook; return its output."""
    startup_folder = Path(startup.__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (startup_folder, package, ROOT))),
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
        import ast

        for name, digests in json.loads(functions.FILE.read_text())["NeMo-RL"].items():
            module = next(name.partition(f".{end}.")[0] + f".{end}" for end in ("model_utils", "train") if end in name)
            rest = name.removeprefix(f"{module}.")
            text = Path(SOURCES, *module.split(".")).with_suffix(".py").read_text()
            scope = ast.parse(text)
            for part in rest.split("."):
                scope = next(node for node in scope.body if getattr(node, "name", None) == part)
            first = min([scope.lineno, *(each.lineno for each in scope.decorator_list)])
            source = "".join(text.splitlines(True)[first - 1 : scope.end_lineno])
            assert hashlib.sha256(source.encode()).hexdigest() in digests, name
