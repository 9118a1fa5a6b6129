"""verl's rollout server, in the class that Ray derives for an actor: ``python -m tests.integrations.in_ray MODEL``.

It prints the server's vLLM arguments and the name of its worker extension as a JSON list, which `test_verl.py` reads.
The external_lib module is imported after Ray derives the class, as in verl. A second argument ``before`` imports it
earlier too.
"""

import json
import sys

from tests.integrations import in_verl


def engine_arguments(path, before):
    in_verl.make_verl_importable()
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    if before:
        in_verl.load_integration()
    instance = object.__new__(ray.remote(vLLMHttpServer).__ray_metadata__.modified_class)
    in_verl.load_integration()
    vars(instance).update(vars(in_verl.server(path)))
    arguments = {}
    instance._preprocess_engine_kwargs(arguments)
    return arguments, instance._get_worker_extension_cls()


if __name__ == "__main__":
    print(json.dumps(engine_arguments(sys.argv[1], sys.argv[2:])))
