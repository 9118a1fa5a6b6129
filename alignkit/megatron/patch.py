"""`patch_megatron`: Megatron-core's GPTModel through alignkit's ops."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, NoReturn

import torch

from alignkit import contract
from alignkit.dist import TP, symmetric
from alignkit.errors import InputError, UnsupportedError
from alignkit.runtime import dispatch

from . import fingerprint, running, seams

_active: Patch | None = None


def patch_megatron(vocab_size: int) -> Patch:
    """From now on every GPTModel of this process computes through alignkit's ops, or is refused.

    vocab_size: the vocabulary without padding. Megatron only knows the padded size; the columns beyond
        `vocab_size` never count in a loss or logprob.

    Models may be built before or after. A model is taken over when it is built, or at its next forward.
    Call it in every process.

    Returns the handle that undoes it; a second call with the same `vocab_size` returns the same handle.
    Raises UnsupportedError for an unknown Megatron-core version, or none, and for a method of its classes that has
    been replaced; InputError for another `vocab_size` than the patch in force. What cannot be kept aligned in a model
    raises UnsupportedError when the model is built or called, on all tensor-parallel ranks.
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


def is_active() -> bool:
    """Whether a patch is in force."""
    return _active is not None


def active() -> Patch:
    """The patch in force. Raises UnsupportedError if there is none."""
    if _active is None:
        raise UnsupportedError("patch_megatron: Megatron-core is not patched in this process")
    return _active


def status(model: Any = None) -> dict[str, Any]:
    """What is patched in this process, and with `model` which of its modules are aligned.

    Keys: patched, and if so megatron (version), vocab_size, seams (names that are replaced), classes (of Megatron's
    modules, and the op that takes over); with a model, contract and backend (of its device), aligned (path -> op),
    stock (paths of modules that alignkit would replace but has not yet) and symmetric_memory (whether its sums over
    ranks have gone through it).
    """
    if _active is None:
        return {"patched": False}
    from . import modules

    report = {
        "patched": True,
        "megatron": _active.version,
        "vocab_size": _active.vocab_size,
        "seams": _active.names,
        "classes": {stock.__name__: aligned.op for stock, aligned in _active.aligned_class.items()},
    }
    if model is not None:
        device = next(model.parameters()).device  # without a model nothing says what will compute
        report["contract"], report["backend"] = contract.contract_id(device), dispatch.name(device)
        report["aligned"] = {
            path: type(module).op for path, module in model.named_modules() if type(module) in modules.ALIGNED
        }
        report["stock"] = [path for path, module in model.named_modules() if type(module) in _active.aligned_class]
        report["symmetric_memory"] = symmetric.used(model.pg_collection.tp)
    return report


