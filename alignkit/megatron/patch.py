"""`patch_megatron`: runs Megatron-core's models through alignkit's ops.

Public: names, signatures and the keys of `status` are documented in docs/api/megatron.md.
"""

from __future__ import annotations

from typing import Any

import torch

from alignkit.dist import symmetric
from alignkit.engines import patch as engine_patch
from alignkit.engines.hook_points import relies_on
from alignkit.errors import InputError, UnsupportedError
from alignkit.runtime import dispatch
from alignkit.runtime.ids import contract_id

from .state import device_of
from .versions import installed


def patch_megatron(vocab_size: int | None = None, *, keep_logits: bool = False) -> Patch:
    """Make every GPTModel and HybridModel of this process compute through alignkit's ops.

    Call it in every process, before or after models are built. A model is patched when it is built, or at its next
    forward. A model that cannot be aligned raises UnsupportedError then, on all tensor-parallel ranks.

    Args:
        vocab_size: Vocabulary size without padding. Megatron stores only the padded size; columns from `vocab_size` on
            never count in a loss or logprob. `set_vocab_size` overrides it for one model; None: every model needs its
            own.
        keep_logits: Store the output layer's logits for the backward pass instead of recomputing them: 4 bytes for
            each label and vocabulary column of this rank. Results are bitwise the same. See `ops.linear_logp`.

    Returns:
        The handle, whose `undo` restores Megatron. A second call with the same arguments returns the same handle.

    Raises:
        UnsupportedError: If Megatron-core is missing or of an unknown version, or one of its methods has been replaced.
        InputError: If an argument is invalid, or differs from the active patch's.
    """
    if vocab_size is not None:
        _check_vocab_size(vocab_size)
    if not isinstance(keep_logits, bool):
        raise InputError(f"keep_logits: must be True or False, got {keep_logits!r}")
    return Patch.apply(vocab_size=vocab_size, keep_logits=keep_logits)


def set_vocab_size(model: torch.nn.Module, vocab_size: int) -> None:
    """Set the vocabulary size of one model, which overrides the size of `patch_megatron`.

    Call it before the model's first forward, on every rank.

    Args:
        model: A GPTModel, a HybridModel or a wrapper of one (Float16Module, DDP, ...).
        vocab_size: Vocabulary size without padding.

    Raises:
        InputError: If `vocab_size` is not a positive integer, or `model` contains no such model.
    """
    from . import models, state

    _check_vocab_size(vocab_size)
    for module in models.contained(model):
        state.of_model(module).own_vocab_size = vocab_size


def _check_vocab_size(vocab_size: int) -> None:
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise InputError(f"vocab_size: must be a positive integer, got {vocab_size!r}")


def is_active() -> bool:
    """Return whether a patch is active."""
    return Patch.live() is not None


def active() -> Patch:
    """Return the active patch. Raises UnsupportedError if there is none."""
    if (live := Patch.live()) is None:
        raise UnsupportedError(
            "patch_megatron: must be called first, because Megatron-core is not patched in this process"
        )
    return live


def status(model: Any = None) -> dict[str, Any]:
    """Return what is patched in this process and, with a model, which of its modules are aligned.

    Args:
        model: A model or a wrapper of one, or None.

    Returns:
        `patched`; if true also

        - `version` of Megatron-core, `vocab_size` and `keep_logits` of the patch
        - `names`: replaced names
        - `classes`: name of a Megatron class -> op that its modules run through

        and with a model also

        - `contract` and `backend` of the model's device
        - `aligned`: path of a module -> op
        - `stock`: paths of modules that will be replaced at the next forward
        - `left`: path of an output layer that stays stock -> reason
        - `symmetric_memory`: whether sums over ranks have used symmetric memory
    """
    report = Patch.status()
    if not report["patched"] or model is None:
        return report
    from . import patch_model

    device = device_of(model)  # a contract and a backend belong to a device, so they need a model
    return {
        **report,
        "contract": contract_id(device),
        "backend": dispatch.backend_of(device),
        **patch_model.report(model),
        "symmetric_memory": symmetric.used(model.pg_collection.tp),
    }


class Patch(engine_patch.Patch):
    """Active patch of Megatron; `undo`, or leaving the context manager, restores Megatron and every model."""

    engine, command = "Megatron", "patch_megatron"

    def __init__(self, *, vocab_size: int | None, keep_logits: bool) -> None:
        self.vocab_size, self.keep_logits = vocab_size, keep_logits
        self._replacements: dict[tuple[Any, str], Any] = {}
        super().__init__(vocab_size=vocab_size, keep_logits=keep_logits)

    def install(self) -> None:
        try:
            import megatron.core
        except ModuleNotFoundError as e:
            raise UnsupportedError(
                f"patch_megatron: Megatron-core is not installed ({e}). Install megatron-core"
            ) from None

        self.version = megatron.core.__version__
        self.has_hook = installed().hook

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

        from . import forward, head, models, modules, moe, patch_model

        self.models = patch_model.Models(self.vocab_size, self.keep_logits, self._replacements)
        self.models.check_methods()
        for owner, name, new in (
            (GPTModel, "__init__", forward.init(self, GPTModel.__init__)),
            (GPTModel, "_preprocess", forward.preprocess(self, GPTModel._preprocess)),
            (GPTModel, "_postprocess", forward.postprocess(self, GPTModel._postprocess)),
            (LanguageModule, "__call__", forward.guard_call(self, LanguageModule)),
            (LanguageModule, "compute_language_model_loss", head.language_model_loss),
            (TransformerBlock, "forward", forward.require_aligned_block(TransformerBlock.forward)),
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

    @relies_on("models/hybrid/hybrid_block.py:TENorm", when="hybrid")
    @relies_on("models/hybrid/hybrid_block.py:HybridStack", when="hybrid")
    def _install_hybrid(self, model: Any, block: Any) -> None:
        from megatron.core.extensions import transformer_engine

        from . import forward, modules

        self.replace(model, "__init__", forward.init_hybrid(self, model.__init__))
        self.replace(model, "forward", forward.hybrid(self, model.forward))
        self.replace(block.HybridStack, "forward", forward.require_aligned_block(block.HybridStack.forward))
        if not transformer_engine.HAVE_TE:
            # HybridModel's final norm is always TransformerEngine's, which cannot be built if that is not installed.
            self.replace(block, "TENorm", modules.RMSNorm.build)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        super().replace(owner, name, new)
        self._replacements[owner, name] = new

    def restored(self) -> None:
        if "models" in vars(self):
            self.models.restore()

    def facts(self) -> dict[str, Any]:
        from . import patch_model, te

        classes = {stock.__name__: aligned.op for stock, aligned in patch_model.ALIGNED.items()}
        rows = te.EXPERT_MODULES | te.ROWS  # for a class in both, the op outside of experts
        return {"classes": classes | {path.rpartition(".")[2]: row.op for path, row in rows.items()}}
