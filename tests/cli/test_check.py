"""`alignkit check` without engines: its plan of rows, its processes, its reports, and its rejected options.

Jobs are short Python commands in place of engines. tests/e2e/test_check.py and `make check` run real engines.
"""

import base64
import html
import html.parser
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from alignkit.check import plan, report, run
from alignkit.check.plan import Row
from alignkit.drift import Logprobs, compare, load, save
from alignkit.errors import InputError, UnsupportedError
from alignkit.jobs.execute import Progress, WorkerError, check_out, execute, needed, prepare
from alignkit.jobs.job import DTYPES, Job, draw_prompts
from alignkit.jobs.model import make_checkpoint
from alignkit.runtime import dispatch
from alignkit.runtime.ids import contract_id
from alignkit.runtime.machine import gpus, installed, machine, most_ranks

ROLLOUTS = {"batch", "one", "chunked", "prefix", "prompt_logprobs", "tp2"}
TRAININGS = {"tp1-one", "tp1-padded", "tp2-one", "tp2-padded", "tp2-sp-one", "tp2-sp-padded"}


def test_full_plans_every_pair_once():
    rows = plan.rows(["bfloat16", "float32"], 2, full=True)
    assert len(rows) == len(set(rows)) == 2 * 6 * 6 * 2
    assert {r.rollout for r in rows} == ROLLOUTS and {r.training for r in rows} == TRAININGS


@pytest.mark.parametrize("dtypes", [["bfloat16", "float32"], ["float32"]])
def test_the_default_plan_covers_each_mechanism(dtypes):
    rows = plan.rows(dtypes, 2, full=False)
    assert len(rows) == len(set(rows))
    for patched in (False, True):
        selected = [r for r in rows if r.patched == patched]
        assert {r.rollout for r in selected} == ROLLOUTS and {r.training for r in selected} == TRAININGS
        assert {r.dtype for r in selected} == set(dtypes)


def test_tp_1_plans_no_tensor_parallel_rows():
    rows = plan.rows(["bfloat16"], 1, full=True)
    assert not [r for r in rows if "tp2" in r.rollout + r.training]


@pytest.mark.parametrize("full", [False, True])
def test_jobs_write_every_file_once_and_wait_for_their_inputs(tmp_path, full):
    rows = plan.rows(["bfloat16", "float32"], 2, full)
    jobs = plan.jobs(
        rows, tmp_path, {"bfloat16": tmp_path, "float32": tmp_path}, [[1, 2]], max_tokens=4, temperature=1.0, seed=0
    )
    outputs = [path for job in jobs for path in job.outputs]
    assert len(outputs) == len(set(outputs))
    for row in rows:
        assert plan.rollout_file(tmp_path, row) in outputs and plan.training_file(tmp_path, row) in outputs
    earlier = set()
    for job in jobs:
        assert set(job.needs) <= earlier
        earlier.update(job.outputs)
    names = [job.name for job in jobs]
    # Each job exists patched and stock. The full plan has per dtype three rollout engines (default, chunked, two ranks)
    # and three training engines. The default plan has these in one dtype, and one engine of each kind in the other.
    assert len(names) == len(set(names)) == 2 * (6 + 6 if full else 6 + 2)
    evaluates = [job.spec for job in jobs if any(r["mode"] == "prompt_logprobs" for r in job.spec["runs"])]
    assert len(evaluates) == (4 if full else 2)
    for spec in evaluates:  # an earlier run of the same engine samples the tokens
        modes = {r["mode"]: i for i, r in enumerate(spec["runs"])}
        assert spec["runs"][modes["batch"]]["out"] == spec["tokens_from"]
        assert modes["batch"] < modes["prompt_logprobs"]


def test_gpu_rollouts_use_vllms_defaults_except_one_eager_engine(tmp_path):
    rows = plan.rows(["bfloat16"], 2, full=False, gpu=True)
    assert {r.rollout for r in rows} == ROLLOUTS | {"eager"}
    jobs = plan.jobs(rows, tmp_path, {"bfloat16": tmp_path}, [[1]], max_tokens=4, temperature=1.0, seed=0, gpu=True)
    rollouts = [job for job in jobs if not job.needs]
    assert [job.spec["tp"] for job in rollouts] == sorted((job.spec["tp"] for job in rollouts), reverse=True)
    for job in rollouts:
        assert job.spec["runner"] == "v2" and job.spec["eager"] == job.name.endswith("eager"), job.name
    assert {job.name.rpartition("rollout-")[2] for job in rollouts} == {"tp1", "tp1-chunked", "tp1-eager", "tp2"}


