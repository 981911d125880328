#!/bin/sh
# Device checks in one go, under six minutes: the tests that need a GPU, then parity and rates of a wide model.
# Run from the repository root, in an environment that has torch with CUDA. Results go to $OUT, or ./gpu_check.
set -eu
out=${OUT:-gpu_check}
python=${PYTHON:-python}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
status=0
timeout 100 "$python" -m pytest -q --no-cov -m gpu tests/engine/test_graphs.py >"$out/tests.txt" 2>&1 || status=$?
tail -3 "$out/tests.txt"
timeout 240 "$python" benchmarks/gpu_check.py "$@" >"$out/gpu_check.json" || status=$?
cat "$out/gpu_check.json"
exit "$status"
