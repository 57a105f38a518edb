# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A role's defaults, its argument_specs and its README name the same variables, with values of the declared type."""

from __future__ import annotations

import re
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").glob("*") if path.is_dir() and any(path.rglob("*.yml")))
SITE = ROOT / "playbooks" / "site.yml"
STAGES = ["preflight", "model_download", "image_sync", "model_sync", "stop_service", "ray_cluster", "vllm_server", "verify", "boot"]

# argument_specs type: what YAML makes of a literal of that type
TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "path": (str,),
    "raw": (object,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
    "bytes": (str, int),
    "bits": (str, int),
    "json": (str, dict, list),
    "jsonarg": (str, dict, list),
}


def load(path: Path) -> t.Any:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None


def defaults(role: str) -> dict[str, t.Any]:
    return load(ROOT / "roles" / role / "defaults" / "main.yml") or {}


def options(role: str) -> dict[str, dict[str, t.Any]]:
    """Options of the entry point ``main``."""
    specs = load(ROOT / "roles" / role / "meta" / "argument_specs.yml") or {}
    return specs.get("argument_specs", {}).get("main", {}).get("options", {}) or {}


def fits(value: t.Any, option: dict[str, t.Any]) -> bool:
    """Whether a default is a value of the option's type; a template is only known at run time."""
    if isinstance(value, str) and "{{" in value:
        return True
    kind = option.get("type", "str")
    if isinstance(value, bool) and kind != "raw":
        return kind == "bool"
    return isinstance(value, TYPES[kind])


def test_every_stage_of_the_site_playbook_is_a_role() -> None:
    missing = [role for role in STAGES if role not in ROLES]
    assert not missing or not SITE.exists()


@pytest.mark.parametrize("role", ROLES)
def test_defaults_and_argument_specs_name_the_same_variables(role: str) -> None:
    """Without a default are: what is required, and the shared inputs (spark_*), which belong to the inventory."""
    without = {name for name, option in options(role).items() if option.get("required") or name.startswith("spark_")}
    assert sorted(defaults(role)) == sorted(set(options(role)) - without)


@pytest.mark.parametrize("role", ROLES)
def test_variables_carry_the_name_of_their_role(role: str) -> None:
    assert [name for name in defaults(role) if not name.startswith(f"{role}_")] == []


@pytest.mark.parametrize("role", ROLES)
def test_defaults_are_of_the_declared_type(role: str) -> None:
    specs = options(role)
    wrong = {name: value for name, value in defaults(role).items() if name in specs and not fits(value, specs[name])}
    assert wrong == {}


@pytest.mark.parametrize("role", ROLES)
def test_defaults_are_among_the_choices(role: str) -> None:
    wrong = {}
    for name, option in options(role).items():
        value = defaults(role).get(name)
        template = isinstance(value, str) and "{{" in value
        if "choices" in option and name in defaults(role) and not template and value not in option["choices"]:
            wrong[name] = value
    assert wrong == {}


@pytest.mark.parametrize("role", ROLES)
def test_literal_defaults_are_written_down_in_the_specification(role: str) -> None:
    """``default:`` in argument_specs is documentation only: where it is given, it must be true."""
    stated = {name: option["default"] for name, option in options(role).items() if "default" in option and name in defaults(role)}
    actual = {name: defaults(role).get(name) for name in stated}
    literal = {name for name, value in actual.items() if not (isinstance(value, str) and "{{" in value)}
    assert {name: stated[name] for name in literal} == {name: actual[name] for name in literal}


@pytest.mark.parametrize("role", ROLES)
def test_every_option_is_described(role: str) -> None:
    specs = load(ROOT / "roles" / role / "meta" / "argument_specs.yml") or {}
    entries = specs.get("argument_specs", {})
    assert "main" in entries
    assert [name for name, entry in entries.items() if not entry.get("short_description") or not entry.get("description")] == []
    assert [name for name, option in options(role).items() if not option.get("description") or "type" not in option] == []
    assert [name for name, option in options(role).items() if option.get("type") == "list" and "elements" not in option] == []


@pytest.mark.parametrize("role", ROLES)
def test_secrets_are_not_logged(role: str) -> None:
    secret = re.compile(r"(token|password|secret|api_key)$")
    assert [name for name, option in options(role).items() if secret.search(name) and not option.get("no_log")] == []


