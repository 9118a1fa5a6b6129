"""Token sequences that `alignkit bisect` reads from a monitor's replay or from a logprob file.

A replay is the file that a monitor saves at its first difference; these are written by the real monitor. One slow test
runs bisect with both engines.
"""

import pytest
import torch

from alignkit import bisect, contract_id
from alignkit.bisect import tokens
from alignkit.drift import Logprobs, Monitor, save
from alignkit.errors import InputError

IDS = torch.arange(4 * 6).reshape(4, 6) + 3
MASK = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])


def write_replay(directory, context, contract="alignkit-3/cpu/v128/k8/kv32/leaf128", at=((1, 0), (2, 1))):
    """Return the replay of a step with three-token responses whose logprobs differ at the positions `at`."""
    training = -torch.rand(4, 3)
    rollout = training.clone()
    for where in at:
        rollout[where] -= 0.5
    with Monitor(directory, contract=contract, on_difference=lambda error: None) as monitor:
        monitor.log(7, rollout, training, torch.ones(4, 3, dtype=torch.bool), tokens=IDS[:, 3:], context=context)
    (path,) = directory.glob("replay-*.safetensors")
    return path


def test_a_replay_gives_the_sequences_that_differed(tmp_path):
    path = write_replay(tmp_path, {"input_ids": IDS, "attention_mask": MASK})
    sequences, replay = tokens.read(path)
    assert sequences == [IDS[1].tolist(), IDS[2, :4].tolist()]
    assert replay.info["step"] == 7


def test_left_padding_and_duplicate_sequences_are_removed(tmp_path):
    ids = IDS.clone()
    ids[1] = ids[0]
    same = MASK.clone()
    same[1] = same[0]
    path = write_replay(tmp_path, {"input_ids": ids, "attention_mask": same}, at=((0, 0), (1, 2)))
    assert tokens.read(path)[0] == [IDS[0, 1:].tolist()]


@pytest.mark.parametrize(
    "context, message",
    [
        ({}, "no prompts"),
        ({"input_ids": IDS[:3]}, "input_ids"),
        ({"input_ids": IDS.float()}, "input_ids"),
        ({"input_ids": IDS, "attention_mask": MASK[:, 1:]}, "attention_mask"),
    ],
)
def test_replays_without_whole_sequences_are_rejected(context, message, tmp_path):
    path = write_replay(tmp_path, context)
    with pytest.raises(InputError, match=f"replay.*{message}"):
        tokens.read(path)


def test_another_contract_is_rejected_before_an_engine_starts(tmp_path):
    path = write_replay(tmp_path / "run", {"input_ids": IDS}, contract="alignkit-6/sm90/v128/k8/kv128/leaf512")
    with pytest.raises(InputError, match="contract: .* got 'alignkit-6/sm90"):
        bisect.bisect(bisect.Options("aligned-megatron", "hf", tmp_path / "out", tokens=path))
    ours = contract_id("cuda" if torch.cuda.is_available() else "cpu")
    tokens.check_contract(
        path, tokens.read(write_replay(tmp_path / "ours", {"input_ids": IDS}, contract=ours))[1], True
    )
    tokens.check_contract(path, tokens.read(path)[1], False)  # stock engines have no contract


@pytest.mark.slow
def test_bisect_runs_a_replay(tmp_path):
    path = write_replay(tmp_path / "run", {"input_ids": IDS, "attention_mask": MASK})
    result = bisect.bisect(
        bisect.Options("stock-megatron", "hf", str(tmp_path / "out"), arch="llama", tokens=str(path))
    )
    assert result.a.sequences == result.b.sequences == [IDS[1].tolist(), IDS[2, :4].tolist()]


def test_a_logprob_file_gives_its_sequences(tmp_path):
    logprobs = Logprobs([[5, 6]], [[7]], [torch.zeros(1)], contract_id("cpu"))
    save(tmp_path / "a.safetensors", logprobs)
    assert tokens.read(tmp_path / "a.safetensors") == ([[5, 6, 7]], None)
    with pytest.raises(InputError, match="no such file"):
        tokens.read(tmp_path / "b.safetensors")
