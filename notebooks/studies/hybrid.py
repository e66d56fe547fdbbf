"""Send missing experts or compute them where they lie: is the balance as fast as the better of the two?

    moelab bench hybrid [--model FOLDER]

decodes the same text with `hybrid`, in turn, with all missing experts sent ("all sent"), with all of
them computed where they lie ("all in place"), and as `moelab.offloading.hybrid` decides by what it has
measured (GPU-NDP Eqs. 1 to 3), over links of several rates, on two groups of threads of one CPU. Each
generation begins with a cache as the one before has left it; the first is not counted. "simulated" is
the last one, played again in simulated time: its decisions are the engine's, its seconds a fit's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import moelab
from moelab.base.arguments import number, several, whole
from moelab.base.progress import progress
from moelab.base.records import Record, Records
from moelab.offloading.hybrid import Balance, Rates

MEASURES = ("moelab/offloading", "moelab/cache", "moelab/simulation")
NEVER = (1e9, 0.0)
#: arm → rates that decide; None: those that are measured
ARMS = {
    "all sent": Rates(far=NEVER),
    "all in place": Rates(link=NEVER, near=NEVER),
    "balanced": None,
}


def run(
    model: str | Path | None = None,
    memory: str = "30%",
    rates: Sequence[float] = (0.05, 0.2, 1.0),
    threads: int = 1,
    tokens: int = 64,
    rounds: int = 5,
) -> Records:
    sections: Records = {}
    for rate in progress(rates, "links", unit="rates"):
        rows: dict[str, Record] = {arm: {"TPOT s": [], "in place %": []} for arm in ARMS}
        how = {"memory": memory, "hybrid": threads, "executor": "fast", "bandwidth": 1e9 * rate}
        with moelab.open_model(model, **how) as lm:
            session = lm.moelab
            inputs = lm.tokenizer("def read(self):", return_tensors="pt")
            for turn in range(rounds + 1):
                for arm, told in ARMS.items():
                    session.engine.controller.balance = Balance(
                        session.run.settings.experts_bytes, told and repeat(told)
                    )
                    session.reset()
                    lm.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens)
                    found = session.metrics()
                    aside = sum(event.resource == "host" for event in session.timeline)
                    asked = found.misses + sum(found.hits.values())
                    if turn:
                        rows[arm]["TPOT s"].append(found.tpot)
                        rows[arm]["in place %"].append(100 * aside / asked)
                        rows[arm]["MB a token"] = (found.read_bytes_per_token or 0) / 1e6
            rows["balanced"]["simulated TPOT s"] = moelab.simulate(session.run).tpot
        sections[f"a link of {rate:g} GB/s, memory for {memory}"] = rows
    return sections


OPTIONS = {
    "model": ({"metavar": "FOLDER"}, "the small model shipped by default"),
    "memory": ({"metavar": "SIZE"}, "of the near place"),
    "rates": (several(number(above=0)), "GB/s of the link"),
    "threads": (whole(1), "of the far place"),
    "tokens": (whole(2), "of an answer"),
    "rounds": (whole(1), "generations that are counted, of each arm"),
}