class Patch:
    """The patch in force; `undo`, or leaving it as a context manager, restores Megatron and every model."""

    def __init__(self, vocab_size: int):
        try:
            import megatron.core
        except ModuleNotFoundError as e:
            raise UnsupportedError(f"patch_megatron: Megatron-core is not installed ({e})") from None

        self.version = seams.release(megatron.core.__version__)
        self.vocab_size = vocab_size
        self.has_hook = self.version in seams.HOOK_VERSIONS
        self.names: list[str] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        """Owner, name, what was there (None if it was inherited), what is there now."""
        self._met: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Models whose ranks have met, or begun to, in the forward that is running."""
        self._load()
        try:
            self._methods.check()
            self._install()
        except BaseException:
            self._restore()
            raise

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.undo()

    def undo(self) -> None:
        """Megatron and all models as they were. Does nothing the second time.

        Raises UnsupportedError, and changes nothing, if other code has replaced what `patch_megatron` had: it is
        named, and must be restored first."""
        global _active
        if _active is self:
            running.check_in_force(self._in_force())
            self._restore()
            _active = None

    def _restore(self) -> None:
        from . import modules

        for owner, name, value, _ in reversed(self._replaced):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._replaced, self.names = [], []
        running.unwatch_hooks()
        for module in list(running.adopted):
            if type(module) in modules.ALIGNED:
                module.__class__ = modules.stock_class(type(module))
            vars(module).pop(running.LOOK, None)
        for kept in (running.adopted, modules.vocabulary, modules.rotations, modules.begun):
            kept.clear()

    def _in_force(self) -> list[tuple[Any, str, Any]]:
        """All that was replaced: owner, name, by what."""
        return [(owner, name, value) for owner, name, _, value in self._replaced]

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

        from . import modules

        self.aligned_class = {
            modules.stock_class(cls): cls for cls in modules.ALIGNED if cls is not modules.OutputLayer
        }
        self._layer, self._bda = modules.TransformerLayer.__base__, (get_bias_dropout_add, modules.residual_add)
        self._exact = {  # gathers, splits and structure: no arithmetic that rounds
            GPTModel,
            LanguageModelEmbedding,
            VocabParallelEmbedding,
            SelfAttention,
            FusedScaleMaskSoftmax,
            IdentityOp,
            IdentityFuncOp,
            torch.nn.ModuleList,
            torch.nn.Dropout,
        }
        self._known = {*self._exact, *self.aligned_class, *modules.ALIGNED}
        self._ours: dict[tuple[type, str], Any] = {}
        self._methods = running.Methods(self._known, self._ours)

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
        self._replace(cross_entropy, "_VocabParallelCrossEntropy", head.VocabParallelCrossEntropy(self.vocab_size))
        # What builds models may be wrapped by others: what it has built is looked at anyway.
        self._running = [r for r in self._in_force() if r[1] not in ("__init__", "__new__")]

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name`; `undo` restores it, or removes it where `owner` had only inherited it."""
        self._replaced.append((owner, name, vars(owner).get(name), value))
        setattr(owner, name, value)
        self._ours[owner, name] = value
        self.names.append(
            f"{getattr(owner, '__module__', owner.__name__)}.{owner.__name__}.{name}"
            if inspect.isclass(owner)
            else f"{owner.__name__}.{name}"
        )

    # What the replaced methods of GPTModel do.

    def _init(self, stock):
        @functools.wraps(stock)
        def init(model, *args, **kwargs):
            stock(model, *args, **kwargs)
            self._adopt(model)

        return init

    def _preprocess(self, stock):
        """The first thing that GPTModel.forward calls, in every version and in frameworks' own forwards."""
        from . import modules, supported

        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def preprocess(model, *args, **kwargs):
            call = signature.bind(model, *args, **kwargs).arguments

            def checks() -> dict:
                running.check_hooks()
                return (
                    self._adopt(model, runs=True)
                    | supported.check_input(model, self.vocab_size, **call)
                    | {
                        "vocab_size": self.vocab_size,
                        "contract": dispatch.family(next(model.parameters()).device).contract_id,
                    }
                )

            self._met.add(model)
            tp = TP(model.pg_collection.tp)
            tp.check_same("GPTModel", checks)
            if call.get("decoder_input") is None:
                tp.check_same_values("GPTModel", input_ids=call.get("input_ids"))
            modules.begun[model.decoder] = call.get("packed_seq_params")
            return stock(model, *args, **kwargs)

        return preprocess

    def _postprocess(self, stock):
        from . import head, supported

        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def postprocess(model, *args, **kwargs):
            call = signature.bind(model, *args, **kwargs).arguments
            labels, hook, asked = call.get("labels"), call.get("output_processor"), head.request.get()
            context = call.get("output_processor_context") if hook is not None else asked

            def checks() -> dict:
                running.check_hooks()
                if hook is not None and hook is not head.output_processor:
                    raise UnsupportedError(f"output_processor: {hook!r} is not alignkit's")
                if hook is None and asked is None and labels is None:
                    gather = call.get("runtime_gather_output")
                    return {"labels": None, "runtime_gather_output": None if gather is None else bool(gather)}
                return supported.check_request(
                    model, self.vocab_size, call["hidden_states"], labels, head.asked_for(context)
                )

            TP(model.pg_collection.tp).check_same("the end of GPTModel", checks)
            if hook is not None or (labels is None and asked is None):
                result = stock(model, *args, **kwargs)
            else:
                tied = model.share_embeddings_and_output_weights
                result = head.output_processor(
                    hidden_states=call["hidden_states"],
                    output_layer=model.output_layer,
                    labels=labels,  # pyright: ignore[reportArgumentType] - none only if `asked` has its own
                    output_weight=model.shared_embedding_or_output_weight() if tied else None,
                    context=context,
                )
                result = result if asked is not None else -result.log_probs
            running.check_hooks()  # those of the output layer; no rank waits for this one any more
            return result

        return postprocess

    def _only_gpt(self, base, gpt):
        def call(model, *args, **kwargs):
            if not isinstance(model, gpt):
                raise UnsupportedError(f"{type(model).__name__}: only GPTModel is supported")

            def checks() -> None:
                running.check_in_force(self._running)
                running.watch_hooks("", model)
                running.watch_global_hooks()
                if kwargs.get("extra_block_kwargs"):
                    raise UnsupportedError(f"extra_block_kwargs: {kwargs['extra_block_kwargs']!r} is not supported")

            self._met.discard(model)
            try:
                checks()
                result = super(base, model).__call__(*args, **kwargs)
            except Exception as e:
                if (
                    model not in self._met
                ):  # the other ranks are about to meet in `_preprocess`, and must hear of it there
                    TP(model.pg_collection.tp).check("GPTModel", functools.partial(_raise, e))
                raise
            running.check_hooks()  # those of the model itself
            return result

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

    def _adopt(self, model, runs: bool = False) -> dict[str, str]:
        """Checks `model` with every module and gives those that compute their aligned class. Returns what must be the
        same on every rank.

        runs: check what only matters once the model runs too: dropout in training, and the device.

        Runs before each forward: modules may have been replaced since (by LoRA, for one), or changed."""
        from . import modules, supported

        supported.check_config(model.config)
        supported.check_model(model, self.vocab_size)
        self._methods.check()
        rotary, device = model.rotary_pos_emb, next(model.parameters()).device
        supported.check_rotary(rotary, model.rotary_base, model.config.kv_channels)
        look = running.Look.of(model)
        if look is None or not look.holds():
            found = list(model.named_modules())
            self._check_modules(model, found, runs)
            for _, module in found:  # nothing is changed before all is checked
                if type(module) in self.aligned_class:
                    module.__class__ = self.aligned_class[type(module)]
            model.output_layer.__class__ = modules.OutputLayer
            running.adopted.update(module for _, module in found)
            look = running.Look(model, fingerprint.modules(found), keep=runs)
        look.watch_hooks()
        running.watch_global_hooks()
        modules.rotations[rotary] = modules.Rotations(float(model.rotary_base), model.config.kv_channels, device)
        modules.vocabulary[model.output_layer] = self.vocab_size
        return fingerprint.settings(model) | look.facts

    def _check_modules(self, model, found: list[tuple[str, torch.nn.Module]], runs: bool) -> None:
        from . import modules, supported

        devices = set() if runs else None
        for path, module in found:
            cls = type(module)
            if cls not in self._known:
                raise UnsupportedError(f"{path or 'model'}: {cls.__module__}.{cls.__qualname__} is not supported")
            if (name := self._methods.shadowed(module)) is not None:
                raise UnsupportedError(f"{path or 'model'}.{name}: the module's own method has been replaced")
            supported.check_module(path, module, model.config, devices)
            if modules.stock_class(cls) is self._layer:
                supported.check_layer(path, module, self._bda)


def _raise(error: Exception) -> NoReturn:
    raise error
