"""Megatron modules that the fork server (tests/forks.py) imports once, before it forks ranks."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.parallel_state
    import megatron.core.tensor_parallel

    from alignkit.megatron.versions import VERSIONS

assert megatron
VERSIONS.inspect_installed()
