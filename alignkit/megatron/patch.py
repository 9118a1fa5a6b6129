"""`patch_megatron`: Megatron-core's models through alignkit's ops."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch

from alignkit import contract
from alignkit.dist import symmetric
from alignkit.engines import patch as engine_patch
from alignkit.errors import InputError, UnsupportedError
from alignkit.runtime import dispatch

from .look import device_of
from .versions import VERSIONS


def patch_megatron(vocab_size: int | None = None, *, keep_logits: bool = False) -> Patch:
    """From now on every GPTModel and HybridModel of this process computes through alignkit's ops, or is refused.

    vocab_size: the vocabulary without padding. Megatron only knows the padded size; the columns beyond
        `vocab_size` never count in a loss or logprob. It holds for models that `set_vocab_size` gives none of their own;
        without it, each must have one.
    keep_logits: the forward pass keeps the products of the output layer, 4 bytes for each label and id of this rank, so that the
        backward pass does not compute them again; see `ops.linear_logp`. It changes no bit.

    Models may be built before or after. A model is taken over when it is built, or at its next forward.
    Call it in every process.

    Returns the handle that undoes it; a second call with the same arguments returns the same handle.
    Raises UnsupportedError for an unknown Megatron-core version, or none, and for a method of its classes that has
    been replaced; InputError for other arguments than those of the patch in force. What cannot be kept aligned in a model
    raises UnsupportedError when the model is built or called, on all tensor-parallel ranks.
    """
    if vocab_size is not None:
        _check_vocab_size(vocab_size)
    if not isinstance(keep_logits, bool):
        raise InputError(f"keep_logits: {keep_logits!r} is neither True nor False")
    return Patch.apply(vocab_size=vocab_size, keep_logits=keep_logits)


def set_vocab_size(model: torch.nn.Module, vocab_size: int) -> None:
    """The vocabulary of one model, without padding, whatever `patch_megatron` was given; before it is called, and on
    every rank. model: a GPTModel, a HybridModel or a wrapper of one (Float16Module, DDP, ...).

    Raises InputError for what is no positive integer or holds no such model.
    """
    from .models import MODELS, NAMES
    from .modules import VOCAB_SIZE

    _check_vocab_size(vocab_size)
    found = [module for module in model.modules() if isinstance(module, MODELS)]
    if not found:
        raise InputError(f"model: there is none of {NAMES} in a {type(model).__name__}")
    for module in found:
        vars(module)[VOCAB_SIZE] = vocab_size


def _check_vocab_size(vocab_size: int) -> None:
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise InputError(f"vocab_size: {vocab_size!r} is not a positive integer")


def is_active() -> bool:
    """Whether a patch is in force."""
    return Patch.live() is not None


def active() -> Patch:
    """The patch in force. Raises UnsupportedError if there is none."""
    if (live := Patch.live()) is None:
        raise UnsupportedError("patch_megatron: Megatron-core is not patched in this process")
    return live


def status(model: Any = None) -> dict[str, Any]:
    """What is patched in this process, and with `model` which of its modules are aligned.

    Keys: patched, and if so version (of Megatron-core), vocab_size, keep_logits, names (that are replaced), classes (of
    Megatron's modules, and the op that takes over); with a model, contract and backend (of its device), aligned (path ->
    op), stock (paths of modules that alignkit would replace but has not yet), left (path of an output layer that stays
    stock -> why) and symmetric_memory (whether its sums over ranks have gone through it).
    """
    report = Patch.status()
    if not report["patched"] or model is None:
        return report
    from . import adopt

    device = device_of(model)  # without a model nothing says what will compute
    return {
        **report,
        "contract": contract.contract_id(device),
        "backend": dispatch.name(device),
        **adopt.report(model),
        "symmetric_memory": symmetric.used(model.pg_collection.tp),
    }


class Patch(engine_patch.Patch):
    """The patch in force; `undo`, or leaving it as a context manager, restores Megatron and every model."""

    engine, command = "Megatron", "patch_megatron"

    def __init__(self, *, vocab_size: int | None, keep_logits: bool) -> None:
        self.vocab_size, self.keep_logits = vocab_size, keep_logits
        self.met: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Models whose ranks have met, or begun to, in the forward that is running."""
        self._ours: dict[tuple[Any, str], Any] = {}
        super().__init__(vocab_size=vocab_size, keep_logits=keep_logits)

    def install(self) -> None:
        try:
            import megatron.core
        except ModuleNotFoundError as e:
            raise UnsupportedError(f"patch_megatron: Megatron-core is not installed ({e})") from None

        self.version = megatron.core.__version__
        self.has_hook = VERSIONS.require(self.version).hook
        VERSIONS.require_seams(Path(megatron.core.__path__[0]), self.version)

        from megatron.core.fusions import fused_cross_entropy
        from megatron.core.models.common.language_module.language_module import LanguageModule
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.tensor_parallel import cross_entropy
        from megatron.core.transformer import attention
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.moe import router
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.core.transformer.transformer_block import TransformerBlock

        from . import adopt, forward, head, models, modules, moe

        self.models = adopt.Models(self.vocab_size, self._ours)
        self.models.methods.check()
        for owner, name, new in (
            (GPTModel, "__init__", forward.init(self, GPTModel.__init__)),
            (GPTModel, "_preprocess", forward.preprocess(self, GPTModel._preprocess)),
            (GPTModel, "_postprocess", forward.postprocess(self, GPTModel._postprocess)),
            (LanguageModule, "__call__", forward.only_known(self, LanguageModule)),
            (LanguageModule, "compute_language_model_loss", head.language_model_loss),
            (TransformerBlock, "forward", forward.only_aligned(TransformerBlock.forward)),
            (WrappedTorchNorm, "__new__", lambda cls, *a, **kw: modules.RMSNorm.build(*a, **kw)),
            (DotProductAttention, "__init__", modules.DotProductAttention.build(DotProductAttention.__init__)),
            (attention, "apply_rotary_pos_emb", modules.apply_rotary_pos_emb),
            (router, "topk_routing_with_score_function", moe.topk_routing),
            (cross_entropy, "_VocabParallelCrossEntropy", head.VocabParallelCrossEntropy(self.vocab_size)),
            (fused_cross_entropy, "_VocabParallelCrossEntropy", head.FusedCrossEntropy(self.vocab_size)),
            *((schedules, name, forward.schedule(self, getattr(schedules, name))) for name in forward.SCHEDULES),
        ):
            self.replace(owner, name, new)
        if models.hybrid_model is not None:
            self._install_hybrid(models.hybrid_model.HybridModel, models.hybrid_block)

    def _install_hybrid(self, model: Any, block: Any) -> None:
        from megatron.core.extensions import transformer_engine

        from . import forward, modules

        self.replace(model, "__init__", forward.init_hybrid(self, model.__init__))
        self.replace(model, "forward", forward.hybrid(self, model.forward))
        self.replace(block.HybridStack, "forward", forward.only_aligned(block.HybridStack.forward))
        if not transformer_engine.HAVE_TE:
            # Its final norm is TransformerEngine's whatever the specs of its layers are, and cannot be built without.
            self.replace(block, "TENorm", modules.RMSNorm.build)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        super().replace(owner, name, new)
        self._ours[owner, name] = new

    def restored(self) -> None:
        if "models" in vars(self):
            self.models.release()

    def facts(self) -> dict[str, Any]:
        from . import adopt, te

        classes = {stock.__name__: aligned.op for stock, aligned in adopt.ALIGNED.items()}
        rows = te.OF_EXPERTS | te.ROWS  # those of both are named for what they are outside of experts
        return {"classes": classes | {path.rpartition(".")[2]: row.op for path, row in rows.items()}}
