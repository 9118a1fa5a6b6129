"""What the ranks import, imported once, before they are forked."""
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.parallel_state

from . import pair

assert pair and megatron
