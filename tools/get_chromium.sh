#!/usr/bin/env bash
# The browser of tests/webui. Root gets it from apt-get where there is one; others are told what is missing, and those
# tests skip with the same words. Does nothing when a browser is there.
set -u
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing chromium for the browser tests (a minute, once)"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get install -y -qq --no-install-recommends chromium ||
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }; } >/dev/null && exit 0
fi
echo "no chromium here: the browser tests (tests/webui) will be skipped; install the package chromium to run them"
