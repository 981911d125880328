#!/usr/bin/env bash
# Resolves pyproject.toml (core, the extras serve, eval and train, and the dev group) in an empty environment and writes the exact versions.
# requirements/pins.txt holds some of them back. torch's own platform packages are left out: torch pins them
# itself, and they differ between machines.
set -euo pipefail
lock=${1:?usage: requirements/lock.sh FILE}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "resolving pyproject.toml in an empty environment ..."
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -qq --upgrade pip
"$work/venv/bin/python" -m pip install -qq --constraint requirements/pins.txt --group dev ".[serve,eval,train]"
"$work/venv/bin/python" -m pip freeze --all --exclude pip --exclude ar2diff |
    grep -v -i -E '^(nvidia-|cuda-|triton)' |
    sed -E 's/^(torch==[0-9.]+)\+.*/\1/' | LC_ALL=C sort -f >"$work/pins"
{
    echo "# Exact versions of the core, serve, eval, train and dev dependencies and all that they pull in."
    echo "# Made by 'make lock' from pyproject.toml; not edited by hand. Packages that torch pins for a"
    echo "# platform (CUDA libraries, triton) are left out, since torch's own metadata fixes them."
    cat "$work/pins"
} >"$work/lock"
mv "$work/lock" "$lock"
echo "wrote $lock ($(grep -c == "$lock") packages)"
