"""`patch_megatron`: Megatron-core's GPTModel through alignkit's ops."""
from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch

from alignkit import backends, contract, symmetric
from alignkit.errors import InputError, UnsupportedError

from . import seams

_active: Patch | None = None


def patch_megatron(vocab_size: int) -> Patch:
    """From now on every GPTModel of this process computes through alignkit's ops, or is refused.

    vocab_size: the vocabulary without padding. Megatron only knows the padded size; the columns beyond
        `vocab_size` never count in a loss or logprob.

    Models may be built before or after. A model is taken over when it is built, or at its next forward.
    Call it in every process, before other code replaces methods of GPTModel.

    Returns the handle that undoes it; a second call with the same `vocab_size` returns the same handle.
    Raises UnsupportedError for an unknown Megatron-core version, InputError for another `vocab_size` than the
    patch in force. What cannot be kept aligned in a model raises UnsupportedError when the model is built or
    called, on all tensor-parallel ranks.
    """
    global _active
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise InputError(f"vocab_size: {vocab_size!r} is not a positive integer")
    if _active is not None:
        if _active.vocab_size != vocab_size:
            raise InputError(f"vocab_size: {vocab_size}, but Megatron is patched with {_active.vocab_size}")
        return _active
    _active = Patch(vocab_size)
    return _active


def active() -> Patch:
    """The patch in force. Raises UnsupportedError if there is none."""
    if _active is None:
        raise UnsupportedError("patch_megatron: Megatron-core is not patched in this process")
    return _active


def status(model: torch.nn.Module | None = None) -> dict[str, Any]:
    """What is patched in this process, and with `model` which of its modules are aligned.

    Keys: patched, and if so megatron (version), vocab_size, seams (names that are replaced), classes (of Megatron's
    modules, and the op that takes over); with a model, contract and backend (of its device), aligned (path -> op),
    stock (paths of modules that alignkit would replace but has not yet) and symmetric_memory (whether its sums over
    ranks have gone through it).
    """
    if _active is None:
        return {"patched": False}
    report = {"patched": True, "megatron": _active.version, "vocab_size": _active.vocab_size,
              "seams": _active.names,
              "classes": {stock.__name__: aligned.op for stock, aligned in _active.aligned_class.items()}}
    if model is not None:
        device = next(model.parameters()).device  # without a model nothing says what will compute
        report["contract"], report["backend"] = contract.contract_id(device), backends.name(device)
        report["aligned"] = {path: module.op for path, module in model.named_modules()
                             if type(module) in _active.stock_class}
        report["stock"] = [path for path, module in model.named_modules()
                           if type(module) in _active.aligned_class]
        report["symmetric_memory"] = symmetric.used(model.pg_collection.tp)
    return report


