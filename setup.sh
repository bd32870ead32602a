#!/usr/bin/env bash
# Makes .venv with the pinned packages and sees to it that there is a Chromium. Running it again costs nothing.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "setup.sh: Python 3.11 or newer is needed; set PYTHON to one" >&2; exit 2; }

[ -x .venv/bin/pip ] || "$python" -m venv --clear .venv ||
  { echo "setup.sh: $python cannot make .venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
if ! cmp -s requirements.txt .venv/installed.txt; then
  echo "setup.sh: installing the packages of requirements.txt (a few minutes the first time)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
  cp requirements.txt .venv/installed.txt
fi

have_chromium() {
  [ -n "${CHROMIUM:-}" ] && { [ -x "$CHROMIUM" ] && return 0
    echo "setup.sh: CHROMIUM=$CHROMIUM is not an executable; unset it or give the browser's path" >&2; exit 2; }
  command -v /usr/lib/chromium/chromium-headless-shell chromium chromium-browser google-chrome >/dev/null && return 0
  .venv/bin/python - 2>/dev/null <<'PY'
from playwright.sync_api import sync_playwright
with sync_playwright() as p:
    p.chromium.launch().close()  # being there is not enough: it may lack libraries of the system
PY
}

if ! have_chromium; then
  echo "setup.sh: no Chromium yet; trying Playwright's own"
  timeout 300 .venv/bin/python -m playwright install chromium >/dev/null 2>&1 || true
  if ! have_chromium && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup.sh: it does not start here; installing the distribution's package, or else what it needs"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq chromium-headless-shell >/dev/null || apt-get install -y -qq chromium >/dev/null ||
      .venv/bin/python -m playwright install-deps chromium >/dev/null
  fi
  have_chromium || { echo "setup.sh: no Chromium: install one (for example: apt-get install chromium) or set CHROMIUM" >&2; exit 2; }
fi
