"""The state that `alignkit watch` reads from a monitor's files: merged ranks, bounded memory, other files ignored.

`runs.py` writes the records. tests/drift/test_monitor.py tests the writer.
"""

import json
import os
import tracemalloc

import pytest

from alignkit.drift.monitor.records import MAX_LINE, records_name, replay_name
from alignkit.errors import InputError
from alignkit.watch import state
from alignkit.watch.state import Watched

from . import runs


def test_two_ranks_are_merged(tmp_path):
    runs.write(tmp_path, range(5), rank=0)
    runs.write(tmp_path, range(4), rank=1, off={2: 0.5, 3: 0.25})
    data = Watched(tmp_path).refresh()
    assert (data["tokens"], data["unequal"], data["max_abs"], data["last_step"]) == (72, 2, 0.5, 4)
    assert data["contracts"] == [runs.CONTRACT] and not data["refused"] and not data["behind"]
    assert [
        (r["rank"], r["records"], r["tokens"], r["unequal"], r["max_abs"], r["last_step"]) for r in data["ranks"]
    ] == [(0, 5, 40, 0, 0.0, 4), (1, 4, 32, 2, 0.5, 3)]
    first = data["first_difference"]
    assert (first["step"], first["rank"], first["sequence"], first["position"], first["token"]) == (2, 1, 1, 2, 4321)
    assert (first["rollout"], first["training"], first["rollout_bits"]) == (-1.5, -1.0, "0xbfc00000")
    assert [(w["step"], w["distance"]) for w in data["worst"]] == [(2, 0.5), (3, 0.25)]
    assert [r["name"] for r in data["replays"]] == [replay_name(1, 2)]
    assert data["curves"][1]["points"] == [[0, 0, 8, 0, 0.0], [1, 1, 8, 0, 0.0], [2, 2, 8, 1, 0.5], [3, 3, 8, 1, 0.25]]
    assert data["latest"]["metrics"]["drift/max_abs"] == 0.25
    json.dumps(data, allow_nan=False)


def test_refresh_resumes_at_the_last_position(tmp_path):
    runs.write(tmp_path, range(3))
    watched = Watched(tmp_path)
    assert watched.refresh()["records"] == watched.refresh()["records"] == 3
    runs.append(tmp_path, step=7)
    with open(tmp_path / records_name(0), "a") as file:
        file.write('{"version": 1, "step": 8, ')
    assert (watched.refresh()["last_step"], watched.refresh()["damaged"]) == (7, 0)
    runs.write(tmp_path, [9], rank=0)  # the next process completes the torn line with a newline
    data = watched.refresh()
    assert (data["records"], data["last_step"], data["damaged"]) == (5, 9, 1)


def test_a_truncated_or_replaced_file_is_reread(tmp_path):
    runs.write(tmp_path, range(3), off={1: 0.5})
    watched = Watched(tmp_path)
    assert watched.refresh()["unequal"] == 1
    path = tmp_path / records_name(0)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])  # truncated
    assert (watched.refresh()["records"], watched.refresh()["unequal"]) == (1, 0)
    (tmp_path / "other").write_bytes(path.read_bytes() * 9)
    os.replace(tmp_path / "other", path)  # replaced, and longer
    assert watched.refresh()["records"] == 9
    path.unlink()
    assert watched.refresh()["ranks"] == []


def test_an_empty_directory_is_accepted_and_a_missing_one_rejected(tmp_path):
    data = Watched(tmp_path).refresh()
    assert (data["tokens"], data["ranks"], data["first_difference"], data["latest"]) == (0, [], None, None)
    with pytest.raises(InputError, match="DIR: must be an existing directory, got .*absent"):
        Watched(tmp_path / "absent")


def test_a_directory_may_disappear_and_return(tmp_path):
    directory = tmp_path / "run"
    runs.write(directory, [0])
    watched = Watched(directory)
    directory.rename(tmp_path / "away")
    assert watched.refresh()["refused"] == [f"{directory}: No such file or directory"]
    (tmp_path / "away").rename(directory)
    assert watched.refresh()["records"] == 1


def long_run(path, records, peak=None):
    """Write one rank's file with a difference at step `peak`."""
    runs.write(path, [0])
    line = json.loads((path / records_name(0)).read_text())
    with open(path / records_name(0), "w") as file:
        for step in range(records):
            off = step == peak
            file.write(
                json.dumps(
                    {
                        **line,
                        "step": step,
                        "drift": {**line["drift"], "bit_equal": 7 if off else 8, "max_abs": 0.75 if off else 0.0},
                    }
                )
                + "\n"
            )


