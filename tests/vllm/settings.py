"""Environment variables (ENV) and options (ENGINE) of the test engines: small, eager and in process, for a CPU.

It imports nothing, so that a process can set ENV before it imports vLLM.
"""

ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "ALIGNKIT_VLLM": "",
}
ENGINE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}
