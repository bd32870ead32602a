#!/usr/bin/env bash
# Sets up and runs the tests: first those that time browsers, alone; then the others, two files at a time.
#   ./test.sh tests/test_equations.py -k eq_5      arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh
export OMP_WAIT_POLICY=passive  # idle torch threads sleep instead of taking the cores from the browsers
pytest=".venv/bin/python -m pytest"
[ $# = 0 ] || exec $pytest "$@"
failed=0
$pytest tests/test_browser.py tests/test_rollout.py || failed=1
$pytest -n 2 --dist loadfile --no-loadscope-reorder \
  --ignore=tests/test_browser.py --ignore=tests/test_rollout.py || failed=1
exit $failed
