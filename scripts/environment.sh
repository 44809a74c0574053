# Sourced by the scripts beside it: a virtual environment with jaxche and what an extra of pyproject.toml names.
#
#   . scripts/environment.sh
#   environment examples        # from the repository root; afterwards .venv/bin/python is ready
#   environment dev --no-compile  # with an option of pip
#
# Made once. Run again only when pyproject.toml changes.

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "jaxche needs Python 3.11 or newer, and none of ${PYTHON:-python3.13 python3.12 python3.11 python3} is." >&2
    echo "Install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
    return 1
}

make_venv() {
    local python=$1 borrowed
    rm -rf .venv
    if "$python" -m venv .venv >/dev/null 2>&1; then
        return
    fi
    # Debian ships Python without ensurepip. A virtualenv from a folder of its own leaves the system's packages alone.
    rm -rf .venv
    borrowed=$(mktemp -d)
    if "$python" -m pip install --quiet --disable-pip-version-check --target "$borrowed" virtualenv &&
        PYTHONPATH=$borrowed "$python" -m virtualenv --quiet .venv; then
        rm -rf "$borrowed"
        return
    fi
    rm -rf "$borrowed" .venv
    echo "$python can make no virtual environment: it has neither venv nor pip." >&2
    echo "On Debian or Ubuntu: apt-get install python3-venv" >&2
    return 1
}

# The extra with the CUDA that the driver of this machine can run, or nothing. JAX_PLATFORMS=cpu does without.
gpu_extra() {
    local driver
    case "${JAX_PLATFORMS:-}" in cpu*) return ;; esac
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || return 0
    driver=${driver%%.*}
    case "$driver" in '' | *[!0-9]*) return ;; esac
    if [ "$driver" -ge 580 ]; then echo ",cuda13"; elif [ "$driver" -ge 525 ]; then echo ",cuda12"; fi
}

environment() {
    local extras stamp python
    extras="$1$(gpu_extra)"
    stamp=".venv/.jaxche-${extras//,/-}"
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || return 1
        echo "making .venv with $python" >&2
        make_venv "$python" || return 1
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" != "$(cksum <pyproject.toml)" ]; then
        echo "installing jaxche[$extras] into .venv" >&2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check "${@:2}" -e ".[$extras]" || return 1
        cksum <pyproject.toml >"$stamp"
    fi
}
