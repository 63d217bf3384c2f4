#!/bin/sh
# Everything that docs/experiments.md shows: sh examples/experiments/all.sh RESULTS. Finished runs are not run again.
# Needs horovodrun and the package; on a quiet machine of 2 cores in about an hour. Where the kernel allows it, each job
# has a network of its own, so that no other program's bytes are counted.
set -e
here=$(dirname "$0")
out=${1:?give a folder for the results}
if unshare --net true 2>/dev/null; then own='unshare --net sh -c "ip link set lo up && exec \"\$@\"" sh'; else own=; fi
run() { ranks=$1; shift; eval "$own" horovodrun -np "$ranks" --gloo python "$here/run.py" --out "$out" '"$@"'; }
types="float32 dynamic_tree linear mantissa static_tree"

run 2 --train-images 20000 --epochs 2
run 2 --train-images 20000 --epochs 2 --parallelism model
run 4 --train-images 20000 --epochs 2 --batch-size 64 --methods $types one_bit
run 2 --model conv --train-images 4000 --epochs 2 --batch-size 64 --seeds 3 --measure-every 10
run 2 --model alexnet --steps 4 --batch-size 4 --seeds 1 --measure-every 100 --methods float32 fp16 dynamic_tree one_bit
run 4 --train-images 20000 --epochs 2 --batch-size 64 --parallelism model
python "$here/report.py" "$out" --json "$out/summary.json" --markdown "$out/summary.md"
