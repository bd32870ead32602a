#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh
exec .venv/bin/python -m pytest "$@"
