# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sphinx settings of the site; `scripts/docs` puts this file, the pages and what it generates into one folder and builds that."""

from __future__ import annotations

import typing as t

from docutils import nodes

project = "dgxspark.serving"
copyright = "2026 dgxspark.serving contributors, GPL-3.0-or-later"  # noqa: A001
author = "dgxspark.serving contributors"
html_title = "dgxspark.serving"

extensions = ["myst_parser", "sphinx_antsibull_ext"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns: list[str] = []
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.strikethrough"]
highlight_language = "console"

html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
# Everything a page needs is in the folder: the site can be read without a network.
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "default"
pygments_dark_style = "github-dark"


# Pages of Ansible's own documentation that the collection's pages point to.
ANSIBLE = ("common_return_values", "ansible_configuration_settings", "action_plugins", "callback_plugins")


def foreign(app: t.Any, env: t.Any, node: t.Any, contnode: t.Any) -> nodes.Node | None:
    """A reference to a page of Ansible's own documentation becomes plain text: nothing is fetched to build this site."""
    target = str(node.get("reftarget", ""))
    if target in ANSIBLE or (target.startswith("ansible_collections.") and not target.startswith("ansible_collections.dgxspark.serving.")):
        return contnode
    return None


def setup(app: t.Any) -> None:
    app.connect("missing-reference", foreign)
