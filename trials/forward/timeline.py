"""Clocks of one block of threads within its first tile, by builds with probes (probe_*.so), at 1x16384 causal, 32/8 heads of 128:
python build/variants/timeline.py build/variants/probe_ahead.so ...; a line for each step, the mean of cycles by group over blocks of keys.
Stamps: 0 a block of keys begins; 1 products begin (woven, lean) or the scores' products are issued (ahead); 2 sums are rescaled
(ahead); 3 the values' products are issued (ahead); 4 probabilities begin (ahead), products are issued (woven, lean); 5 they end;
6 all products have ended."""
import ctypes
import sys
from pathlib import Path

sys.path[:0] = [str(Path("benchmarks").resolve()), str(Path().resolve())]
import attention_schedules as a  # noqa: E402
import torch  # noqa: E402
from attention import Case, Packed  # noqa: E402

problem = Packed(Case(1, 16384), torch.device("cuda"))
inputs = problem.q, problem.k, problem.v, problem.starts, problem.case.head_dim**-0.5
for path in map(Path, sys.argv[1:]):
    forward, kept = a.by_build(path), (ctypes.c_uint32 * (2 * 64 * 8))()
    for _ in range(3):
        forward(*inputs)
    torch.cuda.synchronize()
    assert ctypes.CDLL(str(path.resolve())).alignkit_probed(kept) == 0
    x = torch.tensor(list(kept), dtype=torch.int64).view(2, 64, 8)
    blocks = [i for i in range(10, 60) if i % 8 > 1 and i % 8 < 7]  # within leaves
    used = [s for s in range(7) if x[0, blocks, s].all()]
    print(f"== {path.stem}: stamps {used}; a block of keys, cycles:")
    for g in (0, 1):
        t = x[g]
        period = ((t[58, 0] - t[18, 0]) % 2**32).item() / 40
        parts = []
        for s, e in zip(used, [*used[1:], None], strict=True):
            d = [((t[i, e] if e is not None else t[i + 1, 0]) - t[i, s]) % 2**32 for i in blocks]
            d = torch.stack(d).double()
            parts.append(f"{s}-{e if e is not None else 'next 0'}: {d.mean():.0f} ({d.min():.0f}..{d.max():.0f})")
        print(f"  group {g}: period {period:.0f};", "; ".join(parts))
    lag = [((x[1, i, 0] - x[0, i, 0] + 2**31) % 2**32 - 2**31).item() for i in blocks]
    print(f"  group 1 behind group 0 by {lag[0]} .. {lag[len(lag) // 2]} .. {lag[-1]}")
    for i in (19, 20, 21):
        print("  raw", i, [[((x[g, i, s] - x[0, 19, used[0]] + 2**31) % 2**32 - 2**31).item() for s in used] for g in (0, 1)])
