#!/bin/sh
# Makes a virtual environment for text-classifier-training-env.
# Needs system packages: apt-get install --yes --no-install-recommends git-lfs tmux htop
set -eu
cd "$(dirname "$0")"
venv="${1:-.venv}"
python=3.10
if command -v uv >/dev/null 2>&1; then
  uv venv --quiet --allow-existing --python "$python" "$venv"
  uv pip install --quiet --python "$venv/bin/python" --requirement requirements.txt
else
  "python$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --requirement requirements.txt
fi
