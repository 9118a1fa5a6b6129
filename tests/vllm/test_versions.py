"""Other versions of vLLM, aligned on this CPU: their Python code gives the bits of the installed version.

All tests are slow, and read ALIGNKIT_WHEELS; other_version.py runs the engines. `make test-slow` runs each version and
each architecture once, `make test-matrix` the other pairs. Features that need a
GPU are not tested here: compiled models, CUDA graphs, and the V2 runner beyond its logprobs.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from alignkit.runtime.certificates import RUNNING
from alignkit.testing import free_port
from tests.fetch_engines import versions
from tests.vllm.overlay import make_overlay
from tests.vllm.settings import ENV
from tests.vllm.test_hook_points import wheel_root

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ARCHITECTURES = ["qwen3", "qwen2_moe", "glm4_moe"]


def run(model, out, overlay="", **variables):
    """Run `other_version` and return its output. JSON represents float32 values exactly."""
    command = [sys.executable, "-m", "tests.vllm.other_version", model, str(out)]
    running = out.with_name("running")
    running.write_text(RUNNING)  # not all versions are validated on a CPU
    path = os.pathsep.join(filter(None, [str(overlay), str(ROOT)]))
    environment = os.environ | ENV | {"VLLM_PLUGINS": "", "PYTHONPATH": path, "ALIGNKIT_PROOF": str(running)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment | variables, timeout=400)
    assert done.returncode == 0, done.stderr.partition("nanobind")[0][-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def expected(checkpoint, tmp_path_factory):
    """Return a function that gives the answers of the installed version by architecture. Answers are cached."""
    done = {}

    def get(arch):
        if arch not in done:
            done[arch] = run(checkpoint(arch=arch), tmp_path_factory.mktemp("installed") / "answers.json")
        return done[arch]

    return get


def pairs():
    """Yield each version with each architecture; the first round has every version and every architecture."""
    for offset in range(len(ARCHITECTURES)):
        for i, version in enumerate(versions("vllm")):
            marks = pytest.mark.matrix if offset else ()
            yield pytest.param(version, ARCHITECTURES[(i + offset) % len(ARCHITECTURES)], marks=marks)


@pytest.mark.parametrize("version, arch", list(pairs()))
def test_other_versions_give_the_bits_of_the_installed_version(version, arch, expected, checkpoint, tmp_path):
    overlay = make_overlay(wheel_root(version, tmp_path), version, tmp_path / "overlay")
    answers = run(checkpoint(arch=arch), tmp_path / "answers.json", overlay)
    assert answers["one at a time"] == answers["batch"] == answers["again"]
    of_prompt, of_batch = (
        [[step["sampled"] for step in steps] for _, steps in answers[k]] for k in ("prompt", "batch")
    )
    assert of_prompt == of_batch
    assert answers["v2"] == [True]
    assert _with_routers_of_one_class(answers) == _with_routers_of_one_class(expected(arch))


def test_replicas_of_another_version_give_the_same_bits(expected, checkpoint, tmp_path):
    """The replicas share experts and have batches of different lengths, or none."""
    overlay, model = (
        make_overlay(wheel_root("0.26.0", tmp_path), "0.26.0", tmp_path / "overlay"),
        checkpoint(arch="qwen2_moe"),
    )
    ranks = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port())}

    def replica(rank):
        mine = {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}
        return run(model, tmp_path / f"answers-{rank}.json", overlay, **ranks, **mine)

    with ThreadPoolExecutor(2) as pool:
        replicas = list(pool.map(replica, range(2)))
    want = expected("qwen2_moe")
    for answers, order in zip(replicas, (1, -1), strict=True):
        for name in ("one at a time", "batch", "prompt", "again"):
            assert answers[name] == want[name][::order], name


def _with_routers_of_one_class(answers):
    """Merge the counts of both router classes, which differ between vLLM versions."""
    modules = dict(answers["modules"])
    routers = [modules.pop(f"Aligned{name}", 0) for name in ("ReplicatedLinear", "GateLinear")]
    return answers | {"modules": modules | {"routers": sum(routers)}}