def results(role: str) -> set[str]:
    """Variables that the tasks of a role register or set."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "roles" / role / "tasks").glob("*.yml")]
    return {name for text in texts for name in re.findall(rf"^\s+(?:register: )?({role}_\w+)(?:$|:)", text, re.M)}


@pytest.mark.parametrize("role", ROLES)
def test_readme_lists_every_variable_and_no_other(role: str) -> None:
    text = (ROOT / "roles" / role / "README.md").read_text(encoding="utf-8")
    own = set(re.findall(rf"`({role}_\w+)`", text))
    assert sorted(name for name in options(role) if f"`{name}`" not in text) == []
    assert sorted(own - set(options(role)) - results(role)) == []


def test_shared_inputs_have_no_second_default() -> None:
    """The role preflight alone describes the inventory's inputs; ``serving_settings`` applies the defaults written there."""
    described = {role: sorted(name for name in options(role) if name.startswith("spark_")) for role in ROLES}
    assert [role for role, names in described.items() if names] == ["preflight"]
    assert [role for role in ROLES if any(name.startswith("spark_") for name in defaults(role))] == []


@pytest.mark.parametrize("role", ROLES)
def test_role_says_what_it_is(role: str) -> None:
    info = (load(ROOT / "roles" / role / "meta" / "main.yml") or {}).get("galaxy_info", {})
    assert info.get("description")
    assert info.get("license") == "GPL-3.0-or-later"
    assert not (load(ROOT / "roles" / role / "meta" / "main.yml") or {}).get("dependencies")


@pytest.mark.parametrize(
    ("value", "option", "expected"),
    [
        ("{{ spark_api_port | default(30000) }}", {"type": "int"}, True),
        (30000, {"type": "int"}, True),
        ("30000", {"type": "int"}, False),
        (True, {"type": "int"}, False),
        (1, {"type": "bool"}, False),
        (1, {"type": "float"}, True),
        ([], {"type": "dict"}, False),
        (None, {"type": "str"}, False),
        (None, {"type": "raw"}, True),
    ],
)
def test_fits(value: t.Any, option: dict[str, t.Any], expected: bool) -> None:
    assert fits(value, option) is expected


def inputs(data: t.Any) -> set[str]:
    """What the playbooks' own inputs are called: the keys of ``also`` (or ``stop_also``), wherever it stands."""
    if isinstance(data, list):
        return set().union(*map(inputs, data))
    if not isinstance(data, dict):
        return set()
    return {
        name
        for key, value in data.items()
        for name in (value if key in ("also", "stop_also") and isinstance(value, dict) else inputs(value))
    }


def test_every_input_that_a_text_names_can_be_set() -> None:
    known = set(options("preflight")) | {"spark_stop_first"}  # the last one is what docs/design.md decides not to have
    for path in [*ROOT.glob("playbooks/*.yml"), *ROOT.glob("roles/*/tasks/*.yml")]:
        known |= inputs(load(path))
    unknown = {}
    for pattern in (
        "plugins/**/*.py",
        "roles/**/*.yml",
        "roles/**/*.md",
        "docs/**/*.md",
        "README.md",
        "playbooks/*.yml",
        "inventory/s*/**/*.yml",
    ):
        for path in ROOT.glob(pattern):
            named = set(re.findall(r"(?<![\w.])spark_[a-z0-9_]*[a-z0-9](?![\w*<{])", path.read_text(encoding="utf-8")))
            unknown |= {name: str(path.relative_to(ROOT)) for name in named - known}
    assert not unknown


def test_a_restart_is_proven_like_a_launch() -> None:
    """What runs is stopped right after: rules and fabric are asked although it runs as planned, and in no other playbook."""
    named = {
        path.name
        for path in (ROOT / "playbooks").glob("*.yml")
        for play in load(path)
        for task in play.get("tasks") or []
        if (task.get("vars") or {}).get("preflight_launch") is True and "preflight" in str(task)
    }
    assert named == {"restart.yml"}
    plan, check = load(ROOT / "roles" / "preflight" / "tasks" / "plan.yml")
    assert plan["dgxspark.serving.serving_plan"]["launch"] == "{{ preflight_launch | default(false) }}"

    def asked(in_place: bool, **given: bool) -> bool:
        variables = {"preflight_inputs": {"peers": ["x"]}, "preflight_planned": {"plan": {"server_in_place": in_place}}, **given}
        templar = Templar(loader=DataLoader(), variables=variables)
        return all(templar.template(trust_as_template("{{ " + condition + " }}")) for condition in check["when"])

    assert [asked(True), asked(False), asked(True, preflight_launch=True)] == [False, True, True]


def test_an_inventory_of_one_node_needs_no_group_of_workers() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("roles", "playbooks")
        for path in (ROOT / folder).rglob("*.yml")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"groups(\[['\"]ray_workers['\"]\]|\.ray_workers)(?!\s*\|\s*default\()", line)
    ]
    assert found == []