@pytest.mark.parametrize("peak", [0, 1, 511, 512, 513, 1600, 4999])
def test_a_long_curve_is_bounded_and_keeps_its_peak(tmp_path, peak):
    long_run(tmp_path, 5000, peak)
    data = Watched(tmp_path).refresh()
    points = data["curves"][0]["points"]
    assert state.MAX_POINTS / 4 < len(points) <= state.MAX_POINTS
    assert [p for p in points if p[4] == 0.75] == [p for p in points if p[3] == 1] != []
    assert all(first <= peak <= last for first, last, *_, largest in points if largest == 0.75)
    assert sum(p[2] for p in points) == data["tokens"] == 40000
    assert [p[0] for p in points] == [0] + [p[1] + 1 for p in points[:-1]]  # no step is missing or duplicated


def test_a_huge_file_is_read_in_bounded_pieces(tmp_path, monkeypatch):
    long_run(tmp_path, 6000, 5990)
    size = (tmp_path / records_name(0)).stat().st_size
    monkeypatch.setattr(state, "READ_LIMIT", size // 4)
    watched = Watched(tmp_path)
    tracemalloc.start()
    seen = []
    while not seen or seen[-1]["behind"]:
        seen.append(watched.refresh())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 4 <= len(seen) <= 6 and seen[0]["unequal"] == 0 and seen[-1]["unequal"] == 1
    assert [0 < s["read_bytes"] <= s["all_bytes"] == size for s in seen] == [True] * len(seen)
    assert peak < size / 3


def test_an_endless_line_takes_bounded_memory(tmp_path):
    runs.write(tmp_path, [1])
    path = tmp_path / records_name(0)
    with open(path, "ab") as file:
        file.truncate(path.stat().st_size + 20 * MAX_LINE)  # a hole: zeros
    watched = Watched(tmp_path)
    tracemalloc.start()
    assert watched.refresh()["records"] == 1
    assert tracemalloc.get_traced_memory()[1] < 4 * MAX_LINE
    tracemalloc.stop()


def test_symlinks_and_other_files_are_not_read(tmp_path):
    secret = tmp_path / "secret"
    runs.write(secret, range(3), off={1: 0.5})
    (secret / "secret.jsonl").write_text((secret / records_name(0)).read_text())
    directory = tmp_path / "run"
    runs.write(directory, [0], rank=5)
    (directory / records_name(0)).symlink_to(secret / records_name(0))
    (directory / records_name(1)).symlink_to("nowhere")
    os.mkfifo(directory / records_name(2))
    (directory / records_name(3)).mkdir()
    (directory / "monitor-rank00004.jsonl.bak").write_text((secret / records_name(0)).read_text())
    (directory / ("monitor-rank" + "\N{ARABIC-INDIC DIGIT ZERO}" * 5 + ".jsonl")).write_text(
        (secret / records_name(0)).read_text()
    )
    (directory / replay_name(0, 1)).symlink_to(secret / replay_name(0, 1))
    data = Watched(directory).refresh()
    assert [r["rank"] for r in data["ranks"]] == [5] and data["unequal"] == 0 and data["replays"] == []
    assert [entry.partition(":")[0] for entry in data["refused"]] == [records_name(rank) for rank in range(4)]


def test_ranks_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "MAX_RANKS", 2)
    for rank in range(4):
        runs.write(tmp_path, [0], rank=rank)
    data = Watched(tmp_path).refresh()
    assert [r["rank"] for r in data["ranks"]] == [0, 1]
    assert data["refused"] == [f"{records_name(2)} and later: more than 2 ranks"]


def test_only_the_worst_tokens_are_kept(tmp_path):
    runs.write(tmp_path, range(60), off={step: step / 64 for step in range(60)})
    worst = Watched(tmp_path).refresh()["worst"]
    assert [w["step"] for w in worst] == list(range(59, 59 - state.MAX_WORST, -1))


def test_nonfinite_tokens_rank_worst(tmp_path):
    runs.write(tmp_path, range(3), off={0: 0.5, 1: float("nan"), 2: 0.75})
    data = Watched(tmp_path).refresh()
    assert [(w["step"], w["training"], w["distance"]) for w in data["worst"]] == [
        (1, None, None),
        (2, -0.75, 0.75),
        (0, -1.0, 0.5),
    ]
    assert data["max_abs"] == 0.75 and data["unequal"] == 3
