#!/usr/bin/env bash
# All that a machine with a GPU is needed for, in one go and in the order of its worth: the tests that run kernels, the
# bench, advice beside measurements, a profile. gpu_session.sh FOLDER [LLAMA_BENCH]
# FOLDER keeps models (25 GB) and what was measured. Nothing is downloaded.
set -uo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
export MOELAB_RESULTS="$folder/results"
python3 -m pytest -q -x --maxfail 20 tests/experts tests/fast tests/offloading tests/store tests/zipmoe tests/test_api.py \
    2>&1 | tee "$folder/tests.log" | tail -5
python3 -m moelab doctor | tee "$folder/doctor.txt"
for section in resident offloaded peers contexts; do
    python3 -m moelab bench gpu --only "$section" --folder "$folder/models" ${2:+--llama-bench "$2"} --busy
done
python3 -m moelab bench advise --device cuda --busy
nsys profile -o "$folder/token" python3 -m moelab bench gpu --only offloaded --ways split --shares 0.25 --prompts 128 \
    --rounds 1 --folder "$folder/models" --busy 2>/dev/null || echo "no profile: nsys is not there" >&2
