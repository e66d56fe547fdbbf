"""The calculator: in a browser, from a file, it answers what `advise` does, to the digit."""

import random

import pytest

from moelab.advice import calculator
from moelab.advice.advise import advise
from moelab.advice.assumed import assumed
from moelab.advice.model import find_model
from moelab.advice.question import Question
from moelab.base.specs import DeviceSpec, Figure
from moelab.cards import load_device
from tests.viz.conftest import chromium, tab  # noqa: F401 -- fixtures

#: one that was fitted, one that was not, one in four bits, one with a shared expert
MODELS = "Qwen3-30B-A3B", "Phi-3.5-MoE", "GPT-OSS-20B", "DeepSeek-V2-Lite"
SHOWN = "experts as", "TPOT", "tokens/s", "TTFT", "memory", "hit rate", "loss", "limited by"


def machine(disk, busy, bandwidth, tflops):
    figures = {
        "storage_read_gbs": disk,
        "storage_busy_gbs": busy,
        "memory_bandwidth_gbs": bandwidth,
        "fp32_tflops": tflops,
    }
    return DeviceSpec("own", {n: Figure(of, "", "assumed", "") for n, of in figures.items() if of})


def drawn(rng):
    """A setting of the page: a small machine that hardly holds the model, or a large one."""
    disk = round(10 ** rng.uniform(-1.5, 1.2), 3)
    return {
        "memory": round(rng.choice((4, 40, 200)) * rng.uniform(0.5, 2), 2),
        "disk": disk,
        "busy": rng.choice((0, round(disk * rng.uniform(0.2, 1), 3))),
        "bandwidth": round(10 ** rng.uniform(0.7, 3), 1),
        "tflops": round(10 ** rng.uniform(-1, 2), 2),
        "context": rng.choice((1, 512, 4096, 32768)),
        "any": rng.random() < 0.5,
    }


@pytest.fixture(scope="module")
def questions():
    device, found = load_device("m2-max"), map(find_model, MODELS)
    return [
        Question(one, device, 16 * 10**9, 4096, 1, 0.0, True, assumed(one.spec)) for one in found
    ]


@pytest.fixture
def played_once(questions, monkeypatch):
    """Texts are played for the questions alone: what they find depends on no setting."""
    monkeypatch.setattr(Question, "drafts", lambda *_: "")  # a note, not on the page
    known = {one.model.spec.name: one.assumed for one in questions}
    monkeypatch.setattr("moelab.advice.advise.assumed", lambda spec, *_: known[spec.name])


def opened(tab, file, questions):  # noqa: F811
    file.write_text(calculator.page(questions), encoding="utf-8")
    assert file.stat().st_size < 300_000
    tab.goto(file.as_uri())


def test_200_settings_give_what_advise_gives(tab, tmp_path, questions, played_once):  # noqa: F811
    opened(tab, tmp_path / "calculator.html", questions)
    rng = random.Random(0)
    refused = 0
    for _ in range(200):
        n = rng.randrange(len(MODELS))
        asked = drawn(rng)
        page = tab.evaluate("([n, asked]) => answer(data.models[n], asked)", [n, asked])
        own = machine(*(asked[name] for name in ("disk", "busy", "bandwidth", "tflops")))
        try:
            found = advise(
                MODELS[n],
                f"{asked['memory']}GB",
                context=asked["context"],
                loss="any" if asked["any"] else 0,
                device=own,
            )
        except ValueError as error:
            refused += 1
            few, every = page["numbers"]
            assert f"at least {few} (--memory), and {every} for all of them" in str(error)
            continue
        rows = [way.row(1) for way in found.ways]
        assert page["rows"] == [{name: row[name] for name in SHOWN} for row in rows]
        assert page["commands"] == found.commands
        assert "; ".join(page["more"]) == (found.words.split("More: ")[1].split(".\n")[0]).replace(
            "nothing that was tried here", ""
        )
    assert 10 < refused < 150


def test_the_page_shows_it_and_takes_what_is_typed(tab, tmp_path, questions, played_once):  # noqa: F811
    opened(tab, tmp_path / "calculator.html", questions)
    found = advise("Qwen3-30B-A3B", "20GB", device="m2-max")
    tab.select_option("[name=model]", "0")
    tab.fill("[name=memory]", "20")
    assert f"{1 / found.best.tpot:.3g} tokens/s" in tab.inner_text("#speed")
    assert "\n".join(found.commands) == tab.inner_text("#commands")
    assert "(published)" in tab.inner_text("form") and "(yours)" in tab.inner_text("form")
    again = tab.url
    tab.fill("[name=memory]", "2")
    assert "at least" in tab.inner_text("#refusal") and not tab.is_visible("#answer")
    tab.fill("[name=memory]", "")
    assert "must be a number" in tab.inner_text("#refusal")
    tab.goto("about:blank")
    tab.goto(again)  # a link keeps what was asked
    assert f"{1 / found.best.tpot:.3g} tokens/s" in tab.inner_text("#speed")


def test_the_page_fits_a_telephone(tab, tmp_path, questions):  # noqa: F811
    tab.set_viewport_size({"width": 400, "height": 800})
    opened(tab, tmp_path / "calculator.html", questions)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


def test_what_has_no_page_is_refused(questions):
    with pytest.raises(ValueError, match="of a CPU with a disk"):
        calculator.page([advise("OLMoE-1B-7B", "20GB", device="rtx-4090").asked])
