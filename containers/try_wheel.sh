#!/usr/bin/env bash
# Installs the wheel of a folder (the first argument) into an empty environment, and follows the quickstart from there, with the
# run file that lies in the source archive beside it. The repository is not needed.
set -euo pipefail
dist=$(cd "$1" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv empty
empty/bin/pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-torch}"
empty/bin/pip install --quiet "$dist"/*.whl
tar --extract --gzip --file "$dist"/*.tar.gz --strip-components 1 --wildcards '*/examples/quickstart.yaml'
empty/bin/phalanx --version
empty/bin/phalanx data prepare python-stdlib --out data/python-stdlib --vocab-size 2048 --validation-fraction 0.02
empty/bin/phalanx train examples/quickstart.yaml --run-dir runs/quickstart training.steps=5 optimizer.warmup_steps=2 evaluation.every=5 evaluation.samples=4
empty/bin/phalanx generate runs/quickstart --prompt "def " --tokens 16
empty/bin/phalanx report runs/quickstart
