# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules for the files of this repository: licence lines, no machine's own paths, everything documented and tested."""

from __future__ import annotations

import ast
import re
import subprocess
import typing as t
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

# Files that have comments and whose first lines therefore name the licence.
WITH_COMMENTS = {".py", ".yml", ".yaml", ".sh", ".toml", ".cfg", ".ini", ".j2", ".conf", ".service", ".timer"}
NAMES_WITH_COMMENTS = {"Makefile", "Dockerfile", ".gitignore", ".editorconfig", ".yamllint"}
# Written by a program, or the recorded output of one.
WITHOUT_LICENCE = re.compile(r"(^|/)fixtures/|^changelogs/changelog\.yaml$")

# Pieces, so that this file does not find itself.
MACHINE_PATHS = ["/" + name for name in ("work/", "root/.pyenv", "opt/pypi", "opt/wheels", "home/runner", "Users/")]

MODULES = sorted((ROOT / "plugins" / "modules").glob("*.py"))


def needs_licence(name: Path, first_line: str) -> bool:
    if WITHOUT_LICENCE.search(name.as_posix()):
        return False
    return name.suffix in WITH_COMMENTS or name.name in NAMES_WITH_COMMENTS or first_line.startswith("#!")


def text_of(name: Path) -> str | None:
    """The text of a file, or None for a binary one."""
    try:
        return (ROOT / name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def constants(path: Path) -> dict[str, t.Any]:
    """String constants that a Python file sets at its top level."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
            found[node.targets[0].id] = node.value.value
    return found


def documentation(path: Path) -> dict[str, t.Any]:
    return yaml.safe_load(constants(path).get("DOCUMENTATION") or "{}")


def test_files_name_their_licence(tracked: list[Path]) -> None:
    missing = []
    for name in tracked:
        text = text_of(name)
        if text and needs_licence(name, text.partition("\n")[0]) and "SPDX-License-Identifier: GPL-3.0-or-later" not in text[:600]:
            missing.append(name.as_posix())
    assert missing == []


def test_no_path_of_one_machine(tracked: list[Path]) -> None:
    found = [f"{name}: {path}" for name in tracked for path in MACHINE_PATHS if path in (text_of(name) or "")]
    assert found == []


def test_no_file_is_large(tracked: list[Path]) -> None:
    assert [name.as_posix() for name in tracked if (ROOT / name).stat().st_size > 500_000] == []


def test_no_private_keys(tracked: list[Path]) -> None:
    begin = "-----BEGIN " + "OPENSSH PRIVATE KEY"
    assert [name.as_posix() for name in tracked if begin in (text_of(name) or "")] == []


def test_scripts_can_be_run(tracked: list[Path]) -> None:
    """What has a `#!` line is executable, modules excepted: Ansible sends those."""
    scripts = [name for name in tracked if (text_of(name) or "").startswith("#!") and name.parts[0] != "plugins"]
    assert scripts
    wrong = [name.as_posix() for name in scripts if not (ROOT / name).stat().st_mode & 0o100 and name.suffix != ".j2"]
    assert [name for name in wrong if "/files/" not in name] == []


def test_no_package_files(tracked: list[Path]) -> None:
    """Collections are namespace packages."""
    assert [name.as_posix() for name in tracked if name.name == "__init__.py"] == []


def test_the_link_that_makes_a_plain_clone_work() -> None:
    link = ROOT / "playbooks" / "collections" / "ansible_collections" / "dgxspark" / "serving"
    assert link.is_symlink()
    assert str(link.readlink()) == "../../../.."
    assert link.resolve() == ROOT
    ignored = subprocess.run(["git", "-C", str(ROOT), "check-ignore", "-q", str(link.relative_to(ROOT))], check=False, timeout=30)
    assert ignored.returncode == 1


def test_local_links_in_documents_lead_somewhere(tracked: list[Path]) -> None:
    broken = []
    for name in tracked:
        if name.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(name) or ""):
            if "://" not in target and not target.startswith("mailto:") and not (ROOT / name.parent / target).exists():
                broken.append(f"{name}: {target}")
    assert broken == []


def test_sanity_ignores_give_a_reason() -> None:
    lines = [
        line for path in sorted((ROOT / "tests" / "sanity").glob("ignore-*.txt")) for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert lines
    assert [line for line in lines if " # " not in line] == []


def test_action_group_lists_every_module() -> None:
    runtime = yaml.safe_load((ROOT / "meta" / "runtime.yml").read_text(encoding="utf-8"))
    listed = runtime["action_groups"]["serving"]
    assert listed == sorted(listed)
    assert [path.stem for path in MODULES if path.stem not in listed] == []


def test_utilities_are_private() -> None:
    assert [path.name for path in (ROOT / "plugins" / "module_utils").glob("*.py") if not path.name.startswith("_")] == []


def test_utilities_do_not_know_ansible_modules() -> None:
    """What decides is plain Python: it can be tested, and run anywhere."""
    users = [
        path.name
        for path in (ROOT / "plugins" / "module_utils").glob("*.py")
        if re.search(r"^(from|import) ansible\.", path.read_text("utf-8"), re.M)
    ]
    assert users == []


def test_utilities_say_what_they_are() -> None:
    silent = [
        path.name for path in (ROOT / "plugins" / "module_utils").glob("*.py") if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert silent == []


def test_plugins_have_unit_tests() -> None:
    missing = []
    for kind in ("module_utils", "plugin_utils", "modules", "action", "callback"):
        for path in sorted((ROOT / "plugins" / kind).glob("*.py")):
            if not any((ROOT / "tests" / "unit" / "plugins" / kind).glob(f"test_{path.stem}*.py")):
                missing.append(f"{kind}/{path.name}")
    assert missing == []


def test_actions_belong_to_a_module() -> None:
    modules = {path.stem for path in MODULES}
    assert [path.name for path in (ROOT / "plugins" / "action").glob("*.py") if path.stem not in modules] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
class TestModule:
    def test_parts(self, path: Path) -> None:
        parts = constants(path)
        assert [name for name in ("DOCUMENTATION", "EXAMPLES", "RETURN") if not parts.get(name)] == []
        assert documentation(path)["module"] == path.stem
        assert documentation(path)["short_description"]
        assert documentation(path)["author"]
        assert documentation(path)["version_added"]

    def test_attributes(self, path: Path) -> None:
        attributes = documentation(path).get("attributes", {})
        assert [name for name in ("check_mode", "diff_mode", "idempotent") if not attributes.get(name, {}).get("support")] == []
        unexplained = [
            name for name, value in attributes.items() if value.get("support") in ("partial", "none") and not value.get("details")
        ]
        assert unexplained == []

    def test_examples_use_the_full_name(self, path: Path) -> None:
        examples = yaml.safe_load(constants(path)["EXAMPLES"])
        assert any(f"dgxspark.serving.{path.stem}" in task for task in examples)

    def test_readers_support_check_mode(self, path: Path) -> None:
        if path.stem.endswith(("_info", "_ready", "_check")):
            assert documentation(path)["attributes"]["check_mode"]["support"] == "full"


@pytest.mark.parametrize(
    ("name", "first_line", "expected"),
    [
        ("plugins/modules/a.py", "", True),
        ("lab/on", "#!/usr/bin/env bash", True),
        ("docs/a.md", "# a", False),
        ("tests/unit/plugins/module_utils/fixtures/a.yml", "---", False),
        ("Makefile", "", True),
    ],
)
def test_needs_licence(name: str, first_line: str, expected: bool) -> None:
    assert needs_licence(Path(name), first_line) is expected
