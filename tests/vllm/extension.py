"""A worker extension, as RL frameworks give vLLM one: its methods are the worker's, `collective_rpc` calls them."""

from safetensors import safe_open


class Buckets:
    def load_in_buckets(self, file, size):
        """The weights of a file into the running model, some at a time, as they would arrive from a trainer."""
        with safe_open(file, framework="pt") as weights:
            names = list(weights.keys())
            for i in range(0, len(names), size):
                self.model_runner.model.load_weights([(name, weights.get_tensor(name)) for name in names[i : i + size]])
        return len(names)
