# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
# Sourced by the other files here, which each make one layer of the serving image inside a container without a network.
set -eu
site=/usr/local/lib/python3.11/dist-packages
pip_install() {
    python3 "$(ls /wheels/pip-*.whl)/pip" install -q --root-user-action=ignore --break-system-packages --no-index --find-links=/wheels \
        --no-deps --no-cache-dir --disable-pip-version-check "$@"
}
