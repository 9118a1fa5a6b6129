"""The `alignkit bisect` command that `alignkit check` suggests after a difference, with a fake check result.

The suggested options must parse. No engine runs.
"""

import dataclasses
import shlex

import pytest

from alignkit import cli
from alignkit.bisect.run import parse_side
from alignkit.check import run
from tests.cli.test_check import _result


@pytest.mark.parametrize("rollout, training, taken", [("tp2", "tp2-one", True), ("tp2-ep", "tp1-one", False)])
def test_bisect_is_suggested_for_moe_without_expert_parallelism(rollout, training, taken, tmp_path):
    result = _result((-1.0, -2.5))
    for c in result.compared:
        c.row = dataclasses.replace(c.row, rollout=rollout, training=training)
    result.info["model"]["experts"] = 16
    command = run.bisect_command(run.Options(out=tmp_path), result)
    assert command.startswith("alignkit bisect aligned-vllm:tp=2 aligned-megatron:tp=2") if taken else command is None


def test_a_check_with_differences_suggests_bisect(monkeypatch, capsys, tmp_path):
    result = _result((-1.0, -2.5))
    for values, offered in ((result, True), (_result(), False)):
        monkeypatch.setattr(run, "run", lambda options, progress, values=values: values)
        with pytest.raises(SystemExit) as ended:
            cli.main(["check", "--no-report", "--out", str(tmp_path)])
        err = capsys.readouterr().err
        assert ended.value.code == (1 if offered else 0) and ("alignkit bisect" in err) is offered
        if offered:
            words = shlex.split(err.partition("to locate the first difference: ")[2])
            assert [parse_side(side).name for side in words[2:4]] == ["aligned-vllm", "aligned-megatron:tp=1,mode=one"]
            assert f"--model {tmp_path}/model-bfloat16 --dtype bfloat16" in " ".join(words)
            cli.cli.commands["bisect"].make_context("bisect", words[2:])  # the suggested options are valid
