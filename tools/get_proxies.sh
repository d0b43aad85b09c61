#!/usr/bin/env bash
# The reverse proxies of tests/server/test_proxies.py and tests/webui/test_sub_path.py. Root gets them from apt-get where
# there is one; others are told what is missing, and those tests skip with the same words. Does nothing when both are there.
set -u
export PATH="$PATH:/usr/sbin"
missing=()
command -v nginx >/dev/null || missing+=(nginx-light)
command -v haproxy >/dev/null || missing+=(haproxy)
[ ${#missing[@]} = 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${missing[*]} for the tests behind proxies (seconds, once)"
  export DEBIAN_FRONTEND=noninteractive
  # the tests start proxies of their own: the packages' services stay off
  { RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
    { apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}"; }; } >/dev/null && exit 0
fi
echo "no ${missing[*]} here: the tests behind proxies will be skipped; install the packages to run them"
