#!/usr/bin/env bash
# Builds the manual as a site with search.
set -euo pipefail

if [ "${1:-}" = --help ]; then
  cat <<'USAGE'
usage: launchers/docs.sh [FOLDER]
       launchers/docs.sh --packages

Builds docs/ by mkdocs.yml into FOLDER (.cache/site), and fails on warnings, such as a link that
leads nowhere. The packages of requirements/docs.lock are installed to .venv/docs first; with
--packages, nothing else is done. Look at the site with python -m http.server -d .cache/site
USAGE
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
packages=.venv/docs
if ! cmp -s requirements/docs.lock "$packages/docs.lock"; then
  [ -x .venv/bin/python ] || { echo "error: run launchers/setup.sh first" >&2; exit 2; }
  rm -rf "$packages"
  .venv/bin/python -m pip install -qq --no-deps --target "$packages" -r requirements/docs.lock
  cp requirements/docs.lock "$packages/docs.lock"
fi
[ "${1:-}" != --packages ] || exit 0
# Its author's notice about mkdocs 2 is no warning of the build.
export PYTHONPATH=$packages NO_MKDOCS_2_WARNING=1
exec .venv/bin/python -m mkdocs build --strict --quiet --site-dir "$(realpath -m "${1:-.cache/site}")"