def test_cpu_rollouts_are_eager(tmp_path):
    rows = plan.rows(["bfloat16"], 2, full=True)
    for job in plan.jobs(rows, tmp_path, {"bfloat16": tmp_path}, [[1]], max_tokens=4, temperature=1.0, seed=0):
        assert job.needs or (job.spec["eager"] and job.spec["runner"] == "v1")


def test_a_moe_model_adds_expert_parallel_rows(tmp_path):
    rows = plan.rows(["bfloat16"], 2, full=False, gpu=True, experts=True)
    assert {r.rollout for r in rows} == ROLLOUTS | {"eager", "tp2-ep", "dp2-ep"}
    jobs = plan.jobs(
        rows, tmp_path, {"bfloat16": tmp_path}, [[1]], max_tokens=4, temperature=1.0, seed=0, gpu=True, experts=True
    )
    rollouts = {job.name.rpartition("rollout-")[2]: job.spec for job in jobs if not job.needs}
    assert {name for name, spec in rollouts.items() if spec["eager"]} == {"tp1-eager"}
    assert {r.training for r in rows} == TRAININGS | {
        f"{engine}-ep2-{mode}" for engine in ("tp1", "tp2-sp") for mode in ("one", "padded")
    }
    trainings = {job.name.rpartition("training-")[2]: job for job in jobs if job.needs}
    assert {name: (job.spec["tp"], job.spec["ep"], job.slots) for name, job in trainings.items()} == {
        "tp1": (1, 1, 1),
        "tp2": (2, 1, 2),
        "tp2-sp": (2, 1, 2),
        "tp1-ep2": (1, 2, 2),
        "tp2-sp-ep2": (2, 2, 2),
    }
    assert {name for name, spec in rollouts.items() if spec["expert_parallel"]} == {"tp2-ep", "tp1-dp2-ep"}
    on_cpu = plan.rows(["bfloat16"], 2, True, experts=True)
    assert not [r for r in on_cpu if r.rollout_tp * r.rollout_dp == 2 and not r.patched]
    assert {r.rollout for r in on_cpu} == ROLLOUTS | {"tp2-ep", "dp2-ep"}
    spec = rollouts["tp2-ep"]
    assert (spec["tp"], spec["dp"]) == (2, 1) and [run["mode"] for run in spec["runs"]] == ["batch"]


@pytest.mark.parametrize(
    "rollout, sizes, slots",
    [
        ("dp2", (1, 2, False), 2),
        ("dp4-ep", (1, 4, True), 4),
        ("tp2-dp2-ep", (2, 2, True), 4),
        ("tp2-ep", (2, 1, True), 2),
        ("dp2-one", (1, 2, False), 2),
    ],
)
def test_rollout_names_give_tp_dp_and_ep(tmp_path, rollout, sizes, slots):
    row = plan.Row("bfloat16", rollout, "tp1-padded", True)
    assert (row.rollout_tp, row.rollout_dp, row.rollout_ep) == sizes
    job = plan.jobs([row], tmp_path, {"bfloat16": tmp_path}, [[1]], max_tokens=4, temperature=1.0, seed=0)[0]
    assert (job.spec["tp"], job.spec["dp"], job.spec["expert_parallel"]) == sizes and job.slots == slots


@pytest.mark.parametrize("ranks", ["", "tp2-", "dp2-", "tp2-dp2-"])
def test_prompt_logprobs_read_the_batch_of_the_same_layout(tmp_path, ranks):
    row = plan.Row("bfloat16", f"{ranks}prompt_logprobs", "tp1-padded", True)
    job = plan.jobs([row], tmp_path, {"bfloat16": tmp_path}, [[1]], max_tokens=4, temperature=1.0, seed=0)[0]
    batch = plan.Row("bfloat16", ranks.removesuffix("-") or "batch", "tp1-padded", True)
    assert job.spec["tokens_from"] == str(plan.rollout_file(tmp_path, batch))
    assert [run["mode"] for run in job.spec["runs"]] == ["batch", "prompt_logprobs"]


def test_routing_is_saved_only_if_both_sides_have_all_tokens(tmp_path):
    rows = plan.rows(["bfloat16"], 2, full=False, experts=True)
    routed = [
        plan.Row("bfloat16", f"{ranks}routed", f"tp2-sp-ep2-{mode}", True)
        for ranks in ("", "tp2-", "tp2-ep-")
        for mode in ("padded", "packed")
    ]
    rows += [*routed, plan.Row("bfloat16", "batch", "tp1-pp2-padded", True)]
    common = {"max_tokens": 4, "temperature": 1.0, "seed": 0}
    for gpu, experts in ((False, True), (True, True), (False, False)):
        jobs = plan.jobs(rows, tmp_path, {"bfloat16": tmp_path}, [[1]], gpu=gpu, experts=experts, **common)
        saved = {out["out"] for job in jobs for out in job.spec["runs"] if out.get("routing")}
        known = [r for r in rows if r.rollout not in ("prefix", "dp2-ep") and r.training_pp == 1] if not gpu else routed
        expected = {str(path_of(tmp_path, r)) for r in known for path_of in (plan.rollout_file, plan.training_file)}
        assert saved == (expected if experts else set())
        engines = {job.name.rpartition("rollout-")[2]: job.spec for job in jobs if "rollout-" in job.name}
        for name in ("tp1-routed", "tp2-routed", "tp2-ep-routed"):
            assert engines[name]["expert_parallel"] == ("ep" in name)
            if experts:  # hooks need an eager engine with the V1 runner
                assert (engines[name]["eager"], engines[name]["runner"]) == (True, "v1")


