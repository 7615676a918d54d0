#!/usr/bin/env bash
# Makes the environment in which benchmarks/deepspeed/train.py runs; quick where it is already complete.
#
#   benchmarks/deepspeed/setup.sh [VENV]        default: .bench/deepspeed-venv
#
# DeepSpeed's operators are compiled here, for this processor and into the environment, so that no run measures a
# compiler. Needs Python 3.11, a C++ compiler and libaio's headers. PYTHON names another interpreter.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-$root/.bench/deepspeed-venv}
python=$venv/bin/python

if ! echo '#include <libaio.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null; then
    echo "DeepSpeed's AsyncIO cannot be built without libaio.h: install libaio-dev (Debian: apt-get install libaio-dev)" >&2
    exit 1
fi

[[ -x $python ]] || "${PYTHON:-python3.11}" -m venv "$venv"
install=("$python" -m pip install --quiet --constraint "$root/constraints.txt")
# py-cpuinfo comes before any build: without it DeepSpeed compiles its optimizer for no vector unit and says nothing.
"${install[@]}" torch transformers==5.23.0 setuptools wheel ninja packaging psutil py-cpuinfo numpy
# DeepSpeed's setup imports torch, which an isolated build would not see.
"${install[@]}" --no-build-isolation deepspeed==0.19.8

# Just-in-time builds: DeepSpeed 0.19.8's ahead-of-time build for CPU leaves libaio out of the link. The optimizer's is linked
# against no OpenMP library either and finds the one that torch has loaded.
PATH=$venv/bin:$PATH DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$venv/torch_extensions "$python" - <<'PYTHON'
import deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

for builder in (CPUAdamBuilder(), AsyncIOBuilder(), ShareMemCommBuilder()):  # AsyncIO loads the pinned memory that it needs
    assert builder.load() is not None, builder.name
    print(f"deepspeed {deepspeed.__version__}: {builder.name} is built")
PYTHON
