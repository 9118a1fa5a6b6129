"""Calls FlashAttention 3 and builds once each, for ncu.sh: python build/variants/profiled.py build/variants/base.so ..."""
import sys
from pathlib import Path

sys.path[:0] = [str(Path("benchmarks").resolve()), str(Path().resolve())]
import attention_schedules as a  # noqa: E402
import torch  # noqa: E402
from attention import Case, Packed  # noqa: E402

problem = Packed(Case(1, 16384), torch.device("cuda"))
inputs = problem.q, problem.k, problem.v, problem.starts, problem.case.head_dim**-0.5
calls = [lambda f=a.by_build(Path(p)): f(*inputs) for p in sys.argv[1:]]
try:
    calls.append(problem.fa3())
except Exception as e:
    print(f"without fa3: {e}", flush=True)
for call in calls:
    call()
torch.cuda.synchronize()
torch.cuda.cudart().cudaProfilerStart()
for call in calls:
    call()
torch.cuda.synchronize()
torch.cuda.cudart().cudaProfilerStop()
