#!/usr/bin/env bash
# Run the first commands of a new user in a new clone with an empty home and no caches; print the time of each step.
#   tests/fresh.sh python3.12 [demo] [notebooks] [package] [test]
set -euo pipefail
python=$(command -v "$1")
shift
steps=("$@")
[ $# -gt 0 ] || steps=(demo notebooks package test)
source=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
git clone --quiet "$source" "$place/clone"
if [ -d "$source/../shared" ]; then ln -s "$(cd "$source/../shared" && pwd)" "$place/shared"; fi
mkdir "$place/home"
# Keep pip's settings, which name the package index of the machine.
for file in /etc/pip.conf "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
  if [ -f "$file" ]; then export PIP_CONFIG_FILE=$file; fi
done
mapfile -t pip < <(env | grep '^PIP_')
fresh() {
  (cd "$place/clone" && env -i HOME="$place/home" PATH="/usr/local/bin:/usr/bin:/bin" LANG=C.UTF-8 "${pip[@]}" "$@")
}
timed() {
  local began=$SECONDS
  "${@:2}" > "$place/$1.log" 2>&1 || { tail -40 "$place/$1.log"; echo "$1: failed after $((SECONDS - began)) s"; exit 1; }
  echo "$1: $((SECONDS - began)) s; $(tail -1 "$place/$1.log" | cut -c1-160)"
}
fresh "$python" --version
timed set-up fresh make .venv/.installed PYTHON="$python"
for step in "${steps[@]}"; do
  case $step in
    demo) timed demo fresh make demo PYTHON="$python" ;;
    notebooks) timed notebooks fresh .venv/bin/python docs/run_notebooks.py ;;
    package) timed package fresh make dist PYTHON="$python" ;;
    test) timed test fresh make test PYTHON="$python" ;;
  esac
done
