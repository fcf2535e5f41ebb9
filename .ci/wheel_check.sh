#!/bin/sh
# Builds the distributions and tries them as a user gets them: plain pip, empty environments, no extras.
set -eu
cd "$(dirname "$0")/.."

base=.venv/bin/python
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
trap 'exit 1' INT TERM
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "[wheel-check] $*"; }
fail() { say "$*" >&2; exit 1; }

say "building sdist and, from it, the wheel"
rm -rf dist
"$base" -m build --outdir dist . >"$empty/build.log" 2>&1 || { cat "$empty/build.log"; fail "the build failed"; }
for file in dist/*; do
    size=$(wc -c <"$file")
    [ "$size" -lt 1000000 ] || fail "$file has $size bytes: data got into it"
done

say "installing the wheel into an empty environment"
"$base" -m venv "$empty/wheel"
"$empty/wheel/bin/python" -m pip install -qq dist/*.whl
# Away from the checkout, so that nothing but the wheel can be imported.
root=$(pwd)
cd "$empty"
"$empty/wheel/bin/hf-xai" --help >/dev/null
"$empty/wheel/bin/hf-xai" env
"$empty/wheel/bin/python" "$root/.ci/light_core.py"
cd "$root"

# What `hf extensions install` does with a repository: pip install into a fresh environment, then look for the script.
say "installing the checkout into an empty environment"
"$base" -m venv "$empty/checkout"
"$empty/checkout/bin/python" -m pip install -qq .
[ -x "$empty/checkout/bin/hf-xai" ] || fail "pip install . gave no script hf-xai"
"$empty/checkout/bin/hf-xai" --help >/dev/null
say "passed"
