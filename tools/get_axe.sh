#!/usr/bin/env bash
# axe-core, the accessibility audit of tests/webui, from the npm registry into .venv. Where npm is missing, or it cannot
# reach its registry, those tests skip and say so. Does nothing when this version is there.
set -u
version=4.14.1
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/axe"
grep -qs "\"version\": \"$version\"" "$folder/node_modules/axe-core/package.json" && exit 0
if command -v npm >/dev/null; then
  npm install --prefix "$folder" --no-save --no-audit --no-fund --ignore-scripts --loglevel error \
    "axe-core@$version" >/dev/null && exit 0
fi
echo "axe-core $version is not here: the accessibility audit (tests/webui/test_accessibility.py) will be skipped; install npm to run it"