def test_the_default_plan_adds_moe_rows_to_a_dense_model(tmp_path, monkeypatch):
    """A model family chosen by the user suppresses these rows."""

    def planned(**options):
        jobs = []

        def execute(given, *_):
            jobs.extend(given)
            raise KeyboardInterrupt

        monkeypatch.setattr(run, "execute", execute)
        with pytest.raises(KeyboardInterrupt):
            run.run(run.Options(out=tmp_path, tp=1, dtypes=["bfloat16"], max_tokens=1, **options), Progress())
        return jobs

    jobs = planned()
    moe_jobs = [job for job in jobs if job.name.startswith("qwen3_moe-")]
    assert [job.name.rpartition("bfloat16-")[2] for job in moe_jobs] == [
        "stock-rollout-tp1",
        "patched-rollout-tp1",
        "stock-training-tp1",
        "patched-training-tp1",
    ]
    outputs = [path for job in jobs for path in job.outputs]
    assert len(outputs) == len(set(outputs)) and [bool(job.needs) for job in jobs] == sorted(
        map(bool, (j.needs for j in jobs))
    )
    models = {job.name.startswith("qwen3_moe-"): job.spec["model"] for job in jobs}
    assert {k: json.loads((tmp_path / v / "config.json").read_text())["model_type"] for k, v in models.items()} == {
        True: "qwen3_moe",
        False: "qwen3",
    }
    assert not [job for job in planned(family="qwen3") if job.name.startswith("qwen3_moe-")]


@pytest.mark.parametrize(
    "rollout, training, sizes",
    [
        ("batch", "tp1-one", (1, 1, False)),
        ("prompt_logprobs", "tp2-packed", (1, 2, False)),
        ("tp4", "tp4-sp-padded", (4, 4, True)),
        ("tp2-one", "tp2-sp-one", (2, 2, True)),
        ("tp2-ep", "tp1-one", (2, 1, False)),
    ],
)
def test_a_row_parses_its_parallel_sizes(rollout, training, sizes):
    row = Row("bfloat16", rollout, training, True)
    assert (row.rollout_tp, row.training_tp, row.sequence_parallel) == sizes


def test_prompt_logprobs_use_the_tokens_of_the_same_engine(tmp_path):
    rows = [Row("bfloat16", "tp2-prompt_logprobs", "tp1-packed", True), Row("bfloat16", "v1", "tp1-packed", True)]
    jobs = plan.jobs(
        rows,
        tmp_path,
        {"bfloat16": tmp_path},
        [[1]],
        max_tokens=4,
        temperature=1.0,
        seed=0,
        gpu=True,
        micro_batch=99,
        prefix="m-",
    )
    wide, v1, training = jobs
    assert [job.name for job in jobs] == [
        "m-bfloat16-patched-rollout-tp2",
        "m-bfloat16-patched-rollout-tp1-v1",
        "m-bfloat16-patched-training-tp1",
    ]
    assert [r["mode"] for r in wide.spec["runs"]] == ["batch", "prompt_logprobs"]
    assert wide.spec["tokens_from"] == wide.spec["runs"][0]["out"]
    assert v1.spec["runner"] == "v1" and not v1.spec["eager"]
    assert training.spec["micro_batch"] == 99 and {r["mode"] for r in training.spec["runs"]} == {"packed"}


def test_prompts_are_seeded_and_within_the_vocabulary():
    prompts = draw_prompts(2000, 0, plan.PROMPT_LENGTHS)
    assert len(prompts) == 8 and min(map(len, prompts)) == 3 and max(map(len, prompts)) == 300
    assert prompts == draw_prompts(2000, 0, plan.PROMPT_LENGTHS) != draw_prompts(2000, 1, plan.PROMPT_LENGTHS)
    assert all(0 <= t < 2000 for p in prompts for t in p)


