# ncu.sh BUILD.so ...: on a GPU, from the root of a checkout: each build and FlashAttention 3 at 1x16384, 32/8 heads of 128, by
# Nsight Compute; $OUT/forward.ncu-rep and a summary: where the samples lie, of what kind the stalls are, what pipes do.
out=${OUT:-/tmp}; ncu=$(command -v ncu || ls -d /opt/nvidia/nsight-compute/*/ncu /usr/local/cuda/bin/ncu 2>/dev/null | tail -1)
folder=$(dirname "$(readlink -f "$ncu")")
sections=""
for s in SpeedOfLight WarpStateStats SchedulerStats InstructionStats ComputeWorkloadAnalysis MemoryWorkloadAnalysis SourceCounters; do
  sections="$sections --section $s"
done
profile() {
  timeout 100 "$ncu" --clock-control none --cache-control none --profile-from-start off -f -o "$out/forward" \
    -k 'regex:attention_forward|device_kernel' $sections --import-source no "$@" >"$out/ncu.log" 2>&1
}
profile --metrics sm__cycles_elapsed.max,regex:sm__inst_executed_pipe_ python3 build/variants/profiled.py "$@" ||
  profile python3 build/variants/profiled.py "$@" || { tail -30 "$out/ncu.log"; exit 1; }
grep -i "without fa3\|error" "$out/ncu.log"
python3 build/variants/summary.py "$out/forward.ncu-rep" "$folder" "${LINES_OF_SASS:-60}" >"$out/summary.txt" 2>&1 || {
  tail -5 "$out/summary.txt"
  "$ncu" -i "$out/forward.ncu-rep" --page details >"$out/details.txt" 2>&1
  "$ncu" -i "$out/forward.ncu-rep" --page source --csv >"$out/source.csv" 2>&1
  grep -E "attention_forward|device_kernel|Duration|Cycles|Stall|Executed Ipc|Throughput|Eligible|Hit Rate" "$out/details.txt"
}
# In short; all of it is in $OUT/summary.txt.
grep -E "^===|samples:|by instruction|cycles_elapsed.max|gpu__time|smsp__inst_executed.sum|issue_active|stalled|pipe_[a-z_]*(alu|fma|xu|tensor|gmma|uniform).*pct|hit_rate" \
  "$out/summary.txt" | cut -c1-420 | head -c 11500
