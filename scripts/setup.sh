#!/usr/bin/env bash
# Makes this machine ready to train with hvd_slim. Safe to run again: a second run takes seconds.
#
#   bash scripts/setup.sh
#
# If torch and horovod.torch import in the active Python environment, that environment is used and only
# what is missing is added to it. Otherwise .venv is made in the project, with Horovod built for its torch.
# Debian packages are installed when they are missing and we are root; otherwise the command is printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

CONSTRAINTS="$PROJECT_ROOT/scripts/constraints.txt"
DEBIAN_BUILD="g++ cmake make openmpi-bin libopenmpi-dev openssh-client python3-dev python3-venv iproute2"
DEBIAN_DATA="dataset-fashion-mnist bible-kjv bible-kjv-text"
FASHION_MNIST_DIR=/usr/share/datasets/fashion-mnist

say() { printf '[setup] %s\n' "$*"; }

install_debian_packages() {
    local wanted="$1" missing="" package
    command -v dpkg-query >/dev/null || { say "not a Debian system: provide yourself what '$wanted' provides"; return; }
    for package in $wanted; do
        [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing="$missing $package"
    done
    [ -z "$missing" ] && return
    if [ "$(id -u)" != 0 ]; then
        say "Debian packages are missing. Run this, then run set-up again:"
        say "    sudo apt-get update && sudo apt-get install -y$missing"
        exit 1
    fi
    say "installing Debian packages:$missing"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

make_venv() {
    [ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null && return
    say "making .venv"
    rm -rf .venv
    python3 -m venv .venv
}

pip_install() { "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@"; }

build_horovod() {
    say "building Horovod for this torch (about five minutes on two cores)"
    # Not from pip's cache: a wheel built for another torch does not load.
    CXX="$PROJECT_ROOT/scripts/gxx20.sh" \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    MAKEFLAGS="-j$(nproc)" \
        pip_install --no-build-isolation --no-cache-dir -c "$CONSTRAINTS" horovod
}

# The stamp names what was installed, so that a second run has nothing to ask the network.
stamp_is_current() { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; }
fingerprint() { cat "$CONSTRAINTS" setup.py hvd_slim/native.c | sha256sum; }

# From another folder: from this one hvd_slim imports without being installed.
has_hvd_slim() { (cd / && "$PYTHON" -c 'import hvd_slim') >/dev/null 2>&1; }

# Whether the compiled passes were built here before native.c last changed.
native_is_old() { [ -n "$(find hvd_slim -maxdepth 1 -name '_native*.so' ! -newer hvd_slim/native.c)" ]; }

choose_python
if [ "$IN_VENV" = 1 ]; then
    STAMP=.venv/hvd_slim.stamp
    if ! stamp_is_current || ! has_horovod "$PYTHON" || ! has_hvd_slim; then
        install_debian_packages "$DEBIAN_BUILD"
        make_venv
        say "installing Python packages"
        pip_install -c "$CONSTRAINTS" setuptools wheel packaging cffi cloudpickle psutil pyyaml numpy mpi4py torch
        has_horovod "$PYTHON" || build_horovod
        pip_install -c "$CONSTRAINTS" --no-build-isolation -e '.[examples,test]'
        fingerprint > "$STAMP"
    fi
else
    say "using the active environment: $PYTHON"
    # From another folder: from this one hvd_slim imports without being installed.
    if native_is_old || ! (cd / && "$PYTHON" -c 'import hvd_slim, tqdm, matplotlib, pytest, pytest_timeout, xdist, hypothesis, psutil, mpi4py, tensorboard, pdoc') 2>/dev/null \
        || ! "$PYTHON" -m ruff --version >/dev/null 2>&1 || ! "$PYTHON" -m mypy --version >/dev/null 2>&1; then
        # The environment's own torch, numpy and Horovod stay as they are.
        pip_install -e '.[examples,test]'
    fi
fi

if [ -z "${HVD_SLIM_DATA:-}" ] && { [ ! -d "$FASHION_MNIST_DIR" ] || ! command -v bible >/dev/null; }; then
    install_debian_packages "$DEBIAN_DATA"
fi

"$PYTHON" - <<'PY'
import horovod, horovod.torch as hvd, torch
built = [name for name, yes in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built()), ("NCCL", hvd.nccl_built())) if yes]
print(f"[setup] ready: torch {torch.__version__}, horovod {horovod.__version__} with {', '.join(built)}")
PY
