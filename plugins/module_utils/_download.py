# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asking a Hugging Face hub what a snapshot consists of, and the program that downloads it inside the serving image.

PRIVATE to the collection. This file is also that program (``python3 _download.py JOB``): its source is written to the node and mounted
into the container, so
it uses the standard library and imports nothing of the collection; ``huggingface_hub`` is imported only where the program runs.

The HTTP API of the hub: ``/api/models/<repo>/revision/<rev>?blobs=true`` (files with size, git blob id,
sha256 of LFS files), errors told apart by status and the
headers X-Error-Code and X-Error-Message, rate limits by 429 with Retry-After.
"""

from __future__ import annotations

import email.utils
import errno
import fnmatch
import json
import os
import sys
import time
import typing as t
import urllib.error
import urllib.parse
import urllib.request

DEFAULT_ENDPOINT = "https://huggingface.co"


class HubError(Exception):
    """A classified failure; ``data`` has kind, status, code, message, retry_after."""

    def __init__(self, kind: str, message: str, *, status: int = 0, code: str = "", retry_after: float = 0.0) -> None:
        super().__init__(f"{kind}: {message}")
        self.data: dict[str, t.Any] = {"kind": kind, "status": status, "code": code, "message": message, "retry_after": retry_after}


# --- pure ---


def retry_after_seconds(value: str, now: float) -> float:
    """Seconds of a Retry-After header (number or date); 0 when there is none or it makes no sense."""
    text = (value or "").strip()
    if text.replace(".", "", 1).isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except (TypeError, ValueError, IndexError):
        return 0.0


def classify(status: int, headers: t.Mapping[str, str], now: float) -> HubError:
    """What an error answer of the hub means. ``headers`` must be case-insensitive or have lower-case keys."""
    code = headers.get("x-error-code") or ""
    message = headers.get("x-error-message") or ""
    if status == 429:
        wait = retry_after_seconds(headers.get("retry-after") or "", now)
        return HubError("hub-429", message or "too many requests", status=status, code=code, retry_after=wait)
    if status == 401:
        return HubError("hub-401", message or "not authenticated", status=status, code=code)
    if status in (403, 451):
        return HubError("hub-403", message or "no access", status=status, code=code)
    if status == 404:
        return HubError("hub-404", message or "not found", status=status, code=code)
    return HubError("hub-unreachable", f"HTTP {status} {message}".strip(), status=status, code=code)


def _matches(path: str, patterns: t.Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern + "*" if pattern.endswith("/") else pattern) for pattern in patterns)


def wanted(path: str, allow: t.Sequence[str], ignore: t.Sequence[str]) -> bool:
    """Whether huggingface_hub's allow/ignore patterns (fnmatch, ``dir/`` = everything below) keep a path."""
    return (not allow or _matches(path, allow)) and not _matches(path, ignore)


def manifest_of(info: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]] | None:
    """Rows path, size, blob, algo from an answer of model info with ``blobs=true``; None when the hub left sizes or ids out (then ask
    its tree).
    """
    rows = []
    for item in info.get("siblings") or []:
        lfs = item.get("lfs") or {}
        blob, size = lfs.get("sha256") or item.get("blobId"), lfs.get("size", item.get("size"))
        if not blob or size is None:
            return None
        rows.append({"path": item["rfilename"], "size": int(size), "blob": blob, "algo": "sha256" if lfs.get("sha256") else "git-sha1"})
    return rows


