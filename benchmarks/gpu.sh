#!/bin/sh
# All that a GPU must show, in ten minutes, on a machine with PyTorch and without internet: docs/results/gpu.json and gpu.md.
#
#     make gpu-wheels                  # before, on a machine with internet: fills .whl for Python 3.12
#     sh benchmarks/gpu.sh [--seconds 600] [--out docs/results]
#     sh benchmarks/gpu.sh --pretend   # the whole script on a CPU, in less than five minutes
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
paths=$PWD/src:$PWD/tests:$PWD/benchmarks
site=$PWD/build/gpu-site
if [ -d .whl ] && "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    paths=$paths:$site
    if [ ! -e "$site/ready" ] || [ .whl -nt "$site/ready" ]; then
        # a wheel without scripts is a zip file of packages, so this machine needs no pip
        rm -rf "$site" && mkdir -p "$site"
        for wheel in .whl/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
        touch "$site/ready"
    fi
fi
PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH} exec "$python" benchmarks/gpu.py "$@"
