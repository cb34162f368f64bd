#!/usr/bin/env bash
# Make the virtual environment $1 with everything that moeserve, its tests and its demo need.
# On a bare Debian with root it also installs what Python's own venv and the native kernels want.
set -euo pipefail
venv=${1:?usage: setup.sh VENV}
python=${PYTHON:-python3}
torch=torch==2.13.0

say() { printf 'setup: %s\n' "$*" >&2; }
can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
apt() {
  say "apt-get install $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Through a link it would be another checkout's: installing there makes that one run this code.
if [ -L "$venv" ]; then
  say "$venv is a symbolic link (to $(readlink "$venv")): what is installed there would change"
  say "the checkout that it belongs to; remove the link, then run this again"
  exit 1
fi

if ! command -v "$python" >/dev/null; then
  if [ "$python" = python3 ] && can_apt; then apt python3 python3-venv; else
    say "no $python here; install Python 3.11 or newer, or run: make PYTHON=/path/to/python3"
    exit 1
  fi
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  say "$("$python" --version) is too old: 3.11 or newer is needed (make PYTHON=/path/to/python3)"
  exit 1
fi

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  say "virtual environment in $venv"
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then  # Debian ships them apart
    if can_apt; then apt python3-venv; else
      say "Python's venv module is missing; as root: apt-get install python3-venv"
      exit 1
    fi
  fi
  "$python" -m venv "$venv"
fi

if ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
  if can_apt && apt g++; then :; else
    say "no C++ compiler: the torch kernels will be used (slower); install g++ for the native ones"
  fi
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# A stage of minutes: said before it, a dot every five seconds (where someone looks), its time after.
stage() {
  local text=$1 began=$SECONDS dots=
  shift
  say "$text ..."
  if [ -t 2 ]; then
    (while sleep 5 && kill -0 $$ 2>/dev/null; do printf . >&2; done) &  # not beyond this script
    dots=$!
  fi
  local code=0
  "$@" || code=$?
  if [ -n "$dots" ]; then
    kill "$dots"
    wait "$dots" 2>/dev/null || true
    [ $((SECONDS - began)) -lt 5 ] || printf '\n' >&2
  fi
  [ "$code" = 0 ] || return "$code"
  say "  took $((SECONDS - began)) s"
}

say "three downloads; a few minutes with a quick network, most of it for the first"
stage "1 of 3: torch, the large one" pip install -q "$torch"
stage "2 of 3: what moeserve uses" pip install -q -e .
stage "3 of 3: what tests and checks use" pip install -q -e '.[test,dev]'
say "done"
