"""`alignkit compare` on small logprob files: output, exit status and rejected files."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from alignkit.drift import Logprobs, save


@pytest.fixture
def files(tmp_path):
    def write(name, values, contract="stock", **optional):
        save(tmp_path / name, Logprobs([[1]], [[5, 6]], [torch.tensor(values)], contract, **optional))
        return tmp_path / name

    return write


def test_equal_files_exit_with_0(alignkit, files):
    status, out, err = alignkit("compare", files("a", [-1.0, -2.0]), files("b", [-1.0, -2.0]))
    assert status == 0 and not err and "bit_equal" in out and "worst" not in out


def test_a_difference_exits_with_1_and_prints_the_worst_token(alignkit, files):
    status, out, err = alignkit("compare", files("a", [-1.0, -2.0]), files("b", [-1.0, -2.5]))
    assert status == 1 and not err
    assert "worst: sequence 0, position 1, token 6: rollout -2 (0xc0000000), training -2.5 (0xc0200000)" in out


def test_nonfinite_logprobs_are_reported(alignkit, files):
    status, out, _ = alignkit("compare", files("a", [-1.0, -2.0]), files("b", [-1.0, float("nan")]))
    assert status == 1 and out.startswith("1 token with a nonfinite logprob is left out of the metrics below")


def test_a_directory_is_rejected(alignkit, files, tmp_path):
    status, _, err = alignkit("compare", files("a", [-1.0, -2.0]), tmp_path)
    assert status == 3 and err.endswith(": is a directory, expected a logprob file\n")


def test_json_output_has_the_metrics(alignkit, files):
    status, out, _ = alignkit("compare", "--json", files("a", [-1.0, -2.0]), files("b", [-1.0, float("nan")]))
    report = json.loads(out)
    assert status == 1
    assert (report["tokens"], report["bit_equal"], report["nonfinite"]) == (2, 1, 1)
    assert report["worst"] == [{"sequence": 0, "position": 1, "token_id": 6, "rollout": -2.0, "training": None}]


def test_a_contract_mismatch_is_rejected_unless_allowed(alignkit, files):
    a, b = files("a", [-1.0, -2.0]), files("b", [-1.0, -2.0], contract="alignkit-1/cpu")
    status, out, err = alignkit("compare", a, b)
    assert (
        status == 3
        and not out
        and err.startswith("error: contract: rollout and training must have the same contract id, got 'stock'")
    )
    assert alignkit("compare", a, b, "--allow-contract-mismatch")[0] == 0


def test_a_weights_mismatch_is_rejected_unless_allowed(alignkit, files):
    a, b = files("a", [-1.0, -2.0], weights="ab"), files("b", [-1.0, -2.5], weights="cd")
    status, out, err = alignkit("compare", a, b)
    assert status == 3 and not out and err.startswith("error: weights: rollout and training must have the same weights")
    assert "'ab' and 'cd'" in err and "--allow-weights-mismatch" in err
    status, out, _ = alignkit("compare", a, b, "--allow-weights-mismatch")
    assert status == 1 and "\nweights: different (rollout ab, training cd)\n" in out
    assert "\ncause: different weights: rollout ab, training cd\ncause: unknown: epochs of rollout, temperature" in out


def test_unknown_weights_are_printed_for_equal_files(alignkit, files):
    a, b = files("a", [-1.0, -2.0], weights="ab"), files("b", [-1.0, -2.0])
    status, out, _ = alignkit("compare", a, b)
    assert status == 0 and "\nweights: unknown in training (rollout ab)\n" in out and "cause" not in out


def test_a_truncated_file_is_rejected(alignkit, files):
    a, b = files("a", [-1.0, -2.0]), files("b", [-1.0, -2.0])
    b.write_bytes(b.read_bytes()[:-1])
    status, _, err = alignkit("compare", a, b)
    assert status == 3 and err.count("\n") == 1 and f"{b}: cannot be read as a safetensors file" in err


def test_deeply_nested_metadata_is_rejected(alignkit, files):
    """Enough brackets to overflow a parser's stack give an error message, not a traceback."""
    a, b = files("a", [-1.0, -2.0]), files("b", [-1.0, -2.0])
    with safe_open(b, framework="pt") as f:
        metadata, tensors = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}
    save_file(tensors, b, metadata=metadata | {"meta": "[" * 10**5})
    status, out, err = alignkit("compare", a, b)
    assert status == 3 and not out and err.count("\n") == 1 and f"{b}: meta: must be JSON" in err


@pytest.mark.parametrize("args", [["compare"], ["compare", "a"], ["nothing"], ["compare", "a", "b", "--worst", "x"]])
def test_usage_errors_exit_with_2(alignkit, args):
    status, _, err = alignkit(*args)
    assert status == 2 and "Traceback" not in err
