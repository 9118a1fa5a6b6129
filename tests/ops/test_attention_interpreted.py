"""Triton's decode attention in Triton's interpreter on a CPU: leaves are merged in order, however programs share them.

It computes in fp32 and without the GPU's exp2. PROGRAM runs in a subprocess, because TRITON_INTERPRET must be set
before Triton is imported.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAM = """
import os, warnings
os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")  # numpy warns where a row has seen no key yet
import numpy, torch
from alignkit import ops
from alignkit.ops.attention import triton_backend as backend
from alignkit.ops.attention.sharing import Sharing
from alignkit.runtime.families import SM90
from alignkit.testing import assert_bitwise_equal

# The interpreter uses numpy's matmul, whose summation order depends on the size; rounding from double hides the order.
matmul = numpy.matmul
numpy.matmul = lambda a, b, dtype=None: matmul(a.astype("d"), b.astype("d")).astype(dtype or a.dtype)
leaf, page, heads, kv, dim = SM90.kv_leaf, 48, 4, 2, 16
lens, torch_ = (2 * leaf + 1, 3 * leaf - 7, 5, leaf), torch.manual_seed(0)  # 3, 3, 1 and 1 leaves
q, k, v = (torch.randn(sum(lens), h, dim) for h in (heads, kv, kv))
starts = torch.tensor([0, *lens]).cumsum(0)
want, _ = backend.forward(q, k, v, starts.int(), 0.25, BLOCK_M=64)
assert (want - ops.attention(q, k, v, starts, 0.25)).abs().max() < 2e-6
need = [-(-n // page) for n in lens]
order = torch.randperm(sum(need)).split(need)
table = torch.full((len(lens), max(need) + 1), -1, dtype=torch.int32)
caches = [torch.full((sum(need), page, kv, dim), float("nan")) for _ in range(2)]
for s, n in enumerate(lens):
    table[s, : need[s]], positions = order[s].int(), torch.arange(n)
    for cache, t in zip(caches, (k, v)):
        cache[order[s][positions // page], positions % page] = t[starts[s] : starts[s + 1]]
for take in ((1, 1, 1, 1), (1, 0, 3, 2)):
    rows = torch.cat([torch.arange(int(end) - n, int(end)) for end, n in zip(starts[1:], take)])
    # 1, 1, 2, 5 or 10 programs per head: fewer or more than rows, with runs longer or shorter than the rest of a tile.
    for options in (*({"programs": n} for n in (1, 3, 4, 20)), {"programs": 10, "SEQS": 2, "MORE": True}):
        out = torch.full((len(rows) + 2, heads, dim), float("nan"))
        queries = torch.cat([q[rows], out[-2:]])
        integers = torch.tensor([0, *take]).cumsum(0).int(), torch.tensor(lens).int()
        flat = [c.flatten(0, 1) for c in caches]
        again = backend.paged(queries, *flat, table, *integers, page, 0.25, out, decode_options=options, BLOCK_M=64)
        assert_bitwise_equal(out[:-2], want[rows], f"{options}")
        assert not out[-2:].any()
        if options["programs"] == 3:  # another layer
            others, layer = torch.randn_like(queries), [torch.randn_like(c) for c in flat]
            expected, got = (torch.full_like(out, float("nan")) for _ in range(2))
            backend.paged(others, *layer, table, *integers, page, 0.25, expected, decode_options=options, BLOCK_M=64)
            again(others, *layer, got)
            assert_bitwise_equal(got, expected, "another layer")
n = 37 * leaf + 5  # 32 leaves merged at a time, then 5
k, v, q = torch.randn(n, 1, dim), torch.randn(n, 1, dim), torch.randn(1, 3, dim)
integers = torch.arange(n // leaf + 1).int()[None], torch.tensor([0, 1]).int(), torch.tensor([n]).int()
k, v = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, leaf - 5)) for t in (k, v))
# In a second row, scores exceed the shift in leaves of both batches; then a value is infinite.
k[[10 * leaf, 20 * leaf, 36 * leaf]] += q[:, 1:2] * torch.tensor([100.0, 200.0, 300.0])[:, None, None]
for value in (0.0, float("inf")):
    v[5 * leaf, 0, 3] += value  # seen by all rows
    results = [torch.empty_like(q) for _ in range(4)]
    for programs, out in zip((1, 2, 19, 38), results):
        backend.paged(q, k, v, *integers, leaf, 0.25, out, decode_options={"programs": programs})
        assert_bitwise_equal(out, results[0], f"{programs} programs, {value}")
    assert (results[0][0, :, 3].isfinite() == (value == 0)).all() and results[0][0, :, :3].isfinite().all()
    assert torch.allclose(results[0][0, 1, :3], v[36 * leaf, 0, :3])

# A state is written whole, in full sectors of 32 bytes.
memory, buffers = Sharing.memory, []


def marked(self, *where):
    states, runs = memory(self, *where)
    buffers.append(states.fill_(12345.0))
    return states, runs


Sharing.memory = marked
backend.paged(q, k, v, *integers, leaf, 0.25, results[0], decode_options={"programs": 19})
(states,) = buffers
written = states != 12345.0
assert written.any(1).sum() == 1 + 36  # the first two of 38 leaves are merged
assert (written.all(1) | ~written.any(1)).all() and states[0].nbytes % 32 == 0
print("done")
"""


@pytest.mark.slow
def test_leaves_are_merged_in_order_for_every_number_of_programs():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
