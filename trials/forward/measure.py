"""Builds of attention's forward pass beside FlashAttention 3 and Triton's bytes, on a short list of cells; from a checkout's root:
python build/variants/measure.py build/variants/base.so build/variants/pairs_t.so ..."""
import sys
from pathlib import Path

sys.path[:0] = [str(Path("benchmarks").resolve()), str(Path().resolve())]
import attention_schedules as a  # noqa: E402
from attention import Case  # noqa: E402

CELLS = [Case(8, 1024), Case(4, 4096), Case(1, 16384), Case(1, 32768), Case(64, 65536, drawn=True)]
CELLS += [Case(4, 4096, head_dim=64), Case(1, 32768, head_dim=64)]
a.cases = lambda *_, **__: CELLS  # after the drawn lengths of 28/4 heads of 64, which no block divides
watch = a.Stopwatch(a.torch.device("cuda"))
odd = Case(40, 30000, 28, 4, 128, drawn=True)
CELLS.insert(0, odd)
sys.exit(a.compare_builds([Path(p) for p in sys.argv[1:]], watch, 0.02))
