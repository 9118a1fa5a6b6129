"""A worker extension class, as RL frameworks use: vLLM adds its methods to the worker for `collective_rpc`.

`test_layouts.py` names it as ``worker_extension_cls``.
"""

from safetensors import safe_open


class Buckets:
    def load_in_buckets(self, file, size):
        """Load the weights of a file into the running model in buckets of `size` tensors, as a trainer sends them."""
        with safe_open(file, framework="pt") as weights:
            names = list(weights.keys())
            for i in range(0, len(names), size):
                self.model_runner.model.load_weights([(name, weights.get_tensor(name)) for name in names[i : i + size]])
        return len(names)