class Patch:
    """The patch in force; `undo`, or leaving it as a context manager, restores Megatron and every model."""

    def __init__(self, vocab_size: int):
        import megatron.core

        self.version = seams.release(megatron.core.__version__)
        self.vocab_size = vocab_size
        self.has_hook = self.version in seams.HOOK_VERSIONS
        self.names: list[str] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._load()
        try:
            self._install()
        except BaseException:
            self._restore()
            raise

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.undo()

    def undo(self) -> None:
        """Megatron and all models as they were. Does nothing the second time."""
        global _active
        if _active is self:
            self._restore()
            _active = None

    def _restore(self) -> None:
        for owner, name, value in reversed(self._undo):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for model in self._models:
            for module in model.modules():
                self._release(module)
        self._undo, self.names = [], []

    def _load(self) -> None:
        """The classes of Megatron that are replaced and those that are let through; by exact type, so that a
        subclass, an adapter or a module of another backend is refused."""
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
        from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
        from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
        from megatron.core.transformer.attention import SelfAttention
        from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
        from megatron.core.transformer.transformer_layer import TransformerLayer

        from . import modules

        self.aligned_class = {
            cls.__base__: cls for cls in (
                modules.ColumnParallelLinear, modules.RowParallelLinear, modules.RMSNorm, modules.MLP,
                modules.RotaryEmbedding, modules.DotProductAttention, modules.TransformerBlock)}
        self.stock_class = {cls: base for base, cls in self.aligned_class.items()}
        self.stock_class[modules.OutputLayer] = modules.ColumnParallelLinear.__base__
        self._layer, self._stock_add = TransformerLayer, get_bias_dropout_add
        self._exact = {  # gathers, splits and structure: no arithmetic that rounds
            GPTModel, LanguageModelEmbedding, VocabParallelEmbedding, TransformerLayer, SelfAttention,
            FusedScaleMaskSoftmax, IdentityOp, IdentityFuncOp, torch.nn.ModuleList, torch.nn.Dropout}

    def _install(self) -> None:
        from megatron.core.models.common.language_module.language_module import LanguageModule
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.tensor_parallel import cross_entropy
        from megatron.core.transformer import attention
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.core.transformer.transformer_block import TransformerBlock

        from . import head, modules

        self._replace(GPTModel, "__init__", self._init(GPTModel.__init__))
        self._replace(GPTModel, "_preprocess", self._preprocess(GPTModel._preprocess))
        self._replace(GPTModel, "_postprocess", self._postprocess(GPTModel._postprocess))
        self._replace(LanguageModule, "__call__", self._only_gpt(LanguageModule, GPTModel))
        self._replace(TransformerBlock, "forward", self._only_aligned(TransformerBlock.forward))
        self._replace(WrappedTorchNorm, "__new__", lambda cls, *a, **kw: modules.RMSNorm.build(*a, **kw))
        self._replace(attention, "apply_rotary_pos_emb", modules.apply_rotary_pos_emb)
        self._replace(cross_entropy, "_VocabParallelCrossEntropy",
                      head.VocabParallelCrossEntropy(self.vocab_size))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name`; `undo` restores it, or removes it where `owner` had only inherited it."""
        self._undo.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)
        self.names.append(f"{getattr(owner, '__module__', owner.__name__)}.{owner.__name__}.{name}"
                          if inspect.isclass(owner) else f"{owner.__name__}.{name}")

    # What the replaced methods of GPTModel do.

    def _init(self, stock):
        @functools.wraps(stock)
        def init(model, *args, **kwargs):
            stock(model, *args, **kwargs)
            self._adopt(model)
        return init

    def _preprocess(self, stock):
        """The first thing that GPTModel.forward calls, in every version and in frameworks' own forwards."""
        from alignkit.tp import TP

        from . import supported

        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def preprocess(model, *args, **kwargs):
            call = signature.bind(model, *args, **kwargs).arguments

            def checks() -> dict:
                supported.check_running(self._adopt(model))
                if call.get("inference_context") is not None:
                    raise UnsupportedError("inference_context: Megatron's inference is not supported")
                tokens = call.get("input_ids")
                if call.get("decoder_input") is None:
                    supported.check_tokens(tokens, self.vocab_size)
                return {"vocab_size": self.vocab_size, "padded vocab_size": model.vocab_size,
                        "params_dtype": str(model.config.params_dtype),
                        "contract": contract.contract_id(backends.family(next(model.parameters()).device)),
                        "sequence_parallel": model.config.sequence_parallel,
                        "input_ids": None if tokens is None else tuple(tokens.shape)}

            TP(model.pg_collection.tp).check_same("GPTModel", checks)
            return stock(model, *args, **kwargs)
        return preprocess

    def _postprocess(self, stock):
        from . import head

        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def postprocess(model, *args, **kwargs):
            call = signature.bind(model, *args, **kwargs).arguments
            labels, hook, asked = call.get("labels"), call.get("output_processor"), head.request.get()
            if hook is not None and hook is not head.output_processor:
                raise UnsupportedError(f"output_processor: {hook!r} is not alignkit's")
            if hook is not None or (labels is None and asked is None):
                return stock(model, *args, **kwargs)
            tied = model.share_embeddings_and_output_weights
            result = head.output_processor(
                hidden_states=call["hidden_states"], output_layer=model.output_layer, labels=labels,
                output_weight=model.shared_embedding_or_output_weight() if tied else None,
                context=asked or head.LogProbsRequest())
            return result if asked is not None else -result.log_probs
        return postprocess

    def _only_gpt(self, base, gpt):
        def call(model, *args, **kwargs):
            if not isinstance(model, gpt):
                raise UnsupportedError(f"{type(model).__name__}: only GPTModel is supported")
            return super(base, model).__call__(*args, **kwargs)
        return call

    def _only_aligned(self, stock):
        from . import modules

        @functools.wraps(stock)
        def forward(block, *args, **kwargs):
            if not isinstance(block, modules.TransformerBlock):
                raise UnsupportedError("TransformerBlock: outside of an aligned GPTModel it is not supported")
            return stock(block, *args, **kwargs)
        return forward

    # Models.

    def _adopt(self, model) -> list[tuple[str, torch.nn.Module]]:
        """Checks every module of `model` and gives those that compute their aligned class. Returns all, with paths.

        Runs before each forward: modules may have been replaced since (by LoRA, for one)."""
        from . import modules, supported

        supported.check_config(model.config)
        supported.check_model(model, self.vocab_size)
        found = list(model.named_modules())
        for path, module in found:
            cls = type(module)
            if cls not in self._exact and cls not in self.aligned_class and cls not in self.stock_class:
                raise UnsupportedError(
                    f"{path or 'model'}: {cls.__module__}.{cls.__qualname__} is not supported")
            supported.check_module(path, module)
            if cls is self._layer and not {module.self_attn_bda, module.mlp_bda} <= {
                    self._stock_add, modules.residual_add}:
                raise UnsupportedError(f"{path}.self_attn_bda / mlp_bda: not Megatron's get_bias_dropout_add")
        rotary = model.rotary_pos_emb
        supported.check_rotary(rotary, model.rotary_base, model.config.kv_channels)

        for _, module in found:  # nothing is changed before all is checked
            if type(module) in self.aligned_class:
                module.__class__ = self.aligned_class[type(module)]
            if type(module) is self._layer:
                module.self_attn_bda = module.mlp_bda = modules.residual_add
        rotary.base, rotary.head_dim = float(model.rotary_base), model.config.kv_channels
        rotary.device = next(model.parameters()).device
        model.output_layer.__class__ = modules.OutputLayer
        model.output_layer.true_vocab_size = self.vocab_size
        self._models.add(model)
        return found

    def _release(self, module: torch.nn.Module) -> None:
        """One module back to what it was before `_adopt`."""
        if type(module) in self.stock_class:
            module.__class__ = self.stock_class[type(module)]
        if type(module) is self._layer:
            module.self_attn_bda = module.mlp_bda = self._stock_add
        for name in ("true_vocab_size", "base", "head_dim", "device", "frequencies_seen"):
            module.__dict__.pop(name, None)
