#!/bin/sh
# Checks Octavo on a machine with an NVIDIA GPU, within 8 minutes: kernels against their references, the model against
# the CPU, graphs, the server, swaps, deterministic mode, then speed. Prints one table whose last column says ok or WRONG,
# and nothing for plain figures. Every part reports, also when another one fails.
#
#   tests/gpu/check.sh                            all parts, with the embedded model
#   tests/gpu/check.sh --model /models/x.gguf     with another one
#   tests/gpu/check.sh --only kernels,step_time   some parts
#   PYTHON=/opt/venv/bin/python tests/gpu/check.sh
#
# Exit status: 0 all is right, 1 something is wrong, 2 the check could not run.
#
# Takes .venv, which `make test` makes, or PYTHON: one with torch for CUDA, Triton, pytest, and what pyproject.toml lists
# under dependencies. If Octavo itself is not installed there, it is installed into a virtual environment of its own that
# sees that Python's packages; that needs no network, but setuptools 77 or newer there. The embedded model is fetched
# once; where there is no network, name a file with --model.
set -eu
cd "$(dirname "$0")/../.."

needed='import octavo.worker, pytest, torch'
is_usable() { "$1" -c "$needed" >/dev/null 2>&1; }
give_up() {
    echo "check.sh: $1" >&2
    exit 2
}

python=${PYTHON:-.venv/bin/python}
if ! is_usable "$python"; then
    base=${PYTHON:-python3}
    command -v "$base" >/dev/null || give_up "there is no $base; say which Python to use: PYTHON=/path/to/python $0"
    "$base" -c 'import pytest, torch' || give_up "$base lacks the above; make test installs all that is needed in .venv"
    environment=${TMPDIR:-/tmp}/octavo-check-$(id -u)
    "$base" -m venv --system-site-packages "$environment"
    python=$environment/bin/python
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . ||
        give_up "$base could not install Octavo; it needs setuptools 77 or newer"
    "$python" -c "$needed" || give_up "$base lacks a package that pyproject.toml lists"
fi
case " $* " in *" --device cpu "* | *" --help "* | *" -h "*) ;; *)
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        give_up "torch finds no GPU; to try out the check itself: $0 --device cpu --tiny" ;;
esac
exec "$python" tests/gpu/check.py "$@"
