"""Disks beside what is advised; a place for notes that cannot be written; losses that change
nothing."""

import shutil
from types import SimpleNamespace

import pytest

from moelab import advise
from moelab.advice.advise import parse_loss
from moelab.advice.kept import Kept
from moelab.advice.machine import here
from moelab.advice.model import AS_IS
from moelab.advice.ways import Way

GB = 10**9
WAY = Way(AS_IS, 0.0, 58 * GB, 10 * GB, 14 * GB, 0.5, 1.0, 1.0)


@pytest.fixture
def free(monkeypatch):
    def has(nbytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=nbytes))

    return has


def test_a_store_for_which_the_disk_has_no_room_is_not_advised(free, monkeypatch):
    """60 GB to download and 46 GB of a store beside 81 GB."""
    monkeypatch.setattr("moelab.advice.advise.here", lambda folder: here_once)
    here_once = here()
    here_once.figures.pop("others_cores")  # they are noted, too
    free(10**15)
    plenty = advise("qwen3-30b-a3b", "18GB")
    assert plenty.best.form == "bf12" and not any("small" in note for note in plenty.notes)
    free(81 * GB)
    scarce = advise("qwen3-30b-a3b", "18GB")
    assert scarce.best.form == AS_IS and {way.form for way in scarce.ways} == {
        AS_IS,
        "int4",
        "mxfp4",
    }
    assert any("Left out" in note and "bf12 needs" in note for note in scarce.notes)
    free(10 * GB)
    none = advise("Qwen/Qwen3-30B-A3B", "18GB")
    assert none.best == plenty.best and "too small" in str(none)
    free(0)
    assert "too small" not in str(advise("Qwen3-30B-A3B", "18GB", device="jetson-agx-orin-32gb"))


@pytest.mark.parametrize(
    "text, value",
    [("1%", 0.01), (0.01, 0.01), ("100%", 1), ("ANY", float("inf")), (0, 0), ("0.5", 0.5)],
)
def test_losses(text, value):
    assert parse_loss(text) == value


@pytest.mark.parametrize("text", ["1", 1, 1.0, "5", "101%", "-1%", "nan", "inf", "", "much", None])
def test_what_is_no_loss_or_could_mean_two(text):
    with pytest.raises(ValueError, match="'1%'"):
        parse_loss(text)


@pytest.mark.parametrize("loss, said", [(0, False), ("1%", True), ("any", False)])
def test_a_loss_that_changes_nothing_is_said(loss, said):
    found = advise("Qwen3-30B-A3B", "18GB", device="m2-max", loss=loss)
    assert any("changes nothing" in note for note in found.notes) == said


def test_notes_that_cannot_be_kept_stop_no_advice(tmp_path, monkeypatch):
    """guillochon/MOSFiT pull requests 172 and 249, pypa/pip issue 7488."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOELAB_CACHE", str(tmp_path / "file" / "cache"))
    ran = {"tpot": [2.0] * 4}
    with pytest.warns(UserWarning, match="MOELAB_CACHE"):
        Kept("a").add(WAY, 1, ran)
    assert Kept("a").corrected(WAY, 1).tpot == 2.0 and (tmp_path / "file").read_text() == ""
