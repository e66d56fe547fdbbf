"""A contest: the same model and tokens for every contender, a process each, in interleaved rounds; and its tables.

Everything lies in one folder: the checkpoint, its stores, and the files that other engines want; what is there is not
written again. Before each process the system is asked to forget all of it. Rounds go through all contenders, every
second one backwards, so that heat and order favour none. Medians are over all tokens of all rounds, ratios over
rounds. Who computes as transformers does must give its logits bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelab.bench import limit
from moelab.bench.machine import forget, memory_limit
from moelab.bench.lru_baseline import lay_out
from moelab.progress import progress
from moelab.specs import MoESpec

Arm = tuple[str, dict[str, Any], int | None]                    # contender, options, memory limit
EXACT = ("moelab", "eager", "mapped", "accelerate", "probe")    # these must agree on every bit
#: contender → what must be importable, what writes the model for it, and where
PEER_FILES = (("llama.cpp", "gguf, llama_cpp", "write_gguf", "model.gguf"),
              ("ftllm", "ftllm", "write_unstacked", "hub"))
TIMEOUT = 1800                          # seconds that a contender may take


@dataclass
class Bench:
    """Where everything lies, and how much of it is run. `tokens`: two prompts and what follows the second."""

    spec: MoESpec
    folder: Path
    prompt: int
    decode: int
    rounds: int
    python: dict[str, str]
    samples: dict[str, list[float]] = field(default_factory=dict)
    aims: dict[str, dict[str, Any]] = field(default_factory=dict)
    reference: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------- what is run

    def prepare(self, foreign: bool) -> None:
        """Write the model in every form that is not there yet; what was interrupted goes on."""
        from moelab.models.convert import convert
        from moelab.models.synthesize import synthesize
        model = self.folder / "model"
        if not model.exists():
            synthesize(model, self.spec)
        for name, codec in (("huffman", "huffman"), ("raw", "raw")):
            if not (self.folder / name).exists():
                convert(model, self.folder / name, codec)
        if not (self.folder / "experts.bin").exists():
            lay_out(model, self.folder / "experts.bin")
        for peer, needs, function, path in PEER_FILES if foreign else ():
            program = (f"import sys, {needs}; from moelab.bench.external_engines import {function}; "
                       f"{function}(*sys.argv[1:])")
            if not (self.folder / path).exists():
                try:
                    done = _python(self.python.get(peer), "-c", program, str(model), str(self.folder / path))
                except OSError:
                    continue                    # no interpreter: its contender will say so
                if done.returncode and "ModuleNotFoundError" not in done.stderr:
                    raise RuntimeError(f"{path} could not be written:\n{done.stderr}")

    def tokens(self, decode: int | None = None) -> list[int]:
        rng = random.Random(0)
        return [rng.randrange(self.spec.vocab) for _ in range(2 * self.prompt + (decode or self.decode))]

    def contend(self, arm: Arm, decode: int | None = None) -> dict[str, Any]:
        """One process of a contender: its report, or {"result": why there is none}."""
        name, options, limit = arm
        forget(self.folder)
        options = {"model": str(self.folder / "model"), "tokens": self.tokens(decode),
                   "prompts": [self.prompt, self.prompt]} | options
        with memory_limit(limit) as group:
            options["cgroup"] = str(group.procs) if group.procs else None
            try:
                done = _python(self.python.get(name), "-m", "moelab.bench.peers", name, json.dumps(options))
            except OSError as error:
                return {"result": f"not installed (no interpreter: {error})"}
            except subprocess.TimeoutExpired:
                return {"result": f"gave up after {TIMEOUT / 60:.0f} minutes"}
            if done.returncode:
                last = (done.stderr.strip() or "no word").splitlines()[-1]
                return {"result": f"failed: {'killed, out of memory?' if done.returncode == -9 else last}"}
            report = json.loads(done.stdout.strip().splitlines()[-1])
            if "missing" in report:
                return {"result": report["missing"]}
            return report | {"limit": group.reason, "group_peak_bytes": group.peak_bytes}

    def interleave(self, title: str, arms: dict[str, Arm]) -> dict[str, list[dict[str, Any]]]:
        """The reports of all rounds of each arm; one that cannot run is not tried again."""
        reports: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        for i in progress(range(self.rounds), title, unit="rounds"):
            for name in list(arms)[::-1 if i % 2 else 1]:
                if not any("result" in report for report in reports[name]):
                    reports[name].append(self.contend(arms[name]))
        return reports

    def moelab(self, codec: str, budget: float, limit: int | None = None, trace: Path | None = None,
               guess: str | None = None, compressed: bool = False, **options: Any) -> Arm:
        return "moelab", {"store": str(self.folder / codec), "budget": budget, "options": options,
                          "trace": str(trace) if trace else None, "guess": guess,
                          "compressed": compressed}, limit

    # -------------------------------------------------------------------------------------------------- what is said

    def table(self, title: str, arms: dict[str, Arm], reports: dict[str, list[dict[str, Any]]], base: str
              ) -> dict[str, dict[str, Any]]:
        """A row of figures for each arm; `base` is the arm that ratios are of."""
        rows = {}
        for name, found in reports.items():
            if "result" in found[-1]:
                rows[name] = {"result": found[-1]["result"]}
                continue
            tpot = [second for report in found for second in report["tpot_s"]]
            self.samples[f"{title}: {name}"] = tpot
            low, high = _quantiles(tpot)
            rows[name] = {
                "TPOT s": statistics.median(tpot), "10 %": low, "90 %": high, "best": min(tpot),
                f"÷ {base}": None if "result" in reports[base][-1] else self.ratio(reports, name, base),
                "TTFT s": statistics.median(report["ttft_s"][0] for report in found),
                "2nd TTFT s": statistics.median(report["ttft_s"][-1] for report in found),
                "MB a token": _mean(found, "decode_read_bytes", 1e6 * self.decode),
                "faults a token": _mean(found, "decode_major_faults", self.decode),
                "hit rate": _mean(found, "decode_hit_rate"), "peak GB": _mean(found, "peak_rss_bytes", 1e9),
                "load s": statistics.median(report["load_s"] for report in found),
                "output": self.judge(arms[name][0], found), "result": found[-1]["limit"]}
        return rows

    def ratio(self, reports: dict[str, list[dict[str, Any]]], name: str, base: str) -> float:
        """TPOT of one arm over that of another: the median over rounds of the ratio of their medians."""
        return statistics.median(statistics.median(a["tpot_s"]) / statistics.median(b["tpot_s"])
                                 for a, b in zip(reports[name], reports[base]))

    def judge(self, contender: str, reports: list[dict[str, Any]]) -> str:
        """Whether the logits are those of transformers' eager experts."""
        if self.reference is None:
            self.reference = self.contend(("eager", {}, None))
        if "result" in self.reference:
            return f"no reference: {self.reference['result']}"
        if contender in EXACT:
            return "= eager" if all(r["digest"] == self.reference["digest"] for r in reports) else "≠ EAGER"
        best = reports[-1].get("best")
        same = best and sum(a == b for a, b in zip(best, self.reference["best"])) / len(best)
        return f"best token {same:.0%} as eager" if best else "own tokens"

    def aim(self, name: str, value: float | str | None, aim: float, below: bool = True) -> None:
        if value is not None:
            self.aims[name] = limit.aim(value, aim, below)


def _python(interpreter: str | None, *words: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    return subprocess.run([interpreter or sys.executable, *words], capture_output=True, text=True, timeout=TIMEOUT,
                          env=os.environ | {"PYTHONPATH": path})


def _mean(reports: list[dict[str, Any]], key: str, unit: float = 1.0) -> float | None:
    values = [report[key] / unit for report in reports if report.get(key) is not None]
    return statistics.fmean(values) if values else None


def _quantiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]
