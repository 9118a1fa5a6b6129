"""What ncu.sh's report says of each kernel: python summary.py REPORT NCU_FOLDER [LINES]"""
import collections
import glob
import re
import sys

sys.path[:0] = glob.glob(sys.argv[2] + "/extras/python") + glob.glob("/opt/nvidia/nsight-compute/*/extras/python")
import ncu_report  # noqa: E402

LINES = int(sys.argv[3]) if len(sys.argv) > 3 else 60
PLAIN = re.compile(
    r"^(sm__cycles_(elapsed|active)\.(max|avg)|gpu__time_duration\.sum|smsp__inst_executed\.sum|launch__registers_per_thread"
    r"|launch__occupancy_limit.*|smsp__issue_active\.avg\.pct.*|sm__(inst_executed_)?pipe_.*(pct|sum|ratio).*"
    r"|l1tex__data_(bank|pipe)_.*(sum|pct).*|lts__t_sectors.*hit_rate.*|lts__throughput.*pct.*|dram__throughput.*pct.*"
    r"|smsp__average_warps_issue_stalled_.*_per_issue_active\.ratio|l1tex__throughput.*pct.*|idc__.*pct.*|sm__icc_.*|.*no_inst.*)$"
)
report = ncu_report.load_report(sys.argv[1])
for r in range(report.num_ranges()):
    kernels = report.range_by_idx(r)
    for k in range(kernels.num_actions()):
        action = kernels.action_by_idx(k)
        print(f"\n=== kernel {k}: {action.name()[:90]}")
        names = sorted(action.metric_names())
        for name in names:
            if PLAIN.match(name):
                try:
                    print(f"  {name} = {action.metric_by_name(name).as_double():.4g}")
                except Exception:
                    pass
        at, total = collections.defaultdict(collections.Counter), collections.Counter()
        executed = {}
        for name in names:
            m = action.metric_by_name(name)
            stall = re.match(r"smsp__pcsamp_warps_issue_stalled_(\w+)$", name)
            if not (stall and not stall[1].endswith("not_issued")) and name not in ("inst_executed", "smsp__inst_executed"):
                continue
            ids = m.correlation_ids() if m.has_correlation_ids() else None
            for i in range(m.num_instances() if ids else 0):
                pc, value = ids.as_uint64(i), m.as_uint64(i)
                if stall:
                    at[pc][stall[1]] += value
                    total[stall[1]] += value
                else:
                    executed[pc] = value
        every = sum(total.values()) or 1
        print("  samples:", every, "; by reason, %:", {x: round(100 * n / every, 1) for x, n in total.most_common(14)})
        kinds = collections.Counter()
        for pc, c in at.items():
            op = re.sub(r"^@!?U?P\w+\s+", "", str(action.sass_by_pc(pc)).strip()).split(" ")[0]
            kinds[".".join(op.split(".")[:2])] += sum(c.values())
        print("  by instruction, %:", {x: round(100 * n / every, 1) for x, n in kinds.most_common(20)})
        first = min(at, default=0)
        hot = sorted(sorted(at, key=lambda pc: -sum(at[pc].values()))[:LINES])
        for pc in hot:
            n = sum(at[pc].values())
            why = " ".join(f"{x}:{v}" for x, v in at[pc].most_common(3))
            print(f"  {pc - first:6x} {100 * n / every:5.2f}% x{executed.get(pc, 0):<9} {str(action.sass_by_pc(pc)).strip()[:60]:60} {why}")
