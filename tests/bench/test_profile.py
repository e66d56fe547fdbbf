"""Profiles: a real model is measured by its own run and left closed; what follows is kept."""

import pytest
import torch

from moelab.__main__ import main
from moelab.base.files import read_json
from moelab.base.records import Record
from moelab.base.schema import typed
from moelab.bench import profile as profiling
from moelab.bench.profile import Profile, profile
from moelab.checkpoint.convert import convert
from tests.models import tiny


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    source = tiny.save("qwen3_moe", folder / "m", torch.bfloat16)
    return {codec: convert(source, folder / codec, codec=codec) for codec in ("raw", "huffman")}


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr(profiling, "MINIMUM", 1)


@pytest.fixture(scope="module")
def measured(stores):
    return profile(stores["raw"], 0, mode="buffered")


def test_all_parts_are_measured(measured, stores):
    machine, delays = measured.machine, measured.machine.delays
    assert min(delays.e_read, delays.expert(1), sum(machine.other), sum(machine.head)) > 0
    assert delays.sm_read == delays.sm_bytes == delays.recover == 0
    assert delays.e_bytes == stores["raw"].stored_bytes(0, 0, "both")
    assert measured.tpot > 0
    assert (measured.mode, measured.dtype, measured.codec) == ("buffered", "bfloat16", "raw")
    apart = profile(stores["huffman"], 0, scheduler="affinity", workers=2).machine
    assert min(apart.delays.e_read, apart.delays.sm_read, apart.delays.decompress) > 0
    assert apart.workers == 2

    # at 1 MB a second a read of n bytes cannot take less than n / 1 MB
    slow = profile(stores["raw"], 0, bandwidth=1e6, executor="fast").machine.delays
    assert slow.e_read >= 0.99 * slow.e_bytes / 1e6


def test_the_command_prints_and_keeps(stores, tmp_path, capsys):
    path = tmp_path / "new" / "p"
    words = [str(stores["raw"].folder), "--seconds", "0.001", "--output", str(path)]
    assert main(["profile", *words]) == 0
    assert "reading an expert" in capsys.readouterr().out
    found = read_json(path, Record)
    assert found.pop("format") == profiling.FORMAT and found.pop("run")["date"]
    assert typed(found, Profile).model == stores["raw"].spec.name
