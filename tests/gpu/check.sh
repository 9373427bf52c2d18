#!/bin/sh
# Checks Octavo on a machine with an NVIDIA GPU, within 8 minutes: kernels against their references, the model against
# the CPU, graphs, the server, swaps, deterministic mode, then speed. Prints one table; exit status 1 if something is
# wrong. Every part reports, also when another one fails.
#
#   tests/gpu/check.sh                            all parts, with the embedded model
#   tests/gpu/check.sh --model /models/x.gguf     with another one
#   tests/gpu/check.sh --only kernels,step_time   some parts
#   PYTHON=/opt/venv/bin/python tests/gpu/check.sh
#
# Needs a Python with torch for CUDA, Triton, pytest, and what pyproject.toml lists under dependencies. If Octavo itself
# is not installed there, it is installed into a virtual environment of its own that sees that Python's packages; that
# needs no network. The embedded model is fetched once; where there is no network, name a file with --model.
set -eu
cd "$(dirname "$0")/../.."

is_usable() { "$1" -c 'import octavo.worker, torch' >/dev/null 2>&1; }

python=${PYTHON:-.venv/bin/python}
if ! is_usable "$python"; then
    base=${PYTHON:-python3}
    environment=${TMPDIR:-/tmp}/octavo-check-$(id -u)
    "$base" -m venv --system-site-packages "$environment"
    python=$environment/bin/python
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
    if ! is_usable "$python"; then
        echo "check.sh: $base has no torch, or one of the packages in pyproject.toml is missing:" >&2
        "$python" -c 'import octavo.worker, torch' >&2 || true
        exit 2
    fi
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    case " $* " in *" --device cpu "*) ;; *)
        echo "check.sh: torch finds no GPU; to try out the check itself: $0 --device cpu --tiny" >&2
        exit 2 ;;
    esac
fi
exec "$python" tests/gpu/check.py "$@"
