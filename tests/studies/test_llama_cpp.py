"""The bench beside llama.cpp: it goes on where it was ended, a wrong output has no speed, ratios are to
llama.cpp's fastest arm; moelab's arm runs on a file that gguf-py writes."""

import numpy as np
import pytest

from notebooks.studies import llama_cpp
from notebooks.studies.grid import synthetic

pytest.importorskip("gguf")
SPEC = synthetic("tiny", 3, 8, 2, 256, 256, heads=4)
PROMPT, DECODE = 24, 4
SECONDS = {"moelab": 0.6, "llama.cpp": 2.0, "llama.cpp as it lies": 1.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def bench(folder, arms=("moelab",), kinds=("Q8_0",), **how):
    how = {"limits": (1.5, 0.5), "prompts": (PROMPT,), "decode": DECODE, "spec": SPEC} | how
    return llama_cpp.run(kinds, arms=arms, folder=folder, here=True, **how)


@pytest.fixture
def fake(folder, monkeypatch):
    """Engines that take `SECONDS`; (what ran, the engines whose logits are others')."""
    ran, wrong = [], set()

    def run(name, options):
        arm = options["logits"].removesuffix(".npy").split(", ", 3)[3]
        ran.append(arm)
        best = np.arange(1 + DECODE) + (arm in wrong)
        np.save(options["logits"], np.eye(9, dtype=np.float32)[best])
        assert len(options["tokens"][0]) == PROMPT + DECODE
        if arm == "ik_llama.cpp":
            return {"missing": "not installed"}
        tokens = {"tpot_s": [SECONDS[arm]] * DECODE, "ttft_s": 2 * SECONDS[arm]}
        return tokens | {"open_s": 1.0, "decode_read_bytes": 0, "peak_group_bytes": None}

    monkeypatch.setattr(llama_cpp.peers, "run", run)
    (folder / "runs.journal").unlink(missing_ok=True)
    return ran, wrong


def test_it_goes_on_where_it_was_ended(folder, fake):
    ran, _ = fake
    arms = (*SECONDS, "ik_llama.cpp")
    first = bench(folder, arms[:2], limits=(1.5,))
    assert ran == ["moelab", "llama.cpp"]
    none = bench(folder, arms, minutes=1e-9)
    assert len(ran) == 2 and list(none) == list(first)
    found = bench(folder, arms, rounds=2)
    # each once, in every round; what is not installed is not tried again
    assert ran.count("ik_llama.cpp") == 1
    assert {arm: ran.count(arm) for arm in SECONDS} == dict.fromkeys(SECONDS, 4)
    rows = found[f"Q8_0, 150% of the file, prompt {PROMPT}"]
    assert rows["ik_llama.cpp"] == {"result": "not installed"}
    assert rows["moelab"]["undisturbed ÷ llama.cpp"] == pytest.approx(0.4)
    assert rows["moelab"]["TTFT ÷ llama.cpp"] == pytest.approx(0.4)
    assert rows["llama.cpp"]["undisturbed ÷ llama.cpp"] == pytest.approx(2 / 1.5)
    assert (
        rows["moelab"]["KL"] == rows["moelab"]["logits apart"] == 0
        and rows["moelab"]["best token"] == 1
    )


def test_a_wrong_output_has_no_speed(folder, fake):
    fake[1].add("moelab")
    for rows in list(bench(folder, tuple(SECONDS)).values())[1:]:
        assert list(rows["moelab"]) == ["result"]
        assert rows["moelab"]["result"].endswith("apart: its speed does not count")
        assert rows["llama.cpp"]["TPOT s"] == [2.0] * DECODE


def test_moelab_runs_on_files_of_gguf(tmp_path):
    found = bench(tmp_path, kinds=("BF16", "Q8_0", "Q4_0"), limits=(1.5,))
    assert len(found) == 4
    for rows in list(found.values())[1:]:
        assert rows["moelab"]["undisturbed s"] > 0
        assert rows["moelab"]["TTFT s"] > 0 and len(rows["moelab"]["TPOT s"]) == DECODE