# Processes. These fake engines test that every outcome of a process is detected.


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that makes a job whose process runs the given code."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (tmp_path / "logs").mkdir()
    (tmp_path / "jobs").mkdir()

    def make(name, code, needs=(), out=None, tp=1):
        (tmp_path / f"module_{name}.py").write_text(
            "import json, sys, time, pathlib, subprocess\njob = json.load(open(sys.argv[1]))\n" + code
        )
        runs = [{"out": str(tmp_path / out)}] if out else []
        return Job(name, f"module_{name}", {"tp": tp, "runs": runs}, [tmp_path / n for n in needs])

    return make


WRITE = "pathlib.Path(job['runs'][0]['out']).write_text(str(time.monotonic()))\n"


def test_a_job_waits_for_its_inputs(tmp_path, job):
    second = job("second", f"assert pathlib.Path({str(tmp_path / 'a')!r}).exists()\n" + WRITE, ["a"], "b")
    first = job("first", "time.sleep(0.3)\n" + WRITE, out="a", tp=64)  # wider than the machine: runs alone
    seconds, failures = execute([second, first], tmp_path, 60, Progress())
    assert not failures and set(seconds) == {"first", "second"}
    assert float((tmp_path / "a").read_text()) < float((tmp_path / "b").read_text())


def test_independent_jobs_continue_after_a_failure(tmp_path, job):
    """Results written before a failure are used. A job whose inputs are all missing does not start."""

    def reader_job(name, *inputs):
        copy = "for r in job['runs']:\n    pathlib.Path(r['out']).write_text(pathlib.Path(r['in']).read_text())"
        reader = job(name, copy, inputs)
        reader.spec["runs"] = [{"in": str(tmp_path / i), "out": str(tmp_path / f"{name}-{i}")} for i in inputs]
        return reader

    bad = job("bad", "pathlib.Path(job['runs'][0]['out']).write_text('a')\nraise ValueError('that is why')", out="a")
    bad.spec["runs"].append({"out": str(tmp_path / "b")})
    ended = {}

    class Ended(Progress):
        def ended(self, job, seconds, failure):
            ended[job.name] = failure

    jobs = [bad, job("good", WRITE, out="c"), reader_job("both", "a", "b", "c"), reader_job("none", "b")]
    seconds, failures = execute(jobs, tmp_path, 60, Ended(), keep_going=True)
    assert set(seconds) == {"good", "both"} and set(failures) == {"bad", "none"}
    assert "that is why" in failures["bad"] and ended == failures | {"good": None, "both": None}
    assert (tmp_path / "both-a").exists() and (tmp_path / "both-c").exists() and not (tmp_path / "both-b").exists()


def test_each_job_gets_its_own_gpus(tmp_path, job, monkeypatch):
    monkeypatch.setattr("alignkit.jobs.execute.gpus", lambda: ["3", "5", "7"])
    code = "import os, time\npathlib.Path(job['runs'][0]['out']).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    jobs = [job(name, code + "time.sleep(1)", out=name, tp=n) for name, n in (("a", 2), ("b", 1), ("c", 3))]
    execute(jobs, tmp_path, 60, Progress())
    assert [(tmp_path / name).read_text() for name in "ab"] == ["3,5", "7"]
    assert sorted((tmp_path / "c").read_text().split(",")) == ["3", "5", "7"]


def test_ranks_share_gpus_on_request(monkeypatch):
    def gpus_needed(module, **sizes):
        return needed(Job("wide", module, {"tp": 1, "runs": []} | sizes))

    assert gpus_needed(plan.TRAINING, tp=2, pp=2) == 4
    monkeypatch.setenv("ALIGNKIT_RANKS_PER_GPU", "2")
    layouts = ({}, {"tp": 2}, {"cp": 3}, {"tp": 2, "ep": 4})
    assert [gpus_needed(plan.TRAINING, **sizes) for sizes in layouts] == [1, 1, 2, 2]
    assert [gpus_needed(plan.ROLLOUT, tp=n) for n in (1, 2, 4)] == [1, 1, 2]
    monkeypatch.setattr("alignkit.runtime.machine.gpus", lambda: ["0", "1"])
    assert most_ranks() == 4


def test_gpus_respect_cuda_visible_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert gpus() == ["4", "6"]


def test_tp_defaults_to_1_on_one_gpu(tmp_path, monkeypatch):
    assert run.Options(out=tmp_path).tp == 2
    for module in ("check.run", "runtime.machine"):
        monkeypatch.setattr(f"alignkit.{module}.gpus", lambda: ["0"])
    assert run.Options(out=tmp_path).tp == 1
    if installed("vllm") and installed("megatron.core"):
        with pytest.raises(
            InputError,
            match=r"tp: must be at most 1 on this machine \(GPUs \* ALIGNKIT_RANKS_PER_GPU = 1 \* 1\), got 2",
        ):
            run.run(run.Options(out=tmp_path / "out", tp=2), Progress())
    monkeypatch.setenv("ALIGNKIT_RANKS_PER_GPU", "4")
    assert run.Options(out=tmp_path).tp == 2


