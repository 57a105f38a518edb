# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which versions of the image this collection brought to a node: the present one, the one before it for a way back, and what may go.

PRIVATE to the collection. Pure functions over plain data; image_sync keeps the list in a file of the node, oldest first. An image that was there before
us is in the list too (``ours`` false), so that the order is right, and is never removed. Each version has the ``service`` that it was brought for (older
lists have none, which is the service without a name): a service keeps, forgets and removes its own, and no image goes that another one has.
"""

from __future__ import annotations

import typing as t

Version = dict[str, t.Any]


def keep_tag(reference: str, fingerprint: str) -> str:
    """The name of a replaced version: its own tag was given to the new one."""
    return f"{reference.rpartition(':')[0]}:dgxspark-{fingerprint[:16]}"


def readable(data: t.Any) -> list[Version]:
    """The versions of a record file; what does not look like one is left out, so that a broken file never removes an image."""
    items = data.get("versions") if isinstance(data, dict) else None
    texts = ("fingerprint", "reference", "id")
    good = [item for item in items or [] if isinstance(item, dict) and all(isinstance(item.get(key), str) and item[key] for key in texts)]
    return [
        {**{key: item[key] for key in texts}, "ours": item.get("ours") is True, "service": str(item.get("service") or "")} for item in good
    ]


def of_service(versions: t.Iterable[Version], service: str) -> list[Version]:
    """Those of this service, in their order."""
    return [item for item in versions if item["service"] == service]


def of_others(versions: t.Iterable[Version], service: str) -> list[Version]:
    """Those of the other services."""
    return [item for item in versions if item["service"] != service]


def run_by(
    containers: t.Iterable[t.Mapping[str, t.Any]],
    images: t.Iterable[t.Mapping[str, t.Any]],
    fingerprint: t.Callable[[t.Mapping[str, t.Any]], str],
) -> list[Version]:
    """The same for what containers ({service, image, image_id}) use: also a service that never wrote down a version has an image."""
    contents = {str(image["Id"]): fingerprint(image) for image in images}
    return [
        {
            "fingerprint": contents[item["image_id"]],
            "reference": str(item["image"]),
            "id": item["image_id"],
            "ours": False,
            "service": item["service"],
        }
        for item in containers
        if item["image_id"] in contents
    ]


def remember(versions: t.Sequence[Version], new: Version) -> list[Version]:
    """The list with ``new`` as the present version of its service. One that comes back moves to the end; what we brought for any service stays ours."""
    same = [item for item in versions if item["fingerprint"] == new["fingerprint"]]
    ours = bool(new["ours"] or any(item["ours"] for item in same))
    return [*[item for item in versions if item not in of_service(same, new["service"])], {**new, "ours": ours}]


def surplus(versions: t.Sequence[Version], keep: int, service: str = "") -> list[Version]:
    """Those of the service that may go: ours, and older than its present one and ``keep`` before it."""
    own = of_service(versions, service)
    return [item for item in own[: max(0, len(own) - 1 - keep)] if item["ours"]]


def _names(version: Version) -> set[str]:
    """The names that a version can have from us."""
    return {version["reference"], keep_tag(version["reference"], version["fingerprint"])}


def _spare(image: t.Mapping[str, t.Any], wanted: t.Sequence[str], holders: t.Sequence[Version]) -> list[str]:
    """Those of the ``wanted`` names of an image that can go while ``holders`` have it: not theirs, and not the last, with which it would go itself."""
    if not holders:
        return list(wanted)
    held = set().union(*(_names(item) for item in holders))
    going = [name for name in wanted if name not in held and "@" not in name]
    return going if set(image.get("RepoTags") or []) - set(going) else []


def names_to_remove(
    version: Version,
    images: t.Iterable[t.Mapping[str, t.Any]],
    fingerprint: t.Callable[[t.Mapping[str, t.Any]], str],
    others: t.Iterable[Version] = (),
) -> list[str]:
    """Names of ours that still stand for exactly this content; the Id where nobody gave it a name any more. A name of somebody else keeps its image, and
    so do ``others``, what other services have.
    """
    own = _names(version)
    holders = [item for item in others if item["fingerprint"] == version["fingerprint"]]
    found: list[str] = []
    for image in images:
        if fingerprint(image) != version["fingerprint"]:
            continue
        tags = list(image.get("RepoTags") or [])
        repositories = {str(item).partition("@")[0] for item in image.get("RepoDigests") or []}
        found += _spare(image, [tag for tag in tags if tag in own], holders)
        if not tags and not holders and repositories <= {version["reference"].rpartition(":")[0]}:
            found.append(str(image["Id"]))
    return found


def names_to_forget(
    versions: t.Iterable[Version],
    names: t.Sequence[str],
    images: t.Sequence[t.Mapping[str, t.Any]],
    fingerprint: t.Callable[[t.Mapping[str, t.Any]], str],
    others: t.Sequence[Version] = (),
) -> list[str]:
    """Everything that goes when the image of a service shall go: the image under its ``names``, each version of it that was kept under a name of ours,
    also without a list (its name tells), and its ``versions`` under other references that we brought. Names of somebody else stay, and what
    ``others``, the versions of other services, have.
    """
    found: list[str] = []
    for image in images:
        kept = {keep_tag(name, fingerprint(image)) for name in names if "@" not in name}
        held = [*(image.get("RepoDigests") or []), *(image.get("RepoTags") or [])]
        holders = [item for item in others if item["fingerprint"] == fingerprint(image)]
        found += _spare(image, [name for name in held if name in kept or name in names], holders)
    for version in versions:
        found += names_to_remove(version, images, fingerprint, others) if version["ours"] else []
    return list(dict.fromkeys(found))
