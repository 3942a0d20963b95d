#!/usr/bin/env bash
# Builds the API reference from the docstrings, as HTML, with pdoc.
#
#   bash scripts/docs.sh [FOLDER]    out/api by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
choose_python
if ! "$PYTHON" -c 'import pdoc' 2>/dev/null; then
    echo "error: pdoc is missing; run: $PYTHON -m pip install pdoc" >&2
    exit 2
fi
FOLDER="${1:-out/api}"
mkdir -p "$FOLDER"
"$PYTHON" -m pdoc --docformat google --output-directory "$FOLDER" \
    hvd_slim hvd_slim.elastic hvd_slim.planner hvd_slim.stats hvd_slim.memory hvd_slim.benchmark
echo "API reference: $FOLDER/index.html"