def test_training_layouts_are_compared_with_a_batch(tmp_path, monkeypatch):
    names = ["tp1-te-packed", "tp2-sp-te-cp2-packed", "tp1-pp2-padded", "tp1-packed", "tp1-te-packed"]
    rows = plan.against_batch(["bfloat16", "float32"], names)
    assert len(rows) == len(set(rows)) and {r.rollout for r in rows} == {"batch"}
    assert [r.training for r in rows if r.patched and r.dtype == "float32"] == names[:4]
    assert [r.training for r in rows if not r.patched and r.dtype == "float32"] == ["tp1-te-packed", "tp1-pp2-padded"]
    assert {r.training: r.layout for r in rows}["tp2-sp-te-cp2-packed"] == dict(tp=2, ep=1, pp=1, cp=2, spec="te")
    for name in ("tp1", "te-packed", "tp1-pp2-te-packed", "tp1-te-packed "):
        with pytest.raises(InputError, match=r"training: expected the form tpN.*, got"):
            plan.against_batch(["bfloat16"], [name])
    if installed("vllm") and installed("megatron.core"):
        for name, why in (
            ("tp1-pp3-padded", "pp: must divide the model's 4 layers, got 3"),
            ("tp1-cp3-one", "cp: must divide the 8 query heads, got 3"),
        ):
            with pytest.raises(InputError, match=why):
                run.run(run.Options(out=tmp_path / "out", trainings=[name]), Progress())
        for name, why in (
            (
                "tp8-padded",
                "^tp: must divide num_key_value_heads = 4, got 8; pass --tp 8 to create a model for 8 ranks$",
            ),
            ("tp3-padded", "^tp: must divide num_key_value_heads = 4, got 3$"),  # no --tp helps
        ):
            with pytest.raises(UnsupportedError, match=why):
                run.run(run.Options(out=tmp_path / "out", trainings=[name]), Progress())
        monkeypatch.setattr("alignkit.jobs.train.installed", lambda name: False)
        with pytest.raises(UnsupportedError, match="spec: te requires TransformerEngine"):
            run.run(run.Options(out=tmp_path / "te", trainings=["tp1-te-padded"]), Progress())
        assert not (tmp_path / "te").exists()
        for module in ("check.run", "runtime.machine"):
            monkeypatch.setattr(f"alignkit.{module}.gpus", lambda: ["0"])
        with pytest.raises(
            InputError, match="training: engine .*-tp1-pp2: the number of ranks must be at most 1 .*, got 2"
        ):
            run.run(run.Options(out=tmp_path / "out", trainings=["tp1-pp2-padded"]), Progress())


def test_bisect_is_suggested_only_for_supported_rows(tmp_path):
    """Other layer specs, pipeline and context parallelism are unsupported; MoE models are supported."""
    report = type("Report", (), {"all_equal": False})
    compared = {
        t: run.Compared(plan.Row("bfloat16", "batch", t, True), report, None, None) for t in ("tp1-te-one", "tp2-one")
    }
    options = run.Options(out=tmp_path)
    for experts in (0, 8):
        info = {"model": {"experts": experts}}
        assert run.bisect_command(options, run.Result([compared["tp1-te-one"]], info)) is None
        assert "aligned-megatron:tp=2,mode=one" in run.bisect_command(
            options, run.Result(list(compared.values()), info)
        )


def test_the_commit_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("ALIGNKIT_COMMIT", "abc")
    assert machine()["commit"] == "abc"


def test_a_failure_shows_the_log(tmp_path, job):
    message = r"bad: exit status 1\n(.|\n)*bad.log(.|\n)*ValueError: that is why"
    with pytest.raises(WorkerError, match=message):
        execute([job("bad", "raise ValueError('that is why')")], tmp_path, 60, Progress())


def test_a_missing_output_is_a_failure(tmp_path, job):
    with pytest.raises(WorkerError, match="quiet: exited without writing a"):
        execute([job("quiet", "", out="a")], tmp_path, 60, Progress())


