# Sourced by the other scripts: chooses the Python environment and names its tools.
#   PYTHON   the interpreter to use (the active one if it has torch and Horovod, else .venv's)
#   IN_VENV  1 if that is the project's own .venv
PROJECT_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PROJECT_ROOT

has_horovod() { "$1" -c 'import torch, horovod.torch as hvd; hvd.init' >/dev/null 2>&1; }

choose_python() {
    if [ -z "${HVD_SLIM_FORCE_VENV:-}" ] && command -v python3 >/dev/null && has_horovod python3; then
        PYTHON="$(command -v python3)"
        IN_VENV=0
    else
        PYTHON="$PROJECT_ROOT/.venv/bin/python"
        IN_VENV=1
        export PATH="$PROJECT_ROOT/.venv/bin:$PATH"
    fi
    export PYTHON IN_VENV
}
