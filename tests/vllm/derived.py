"""Worker classes of a framework's own. Imported where vLLM is patched or workers run."""

from vllm.v1.worker.cpu_worker import CPUWorker

from alignkit.vllm.worker import AlignedWorker
from tests.vllm.extension import Buckets


class Mine(Buckets, AlignedWorker):
    """It adds what it computes beside the model, and begins in its own way."""

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
