# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which versions of the image this collection brought to a node: the present one, the one before it for a way back, and what may go.

PRIVATE to the collection. Pure functions over plain data; image_sync keeps the list in a file of the node, oldest first. An image that was there before
us is in the list too (``ours`` false), so that the order is right, and is never removed.
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
    return [{**{key: item[key] for key in texts}, "ours": item.get("ours") is True} for item in good]


def remember(versions: t.Sequence[Version], new: Version) -> list[Version]:
    """The list with ``new`` as the present version. One that comes back moves to the end, and stays ours if it was ours."""
    same = [item for item in versions if item["fingerprint"] == new["fingerprint"]]
    ours = bool(new["ours"] or any(item["ours"] for item in same))
    return [*[item for item in versions if item["fingerprint"] != new["fingerprint"]], {**new, "ours": ours}]


def surplus(versions: t.Sequence[Version], keep: int) -> list[Version]:
    """Those that may go: ours, and older than the present one and ``keep`` before it."""
    return [item for item in versions[: max(0, len(versions) - 1 - keep)] if item["ours"]]


def names_to_remove(
    version: Version, images: t.Iterable[t.Mapping[str, t.Any]], fingerprint: t.Callable[[t.Mapping[str, t.Any]], str]
) -> list[str]:
    """Names of ours that still stand for exactly this content; the Id where nobody gave it a name any more. A name of somebody else keeps its image."""
    own = {version["reference"], keep_tag(version["reference"], version["fingerprint"])}
    found: list[str] = []
    for image in images:
        if fingerprint(image) != version["fingerprint"]:
            continue
        tags = list(image.get("RepoTags") or [])
        repositories = {str(item).partition("@")[0] for item in image.get("RepoDigests") or []}
        found += [tag for tag in tags if tag in own]
        if not tags and repositories <= {version["reference"].rpartition(":")[0]}:
            found.append(str(image["Id"]))
    return found


def names_to_forget(
    versions: t.Iterable[Version],
    names: t.Sequence[str],
    images: t.Sequence[t.Mapping[str, t.Any]],
    fingerprint: t.Callable[[t.Mapping[str, t.Any]], str],
) -> list[str]:
    """Everything that goes when the image shall go: the image under its ``names``, each version of it that was kept under a name of ours, also
    without a list (its name tells), and the versions under other references that we brought. Names of somebody else stay.
    """
    found: list[str] = []
    for image in images:
        kept = {keep_tag(name, fingerprint(image)) for name in names if "@" not in name}
        held = [*(image.get("RepoDigests") or []), *(image.get("RepoTags") or [])]
        found += [name for name in held if name in kept or name in names]
    for version in versions:
        found += names_to_remove(version, images, fingerprint) if version["ours"] else []
    return list(dict.fromkeys(found))
