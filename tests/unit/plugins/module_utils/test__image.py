# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Identity of images, words for docker's errors, and the registry view of what lies on disk."""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import tarfile
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _image

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "image"


def inspect(store: str) -> dict[str, t.Any]:
    return json.loads((FIXTURES / f"inspect_{store}.json").read_text())[0]


def test_one_image_in_two_stores_has_two_ids_and_one_fingerprint() -> None:
    first, second = inspect("containerd"), inspect("classic")
    assert first["Id"] != second["Id"]
    assert _image.image_fingerprint(first) == _image.image_fingerprint(second)
    assert len(_image.image_fingerprint(first)) == 64


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda data: data.update(Id="sha256:0", RepoTags=["x:1"], RepoDigests=[], Created="", Size=1), True),
        (lambda data: data["Config"].update(User=None, WorkingDir=None), True),
        (lambda data: data["Config"].pop("User"), True),
        (lambda data: data["Config"].update(Labels={"a": "b"}, Hostname="x"), True),
        (lambda data: data["RootFS"]["Layers"].reverse(), False),
        (lambda data: data["Config"].update(Env=["A=c"]), False),
        (lambda data: data["Config"].update(Cmd=None), False),
        (lambda data: data["Config"].update(Entrypoint=["bash"]), False),
        (lambda data: data["Config"].update(User="1000"), False),
        (lambda data: data["Config"].update(WorkingDir="/app"), False),
        (lambda data: data.update(Architecture="arm64"), False),
    ],
)
def test_fingerprint_sees_content_and_nothing_else(change: t.Callable[[dict[str, t.Any]], t.Any], same: bool) -> None:
    data = inspect("classic")
    changed = copy.deepcopy(data)
    change(changed)
    assert (_image.image_fingerprint(changed) == _image.image_fingerprint(data)) is same


def test_fingerprint_of_no_image_is_empty() -> None:
    assert _image.image_fingerprint({}) == ""


def test_record_of_an_image() -> None:
    record = _image.image_record(inspect("containerd"), "datatest-img:1")
    assert record["present"] and record["reference"] == "datatest-img:1"
    assert record["env"] == {"A": "b"} and record["entrypoint"] == ["sh"]
    assert record["architecture"] == "amd64" and record["size"] > 20_000_000 and len(record["layers"]) == 2
    assert set(record) == set(_image.absent_record("x"))


@pytest.mark.parametrize("nothing", [None, {}])
def test_record_of_nothing(nothing: dict[str, t.Any] | None) -> None:
    record = _image.image_record(nothing, "a:1")
    assert record["present"] is False and record["fingerprint"] == "" and record["reference"] == "a:1"


DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("reference", "parts", "local"),
    [
        ("vllm", ("vllm", "", ""), "vllm:latest"),
        ("org/vllm:1.2", ("org/vllm", "1.2", ""), "org/vllm:1.2"),
        ("10.1.230.2:5000/org/vllm:1", ("10.1.230.2:5000/org/vllm", "1", ""), "10.1.230.2:5000/org/vllm:1"),
        ("10.1.230.2:5000/vllm", ("10.1.230.2:5000/vllm", "", ""), "10.1.230.2:5000/vllm:latest"),
        (f"org/vllm@{DIGEST}", ("org/vllm", "", DIGEST), "org/vllm:dgxspark-abababababababab"),
        (f"org/vllm:9@{DIGEST}", ("org/vllm", "9", DIGEST), "org/vllm:dgxspark-abababababababab"),
    ],
)
def test_references(reference: str, parts: tuple[str, str, str], local: str) -> None:
    assert tuple(_image.split_reference(reference)) == parts
    assert _image.local_reference(reference) == local


@pytest.mark.parametrize("reference", ["", "Org/Vllm", "vllm@sha256:12", "vllm:", "vllm:a b", "a//", "-x", "a;rm -rf"])
def test_bad_references_name_themselves(reference: str) -> None:
    with pytest.raises(ValueError, match="'"):
        _image.split_reference(reference)


@pytest.mark.parametrize(("version", "text", "ident"), json.loads((FIXTURES / "pull_errors.json").read_text()))
def test_pull_errors_are_told_apart(version: str, text: str, ident: str) -> None:
    got, cause, remedy = _image.classify_pull_error("Using default tag: latest\n" + text + "\n")
    assert got == ident, version
    assert cause and remedy


