# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
#
# Sourced by the scripts beside it: places, messages, and `check`, which runs one check and counts it.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# scripts/matrix sets SPARK_VENV: an environment of its own for another ansible-core.
VENV="${SPARK_VENV:-$ROOT/.venv}"
CACHE="$ROOT/.cache"
export ROOT VENV CACHE
# Compiled once, but not into the tree.
export PYTHONPYCACHEPREFIX="$CACHE/pycache" ANSIBLE_NOCOWS=1
# An ANSIBLE_* setting of the caller's shell must not decide what a check finds.
unset ANSIBLE_COLLECTIONS_PATH ANSIBLE_ROLES_PATH ANSIBLE_INVENTORY ANSIBLE_CONFIG ANSIBLE_VAULT_PASSWORD_FILE
# The checkout may belong to another user (root in a CI job): git would refuse to list it.
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0="$ROOT"

say() { printf '%s\n' "$*"; }
die() { printf '%s\n' "$*" >&2; exit 1; }

PASSED=0
FAILED=0
# check NAME COMMAND...: one line with the result and the seconds; the output of the command only when it fails.
check() {
    local name="$1" log start=$SECONDS rc=0
    shift
    log="$(mktemp)"
    "$@" </dev/null >"$log" 2>&1 || rc=$?
    if [ "$rc" -eq 0 ]; then
        PASSED=$((PASSED + 1))
        printf 'ok      %-34s %4ds\n' "$name" $((SECONDS - start))
    else
        FAILED=$((FAILED + 1))
        sed 's/^/    /' "$log"
        printf 'FAILED  %-34s %4ds  (exit %s)\n' "$name" $((SECONDS - start)) "$rc"
    fi
    rm -f "$log"
}

# finish: the closing line of a script and its exit code.
finish() {
    printf '%d passed, %d failed\n' "$PASSED" "$FAILED"
    [ "$FAILED" -eq 0 ] && [ "$PASSED" -gt 0 ]
}

# files_of_checkout: what git tracks or would add, NUL-separated, existing files only (the tree as it is now, not the last commit).
files_of_checkout() {
    git -C "$ROOT" ls-files -z --cached --others --exclude-standard --deduplicate |
        while IFS= read -r -d '' name; do
            if [ -e "$ROOT/$name" ] || [ -L "$ROOT/$name" ]; then printf '%s\0' "$name"; fi
        done
}

# copy_of_checkout DIRECTORY: the tree as it is now, uncommitted changes included, as a git checkout of its own.
copy_of_checkout() {
    local target="$1"
    mkdir -p "$target"
    files_of_checkout | tar -C "$ROOT" --no-recursion --null --files-from=- -cf - | tar -C "$target" -xf -
    git -C "$target" init -q
    git -C "$target" add -A
}

# tools NAME [PYTHON]: sets TOOLS to the virtual environment with what scripts/tools/NAME.txt pins; made anew when that file or the Python has changed. For
# tools that only one script needs: scripts/setup does not install them.
tools() {
    local name="$1" python="${2:-$VENV/bin/python}" pins="$ROOT/scripts/tools/$1.txt" hash start=$SECONDS
    TOOLS="$CACHE/tools/$name"
    hash="$(cat "$pins" "$ROOT/scripts/constraints.txt" <("$python" -c 'import sys; print(sys.base_prefix, sys.version)') <(printf '%s' "$ROOT") | sha256sum | cut -d' ' -f1)"
    if [ -f "$TOOLS/.stamp" ] && [ "$(cat "$TOOLS/.stamp")" = "$hash" ]; then return; fi
    say "tools: installing scripts/tools/$name.txt into ${TOOLS#"$ROOT"/} with $("$python" --version)"
    rm -rf "$TOOLS"
    "$python" -m venv "$TOOLS"
    "$TOOLS/bin/python" -m pip install -qq --disable-pip-version-check --no-compile --no-input --requirement "$pins" </dev/null
    printf '%s' "$hash" >"$TOOLS/.stamp"
    say "tools: done in $((SECONDS - start)) s"
}
