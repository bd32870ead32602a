#!/usr/bin/env bash
# Sets up and runs the tests, two files at a time; arguments go to pytest (--pdb wants -n 0).
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh
export OMP_WAIT_POLICY=passive  # idle torch threads sleep instead of taking the cores from the browsers
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
