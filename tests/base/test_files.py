"""Files that are written: whole whoever else writes, reads or is killed; never through a name that
somebody else has made; and what is wrong about a place is said before the work."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
from argparse import ArgumentTypeError
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.base import files
from moelab.base.arguments import output
from moelab.base.files import (
    absolute,
    atomic,
    cache_folder,
    read_json,
    save_tensors,
    stamp,
    writable,
    write_json,
    write_text,
)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["begin", "half", "end", "fail"])), max_size=30
    )
)
def test_writers_in_any_order_leave_the_last_one_whole(tmp_path_factory, steps):
    """The oracle: a variable that is assigned when a writer ends."""
    path, there, running = tmp_path_factory.mktemp("files") / "x.json", None, {}
    for n, (who, what) in enumerate(steps):
        if what == "begin" and who not in running:
            running[who] = (place := atomic(path)), place.__enter__(), n
        elif what == "half" and who in running:
            running[who][1].write_text("half of it")
        elif what in ("end", "fail") and who in running:
            place, part, begun = running.pop(who)
            part.write_text(f"{who} since {begun}")
            if what == "end":
                place.__exit__(None, None, None)
                there = f"{who} since {begun}"
            else:
                assert not place.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert (path.read_text() if path.exists() else None) == there
    for place, _, _ in running.values():
        place.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert [file.name for file in path.parent.iterdir()] == ["x.json"] * (there is not None)


def test_a_killed_writer_leaves_what_was_there_and_nothing_for_long(tmp_path):
    path = write_text(tmp_path / "x.txt", "old")
    code = (
        "import sys, time; from moelab.base.files import atomic\nwith atomic(sys.argv[1]) as part:\n"
        "    part.write_text('half'); print('now', flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "now\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    write_text(tmp_path / "another.txt", "")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["another.txt", "x.txt"]


def test_links(tmp_path):
    """What a link leads to is replaced, there or not yet; one that somebody has made of a temporary
    name is no way."""
    (tmp_path / "elsewhere").mkdir()
    real, link, dangling = (
        tmp_path / "elsewhere" / "x.json",
        tmp_path / "x.json",
        tmp_path / "y.json",
    )
    victim = write_text(tmp_path / "victim", "kept")
    write_json(real, 1)
    link.symlink_to(real)
    dangling.symlink_to("elsewhere/new.json")
    (tmp_path / "elsewhere" / "x.json.part").symlink_to(victim)
    write_json(link, 2)
    write_json(dangling, 3)
    assert link.is_symlink() and dangling.is_symlink() and victim.read_text() == "kept"
    assert read_json(real) == 2 and read_json(tmp_path / "elsewhere" / "new.json") == 3


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_text(path, "x"),
        lambda path: write_json(path, 1),
        lambda path: save_tensors(path, "x", {"a": torch.ones(2)}),
    ],
    ids=["text", "json", "tensors"],
)
def test_rights_are_those_that_were_there_or_any_new_file_s(tmp_path, write):
    (plain := tmp_path / "plain").touch()
    (kept := tmp_path / "kept").touch()
    kept.chmod(0o640)
    write(kept), write(tmp_path / "new")
    assert kept.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "new").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize(
    "kind", ["folder", "pipe", "socket", "device", "link to a device", "circle"]
)
def test_what_is_no_file_is_not_replaced(tmp_path, kind, monkeypatch):
    path = tmp_path / "out"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # the name of one is short
        socket.socket(socket.AF_UNIX).bind("out")
    elif kind == "device":
        path = absolute("/dev/null")
    else:
        path.symlink_to("/dev/null" if kind == "link to a device" else path)
    before = os.lstat(path).st_mode
    for refused, error in (
        (writable, ValueError),
        (lambda p: write_text(p, "x"), ValueError),
        (output, ArgumentTypeError),
    ):
        with pytest.raises(error, match="is no regular file"):
            refused(str(path))
    assert os.lstat(path).st_mode == before


def test_a_place_that_cannot_be_written_is_said_and_a_new_one_is_not_made(tmp_path, monkeypatch):
    assert writable(tmp_path / "a" / "b" / "x.json") == tmp_path / "a" / "b" / "x.json"
    assert not list(tmp_path.iterdir())
    write_text(tmp_path / "file", "")
    with pytest.raises(NotADirectoryError, match="file/x.json cannot be written: Not a directory"):
        writable(tmp_path / "file" / "x.json")
    if os.path.isdir("/proc/self"):
        with pytest.raises(OSError, match="cannot be written"):
            writable("/proc/x.json")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(files, "_probe", lambda folder: (_ for _ in ()).throw(full))
    with pytest.raises(
        ArgumentTypeError, match="x.json cannot be written: No space left on device"
    ):
        output(str(tmp_path / "x.json"))
    if os.geteuid():
        (tmp_path / "file").chmod(0o400)
        with pytest.raises(PermissionError, match="write-protected"):
            write_text(tmp_path / "file", "x")


def test_without_a_cache_a_temporary_folder_takes_its_place(tmp_path, monkeypatch):
    """As in guillochon/MOSFiT pull request 172: a place in an installation that belongs to somebody
    else."""
    write_text(tmp_path / "file", "")
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(
        UserWarning, match="nothing can be kept in .*file/cache/notes .*MOELAB_CACHE"
    ):
        folder = cache_folder("notes")
    assert write_json(folder / "x.json", 1).is_file() and cache_folder("notes") == folder
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "cache"))
    assert cache_folder("notes") == tmp_path / "cache" / "notes"


def test_home_and_the_working_folder_are_those_of_the_call(tmp_path, monkeypatch):
    """As in python/mypy pull request 10051."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert absolute("~/x") == tmp_path / "x" == absolute("x")
    assert write_json("~/a/x.json", 1) == tmp_path / "a" / "x.json" and read_json("~/a/x.json") == 1
    monkeypatch.setenv("MOELAB_CACHE", "~/cache")
    monkeypatch.setenv("MOELAB_RESULTS", "~/results")
    assert files.cache_root() == tmp_path / "cache" and files.results_root() == tmp_path / "results"
    assert not (tmp_path / "~").exists()
    with atomic("later.txt") as part:
        part.write_text("x")
        os.chdir("/")
    assert (tmp_path / "later.txt").is_file()


@pytest.mark.parametrize("how", ["cp -p", "rsync", "tar", "truncated", "gone"])
def test_a_stamp_tells_a_changed_file_whatever_its_times_say(tmp_path, how):
    path = write_text(tmp_path / "x", "old")
    times, before = os.stat(path), stamp(path)
    assert stamp(path) == before
    if how in ("tar", "gone"):
        path.unlink()
    if how == "rsync":
        write_text(path, "new")
    elif how != "gone":
        path.write_text("new" if how != "truncated" else "ol")
    with suppress(FileNotFoundError):
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stamp(path) != before


@pytest.mark.parametrize("chance", ["12345678", "1a_b2c3d", "00000001"])
def test_what_another_thread_writes_is_no_leftover(chance, tmp_path):
    """Whatever the random part of its name is; that of a process which has ended is one."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    parts = [
        tmp_path / f".x.json@{platform.node()}@{pid}@{chance}.part"
        for pid in (os.getpid(), ended.pid)
    ]
    for part in parts:
        part.mkdir()
    write_text(tmp_path / "y.json", "{}")
    assert [part.exists() for part in parts] == [True, False]
