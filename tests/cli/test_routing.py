"""Count of rerouted tokens (alignkit/jobs/routing.py): tokens with another expert in training than in rollout.

Recorded rows of both engines must map to the right tokens. Megatron's real router is used if installed; vLLM's steps
are fakes.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from alignkit.drift import Logprobs
from alignkit.errors import InputError
from alignkit.jobs import routing
from alignkit.jobs.train import _MODES, _forwards, _micro_batches


def sequences_of(*lengths):
    """Return sequences with a one-token prompt and the given numbers of sampled tokens."""
    return Logprobs([[1]] * len(lengths), [[2] * n for n in lengths], [torch.zeros(n) for n in lengths], "stock")


def compared(tmp_path, logits, chosen):
    a, b = tmp_path / "a", tmp_path / "b"
    save_file({"logits": torch.tensor(logits)}, a)
    save_file({"chosen": torch.tensor(chosen, dtype=torch.uint8)}, b)
    return routing.rerouted(a, b)


def test_a_token_is_rerouted_if_any_layer_differs(tmp_path):
    logits = [[[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]] * 4
    same, other = [[1, 1, 0], [0, 1, 1]], [[1, 1, 0], [1, 0, 1]]
    assert compared(tmp_path, logits, [same, other, same, same]) == (1, 4)
    assert compared(tmp_path, logits, [same] * 4) == (0, 4)


def test_ties_may_be_broken_either_way(tmp_path):
    logits = [[[2.0, 1.0, 1.0, 0.0]]] * 3
    assert compared(tmp_path, logits, [[[1, 1, 0, 0]], [[1, 0, 1, 0]], [[1, 0, 0, 1]]]) == (1, 3)


def test_nan_logits_are_not_compared(tmp_path):
    nan = float("nan")
    assert compared(tmp_path, [[[nan, nan]], [[1.0, 0.0]]], [[[1, 0]], [[0, 1]]]) == (1, 1)


def test_a_shape_mismatch_is_rejected(tmp_path):
    with pytest.raises(InputError, match="'chosen': must have the shape"):
        compared(tmp_path, [[[1.0, 0.0]]], [[[1, 0]], [[0, 1]]])


@pytest.mark.parametrize("mode", ["one", "padded", "packed"])
@pytest.mark.parametrize("micro_batch, multiple", [(None, 1), (12, 1), (None, 4)])
def test_megatron_rows_map_to_their_tokens(mode, micro_batch, multiple):
    """The fake routers choose expert (token id + layer), which identifies the token's position."""
    router = pytest.importorskip("megatron.core.transformer.moe.router")

    class Router(router.TopKRouter):
        def __init__(self):
            torch.nn.Module.__init__(self)

        def forward(self, numbers):
            return None, torch.nn.functional.one_hot(numbers, 64).bool()

    routers, batch = torch.nn.ModuleList([Router(), Router()]), sequences_of(3, 5, 1)
    routers.config = SimpleNamespace(sequence_parallel=False)
    forwards = _forwards(batch, mode, multiple, micro_batch)
    assert [at.sequence for sequences in forwards for at in sequences] == [0, 1, 2]
    assert len(forwards) == (3 if mode == "one" else 2 if micro_batch else 1)

    def logp(tokens, labels, mask=None, packed=None):
        """Call the routers with tokens in Megatron's [s, b] layout, as a model does."""
        assert tokens.shape[1] % multiple == 0
        numbers = tokens.mT
        for layer, one in enumerate(routers):
            one((numbers + layer).flatten())
        return torch.zeros(tokens.shape)

    with routing.Choices(routers) as choices:
        numbered = [([10 * i + 10], [10 * i + 10 + p for p in range(1, n + 1)]) for i, n in enumerate((3, 5, 1))]
        for part in _micro_batches(numbered, micro_batch):
            _MODES[mode](logp, part, multiple, torch.device("cpu"))
    routers[0](torch.zeros(1, dtype=torch.int64))  # not recorded: outside of the context
    chosen = choices.of(batch, forwards).argmax(dim=-1)
    expected = [10 * i + 10 + p for i, n in enumerate((3, 5, 1)) for p in range(n)]
    assert chosen.tolist() == [[e, e + 1] for e in expected]


def test_step_rows_map_to_their_tokens():
    """Map two known requests, one of them within its prompt, an unknown request and padding."""
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [6]}
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=3, req_ids=["a", "c", "b", "gone"]),
        query_start_loc=SimpleNamespace(np=[0, 2, 3, 5, 9]),
        requests={name: SimpleNamespace(prompt_token_ids=ids) for name, ids in prompts.items()},
    )
    positions = torch.tensor([1, 2, 0, 4, 5, 7])
    first = {(1, 2, 3): 100, (4, 5): 200}
    for args, kwargs in (((None, positions), {}), ((), {"positions": positions})):
        rows, starts = routing.rows_of_step(runner, args, kwargs, first)
        assert rows.tolist() == [101, 102, -1, 204, 205, -1] and starts.tolist() == [0, 2, 3, 5]
