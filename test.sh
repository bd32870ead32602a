#!/usr/bin/env bash
# Sets up, reads the source (ruff, mypy) and runs the tests: those that time browsers, one after the other, then
# those whose browsers may share the machine, two files at a time; beside them, giving way, those without a browser.
#   ./test.sh --quick                              a minute: equations, update, house; for who edits an equation
#   ./test.sh tests/test_equations.py -k eq_5      arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh
export OMP_WAIT_POLICY=passive  # idle torch threads sleep instead of taking the cores from the browsers
pytest=".venv/bin/python -m pytest"
case "${1:-}" in
  "") ;;
  --quick) .venv/bin/ruff check --quiet .
    exec $pytest tests/test_equations.py tests/test_losses.py tests/model/test_update.py tests/test_grpo_log.py tests/test_house.py ;;
  *) exec $pytest "$@" ;;
esac
failed=0
.venv/bin/ruff check --quiet . || failed=1
.venv/bin/mypy || failed=1
timed="tests/web/test_browser.py tests/web/test_chromium.py tests/test_rollout.py"
shared="tests/test_stages.py tests/sites/test_env_webarena.py tests/model/test_agents.py tests/test_scale.py
  tests/test_evaluate.py tests/test_demo.py tests/test_analysis.py tests/records/test_viewer.py tests/web/test_effects.py
  tests/web/test_scrolling.py tests/sites/test_env_miniwob.py tests/sites/test_miniwob_rewards.py tests/test_systems.py
  tests/test_forks.py"
said=$(mktemp) beside=
trap 'kill $beside 2>/dev/null || true; rm -f "$said"' EXIT
nice -n 5 $pytest $(printf -- '--ignore=%s ' $timed $shared) >"$said" 2>&1 & beside=$!
$pytest $timed || failed=1
$pytest -n 2 --dist loadfile --no-loadscope-reorder $shared || failed=1
wait $beside || failed=1
cat "$said"
exit $failed
