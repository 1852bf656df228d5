#!/usr/bin/env bash
# The GPU tests on a machine without a package index, whose Python has PyTorch for CUDA 13, transformers, onnx,
# cuda-bindings, pytest and NVIDIA's libraries, but ONNX Runtime for the processor alone; what is brought to it comes in
# parts of at most PART_MB. `make gpu-tests` is for all others.
#
# The wheel of ONNX Runtime for CUDA has 256 MB. Three quarters of it are code for other GPUs: zeroed and packed it is
# about 62 MB. TensorRT is not brought: its tests skip.
#
#   on a machine with an index, in the root of the checkout:
#     bash tests/gpu/without_index.sh pack       writes .gpu/1, .gpu/2, ...: each has a part and this script; ignored by git
#     bash tests/gpu/without_index.sh rehearse   the same tests with the packages of the machine, as far as they go
#   on the GPU machine, in the root of the checkout, with each part brought to the same place:
#     bash .gpu/1/without_index.sh put           once for each part; the last one unpacks
#     bash .gpu/1/without_index.sh first         a minute: versions, one engine captured, the one copy of the weights
#     bash .gpu/1/without_index.sh tests parity  tests/gpu/test_parity.py, with a table in OUT; then the others
#
# Settings: PYTHON_VERSION of the machine (3.12), ARCH of its GPU (90 for Hopper), PART_MB (52), SITE, where it unpacks,
# outside the checkout, and OUT, where tables go.
set -euo pipefail

ORT=1.31.1
PYTHON_VERSION=${PYTHON_VERSION:-3.12}
ARCH=${ARCH:-90}
PART_MB=${PART_MB:-52}
SITE=${SITE:-${TMPDIR:-$HOME}/nestforge-gpu}
OUT=${OUT:-$SITE}
HERE=$(cd "$(dirname "$0")" && pwd)

pack() {
  [[ -f pyproject.toml ]] || { echo "run it in the root of the checkout"; exit 1; }
  git check-ignore -q .gpu/ || { echo ".gpu/ is not ignored by git here"; exit 1; }
  rm -rf .gpu && mkdir -p .gpu/wheel .gpu/tree
  "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$PYTHON_VERSION" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 -d .gpu/wheel "onnxruntime-gpu==$ORT"
  "$PYTHON" -m zipfile -e .gpu/wheel/*.whl .gpu/tree
  local capi=.gpu/tree/onnxruntime/capi
  # Not needed: the C library (the Python module has its own copy), TensorRT's provider, tools.
  rm -rf $capi/libonnxruntime.so.* $capi/libonnxruntime_providers_tensorrt.so \
    .gpu/tree/onnxruntime/{tools,transformers,quantization,datasets,backend}
  "$PYTHON" "$HERE/other_gpus.py" "$ARCH" $capi/libonnxruntime_providers_cuda.so
  # What compiles ask of installed packages: nestforge's own version. Its code is the checkout's, by a link made there.
  local version && version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  mkdir -p ".gpu/tree/nestforge-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: nestforge\nVersion: %s\n' "$version" \
    >".gpu/tree/nestforge-$version.dist-info/METADATA"
  tar c -C .gpu/tree . | xz -9 -T0 >.gpu/all.xz
  split -b "${PART_MB}M" --numeric-suffixes=1 -a 1 .gpu/all.xz .gpu/part.
  local sum parts && sum=$(sha256sum .gpu/all.xz | cut -d' ' -f1) && parts=$(ls .gpu/part.* | wc -l)
  for part in .gpu/part.*; do
    local folder=.gpu/${part##*.}
    mkdir "$folder" && mv "$part" "$folder/" && cp "$0" "$folder/" && echo "$sum $parts" >"$folder/whole"
  done
  rm -rf .gpu/wheel .gpu/tree .gpu/all.xz
  du -sh .gpu/*
}

rehearse() {  # in an environment of its own, in the versions that the machine has: give those as arguments
  "$PYTHON" -m venv .gpu-rehearsal
  local pip=.gpu-rehearsal/bin/pip python=.gpu-rehearsal/bin/python
  $pip install -q "onnxruntime-gpu==$ORT" pytest pytest-timeout hypothesis psutil click rich PyYAML ml_dtypes "$@"
  $pip install -q --no-deps -e .
  mkdir -p .gpu-rehearsal/plugins && older_torch .gpu-rehearsal/plugins && export PYTHONPATH=.gpu-rehearsal/plugins
  $python -m pytest -W default tests/gpu -rs                       # skips, and says why
  $python -m pytest -W default tests/gpu --gpu-rehearsal -rs       # on the processor, which plays a GPU
  $python -m pytest -W default tests/unit/runtime/engines/onnxruntime_gpu
}

put() {  # keeps a part outside the checkout; the last one unpacks
  mkdir -p "$SITE/parts" && cp "$HERE"/part.* "$SITE/parts/"
  local sum parts && read -r sum parts <"$HERE/whole"
  [[ $(ls "$SITE/parts" | wc -l) == "$parts" ]] || { ls -l "$SITE/parts"; return; }
  cat "$SITE"/parts/part.* >"$SITE/all.xz"
  [[ $(sha256sum "$SITE/all.xz" | cut -d' ' -f1) == "$sum" ]] || { echo "parts of another pack; remove $SITE"; exit 1; }
  rm -rf "$SITE/site" && mkdir -p "$SITE/site"
  xz -dc "$SITE/all.xz" | tar x -C "$SITE/site" && rm "$SITE/all.xz"
}

environment() {
  ln -sfn "$PWD" "$SITE/site/nestforge"
  # onnxruntime.preload_dlls() looks for NVIDIA's packages beside itself, and nowhere else.
  ln -sfn "$("$PYTHON" -c 'import nvidia; print(list(nvidia.__path__)[0])')" "$SITE/site/nvidia"
  export PYTHONPATH=$SITE/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
  export XDG_CACHE_HOME=$SITE/cache && mkdir -p "$XDG_CACHE_HOME" "$OUT"
  older_torch "$SITE/site"
}

older_torch() {  # a plugin of pytest in folder $1: PyTorch before 2.13 lacks a setting that traces switch
  printf 'import torch.fx\ntorch.fx.config.do_not_emit_stack_traces = False\n' >"$1/older_torch.py"
  export PYTEST_ADDOPTS="-p older_torch"
}

first() {
  environment
  nvidia-smi -L
  "$PYTHON" -m pip list 2>/dev/null | grep -iE '^(torch|transformers|onnx|numpy|cuda-bindings|nvidia-c|pytest)' || true
  "$PYTHON" -m pytest -W default -p no:cacheprovider -rs -x tests/gpu/test_weights.py tests/gpu/test_graphs.py \
    --gpu-results "$OUT/first.md" 2>&1 | tee "$OUT/first.log"
}

tests() {  # other versions of torch and transformers warn of other things, and warnings are errors without `-W default`
  environment
  "$PYTHON" -m pytest -W default -p no:cacheprovider -rs --durations=8 "tests/gpu/test_$1.py" \
    --gpu-results "$OUT/$1.md" 2>&1 | tee "$OUT/$1.log"
}

PYTHON=${PYTHON:-$(command -v "python$PYTHON_VERSION" || command -v python3)}
"$@"
