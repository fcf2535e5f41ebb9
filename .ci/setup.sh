#!/bin/sh
# Makes .venv, or brings it up to date; does nothing where it is current. The Makefile calls it before every target.
#   TORCH            auto (default), or what pip shall install: TORCH="torch==2.14.1"
#   TORCH_CPU_INDEX  the index with PyTorch's CPU builds, asked on Linux machines without an NVIDIA driver
set -eu
cd "$(dirname "$0")/.."

TORCH=${TORCH:-auto}
# The label +cpu keeps pip from taking a CUDA build of several GB that happens to lie on the same disk.
local_torch="torch==2.13.0+cpu"
python=.venv/bin/python
stamp=.venv/installed-for
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONHOME PYTHONPATH

say() { echo "[setup] $*" >&2; }
fail() { say "$*"; exit 1; }
works() { "$@" </dev/null >/dev/null 2>&1; }

# Scripts in a venv hold its full path, so a folder that was moved needs a new one.
folder_line() { echo "folder $(pwd -P)"; }
inputs_line() { echo "inputs $(cat pyproject.toml constraints.txt | cksum)"; }
torch_line() { echo "torch $TORCH"; }
stamped() { [ -f "$stamp" ] && grep -qxF "$1" "$stamp"; }

is_current() {
    stamped "$(folder_line)" && stamped "$(inputs_line)" || return 1
    # auto means what is installed, whoever chose it.
    [ "$TORCH" = auto ] || stamped "$(torch_line)" || return 1
    works "$python" -c ''
}

# A command of that name can exist and not work: a pyenv shim, or the installer that macOS and Windows put there.
right_version() { works "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; }
makes_venvs() { works "$1" -c 'import ensurepip, venv'; }
torch_at_hand() { works "$1" -m pip install --quiet --no-index --no-deps --dry-run --ignore-installed "$2"; }

wanted_torch() { if [ "$TORCH" = auto ]; then echo "$local_torch"; else echo "$TORCH"; fi; }

# Every Python on the path, newest first: one that doesn't work may hide one of the same name that does.
candidates() {
    for name in python3.13 python3.12 python3.11 python3 python; do
        (
            IFS=:
            for folder in $PATH; do
                [ -x "$folder/$name" ] && echo "$folder/$name"
            done
        ) || :
    done
}

# The newest Python for which torch lies on this machine, else the newest; empty where none can make a venv.
# One that works but can't make a venv is left in $without_venv.
find_python() {
    found="" without_venv=""
    while IFS= read -r candidate; do
        right_version "$candidate" || continue
        if ! makes_venvs "$candidate"; then
            without_venv=${without_venv:-$candidate}
        elif torch_at_hand "$candidate" "$(wanted_torch)"; then
            found=$candidate
            return
        else
            found=${found:-$candidate}
        fi
    done <<END
$(candidates)
END
}

make_venv() {
    rm -rf .venv
    find_python
    if [ -n "$found" ]; then
        say "making .venv with $("$found" --version)"
        "$found" -m venv .venv
    elif works uv --version; then
        say "making .venv with uv"
        uv venv --quiet --seed --python "${without_venv:->=3.11,<3.14}" .venv ||
            fail "uv found no Python 3.11 to 3.13 and could not fetch one: install one of them, then run make again."
    elif [ -n "$without_venv" ]; then
        version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "$without_venv has no venv module: install it (on Debian and Ubuntu: apt install python$version-venv)" \
            "or install uv, then run make again."
    else
        fail "no Python 3.11 to 3.13 found: install one (or uv, which brings one along), then run make again."
    fi
}

# Twice quiet: errors only. Once leaves a line for every index of the machine's own that lacks a package.
pip_install() { "$python" -m pip install -qq "$@"; }
torch_version() { "$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }

# One short question, so that a machine without that network waits seconds, not minutes.
cpu_index_answers() {
    [ -n "${TORCH_CPU_INDEX:-}" ] && [ "$(uname -s)" = Linux ] && ! works nvidia-smi &&
        works "$python" -m pip index versions torch --timeout 5 --retries 0 --index-url "$TORCH_CPU_INDEX"
}

install_torch() {
    if [ "$TORCH" != auto ]; then
        say "installing $TORCH"
        # Unquoted: it may name several packages, as in TORCH="torch==X torchvision==Y".
        pip_install $TORCH
    elif [ -n "$(torch_version)" ]; then
        say "keeping torch $(torch_version)"
    elif torch_at_hand "$python" "$local_torch"; then
        say "installing $local_torch, which lies on this machine"
        pip_install --constraint constraints.txt "$local_torch"
    elif cpu_index_answers; then
        say "installing torch from PyTorch's index of CPU builds"
        pip_install --constraint constraints.txt --index-url "$TORCH_CPU_INDEX" torch
    else
        say "installing torch from pip's own index (on Linux a CUDA build of several GB)"
        pip_install --constraint constraints.txt torch
    fi
}

# constraints.txt with the torch that is installed in the place of its torch lines: TORCH=... need not agree with
# them. A torchvision that pip brings later asks for one exact torch, so the torch line alone keeps the two together.
write_constraints() {
    { grep -v -e '^#' -e '^torch' constraints.txt || :; echo "torch==$(torch_version)"; } >.venv/constraints.txt
}

install() {
    start=$(date +%s)
    if ! stamped "$(folder_line)" || ! works "$python" -m pip --version; then
        make_venv
    fi
    # No stamp means an installation that did not end: the next call starts anew, whatever lies in .venv.
    rm -f "$stamp"
    install_torch
    write_constraints
    say "installing hf-xai with its development tools"
    pip_install --constraint .venv/constraints.txt --editable ".[dev]"
    { folder_line; inputs_line; torch_line; } >"$stamp.new"
    mv "$stamp.new" "$stamp"
    say "done in $(($(date +%s) - start)) s: $("$python" --version), torch $(torch_version)"
}

is_current || install
