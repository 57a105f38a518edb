# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pages of the documentation's site: those of docs/ with their links turned to the site, and those that are made of other files.

``docs.py write DIRECTORY`` puts the source of the site there, ``docs.py tidy DIRECTORY`` takes from the pages of antsibull-docs what this site has otherwise,
``docs.py check DIRECTORY`` looks through the built one.
"""

from __future__ import annotations

import html
import html.parser
import posixpath
import re
import shutil
import sys
import typing as t
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = DOCS / "site"

# The order of the menu. A page of docs/ that is in none of them comes under the last heading, so that a new one is never left out.
MENU: dict[str, list[str]] = {
    "Start": ["tutorial", "lab"],
    "How to": ["day-two", "recipes", "fabric", "copying", "copying-image"],
    "Reference": ["playbooks", "Inputs <collections/preflight_role>", "Modules and roles <collections/index>"],
    "When something fails": ["troubleshooting"],
    "How it is built": ["architecture", "design", "development", "benchmarks", "benchmarks/sync"],
}
MORE = "More"

# Places of the repository that have a page of another name.
PAGES = {
    "README.md": "index.md",
    "docs/failure-modes.md": "troubleshooting.md",
    "playbooks": "playbooks.md",
    "plugins/modules": "collections/index.rst",
    "roles": "collections/index.rst",
}
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
BADGES = {"A": "nearly everyone meets it", "B": "common", "C": "occasional"}


# --- links


def page_of(place: str) -> str | None:
    """Where a path of the repository is in the site; None when it has no page."""
    place = place.rstrip("/")
    if place in PAGES:
        return PAGES[place]
    role = re.fullmatch(r"roles/(\w+)/README\.md", place)
    if role:
        return f"collections/{role[1]}_role.rst"
    for folder in ("docs/site/", "docs/"):
        if place.startswith(folder) and place.endswith((".md", ".svg", ".png", ".html", ".json")):
            return place.removeprefix(folder)
    return None


def turned(text: str, place: str) -> str:
    """A page's text with every link to a file of the repository turned to its page, or to plain text where it has none. ``place``: of the page."""
    own = page_of(place) or place

    def turn(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        there = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(place), target)))
        if there is None:
            return f"]({{repository}}{found['after']}"
        return f"{found['before']}{posixpath.relpath(there, posixpath.dirname(own) or '.')}{found['anchor'] or ''}{found['after']}"

    # what has no page: only the words of the link stay
    return re.sub(r"\[([^\]\n]+)\]\(\{repository\}\)", r"\1", LINK.sub(turn, text))


# --- pages that are made


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def anchor(name: str) -> str:
    return name.lower()


def proofs(shown: str) -> list[str]:
    """The tests of an entry, folded up: who looks for a remedy does not look for them."""
    tests = re.findall(r"`([^`]+)`", shown)
    if not tests:
        return [f"Shown by: {shown}"]
    items = "".join(f"<li><code>{html.escape(test)}</code></li>" for test in tests)
    return [f"<details><summary>{len(tests)} test{'s' if len(tests) > 1 else ''}</summary><ul>{items}</ul></details>"]


def troubleshooting(catalogue: str) -> str:
    """The catalogue of failures as a page to look things up: one entry for each id, under the headings of the catalogue."""
    lines = [
        "# Troubleshooting",
        "",
        "A failing task says what was found, what was expected and what to do about it; the word behind `see` is an entry of this page. Look for it",
        "with the search of your browser, or for words of the message. *Refused* means found before anything was changed.",
        "",
    ]
    for line in catalogue.splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        if not line.startswith("|"):
            continue
        row = cells(line)
        if len(row) != 5 or row[0] == "Id" or re.fullmatch(r"[-: ]+", row[0]):
            continue
        name, title, tier, handled, shown = row
        kind, colon, text = handled.partition(":")
        lines += [
            f"({anchor(name)})=",
            f"### {name}: {title}",
            "",
            f"**{kind.strip().capitalize()}**{': ' + text.strip() if colon else ''}",
            "",
            f"*{BADGES.get(tier, tier)}*",
            "",
            *proofs(shown),
            "",
        ]
    return "\n".join(lines) + "\n"


def heading_of(path: Path) -> tuple[list[str], list[str]]:
    """The words and the commands of a playbook's first comment, the licence left out."""
    words: list[str] = []
    commands: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line in ("---",) or "Copyright (c)" in line or "SPDX-License-Identifier" in line:
            continue
        if not line.startswith("#"):
            if line.strip():
                break
            continue
        if line.startswith("#   "):
            commands.append(line[4:])
        elif line.strip() != "#":
            words.append(line[2:])
    return words, commands


def plays(path: Path) -> list[tuple[str, str]]:
    """Name and hosts of the plays of a playbook."""
    found = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    return [(str(play.get("name", "")), str(play.get("hosts", ""))) for play in found if isinstance(play, dict) and "hosts" in play]


