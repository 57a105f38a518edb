# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The faults of a copy (docs/copying.md, docs/copying-image.md), the guard against each, and the tests that must fail without it.

``guards.py DIRECTORY [WORD ...]``: in a copy of the tree, breaks each guard (with a WORD in its fault), runs its tests, restores it. A line for each:
``caught`` with the tests that failed (``hangs``: they did not end in time, which is a failure as well), or ``MISSED``. That every line to break is still
in the source and every test still exists is a unit test (tests/unit/test_guards.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

UTILS, MODULES = "plugins/module_utils/", "plugins/modules/"
TRANSFER, SERVER = UTILS + "_transfer.py", UTILS + "_sync_server.py"
LIMIT = 100.0

T = "tests/unit/plugins/module_utils/test__transfer.py::"
R = "tests/unit/plugins/module_utils/test__transfer_relay.py"
P = "tests/unit/plugins/module_utils/test__sync_server.py::"
D = "tests/unit/plugins/module_utils/test__download.py::"
L = "tests/unit/plugins/module_utils/test__leftovers.py::"
X = "tests/unit/plugins/module_utils/test__image_load.py::"
H = "tests/unit/plugins/modules/test_hf_snapshot.py::"
S = "tests/unit/plugins/modules/test_model_sync.py::"
V = "tests/unit/plugins/modules/test_sync_server.py::"
I = "tests/unit/plugins/modules/test_image_sync.py::"  # noqa: E741
C = "tests/unit/test_real_cache.py::"


class Cut(t.NamedTuple):
    """One place of a source that is replaced."""

    path: str
    old: str
    new: str


class Guard(t.NamedTuple):
    """A fault, who guards against it, how that is taken out, and which tests fail then."""

    fault: str
    guard: str
    cuts: tuple[Cut, ...]
    tests: tuple[str, ...]


HASH = Cut(
    TRANSFER, '            if digest == row["blob"]:\n                self._publish', "            if True:\n                self._publish"
)
STALL = Cut(TRANSFER, "            if now - begin > timeout or now - last > stall:\n", "            if now - begin > timeout:\n")

GUARDS = (
    # --- model
    Guard(
        "worker killed: what arrived is reused",
        "Puller._rehash",
        (Cut(TRANSFER, "            offset = self._rehash(fd,", "            os.ftruncate(fd, 0)\n            offset = self._rehash(fd,"),),
        (T + "test_killed_run_is_continued", T + "test_resume_moves_only_the_rest"),
    ),
    Guard(
        "worker killed: nothing half under its final name",
        "Puller.fetch (staging)",
        (Cut(TRANSFER, 'os.path.join(self.target.staging, row["blob"] + PART)', 'os.path.join(self.target.blobs, row["blob"])'),),
        (T + "test_killed_run_is_continued",),
    ),
    Guard(
        "copy fails: the old snapshot stays visible, refs last",
        "ModelSync.run (order)",
        (
            Cut(
                MODULES + "model_sync.py",
                "                missing = self._sort_out()\n                if missing:\n",
                "                missing = self._sort_out()\n"
                '                _snapshot.write_ref(self.folder, self.params["ref"], self.commit, self.owner)\n                if missing:\n',
            ),
        ),
        (S + "test_old_snapshot_stays_visible_when_the_copy_fails",),
    ),
    Guard(
        "server killed: waited for",
        "Puller._retry_or_raise",
        (
            Cut(
                TRANSFER,
                "        if time.monotonic() >= deadline:\n            raise self.problem(",
                "        if True:\n            raise self.problem(",
            ),
        ),
        (T + "test_server_killed_in_the_middle", T + "test_a_server_that_comes_back_is_waited_for"),
    ),
    Guard(
        "server killed: not waited for without end",
        "Puller._retry_or_raise",
        (
            Cut(
                TRANSFER,
                "        if time.monotonic() >= deadline:\n            raise self.problem(",
                "        if False:\n            raise self.problem(",
            ),
        ),
        (T + "test_no_server_is_an_error_in_time",),
    ),
    Guard(
        "link cut: connections are continued where they were",
        "Puller._request (Range)",
        (Cut(TRANSFER, 'headers = {"Range": f"bytes={offset}-"} if offset else {}', "headers: dict[str, str] = {}"),),
        (T + "test_cut_connections_are_continued",),
    ),
    Guard(
        "link silent for good (each of the three alone is enough)",
        "Puller._connect (timeout), Pool.run (stall, timeout)",
        (
            Cut(TRANSFER, "HTTPConnection(source.address, source.port, timeout=limit)", "HTTPConnection(source.address, source.port)"),
            Cut(TRANSFER, "            if now - last > self.stall:\n", "            if False:\n"),
            Cut(TRANSFER, "            if now - begin > self.timeout:\n", "            if False:\n"),
        ),
        (T + "test_link_that_carries_nothing",),
    ),
    Guard(
        "disk full on the worker: said as what it is",
        "Puller._fill (ENOSPC)",
        (Cut(TRANSFER, "            if exc.errno in (errno.ENOSPC, errno.EDQUOT):\n", "            if False:\n"),),
        (T + "test_full_disk", T + "test_full_disk_for_real"),
    ),
    Guard(
        "disk too small: refused before the first byte",
        "_transfer.check_space",
        (Cut(TRANSFER, "    if free < want:\n", "    if False:\n"),),
        (
            T + "test_space_is_checked_with_numbers",
            H + "test_failures_are_told_apart",
            S + "test_failures_name_node_found_expected_remedy",
            I + "test_peer_needs_space_only_for_what_is_missing",
        ),
    ),
    Guard("byte flipped on the way: noticed", "Puller.fetch (hash)", (HASH,), (T + "test_a_flipped_byte_on_the_way_is_fetched_again",)),
    Guard(
        "byte flipped on the way: fetched again",
        "Puller.fetch (second time)",
        (Cut(TRANSFER, "for again in (False, True):", "for again in (False,):"),),
        (T + "test_a_flipped_byte_on_the_way_is_fetched_again",),
    ),
    Guard("byte flipped on the head's disk", "Puller.fetch (hash)", (HASH,), (T + "test_damaged_file_on_the_head_is_never_published",)),
    Guard(
        "two plays at once, or controller killed: one waits for the other",
        "_transfer.exclusive",
        (Cut(TRANSFER, "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),),
        (S + "test_two_plays_at_once", T + "test_lock_is_exclusive_and_freed"),
    ),
    Guard(
        "two plays at once: each has a server of its own",
        "sync_server.new_result (unique)",
        (Cut(MODULES + "sync_server.py", 'if params["unique"] and params["state"] == "present" else ""', 'if False else ""'),),
        (V + "test_two_runs_have_servers_of_their_own",),
    ),
    Guard(
        "two plays at once: the other one's server stays",
        "SyncServer._clean_abandoned (quiet)",
        (
            Cut(
                MODULES + "sync_server.py",
                '            if running and float(self._ask(directory).get("quiet", ABANDONED_SECONDS)) < ABANDONED_SECONDS:\n',
                "            if False:\n",
            ),
        ),
        (V + "test_two_runs_have_servers_of_their_own",),
    ),
    Guard(
        "controller killed: the next run removes its server",
        "SyncServer._clean_abandoned",
        (Cut(MODULES + "sync_server.py", "            self._clean_abandoned()\n", "            pass\n"),),
        (V + "test_two_runs_have_servers_of_their_own",),
    ),
    Guard(
        "controller killed: its server ends by itself",
        "_sync_server.main (idle)",
        (Cut(SERVER, " or (idle and server.idle_seconds() >= idle)", ""),),
        (P + "test_the_program_ends_when_nobody_asks",),
    ),
    Guard(
        "file changed on the head, another size",
        "Handler._file (409)",
        (Cut(SERVER, '            if "part" not in entry and os.fstat(fd).st_size != size:\n', "            if False:\n"),),
        (T + "test_file_cut_short_on_the_head_during_the_copy", T + "test_refusals_are_told_apart"),
    ),
    Guard("file changed on the head, the same size", "Puller.fetch (hash)", (HASH,), (S + "test_a_file_that_changes_on_the_head",)),
    Guard(
        "chain: a worker that fails is left alone",
        "Puller._fill (avoid)",
        (Cut(TRANSFER, "                    self._avoid[source] = time.monotonic() + PEER_REST_SECONDS\n", ""),),
        (T + "test_chain_with_a_bad_worker_in_front",),
    ),
    Guard(
        "chain: a wrong file comes from the head the second time",
        "Puller._choose (head_only)",
        (Cut(TRANSFER, "return self.head if head_only or not usable", "return self.head if not usable"),),
        (T + "test_chain_with_a_bad_worker_in_front",),
    ),
    Guard(
        "port blocked: said in time",
        "Puller._fill (patience)",
        (Cut(TRANSFER, "(self.stall if self.reached else min(self.stall, CONNECT_SECONDS))", "self.stall"),),
        (T + "test_port_that_answers_nothing",),
    ),
    Guard(
        "port blocked: rsync over SSH",
        "ModelSync._transport",
        (Cut(MODULES + "model_sync.py", 'if choice == "http" or exc.id != "sync-stalled"', "if True or exc.id"),),
        (S + "test_rsync_is_the_second_way",),
    ),
    # --- hub
    Guard(
        "hub stalls",
        "_transfer.watch",
        (STALL,),
        (H + "test_a_stall_is_ended_and_tried_without_xet", H + "test_a_stall_without_end_is_MOD_02"),
    ),
    Guard(
        "hub stalls: tried without Xet",
        "Downloader.run",
        (Cut(MODULES + "hf_snapshot.py", "            xet = False\n", ""),),
        (H + "test_a_stall_is_ended_and_tried_without_xet",),
    ),
    Guard(
        "hub lies about the hash",
        "HfSnapshot._get (verify)",
        (
            Cut(
                MODULES + "hf_snapshot.py",
                "            bad = self._verify(commit, found.unknown)\n            for row in bad:\n",
                "            bad = []\n            for row in bad:\n",
            ),
        ),
        (H + "test_failures_are_told_apart",),
    ),
    Guard(
        "hub cuts the body",
        "Downloader._result",
        (Cut(MODULES + "hf_snapshot.py", 'return None if answer.get("ok") else', "return None if answer else"),),
        (H + "test_failures_are_told_apart",),
    ),
    *(
        Guard(
            f"hub answers {status}",
            "_download.classify",
            (Cut(UTILS + "_download.py", old, "    if status == 999:\n"),),
            (H + "test_failures_are_told_apart",),
        )
        for status, old in (
            (401, "    if status == 401:\n"),
            (403, "    if status in (403, 451):\n"),
            (404, "    if status == 404:\n"),
            (429, "    if status == 429:\n"),
        )
    ),
    Guard(
        "hub revokes the token in the middle",
        "_download.classify_exception",
        (Cut(UTILS + "_download.py", "        if status and status >= 400:\n", "        if False:\n"),),
        (C + "test_a_token_that_is_revoked_in_the_middle",),
    ),
    Guard(
        "reboot during a download: its parts are removed",
        "HfSnapshot._remove_dead_parts",
        (
            Cut(
                MODULES + "hf_snapshot.py",
                "                    os.unlink(part.path)\n        return size",
                "                    pass\n        return size",
            ),
        ),
        (H + "test_parts_that_a_reboot_left_are_removed_and_those_that_are_written_kept",),
    ),
    Guard(
        "reboot during a download: the part of another job stays",
        "_leftovers.dead (open)",
        (Cut(UTILS + "_leftovers.py", "if part.file not in held and now", "if now"),),
        (H + "test_parts_that_a_reboot_left_are_removed_and_those_that_are_written_kept", L + "test_what_another_process_has_open"),
    ),
    Guard(
        "reboot during a download: a part that was closed just now stays",
        "_leftovers.dead (quiet)",
        (Cut(UTILS + "_leftovers.py", "QUIET_SECONDS = 60.0", "QUIET_SECONDS = -1.0"),),
        (H + "test_parts_that_a_reboot_left_are_removed_and_those_that_are_written_kept",),
    ),
    Guard(
        "other patterns for a directory",
        "_snapshot._plain_state",
        (Cut(UTILS + "_snapshot.py", '(stamp or {}).get("patterns") if patterns is None else patterns', '(stamp or {}).get("patterns")'),),
        (H + "test_other_patterns_of_a_directory",),
    ),
    Guard(
        "other patterns for a repository",
        "_snapshot.local_state",
        (
            Cut(
                UTILS + "_snapshot.py",
                '    if stamp and not changed and other_patterns(stamp, patterns):\n        changed = "it was verified with other patterns"\n    if stamp and',
                "    if stamp and",
            ),
        ),
        ("tests/unit/plugins/module_utils/test__snapshot.py::test_other_patterns_make_a_snapshot_unverified",),
    ),
    # --- image
    Guard(
        "image: pull killed",
        "ImageSync._pull_failed (signal)",
        (Cut(MODULES + "image_sync.py", "        if watched.rc < 0:\n", "        if False:\n"),),
        (I + "test_a_pull_that_is_killed",),
    ),
    Guard(
        "image: server killed, or the port blocked",
        "ImageSync._pull_failed (relay)",
        (Cut(MODULES + "image_sync.py", "        if relay and relay.error:\n", "        if False:\n"),),
        (I + "test_peer_failures_are_told_apart",),
    ),
    Guard("image: pull stands still", "_transfer.watch", (STALL,), (I + "test_a_pull_that_stands_still_is_ended",)),
    Guard(
        "image: link cut for good",
        "Relay._link (keep-alive)",
        (Cut(TRANSFER, "        far.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)\n", ""),),
        (R,),
    ),
    Guard(
        "image: link cut for some seconds",
        "Relay._link (patience)",
        (Cut(TRANSFER, "TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 8)", "TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2)"),),
        (R,),
    ),
    Guard(
        "image: disk full in the middle",
        "classify_pull_error",
        (Cut(UTILS + "_image.py", 'r"no space left on device|disk quota exceeded"', 'r"never"'),),
        ("tests/unit/plugins/module_utils/test__image.py::test_pull_errors_are_told_apart",),
    ),
    Guard(
        "image: registry cuts the body, or a byte flipped",
        "ImageSync._pull (tries)",
        (Cut(MODULES + "image_sync.py", "if watched.ended or number + 1 == TRIES or not", "if True or not"),),
        (I + "test_a_pull_that_broke_in_the_middle_goes_on",),
    ),
    Guard(
        "image: byte flipped on the head's disk",
        "ImageSync._relay_error",
        (
            Cut(
                MODULES + "image_sync.py",
                '        if ident == "image-damaged":\n            remedy',
                '        if ident == "never":\n            remedy',
            ),
        ),
        (I + "test_what_stays_damaged_is_told",),
    ),
    Guard(
        "image: registry answers 429 or 404",
        "_image.classify_pull_error",
        (
            Cut(
                UTILS + "_image.py",
                "    for pattern, ident, cause, remedy in PULL_ERRORS:\n",
                "    for pattern, ident, cause, remedy in PULL_ERRORS[:0]:\n",
            ),
        ),
        (I + "test_registry_errors_are_told_apart",),
    ),
    Guard(
        "image: another content than the head's",
        "ImageSync._copy (fingerprint)",
        (
            Cut(
                MODULES + "image_sync.py",
                "        if fingerprint != wanted:\n            self.docker",
                "        if False:\n            self.docker",
            ),
        ),
        (I + "test_peer_with_other_content_is_refused_and_removed",),
    ),
    Guard(
        "image: two plays at once",
        "ImageSync._lock",
        (
            Cut(
                MODULES + "image_sync.py",
                "        with self._lock():\n            self._clean(",
                "        with contextlib.nullcontext():\n            self._clean(",
            ),
        ),
        (I + "test_peer_takes_what_another_run_brought_while_it_waited",),
    ),
    Guard(
        "image: names of broken runs",
        "ImageSync._clean",
        (
            Cut(
                MODULES + "image_sync.py",
                "            self._clean(temporary_names(self._all_images()))\n            same",
                "            same",
            ),
        ),
        (I + "test_peer_removes_names_of_broken_runs",),
    ),
    Guard(
        "image: docker save of the head ends early, the stream has no end",
        "Handler._archive",
        (Cut(SERVER, "                if process.wait() == 0:\n", "                if process.wait() >= 0:\n"),),
        (P + "test_an_archive_is_whole_or_has_no_end", I + "test_peer_archive_failures"),
    ),
    Guard(
        "image: wrong platform",
        "ImageSync._platform",
        (Cut(MODULES + "image_sync.py", "        if architecture and architecture != self.architecture:\n", "        if False:\n"),),
        (I + "test_wrong_platform", I + "test_peer_of_another_platform_is_refused_before_the_copy"),
    ),
    Guard(
        "image: the version before is kept",
        "ImageSync._versions",
        (Cut(MODULES + "image_sync.py", 'if self.docker("tag", str(before["Id"]), name)[0] == 0:', "if False:"),),
        (I + "test_one_replaced_version_is_kept",),
    ),
    Guard(
        "image: an image of somebody else stays",
        "_image_versions.surplus (ours)",
        (Cut(UTILS + "_image_versions.py", 'max(0, len(own) - 1 - keep)] if item["ours"]]', "max(0, len(own) - 1 - keep)]]"),),
        (I + "test_an_image_that_was_there_before_us_is_never_removed",),
    ),
    Guard(
        "image: what another service has stays",
        "_image_versions._spare",
        (Cut(UTILS + "_image_versions.py", "    if not holders:\n        return list(wanted)\n", "    return list(wanted)\n"),),
        (I + "test_absent_of_an_image_that_two_services_have",),
    ),
    Guard(
        "image: teardown removes the kept versions",
        "_image_versions.names_to_forget",
        (Cut(UTILS + "_image_versions.py", "if name in kept or name in names]", "if name in names]"),),
        (I + "test_absent_without_the_list_of_versions",),
    ),
)


def tried(root: Path, guard: Guard) -> tuple[bool, str]:
    """(whether a test failed without the guard, which one)."""
    before = {cut.path: (root / cut.path).read_text(encoding="utf-8") for cut in guard.cuts}
    after = dict(before)
    for cut in guard.cuts:
        after[cut.path] = after[cut.path].replace(cut.old, cut.new, 1)
    try:
        for path, text in after.items():
            (root / path).write_text(text, encoding="utf-8")
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-rf", "--no-header", "-p", "no:cacheprovider", *guard.tests],
            cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, dummy = process.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                return True, "hangs"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        for path, text in before.items():
            (root / path).write_text(text, encoding="utf-8")
    failed = [line.split(" - ")[0].rpartition("::")[2] for line in out.splitlines() if line.startswith("FAILED ")]
    return process.returncode == 1, ", ".join(failed) or out.strip().splitlines()[-1]


def main(root: Path, words: t.Sequence[str]) -> int:
    """0 when a test noticed that each guard was gone."""
    missed = 0
    chosen = [guard for guard in GUARDS if not words or any(word in guard.fault for word in words)]
    for guard in chosen:
        begin = time.monotonic()
        caught, which = tried(root, guard)
        missed += not caught
        print(f"{'caught' if caught else 'MISSED'}  {guard.fault} [{guard.guard}]: {which} ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} passed, {missed} failed")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