def manifest_of_tree(entries: t.Iterable[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """The same from answers of ``/tree/<rev>?recursive=true``."""
    rows = []
    for item in entries:
        if item.get("type") != "file":
            continue
        lfs = item.get("lfs") or {}
        row = {"path": item["path"], "size": int(lfs.get("size", item["size"])), "blob": lfs.get("oid") or item["oid"]}
        rows.append({**row, "algo": "sha256" if lfs.get("oid") else "git-sha1"})
    return rows


def problem_fields(error: t.Mapping[str, t.Any], *, repo_id: str, revision: str, endpoint: str, token: bool) -> dict[str, str]:
    """found, expected, remedy of a classified hub failure, in words for the user."""
    kind, said = error["kind"], str(error.get("message") or "")
    what = f"{repo_id} at revision {revision}"
    page = f"{endpoint}/{repo_id}"
    if kind == "hub-401":
        first = "the token is not accepted" if token else "no token was given"
        gated = (
            "it is gated"
            if error.get("code") == "GatedRepo"
            else "it is private or gated, or there is no such model (a hub answers the same)"
        )
        return {
            "found": f"401 from {endpoint} for {what}: {first}; {gated} ({said})",
            "expected": "a valid token of an account that may read it",
            "remedy": f"check the name; else make a read token at {endpoint}/settings/tokens, in the file that spark_hf_token_file names",
        }
    if kind == "hub-403":
        return {
            "found": f"403 from {endpoint} for {what}: the token is valid but has no access ({said})",
            "expected": "access of this account to this model",
            "remedy": f"accept the licence at {page} with the token's account (or wait for approval), or let the token read gated models",
        }
    if kind == "hub-404":
        missing = {"RevisionNotFound": f"revision {revision} of {repo_id}", "EntryNotFound": f"such file in {what}"}.get(
            str(error.get("code")), repo_id
        )
        return {
            "found": f"404 from {endpoint}: no {missing} ({said})",
            "expected": "a model and revision that the hub knows",
            "remedy": "correct spark_model or spark_model_revision (a private model needs a token to be seen)",
        }
    if kind == "hub-429":
        wait = float(error.get("retry_after") or 0)
        return {
            "found": f"429 from {endpoint}: too many requests" + (f", come back in {wait:.0f} s" if wait else ""),
            "expected": "fewer requests than the limit of this address or account",
            "remedy": "wait that long and run again (what was downloaded is reused), or set a token: its limit is higher",
        }
    if kind == "disk-model":
        return {
            "found": f"the disk filled up during the download ({said})",
            "expected": "room for the whole snapshot",
            "remedy": "free space or choose another spark_model_cache, then run again: finished files are reused",
        }
    if kind == "hub-unreachable":
        return {
            "found": f"no usable answer from {endpoint}: {said}",
            "expected": "a hub that this node reaches",
            "remedy": "check DNS, proxy and Internet of this node, or set spark_hf_endpoint; or set spark_model_offline if it is on disk",
        }
    return {
        "found": f"the download of {what} failed: {said}",
        "expected": "a complete download",
        "remedy": "run again (finished files are reused); if it stays, report this message",
    }


# --- asking the hub (on the node, standard library) ---


class _SafeRedirect(urllib.request.HTTPRedirectHandler):
    """Follow redirects (renamed models), but never carry the token to another host."""

    def redirect_request(self, req: t.Any, fp: t.Any, code: int, msg: str, headers: t.Any, newurl: str) -> t.Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        return request


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer."""

    def redirect_request(self, req: t.Any, fp: t.Any, code: int, msg: str, headers: t.Any, newurl: str) -> None:
        return None


class Hub:
    """The few calls that are needed before a download. Raises HubError only."""

    def __init__(self, endpoint: str, token: str = "", *, timeout: float = 20.0, retries: int = 3, patience: float = 120.0) -> None:
        self.endpoint = (endpoint or DEFAULT_ENDPOINT).rstrip("/")
        self.token = token
        self.timeout = timeout
        self.retries = retries
        self.patience = patience
        self.sleep = time.sleep

    def _once(self, method: str, url: str, follow: bool) -> tuple[int, t.Any, bytes]:
        request = urllib.request.Request(url, method=method, headers={"User-Agent": "dgxspark.serving", "Accept": "application/json"})
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        opener = urllib.request.build_opener(_SafeRedirect() if follow else _NoRedirect())
        try:
            with opener.open(request, timeout=self.timeout) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as exc:
            with exc:
                if exc.code in (301, 302, 303, 307, 308):
                    return exc.code, exc.headers, b""
                raise classify(exc.code, t.cast("t.Mapping[str, str]", exc.headers), time.time()) from exc
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "reason", exc)
            raise HubError("hub-unreachable", str(reason) or type(exc).__name__) from exc
        except Exception as exc:  # http.client.HTTPException: an answer that is not HTTP
            raise HubError("hub-unreachable", f"{type(exc).__name__}: {exc}") from exc

    def request(self, method: str, path: str, *, follow: bool = True) -> tuple[int, t.Any, bytes]:
        """One call; rate limits and passing failures are retried as long as patience allows."""
        url = path if path.startswith("http") else self.endpoint + path
        spent = 0.0
        for attempt in range(self.retries + 1):
            try:
                return self._once(method, url, follow)
            except HubError as exc:
                wait = exc.data["retry_after"] or float(2**attempt)
                passing = exc.data["kind"] == "hub-429" or (
                    exc.data["kind"] == "hub-unreachable" and exc.data["status"] in (0, 500, 502, 503, 504)
                )
                if not passing or attempt == self.retries or spent + wait > self.patience:
                    raise
                self.sleep(wait)
                spent += wait
        raise HubError("hub-unreachable", "no attempt left")

    def _json(self, path: str) -> tuple[t.Any, t.Any]:
        dummy, headers, body = self.request("GET", path)
        try:
            return json.loads(body), headers
        except ValueError as exc:
            raise HubError("hub-unreachable", "the answer is not JSON (a proxy or a login page?)") from exc

    def snapshot(self, repo_id: str, revision: str) -> tuple[str, list[dict[str, t.Any]]]:
        """``(commit, manifest)`` of a revision."""
        quoted = urllib.parse.quote(repo_id)
        info, dummy = self._json(f"/api/models/{quoted}/revision/{urllib.parse.quote(revision, safe='')}?blobs=true")
        commit = str(info.get("sha") or "") if isinstance(info, dict) else ""
        if not commit:
            raise HubError("hub-unreachable", "the answer names no commit (not a Hugging Face hub?)")
        rows = manifest_of(info)
        if rows is None:
            rows = self._tree(quoted, commit)
        return commit, sorted(rows, key=lambda row: row["path"])

    def _tree(self, quoted: str, commit: str) -> list[dict[str, t.Any]]:
        entries: list[t.Any] = []
        path = f"/api/models/{quoted}/tree/{commit}?recursive=true"
        for dummy in range(200):
            page, headers = self._json(path)
            entries += page
            link = headers.get("Link") or ""
            if 'rel="next"' not in link:
                break
            path = link.partition("<")[2].partition(">")[0]
        return manifest_of_tree(entries)

    def check_access(self, repo_id: str, commit: str, path: str) -> None:
        """Files of a gated model are refused although its metadata are public: ask for one file before anything is downloaded (MOD-03)."""
        self.request("HEAD", f"/{urllib.parse.quote(repo_id)}/resolve/{commit}/{urllib.parse.quote(path)}", follow=False)


# --- the program (in the container) ---


def classify_exception(exc: BaseException) -> dict[str, t.Any]:
    """What an exception of huggingface_hub means; the whole cause chain is looked at, because it hides an HTTP error behind 'not in the
    cache'.
    """
    chain: list[BaseException] = []
    item: BaseException | None = exc
    while item is not None and item not in chain:
        chain.append(item)
        item = item.__cause__ or item.__context__
    for link in chain:
        response = getattr(link, "response", None)
        status = getattr(response, "status_code", 0)
        if status and status >= 400:
            return classify(int(status), response.headers, time.time()).data  # type: ignore[union-attr]
    for link in chain:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return HubError("disk-model", str(link)).data
    text = f"{type(exc).__name__}: {exc}".split("\n", maxsplit=1)[0]
    for link in chain:
        name = type(link).__name__
        if any(word in name for word in ("Connect", "Timeout", "RemoteProtocol", "ReadError", "NetworkError", "ProxyError")):
            return HubError("hub-unreachable", f"{name}: {link}").data
    return HubError("hub-download", text).data


def exact(path: str) -> str:
    """An fnmatch pattern for exactly this path."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in path)


def download(job: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Run snapshot_download for the files of the job; {ok, path, version} or {ok: false, error}."""
    result: dict[str, t.Any] = {"ok": False, "version": ""}
    try:
        import huggingface_hub  # pylint: disable=import-outside-toplevel,import-error
    except ImportError as exc:
        result["error"] = HubError("hub-no-library", str(exc)).data
        return result
    result["version"] = huggingface_hub.__version__
    try:
        result["path"] = huggingface_hub.snapshot_download(
            job["repo_id"],
            revision=job["commit"],
            allow_patterns=[exact(path) for path in job["paths"]],
            max_workers=int(job["workers"]),
        )
        result["ok"] = True
    except BaseException as exc:  # pylint: disable=broad-except
        result["error"] = classify_exception(exc)
    return result


def main(argv: t.Sequence[str]) -> int:
    """``JOB`` is a JSON file beside which ``result.json`` is written."""
    with open(argv[1], encoding="utf-8") as handle:
        job = json.load(handle)
    os.environ.update(job.get("environment") or {})
    os.umask(0o022)
    result = download(job)
    path = os.path.join(os.path.dirname(argv[1]), "result.json")
    with open(path + ".tmp", "w", encoding="utf-8") as handle:
        json.dump(result, handle)
    os.replace(path + ".tmp", path)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