def playbooks(folder: Path) -> str:
    lines = [
        "# Playbooks",
        "",
        "Each with its full name `dgxspark.serving.<name>`, too, where the collection is installed. All take the same inventory. In a checkout",
        "`ansible.cfg` chooses a short output (the callback `dgxspark.serving.stages`): `-v` shows everything, `ANSIBLE_STDOUT_CALLBACK=default` what Ansible",
        "itself shows.",
        "",
    ]
    for path in sorted(folder.glob("*.yml"), key=lambda path: (path.name != "site.yml", path.name)):
        if path.name.endswith(".meta.yml"):
            continue
        words, commands = heading_of(path)
        words = [re.sub(r"\bdocs/([\w-]+)\.md", lambda found: f"[{found[1]}]({page_of(found[0])})", line) for line in words]
        lines += [f"## {path.name}", "", *words, ""]
        if commands:
            lines += ["```console", *(f"$ {command}" if not command.startswith(" ") else command for command in commands), "```", ""]
        lines += [f"- play *{name}* on `{hosts}`" for name, hosts in plays(path)]
        lines.append("")
    return "\n".join(lines)


TITLE = re.compile(r"^dgxspark\.serving\.(?P<name>\w+) (?P<kind>\w+) -- (?P<text>.+)\n(?P<rule>\+{3,})$", re.MULTILINE)
CONTENTS = re.compile(r"^\.\. contents::\n(?:[ ]+:.*\n)+", re.MULTILINE)
NOTE = re.compile(r"^\.\. note::\n    This \w+(?: \w+)? is part of the `dgxspark.*\n(?:(?:    .*)?\n)+", re.MULTILINE)


def tidied(text: str) -> str:
    """A page of antsibull-docs with a short title, without its own table of contents (the theme has one) and without the word on Galaxy."""
    text = CONTENTS.sub("", text)
    text = NOTE.sub("", text)
    text = text.replace("Dgxspark.Serving\n================", "Modules and roles\n=================", 1)

    def title(found: re.Match[str]) -> str:
        short = f"{found['name']} ({found['kind']})"
        return f"{short}\n{'+' * len(short)}\n\n{found['text']}.\n\nIn a playbook: ``dgxspark.serving.{found['name']}``\n"

    return TITLE.sub(title, text, count=1)


def tidy(folder: Path) -> None:
    for path in sorted(folder.glob("*.rst")):
        path.write_text(tidied(path.read_text(encoding="utf-8")), encoding="utf-8")


def menu(pages: t.Iterable[str]) -> str:
    """The toctrees of the first page; ``pages``: every page of the site but the first, without its suffix."""
    left = set(pages)
    known = {name for names in MENU.values() for name in names}
    groups = {heading: [name for name in names if name in left or "collections/" in name] for heading, names in MENU.items()}
    groups[MORE] = sorted(left - known - {"index"})
    lines = []
    for heading, names in groups.items():
        if names:
            lines += ["```{toctree}", ":hidden:", f":caption: {heading}", ":maxdepth: 1", "", *names, "```", ""]
    return "\n".join(lines)


def write(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(DOCS.rglob("*")):
        place = path.relative_to(ROOT).as_posix()
        page = page_of(place)
        if not path.is_file() or place == "docs/failure-modes.md":
            continue
        if page is None:
            if path.name == "conf.py":
                shutil.copyfile(path, target / "conf.py")
            continue
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            (target / page).write_text(turned(path.read_text(encoding="utf-8"), place), encoding="utf-8")
        else:
            shutil.copyfile(path, target / page)
    catalogue = (DOCS / "failure-modes.md").read_text(encoding="utf-8")
    (target / "troubleshooting.md").write_text(turned(troubleshooting(catalogue), "docs/troubleshooting.md"), encoding="utf-8")
    (target / "playbooks.md").write_text(playbooks(ROOT / "playbooks"), encoding="utf-8")
    names = [path.relative_to(target).with_suffix("").as_posix() for path in target.rglob("*.md")]
    with open(target / "index.md", "a", encoding="utf-8") as stream:
        stream.write("\n" + menu(names))


# --- the built site


class References(html.parser.HTMLParser):
    """What a page refers to: (what, target), and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        if found.get("id"):
            self.anchors.add(found["id"])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("img", "script", "iframe", "source", "object") and (found.get("src") or found.get("data")):
            self.loads.append(found.get("src") or found["data"])
        if tag == "link" and found.get("rel") in ("stylesheet", "preload", "icon") and found.get("href"):
            self.loads.append(found["href"])


def problems_of(site: Path) -> list[str]:
    """Links and loaded files of the built site that lead nowhere, or away."""
    pages: dict[Path, References] = {}
    for path in sorted(site.rglob("*.html")):
        found = References()
        found.feed(path.read_text(encoding="utf-8"))
        pages[path.resolve()] = found
    wrong = []
    for path, found in pages.items():
        name = path.relative_to(site.resolve())
        for target in found.loads:
            if re.match(r"(https?:)?//", target):
                wrong.append(f"{name}: loads {target}")
        for target in [*found.links, *found.loads]:
            if re.match(r"([a-z]+:|//)", target) or target == "#":
                continue
            place, dummy, fragment = target.partition("#")
            there = (path.parent / place.partition("?")[0]).resolve() if place else path
            if not there.exists():
                wrong.append(f"{name}: {target}")
            elif fragment and there in pages and fragment not in pages[there].anchors:
                wrong.append(f"{name}: no {target}")
    return wrong


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("write", "tidy", "check"):
        print("docs.py write|tidy|check DIRECTORY", file=sys.stderr)
        return 2
    if arguments[0] != "check":
        (write if arguments[0] == "write" else tidy)(Path(arguments[1]))
        return 0
    wrong = problems_of(Path(arguments[1]))
    print("\n".join(wrong) or "all well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
