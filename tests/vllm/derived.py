"""Worker classes that a framework could define; `test_layouts.py` passes their paths as ``worker_cls``.

Import the module only in a process in which vLLM is patched, or in a worker.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from alignkit.vllm.worker import AlignedWorker
from tests.vllm.extension import Buckets


class Mine(Buckets, AlignedWorker):
    """A worker class with its own mixin and constructor."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loaded = 0


class Overrides(AlignedWorker):
    def load_model(self, **kwargs):
        super().load_model(**kwargs)

    def execute_model(self, scheduler_output):
        return super().execute_model(scheduler_output)


class Stock(CPUWorker):
    pass


class Loads(CPUWorker):
    def load_model(self, **kwargs):
        super().load_model(**kwargs)


class Between(AlignedWorker, Loads):
    pass