def test_architecture_names() -> None:
    assert [_image.docker_architecture(item) for item in ("aarch64", "x86_64", "riscv64")] == ["arm64", "amd64", "riscv64"]


# --- content store ---


class Store:
    """A containerd content store in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layer = gzip.compress(b"layer" * 100)
        diff = "sha256:" + hashlib.sha256(b"layer" * 100).hexdigest()
        self.config = self.put({"architecture": "arm64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [diff]}})
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **self.config},
            "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", **self.blob(self.layer)}],
        }
        self.manifest = self.put(manifest)
        attestation = self.put({"schemaVersion": 2, "config": self.config, "layers": []})
        unknown = {"architecture": "unknown", "os": "unknown"}
        self.index = self.put(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.index.v1+json",
                "manifests": [
                    {**attestation, "platform": unknown, "annotations": {"vnd.docker.reference.type": "attestation-manifest"}},
                    {"digest": "sha256:" + "0" * 64, "size": 3, "platform": {"architecture": "amd64", "os": "linux"}},
                    {**self.manifest, "mediaType": manifest["mediaType"], "platform": {"architecture": "arm64", "os": "linux"}},
                ],
            }
        )
        self.inspect = {"Id": self.index["digest"], "Architecture": "arm64", "Os": "linux", "RootFS": {"Layers": [diff]}}

    def blob(self, data: bytes) -> dict[str, t.Any]:
        name = hashlib.sha256(data).hexdigest()
        (self.root / name).write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data)}

    def put(self, data: t.Any) -> dict[str, t.Any]:
        return self.blob(json.dumps(data).encode())

    def path(self, descriptor: dict[str, t.Any]) -> Path:
        return self.root / descriptor["digest"][7:]


@pytest.mark.parametrize("start", ["index", "manifest"])
def test_view_picks_the_platform_and_leaves_attestations(tmp_path: Path, start: str) -> None:
    store = Store(tmp_path)
    view = _image.view_of_content(str(tmp_path), {**store.inspect, "Id": getattr(store, start)["digest"]})
    assert view["manifest_digest"] == store.manifest["digest"]
    assert view["manifests"] == {store.manifest["digest"]: "application/vnd.oci.image.manifest.v1+json"}
    assert len(view["blobs"]) == 3
    assert view["bytes"] == store.config["size"] + len(store.layer)
    assert all(Path(entry["path"]).stat().st_size == entry["size"] for entry in view["blobs"].values())


def test_view_refuses_what_is_not_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    layer = tmp_path / hashlib.sha256(store.layer).hexdigest()
    cases: list[tuple[t.Callable[[], t.Any], dict[str, t.Any], str]] = [
        (lambda: None, {"Architecture": "riscv64"}, "no manifest for linux/riscv64"),
        (lambda: None, {"RootFS": {"Layers": ["sha256:1"]}}, "other layers"),
        (lambda: None, {"Id": "sha256:" + "1" * 64}, "not in the content store"),
        (lambda: None, {"Id": "../../etc/passwd"}, "not a sha256 digest"),
        (lambda: layer.write_bytes(b"short"), {}, "5 bytes, not"),
        (layer.unlink, {}, "not in the content store"),
    ]
    for break_it, over, message in cases:
        break_it()
        with pytest.raises(_image.NotServable, match=message):
            _image.view_of_content(str(tmp_path), {**store.inspect, **over})


def test_content_roots() -> None:
    roots = _image.content_roots("/data/docker", 'version = 2\nroot = "/data/containerd"\nstate = "/run/containerd"\n')
    tail = "/io.containerd.content.v1.content/blobs/sha256"
    assert roots == ["/data/containerd" + tail, "/var/lib/containerd" + tail, "/data/docker/containerd/daemon" + tail]


# --- docker save ---


def save_stream(members: list[tuple[str, bytes | str]]) -> io.BytesIO:
    """A tar like docker save writes; a str content is a symbolic link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    out.seek(0)
    return out


OLD = [
    ("aa/layer.tar", b"L" * 3000),
    ("bb/layer.tar", "../aa/layer.tar"),
    ("cc.json", b'{"rootfs":{}}'),
    ("aa/VERSION", b"1.0"),
    ("repositories", b"{}"),
]
OLD_LIST = [{"Config": "cc.json", "RepoTags": None, "Layers": ["aa/layer.tar", "bb/layer.tar"]}]
OCI = [
    ("blobs/sha256/11", gzip.compress(b"x")),
    ("blobs/sha256/22", b"\x28\xb5\x2f\xfdzz"),
    ("blobs/sha256/33", b"{}"),
    ("index.json", b"{}"),
]
OCI_LIST = [{"Config": "blobs/sha256/33", "RepoTags": ["a:1"], "Layers": ["blobs/sha256/11", "blobs/sha256/22"]}]


