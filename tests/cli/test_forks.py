"""Fork servers (alignkit/jobs/forks.py), from which `alignkit check` forks its engine processes on a CPU.

Small modules written by the tests take the place of engines.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from alignkit.jobs import execute as execution
from alignkit.jobs import forks
from alignkit.jobs.job import Job

from .test_check import _alive

LARGE = "import os\nBY = os.getpid()\n"
SMALL = "import os, subprocess, sys, time\ndef main(arguments):\n    import large\n"


@pytest.fixture
def start_fork(tmp_path, monkeypatch):
    """Yield a function that forks a server with `large` imported; the fork's ``main`` has the given lines."""
    monkeypatch.setattr(forks, "_servers", {})
    (tmp_path / "large.py").write_text(LARGE)
    env = {"PYTHONUNBUFFERED": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def start(name, code, imports=("large",), **more):
        (tmp_path / f"{name}.py").write_text(SMALL + "".join(f"    {line}\n" for line in code.splitlines()))
        monkeypatch.setitem(forks._IMPORTS, name, imports)
        return forks.start(name, tmp_path / "job", tmp_path / f"{name}.log", env | more)

    yield start
    for server in forks._servers.values():
        server._process.kill()
        server._process.wait()


def test_one_server_process_forks_all_jobs(start_fork, tmp_path):
    found = {}
    for name in ("one", "two"):
        start_fork(
            name,
            "from alignkit.jobs import forks\n"
            "print(large.BY, os.getppid(), forks.forked, os.getpgid(0) == os.getpid(), os.environ['HERE'], *arguments)",
            HERE=name,
        ).wait(30)
        found[name] = (tmp_path / f"{name}.log").read_text().split()
    (server,) = {int(by) for by, *_ in found.values()}
    assert server != os.getpid() and found["one"] == [
        str(server),
        str(server),
        "True",
        "True",
        "one",
        str(tmp_path / "job"),
    ]
    assert found["two"][4] == "two" and not forks.forked


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL"])
def test_variables_read_at_import_get_a_separate_server(start_fork, tmp_path, name):
    for value in ("1", "2"):
        start_fork(f"of{value}", "print(large.BY)", **{name: value}).wait(30)
    assert (tmp_path / "of1.log").read_text() != (tmp_path / "of2.log").read_text()


@pytest.mark.parametrize(
    "code, status, message",
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('that is why')", 1, "ValueError: that is why"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_fork_reports_its_exit_status(start_fork, tmp_path, code, status, message):
    fork = start_fork("ends", code)
    assert fork.wait(30) == fork.poll() == fork.returncode == status
    assert message in (tmp_path / "ends.log").read_text()


def test_a_failed_import_is_reported_by_the_fork(start_fork, tmp_path):
    assert start_fork("asks", "import absent", imports=("absent",)).wait(30) == 1
    assert "No module named 'absent'" in (tmp_path / "asks.log").read_text()


def test_stopping_a_fork_stops_its_children(start_fork, tmp_path):
    fork = start_fork(
        "stuck", "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\ntime.sleep(600)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(1)
    while not (child := (tmp_path / "stuck.log").read_text()):
        time.sleep(0.05)
    execution.stop(fork)
    assert fork.returncode == -signal.SIGTERM
    deadline = time.monotonic() + 30
    while _alive(int(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(int(child))


def test_forks_end_with_their_server(start_fork):
    fork = start_fork("left", "time.sleep(600)")
    forks._servers.popitem()[1]._connection.close()  # the server sees this when its parent exits
    deadline = time.monotonic() + 30
    while _alive(fork.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(fork.pid)
    assert fork.poll() == -signal.SIGKILL
    assert start_fork("next", "").wait(30) == 0


def test_a_process_has_one_thread_when_it_forks_its_ranks(start_fork, tmp_path):
    """Another thread could hold a lock that deadlocks the fork, such as glibc's resolver lock."""
    fork = start_fork(
        "ranks",
        """from alignkit.jobs import train
threads = []
os.register_at_fork(before=lambda: threads.append(len(os.listdir("/proc/self/task"))))
def rank(rank, job, body, store):
    store.set(str(rank), "is here")
    store.wait([str(1 - rank)])
train._rank = rank
train.launch({"tp": 2}, None)
print(threads)""",
        imports=("alignkit.jobs.train",),
    )
    assert fork.wait(60) == 0, (tmp_path / "ranks.log").read_text()
    assert (tmp_path / "ranks.log").read_text().strip() == "[1, 1]"


def test_engine_jobs_are_forked_only_on_a_cpu(tmp_path, monkeypatch):
    """On GPUs, each job starts as a new process."""
    for name in ("jobs", "logs"):
        (tmp_path / name).mkdir()
    started = []
    monkeypatch.setattr(forks, "start", lambda module, *_: started.append(module))
    job = Job("job", "alignkit.jobs.rollout", {"tp": 1, "runs": []})
    execution._start(job, tmp_path, None)
    assert started == [job.module]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command[:3]))
    execution._start(job, tmp_path, ["0"])
    execution._start(Job("other", "json.tool", {"tp": 1, "runs": []}), tmp_path, None)
    assert started[1:] == [[sys.executable, "-m", job.module], [sys.executable, "-m", "json.tool"]]
