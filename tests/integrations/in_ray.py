"""verl's rollout server of the class that Ray makes of it for an actor: ``python -m tests.integrations.in_ray MODEL [before]`` prints
what it asks vLLM for, as JSON. The line of the recipe is imported after Ray has made the class, as in verl; with ``before``
before that, too."""

import json
import sys

from tests.integrations import in_verl


def asked(path, before):
    in_verl.importable()
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    if before:
        in_verl.line()
    made = object.__new__(ray.remote(vLLMHttpServer).__ray_metadata__.modified_class)
    in_verl.line()
    vars(made).update(vars(in_verl.server(path)))
    arguments = {}
    made._preprocess_engine_kwargs(arguments)
    return arguments, made._get_worker_extension_cls()


if __name__ == "__main__":
    print(json.dumps(asked(sys.argv[1], sys.argv[2:])))