@pytest.mark.parametrize(
    ("members", "listing", "kinds"),
    [(OLD, OLD_LIST, ["tar", "tar"]), (OCI, OCI_LIST, ["tar+gzip", "tar+zstd"])],
)
def test_stage_both_forms_of_docker_save(tmp_path: Path, members: t.Any, listing: t.Any, kinds: list[str]) -> None:
    stream = save_stream([*members, ("manifest.json", json.dumps(listing).encode())])
    view = _image.stage(stream, str(tmp_path / "x"))
    manifest = json.loads(Path(view["blobs"][view["manifest_digest"][7:]]["path"]).read_text())
    assert [layer["mediaType"].rpartition(".")[2] for layer in manifest["layers"]] == kinds
    for entry in view["blobs"]:
        assert hashlib.sha256((tmp_path / "x" / "blobs" / entry).read_bytes()).hexdigest() == entry
    assert {item.name for item in (tmp_path / "x" / "blobs").iterdir()} == set(view["blobs"])
    assert _image.view_of_stage(str(tmp_path / "x")) == view


def test_stage_of_a_broken_stream(tmp_path: Path) -> None:
    whole = save_stream([*OLD, ("manifest.json", json.dumps(OLD_LIST).encode())]).getvalue()
    for data, message in [
        (whole[:2000], "broken stream"),
        (b"", "no complete image|broken"),
        (save_stream(OLD).getvalue(), "no complete image"),
    ]:
        with pytest.raises(_image.NotServable, match=message):
            _image.stage(io.BytesIO(data), str(tmp_path / "y"))
    with pytest.raises(_image.NotServable, match="nothing is staged"):
        _image.view_of_stage(str(tmp_path / "y"))


def test_a_staging_that_lost_a_blob_is_not_used(tmp_path: Path) -> None:
    view = _image.stage(save_stream([*OLD, ("manifest.json", json.dumps(OLD_LIST).encode())]), str(tmp_path))
    Path(next(iter(view["blobs"].values()))["path"]).unlink()
    with pytest.raises(_image.NotServable):
        _image.view_of_stage(str(tmp_path))


# --- before a copy ---


@pytest.mark.parametrize(
    ("layers", "present", "missing"),
    [
        ([("a", 10), ("b", 20)], [], 30),
        ([("a", 10), ("b", 20)], ["a"], 20),
        ([("a", 10), ("b", 20)], ["a", "b", "c"], 0),
        ([("a", 10), ("a", 10)], [], 10),  # one layer twice crosses once
        ([], [], 0),
    ],
)
def test_missing_bytes(layers: list[tuple[str, int]], present: list[str], missing: int) -> None:
    assert _image.missing_bytes([{"diff_id": name, "bytes": size} for name, size in layers], present) == missing


@pytest.mark.parametrize(
    ("missing", "content", "unpacked", "need"),
    [(10, 10, 25, 35), (2, 10, 25, 7), (10, 10, 10, 20), (10, 10, 5, 20), (0, 10, 25, 0), (0, 0, 0, 0)],
)
def test_space_for(missing: int, content: int, unpacked: int, need: int) -> None:
    """Packed and unpacked; never less than twice, as a layer that was not packed lies there twice too."""
    assert _image.space_for(missing, content, unpacked) == need


def test_layers_that_a_store_has_met(tmp_path: Path) -> None:
    """By their digest on the wire, as the registry names them."""
    known = tmp_path / "image" / "overlay2" / "distribution" / "diffid-by-digest" / "sha256"
    known.mkdir(parents=True)
    (known / "aa").write_text("sha256:1111")
    (tmp_path / "bb").write_bytes(b"")
    assert [_image.local_diff_id([str(tmp_path)], f"sha256:{name}") for name in ("aa", "bb")] == ["sha256:1111", ""]
    assert [_image.has_blob([str(tmp_path)], f"sha256:{name}") for name in ("aa", "bb")] == [False, True]