def test_a_timeout_stops_child_processes(tmp_path, job):
    code = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\ntime.sleep(600)\n"
    )
    with pytest.raises(WorkerError, match="stuck: timed out after 2 s"):
        execute([job("stuck", code)], tmp_path, 2, Progress())
    child = int(re.search(r"child (\d+)", (tmp_path / "logs" / "stuck.log").read_text())[1])
    for _ in range(100):
        if not _alive(child):
            break
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_engines(tmp_path, job, sent):
    stuck = job("stuck", "import os\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)")
    # Shells make background jobs ignore SIGINT, and children inherit that.
    code = (
        f"import pathlib, signal\nfrom alignkit import cli\nfrom alignkit.check import run\n"
        f"from alignkit.jobs.execute import Progress, execute\nfrom alignkit.jobs.job import Job\n"
        f"signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"def check(options, progress):\n"
        f"    job = Job('stuck', {stuck.module!r}, {stuck.spec!r})\n"
        f"    execute([job], pathlib.Path({str(tmp_path)!r}), 600, Progress())\n"
        f"run.run = check\ncli.main(['check', '--no-report'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "logs" / "stuck.log"
    for _ in range(600):
        if log.exists() and "pid" in log.read_text():
            break
        time.sleep(0.05)
    pid = int(log.read_text().split()[1])
    process.send_signal(sent)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted; the engines were stopped" in err
    assert not _alive(pid)


# Results.


def _logprobs(values, contract="stock", prompts=((1, 2),)):
    return Logprobs(
        [list(p) for p in prompts], [[7] * len(v) for v in values], [torch.tensor(v) for v in values], contract
    )


def _result(patched_training=(-1.0, -2.0)):
    def compared(dtype, patched, training):
        pair = _logprobs([[-1.0, -2.0]]), _logprobs([list(training)])
        return run.Compared(Row(dtype, "batch", "tp1-one", patched), compare(*pair), *pair)

    info = machine() | {
        "contract": contract_id("cpu"),
        "max_tokens": 2,
        "temperature": 1.0,
        "seed": 0,
        "model": {
            "family": "qwen3",
            "hidden": 512,
            "layers": 4,
            "heads": 8,
            "head_dim": 64,
            "kv_heads": 4,
            "vocab": 2000,
            "tied": False,
            "experts": 0,
        },
        "seconds": {"all": 1.0},
    }
    return run.Result(
        [compared(d, False, (-1.0, -2.25)) for d in DTYPES] + [compared(d, True, patched_training) for d in DTYPES],
        info,
    )


def test_check_json_row_fields():
    row = _result().compared[0].to_json()
    names = ["dtype", "rollout", "training", "patched", "tokens", "bit_equal", "max_abs", "mean_abs"]
    assert list(row)[:8] == names
    assert list(row.values())[:8] == ["bfloat16", "batch", "tp1-one", False, 2, 1, 0.25, 0.125]
    json.dumps(row, allow_nan=False)


def test_failures_name_the_row_and_token():
    assert _result().failures == []
    failures = _result((-1.0, -2.5)).failures
    assert len(failures) == 2
    assert failures[0].startswith(
        "bfloat16 patched: batch against tp1-one: 1 of 2 tokens are bit-equal; first difference: "
        "sequence 0, position 1, token 7: rollout -2 (0xc0000000)"
    )


def test_nan_in_a_patched_row_is_a_failure():
    assert len(_result((-1.0, float("nan"))).failures) == 2


def test_the_headline_counts_bit_equal_logprobs():
    assert report.headline(_result()) == ("Patched: 4 of 4 logprobs are bit-equal (2 of 2 rows). Stock: 2 of 4.")


def with_moe(patched_routing=(0, 9)):
    """Return a result with additional rows of a MoE model."""
    result = _result()
    for patched, routing in ((False, (4, 9)), (True, patched_routing)):
        like = next(c for c in result.compared if c.row.patched == patched)
        row = Row("bfloat16", "batch", "tp1-one", patched, "qwen3_moe")
        result.compared.append(run.Compared(row, like.report, like.rollout, like.training, routing))
    return result


def test_reports_count_rerouted_tokens(tmp_path):
    result = with_moe()
    ending = "Tokens routed to other experts in training: patched 0 of 9, stock 4 of 9."
    assert report.headline(result).endswith(ending) and result.failures == []
    row = result.compared[-2].to_json()
    assert (row["model"], row["rerouted"], row["routed"]) == ("qwen3_moe", 4, 9)
    assert not result.compared[0].to_json().keys() & {"model", "rerouted", "routed"}
    shown = Console(width=80, file=io.StringIO())
    shown.print(report.table(result))
    assert "bf16*" in shown.file.getvalue() and "* small MoE model (qwen3_moe)" in shown.file.getvalue()
    pytest.importorskip("matplotlib")
    report.write_html(result, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "bfloat16 (qwen3_moe)" in text and text.count("rerouted tokens") == 2
    assert "<td>4 of 9</td>" in text and '<td class="equal">0 of 9</td>' in text
    report.write_html(_result(), tmp_path / "report.html")
    assert not re.search("other experts|rerouted", (tmp_path / "report.html").read_text())


def test_a_rerouted_token_in_a_patched_row_is_a_failure():
    result = with_moe((1, 9))
    assert result.failures == [
        "qwen3_moe bfloat16 patched: batch against tp1-one: 1 of 9 tokens were routed to other experts in training"
    ]
    assert run.bisect_command(run.Options(out=Path("out")), result) is None


@pytest.mark.parametrize("training", [(-1.0, -2.0), (-1.0, -2.5), (-1.0, float("nan"))])
def test_the_html_report_is_self_contained(tmp_path, training):
    pytest.importorskip("matplotlib")
    result = _result(training)
    report.write_html(result, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert report.headline(result) in text
    assert all(failure in text for failure in result.failures)
    images = re.findall(r'src="([^"]*)"', text)
    assert len(images) == 6
    for image in images:
        assert base64.b64decode(image.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert not re.search(r'(src|href)="(?!data:)|url\(|@import|<script', text)


class _Tables(html.parser.HTMLParser):
    """A parser that collects the classes of the elements around each table."""

    def __init__(self):
        super().__init__()
        self.open, self.around = [], []

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.around.append({c for _, classes in self.open for c in classes})
        if tag not in ("meta", "img"):
            self.open.append((tag, (dict(attributes).get("class") or "").split()))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag


@pytest.fixture
def long_report(tmp_path):
    """Return the report of a failed check, which has all parts, with long names of machine and versions."""
    pytest.importorskip("matplotlib")
    result = _result((-1.0, -2.5))
    result.info |= {"cpu": "A processor whose name is long " * 3, "system": "Linux-6.1.0-a-very-long-release-name-" * 3}
    report.write_html(result, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def test_report_tables_scroll_independently(long_report):
    tables = _Tables()
    tables.feed(long_report)
    assert len(tables.around) == 2 * 2 + 2 and all("wide" in around for around in tables.around)
    assert re.search(r"^\.wide \{[^}]*overflow-x: auto", long_report, re.MULTILINE)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_report_fits_a_narrow_screen(tmp_path, long_report):
    page = tmp_path / "page.html"
    page.write_text(f"""<iframe id=f width=420 height=900 srcdoc="{html.escape(long_report)}"></iframe><script>
        onload = () => document.body.append(`width ${{f.contentDocument.documentElement.scrollWidth}}.`)</script>""")
    seen = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=10000",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert 0 < int(re.search(r"width (\d+)\.", seen)[1]) <= 420


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(contract="stock"), "contract: expected .*, got 'stock'"),
        (dict(prompts=[[9]]), r"prompts\[0\]: must be the prompt that alignkit check gave the engine, got other"),
        (dict(values=[[]]), r"tokens\[0\]: must have at least one sampled token, got none"),
    ],
)
def test_a_result_file_must_match_its_job(tmp_path, change, message):
    good = dict(values=[[-1.0]], contract=contract_id("cpu"))
    save(tmp_path / "a", _logprobs(**good))
    assert run._read(tmp_path / "a", True, [[1, 2]]).tokens == load(tmp_path / "a").tokens
    save(tmp_path / "a", _logprobs(**(good | change)))
    with pytest.raises(WorkerError, match=message):
        run._read(tmp_path / "a", True, [[1, 2]])


# Rejections before any process starts.

engines = pytest.mark.skipif(not (installed("vllm") and installed("megatron.core")), reason="needs both engines")


@engines
@pytest.mark.parametrize(
    "config, message", [({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"), (None, "config.json")]
)
def test_an_unsupported_model_is_rejected(alignkit, tmp_path, config, message):
    model = tmp_path / "model"
    model.mkdir()
    if config:
        (model / "config.json").write_text(json.dumps(config))
    status, _, err = alignkit("check", "--model", model, "--out", tmp_path / "out", "--no-report")
    assert status == 3 and message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@engines
def test_a_foreign_output_directory_is_rejected(alignkit, tmp_path):
    (tmp_path / "logs").mkdir()
    status, _, err = alignkit("check", "--out", tmp_path, "--no-report")
    assert status == 3 and "must be new, empty, or hold results of an earlier alignkit check" in err
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]


def test_check_rejects_a_directory_of_bisect_results(tmp_path):
    prepare(tmp_path, command="bisect")
    check_out(tmp_path, "bisect")
    with pytest.raises(InputError, match="must be new, empty, or hold results of an earlier alignkit check"):
        check_out(tmp_path)


@engines
@pytest.mark.parametrize("command", [["check"], ["bisect", "stock-vllm", "stock-megatron"]])
def test_environment_variables_are_validated_before_engines_start(alignkit, tmp_path, monkeypatch, command):
    monkeypatch.setenv("ALIGNKIT_STRICT", "maybe")
    status, _, err = alignkit(*command, "--out", tmp_path / "out", "--no-report")
    assert status == 3 and err.startswith("error: ALIGNKIT_STRICT: must be a boolean") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    monkeypatch.delenv("ALIGNKIT_STRICT")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with dispatch.use("cuda"):
        status, _, err = alignkit(*command, "--out", tmp_path / "out", "--no-report")
    wanted = "error: ALIGNKIT_BACKEND: must be one of auto, cpu, reference for CPU tensors, got 'cuda'\n"
    assert status == 3 and err == wanted
    assert not (tmp_path / "out").exists()


@engines
@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tp=3), "tp: must divide .*heads = .*, got 3"),
        (dict(tp=0), "tp: must be positive, got 0"),
        (dict(max_tokens=0), "max_tokens: must be positive, got 0"),
        (dict(max_tokens=4000), "max_tokens: must be at most 3796 .* got 4000"),
        (dict(dtypes=["float16"]), "dtype"),
        (dict(temperature=float("nan")), "temperature: .*, got nan"),
        (dict(temperature=-1.0), "temperature: .*, got -1"),
        (dict(seed=-1), "seed: .*, got -1"),
        (dict(timeout=0.0), "timeout: must be positive, got 0"),
    ],
)
@pytest.mark.parametrize("own_model", [False, True])
def test_invalid_options_are_rejected(tmp_path, options, message, own_model):
    model = make_checkpoint(tmp_path / "model", layers=1) if own_model else None
    with pytest.raises((InputError, UnsupportedError), match=message):
        run.run(run.Options(out=tmp_path / "out", model=model, **options), Progress())
    assert not (tmp_path / "out").exists()


