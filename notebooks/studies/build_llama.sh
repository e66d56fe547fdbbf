#!/usr/bin/env bash
# Builds llama.cpp's llama-bench for CUDA from the source of its Python package: build_llama.sh FOLDER [SDIST]
# Prints the program's path, for `moelab bench gpu --llama-bench PATH`. Needs nvcc, cmake and a C++ compiler; with
# SDIST, a llama_cpp_python-*.tar.gz that was downloaded before, it needs no network.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
sdist=${2:-}
if [ -z "$sdist" ]; then
    python3 -m pip download --no-deps --no-binary :all: --no-build-isolation -d "$folder" llama-cpp-python==0.3.36 >&2
    sdist=$(ls "$folder"/llama_cpp_python-*.tar.gz)
fi
tar -xzf "$sdist" -C "$folder"
source=$(ls -d "$folder"/llama_cpp_python-*/vendor/llama.cpp)
cmake -S "$source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >&2
cmake --build "$folder/build" --target llama-bench -j "$(nproc)" >&2
ls "$folder/build/bin/llama-bench"
