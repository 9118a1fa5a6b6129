"""Script of `test_nemo_rl.py`, which runs it with alignkit's startup folder on PYTHONPATH, as in NeMo-RL.

Arguments: names of functions below, then the folder of a model. It prints the functions' merged results as one JSON
object. The key ``error`` holds the message of an AlignkitError.
"""

import contextlib
import importlib
import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from tests.vllm.settings import ENGINE, ENV

BACKEND = "nemo_rl.models.generation.vllm.vllm_backend"


def replaced(_):
    """Return the names that importing NeMo-RL's modules replaces, and ``kind``, the type of DistributedLogprob."""
    utils = importlib.import_module("nemo_rl.distributed.model_utils")
    importlib.import_module("nemo_rl.models.policy.workers.megatron_policy_worker")
    importlib.import_module(BACKEND)
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


def import_backend():
    """Import the module of NeMo-RL's vLLM worker, without the packages above it, which need NeMo-RL's environment."""
    import nemo_rl

    for name in ("models.policy", "models.generation", "models.generation.vllm"):
        module = types.ModuleType(f"nemo_rl.{name}")
        module.__path__ = [str(Path(nemo_rl.__file__).parent.joinpath(*name.split(".")))]
        sys.modules[module.__name__] = module
    return importlib.import_module(BACKEND)


class Bytes:
    """A stand-in for the ZMQ socket of a NeMo-RL worker, with all weights in one buffer on the CPU."""

    def __init__(self, weights, aligned, complete):
        parts = []
        for _, tensor in weights:
            parts += [tensor.contiguous().view(-1).view(torch.uint8)]
            parts += [torch.zeros(aligned(tensor.nbytes) - tensor.nbytes, dtype=torch.uint8)]
        buffer = torch.cat(parts)
        self.payloads = [(buffer, [name for name, _ in weights], len(buffer)), complete]

    def recv_pyobj(self):
        return self.payloads.pop(0)

    def send(self, answer):
        pass


def refit(path):
    """Sync weights of a Megatron model to a vLLM engine with NeMo-RL's worker extension.

    Returns:
        By transport and fault, the workers' results and the error of a request after the sync, or None. By transport
        that is rejected, the error.
    """
    os.environ |= {name: value for name, value in ENV.items() if name != "ALIGNKIT_VLLM"}
    backend = import_backend()
    if hasattr(backend.VllmInternalWorkerExtension, "synchronize_device"):  # newer workers of vLLM have the name too
        del backend.VllmInternalWorkerExtension.synchronize_device
    from vllm import LLM, SamplingParams

    import alignkit
    from alignkit.convert import read_architecture
    from alignkit.integrations import nemo_rl
    from alignkit.megatron import build
    from alignkit.megatron.cpu import cpu_host

    alignkit.patch_vllm()
    llm = LLM(
        path,
        worker_extension_cls=f"{BACKEND}.VllmInternalWorkerExtension",
        load_format="dummy",
        dtype="bfloat16",
        **ENGINE,
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    from megatron.core import parallel_state

    arch = read_architecture(path)
    patches = contextlib.ExitStack()
    for patch in (cpu_host(), mock.patch("torch.cuda.nvtx"), mock.patch("torch.cuda.current_stream")):
        patches.enter_context(patch)
    parallel_state.initialize_model_parallel()
    model = build.gpt_model(path, torch.bfloat16)
    trainer = SimpleNamespace(cfg={"model_name": path, "generation": {"backend": "vllm"}}, model=model)
    export = nemo_rl.with_fingerprint(lambda self: build.hf_weights(self.model, arch))

    def stream():
        return [(name, tensor.detach().clone()) for name, tensor in export(trainer)]

    def sync(transport, weights):
        def collective(iterator, group, src, post_unpack_func):
            post_unpack_func(list(weights))

        worker.model_update_group = None
        if hasattr(backend, "IPCProtocol"):
            worker.zmq_socket = Bytes(weights, backend.calculate_aligned_size, backend.IPCProtocol.COMPLETE)
            backend.rebuild_cuda_tensor_from_ipc = lambda handle, device: handle
        backend.packed_broadcast_consumer = collective
        return llm.collective_rpc(transport)

    def request():
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)

    def error_of(call, *args):
        try:
            call(*args)
        except Exception as e:
            return str(e)
        return None

    old = stream()
    for weight in model.parameters():
        weight.data.add_(torch.ones_like(weight), alpha=0.01)
    new = stream()
    flipped = [(name, tensor.clone()) for name, tensor in new]
    dict(flipped)["model.layers.1.self_attn.k_proj.weight"].view(torch.int16)[3, 5] ^= 1
    short = [(name, tensor[:-1] if name == "model.norm.weight" else tensor) for name, tensor in new]
    llm.collective_rpc("prepare_refit_info", args=({name: (tensor.shape, tensor.dtype) for name, tensor in new},))
    found = {}
    for transport in ("update_weights_via_ipc_zmq", "update_weights_from_collective"):
        for fault, weights in {
            "right": new,
            "flipped bit": flipped,
            "older step": [*old[:-1], new[-1]],
            "no fingerprint": new[:-1],
            "not loaded": short,
        }.items():
            found[f"{transport}, {fault}"] = sync(transport, weights), error_of(request)
            sync(transport, old)
            assert error_of(request) is None
    for transport in ("nccl_reshard_refit", "update_weights_from_decoded_sparse_payload"):
        found[transport] = error_of(llm.collective_rpc, transport)
    trainer.cfg["generation"]["refit_transport"] = "nixl"
    found["the trainer"] = error_of(stream)
    return found


if __name__ == "__main__":
    from alignkit.errors import AlignkitError

    *names, path = sys.argv[1:]
    result = {}
    for name in names:
        try:
            known = {"replaced": replaced, "bits": bits, "setup": setup, "sampling": sampling, "refit": refit}
            result |= known[name](path)
        except AlignkitError as error:
            result["error"] = str(error)
    print(json.dumps(result))
