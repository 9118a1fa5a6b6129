"""Script of `test_nemo_rl.py`, which runs it with alignkit's startup folder on PYTHONPATH, as in NeMo-RL.

Arguments: names of functions below, then the folder of a model. It prints the functions' merged results as one JSON
object. The key ``error`` holds the message of an AlignkitError.
"""

import importlib
import json
import sys
from types import SimpleNamespace

import torch


def replaced(_):
    """Return the names that importing NeMo-RL's modules replaces, and ``kind``, the type of DistributedLogprob."""
    utils = importlib.import_module("nemo_rl.distributed.model_utils")
    from alignkit.integrations.nemo_rl import Patch

    return {"names": Patch.live().names, "kind": type(utils.DistributedLogprob).__name__}


def bits(path):
    """Compare NeMo-RL's logprobs with alignkit's.

    Returns:
        ``differing``, the number of different logprobs by call variant; ``of``, the number of logprobs of each; and
        ``has_gradient``, whether a backward pass gives the output layer a gradient.
    """
    import torch.distributed as dist

    from alignkit.megatron import build, logprobs, patch_megatron, set_vocab_size
    from alignkit.megatron.cpu import cpu_host

    utils = importlib.import_module("nemo_rl.distributed.model_utils")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    rows = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(2))
    found = {}
    with cpu_host(), patch_megatron():
        parallel_state.initialize_model_parallel()
        model = build.gpt_model(path, torch.bfloat16)
        set_vocab_size(model, 300)
        positions = torch.arange(40).expand_as(rows)
        with torch.no_grad():
            expected = logprobs(model, rows, positions, None, rows.roll(-1, -1)).log_probs[:, :-1]
            logits = model(rows, positions, None)
        common = dict(vocab_start_index=0, vocab_end_index=logits.shape[-1], cp_group=dist.group.WORLD)
        for chunk in (None, 7):
            for inference in (True, False):
                got = utils.from_parallel_logits_to_logprobs(
                    logits, rows, tp_group=dist.group.WORLD, inference_only=inference, chunk_size=chunk, **common
                )
                found[f"padded, {chunk}, {inference}"] = int((got != expected).sum())
            packed = utils.from_parallel_logits_to_logprobs_packed_sequences(
                logits.reshape(1, -1, logits.shape[-1]),
                rows.reshape(1, -1),
                torch.tensor([0, 40, 80, 120]),
                40,
                group=dist.group.WORLD,
                chunk_size=chunk,
                **common,
            )
            found[f"packed, {chunk}"] = int((packed != expected).sum())
        logits = model(rows, positions, None)
        got = utils.from_parallel_logits_to_logprobs(logits, rows, tp_group=dist.group.WORLD, **common)
        got.sum().backward()
        has_gradient = bool(model.output_layer.weight.grad.abs().sum() > 0)
    return {"differing": found, "of": expected.numel(), "has_gradient": has_gradient}


def setup(_):
    """Return the vocabulary size of the model that NeMo-RL's setup builds."""
    from alignkit.megatron.state import of_model

    module = importlib.import_module("nemo_rl.models.megatron.setup")
    state = module.setup_model_and_optimizer(None, SimpleNamespace(model=SimpleNamespace(vocab_size=300)))
    return {"vocab_size": of_model(state.model).own_vocab_size}


def sampling(_):
    """Call NeMo-RL's logprob function for top-p sampling, which must raise an AlignkitError."""
    utils = importlib.import_module("nemo_rl.distributed.model_utils")
    utils.DistributedLogprobWithSampling.apply(None, None, None, None, 0.9)


if __name__ == "__main__":
    from alignkit.errors import AlignkitError

    *names, path = sys.argv[1:]
    result = {}
    for name in names:
        try:
            result |= {"replaced": replaced, "bits": bits, "setup": setup, "sampling": sampling}[name](path)
        except AlignkitError as error:
            result["error"] = str(error)
    print(json.dumps(result))