@pytest.mark.parametrize(
    ("host", "insecure"),
    [
        ("127.0.0.1:5000", True),
        ("127.4.5.6:5000", True),
        ("localhost:5000", True),
        ("10.1.230.2:5000", True),
        ("10.1.230.3:5000", False),
        ("docker.io", False),
        ("org", False),
    ],
)
def test_insecure_registry(host: str, insecure: bool) -> None:
    config = {
        "InsecureRegistryCIDRs": ["127.0.0.0/8", "::1/128"],
        "IndexConfigs": {"docker.io": {"Secure": True}, "10.1.230.2:5000": {"Secure": False}},
    }
    assert _image.insecure_registry(json.dumps(config), host) is insecure
    assert not _image.insecure_registry("nonsense", "127.0.0.1:5000")


def test_pulled_bytes() -> None:
    """As docker pull draws it on a terminal; a layer that is loaded counts as a whole from then on."""
    layers: dict[str, tuple[int, int]] = {}
    first = "\x1b[2A\x1b[2K\r129882589ff3: Downloading [=>    ]  1.5MB/3MB\x1b[2B\r30d22edc91e5: Downloading [>  ]  500kB/2GB\r\nb89a4dab3fc3: Waiting"
    assert _image.pulled_bytes(first, layers) == 2_000_000
    assert _image.pulled_bytes("129882589ff3: Download complete", layers) == 3_500_000
    assert _image.pulled_bytes("129882589ff3: Extracting [>  ]  1MB/3MB", layers) == 3_500_000


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("filesystem layer verification failed for digest sha256:1", True),
        (
            'failed commit on ref "layer-sha256:b": commit failed: unexpected commit digest sha256:9, expected sha256:b: failed precondition',
            True,
        ),
        ("failed to read expected number of bytes: unexpected EOF", True),
        ("read tcp 127.0.0.1:1->127.0.0.1:2: read: connection reset by peer", True),
        ("toomanyrequests: toomanyrequests", False),
        ("write /x: no space left on device", False),
        ("manifest unknown", False),
    ],
)
def test_what_is_tried_again(text: str, again: bool) -> None:
    assert _image.worth_another_try(text) is again


def test_archive_inspect(tmp_path: Path) -> None:
    """The same fingerprint as Docker's after the load; what cannot be told is None."""
    config = {"architecture": "arm64", "os": "linux", "config": {"Cmd": ["x"]}, "rootfs": {"diff_ids": ["sha256:1"]}, "created": "now"}
    listing = [{"Config": "c.json", "RepoTags": ["a:1", "b:2"], "Layers": ["l"]}]
    path = tmp_path / "a.tar"
    path.write_bytes(
        save_stream([("l", b"x"), ("c.json", json.dumps(config).encode()), ("manifest.json", json.dumps(listing).encode())]).getvalue()
    )
    found = _image.archive_inspect(str(path))
    assert found and (found["RepoTags"], found["Images"], found["Architecture"]) == (["a:1", "b:2"], 1, "arm64")
    docker = {
        "Id": "sha256:9",
        "Architecture": "arm64",
        "Os": "linux",
        "RootFS": {"Layers": ["sha256:1"]},
        "Config": {"Cmd": ["x"], "Env": None},
    }
    assert _image.image_fingerprint(found) == _image.image_fingerprint(docker)
    for content in (b"", gzip.compress(path.read_bytes()), save_stream([("index.json", b"{}")]).getvalue(), path.read_bytes()[:700]):
        (tmp_path / "b.tar").write_bytes(content)
        assert _image.archive_inspect(str(tmp_path / "b.tar")) is None


def test_loaded_names() -> None:
    text = "Loading layer [=>]\nLoaded image: org/a:1\nLoaded image ID: sha256:1234\n"
    assert _image.loaded_names(text) == ["org/a:1", "sha256:1234"]


def test_layers_of_a_view(tmp_path: Path) -> None:
    """What crosses for each unpacked layer, from both sources; nothing when the two lists do not fit."""
    store = Store(tmp_path)
    view = _image.view_of_content(str(tmp_path), store.inspect)
    assert view["layers"] == [{"diff_id": store.inspect["RootFS"]["Layers"][0], "bytes": len(store.layer)}]
    assert _image.layer_sizes(["a", "b"], [{"size": 1}]) == []


ARM = {"digest": "d", "platform": {"architecture": "arm64", "os": "linux"}}


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({"layers": [], "config": {}}, {"layers": [], "config": {}}),
        ({"manifests": [ARM]}, ARM),
        ({"something": 1}, None),
        ([1], None),
    ],
)
def test_pick_for_platform(document: t.Any, found: t.Any) -> None:
    assert _image.pick_for_platform(document, "arm64") == found
