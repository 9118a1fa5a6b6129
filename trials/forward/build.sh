# build.sh NAME SOURCE [options]
name=$1; src=$2; shift 2
nice -n 19 nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -lineinfo -Xptxas=-v --fmad=false -Xcompiler -fPIC -shared -cudart static "$@" -o build/variants/$name.so build/variants/src/sm90/attention/$src 2>&1 | grep -v "^$\|Compile time\|Function prop\|gmem"