@pytest.fixture
def check_changed_model(alignkit, tmp_path, monkeypatch):
    """Return a function that changes a checkpoint and runs `alignkit check` on it. No engine may start."""
    monkeypatch.setattr(run, "execute", lambda *args: pytest.fail("an engine was started"))
    path = make_checkpoint(tmp_path / "model", layers=1, tied=True)

    def check(change):
        change(path)
        status, out, err = alignkit("check", "--model", path, "--out", tmp_path / "out", "--no-report")
        assert not out and err.count("\n") == 1 and not (tmp_path / "out").exists()
        return status, err

    return check


def _config(**change):
    def apply(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | change))

    return apply


def _index(weight_map):
    def apply(path):
        (path / "model.safetensors").rename(path / "model-1.safetensors")
        (path / "model.safetensors.index.json").write_text(weight_map)

    return apply


def _truncate(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1])


def _add_head(path):
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path / "model.safetensors")


@engines
@pytest.mark.parametrize(
    "change, message",
    [
        (_config(rope_theta=None), "rope_theta: must be a positive number, got null"),
        (_config(rms_norm_eps=None), "rms_norm_eps: must be a positive number, got null"),
        (_config(logit_scale=0.5), "logit_scale: must be 1, got 0.5"),
        (_config(num_hidden_layers=2), "the checkpoint has no tensor 'model.layers.1."),
        (
            _config(intermediate_size=1024),
            "gate_proj.weight: must have shape (1024, 512), computed from config.json, got (1536, 512)",
        ),
        (_add_head, "tie_word_embeddings: "),
        (_truncate, "cannot read"),
        (lambda path: (path / "model.safetensors").unlink(), "has no model.safetensors"),
        (_index("{"), "cannot read"),
        (_index('{"weight_map": {"model.norm.weight": "model-2.safetensors"}}'), "has no model-2.safetensors"),
        (_index('{"weight_map": {"lm_head.bias": "model-1.safetensors"}}'), "has no tensor 'lm_head.bias'"),
    ],
)
def test_a_broken_model_is_rejected_before_an_engine_starts(check_changed_model, change, message):
    status, err = check_changed_model(change)
    assert status == 3 and err.startswith("error: ") and message in err


@engines
def test_a_failed_engine_has_its_own_exit_status(alignkit, tmp_path, monkeypatch):
    def fail(*args):
        raise WorkerError("bfloat16-stock-rollout-tp1: exit status 1")

    monkeypatch.setattr(run, "execute", fail)
    status, _, err = alignkit("check", "--out", tmp_path / "out", "--no-report")
    assert status == 4 and err == "error: bfloat16-stock-rollout-tp1: exit status 1\n"


@pytest.mark.parametrize("module, named", [("vllm", "vLLM"), ("megatron", "Megatron-core")])
def test_a_missing_engine_is_named(alignkit, without_modules, tmp_path, module, named):
    without_modules(module)
    status, _, err = alignkit("check", "--out", tmp_path / "out", "--no-report")
    assert status == 3 and f"requires {named}, which is not installed" in err and err.count("\n") == 1


def test_a_missing_report_library_is_named(alignkit, without_modules, tmp_path):
    without_modules("matplotlib")
    status, _, err = alignkit("check", "--out", tmp_path / "out")
    assert status == 3 and "pip install 'alignkit[report]'" in err and err.count("\n") == 1
