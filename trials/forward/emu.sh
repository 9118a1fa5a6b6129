# emu.sh SOURCE [DEFINES...]: the tests of bits on a CPU, of a variant
d=$(mktemp -d); mkdir -p $d/sm90/attention; src=$1; shift
cp csrc/interface.h $d; cp csrc/sm90/attention/heads.cuh $d/sm90/attention
(for x in "$@"; do echo "#define ${x/=/ }"; done; cat build/variants/src/sm90/attention/$src) > $d/sm90/attention/forward.cu
VARIANT=$d PYTHONPATH=build/variants nice -n 19 timeout 560 .venv/bin/python -m pytest -q -x -p plug -p no:cacheprovider tests/ops/test_attention_on_cpu.py -k "not backward" 2>&1 | tail -15
