"""The offloading engine beside its peers and its limits: one interleaved run on a synthetic model of 5 GB.

24 layers of 64 experts, 8 a token, H 1024, I 512, bf16. Every contender runs in a process of its own, in the same
control group of memory, from the same file system with a read-ahead of 128 KB, on the same tokens: drawn at random
and given, not generated, because a random model repeats one token and its routing freezes. Rounds go through all
contenders, every second one backwards; medians are over all tokens of all rounds, ratios over rounds. Everything
that computes as transformers does must give the same logits, bit for bit. "The limit" is `on_demand_limit`: Σ over
layers of (attention and router + max(read, decompress, expert compute)), from the run's own bytes and times and from
the rate at which the same process then read whole experts with nothing else running.

Left out: batches, other devices, output quality (the model is random).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelab.bench.machine import disk, forget, memory_limit
from moelab.bench.peers import FOUND, lay_out
from moelab.progress import progress
from moelab.specs import MoESpec

SPEC = MoESpec("synthetic-5GB", "qwen3_moe", 24, tuple(range(24)), 64, 8, 1024, 512, vocab=8192, heads=16, kv_heads=4,
               head_dim=64)
#: memory limits of `peers`, as shares of the checkpoint: 3.06 and 1.85 GB
SHARES = (0.613, 0.371)
#: what a limit leaves for the interpreter and its libraries; accelerate brings whole layers to memory on top
PROCESS, ACCELERATE = 450e6, 650e6
SLOW = 500e6                            # bytes a second of `throttled`
BUDGETS = (0.15, 0.25, 0.4, 0.5, 0.75)  # of `simulated`
EXACT = ("moelab", "eager", "mapped", "accelerate", "probe")    # these must agree on every bit

Arm = tuple[str, dict[str, Any], int | None]                    # contender, options, memory limit


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

    def prepare(self, gguf: bool) -> None:
        """Write the model in every form that is not there yet; what was interrupted goes on."""
        from moelab.runtime.convert import convert
        from moelab.runtime.synthesize import synthesize
        model = self.folder / "model"
        if not model.exists():
            synthesize(model, self.spec)
        for name, codec in (("huffman", "huffman"), ("raw", "raw")):
            if not (self.folder / name).exists():
                convert(model, self.folder / name, codec)
        if not (self.folder / "experts.bin").exists():
            lay_out(model, self.folder / "experts.bin")
        if gguf and not (self.folder / "model.gguf").exists():
            program = "import sys; from moelab.bench.foreign import write_gguf; write_gguf(*sys.argv[1:])"
            done = _python(self.python.get("llama.cpp"), "-c", program, str(model), str(self.folder / "model.gguf"))
            if done.returncode and "ModuleNotFoundError" not in done.stderr:
                raise RuntimeError(f"the GGUF file could not be written:\n{done.stderr}")

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
               **options: Any) -> Arm:
        return "moelab", {"store": str(self.folder / codec), "budget": budget, "options": options,
                          "trace": str(trace) if trace else None}, limit

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

    def aim(self, name: str, value: float | None, aim: float, below: bool = True) -> None:
        if value is not None:
            self.aims[name] = {"measured": value, "aim": f"{'≤' if below else '≥'} {aim}",
                               "met": value <= aim if below else value >= aim}


# ---------------------------------------------------------------------------------------------------------- sections

def resident(bench: Bench) -> dict[str, Any]:
    """Everything in memory."""
    arms: dict[str, Arm] = {"moelab": bench.moelab("huffman", 1.0), "eager": ("eager", {}, None),
                            "llama.cpp": ("llama.cpp", {"gguf": str(bench.folder / "model.gguf")}, None)}
    reports = bench.interleave("resident", arms)
    rows = bench.table("resident", arms, reports, "eager")
    bench.aim("everything resident: TPOT ÷ eager", rows["moelab"].get("÷ eager"), 1.0)
    return {"everything resident": rows}


def limit(bench: Bench) -> dict[str, Any]:
    """Budgets of 25 % and 50 % against the on-demand limit; TTFT against reading the experts once."""
    arms = {f"{codec}, {share:.0%}": bench.moelab(codec, share) for share in (0.25, 0.5) for codec in ("huffman", "raw")}
    reports = bench.interleave("limit", arms)
    rows, against = bench.table("limit", arms, reports, "huffman, 50%"), {}
    for name, found in reports.items():
        if "result" in found[-1]:
            continue
        demand = statistics.median(report["on_demand_s"] for report in found)
        over = statistics.median(statistics.fmean(r["tpot_s"]) / r["on_demand_s"] for r in found)
        rate = statistics.median(report["read_rate"] for report in found)
        once = found[-1]["experts_bytes"] / rate
        first, second = (statistics.median(report["ttft_s"][i] for report in found) for i in (0, -1))
        against[name] = {
            "mean TPOT s": statistics.fmean(s for r in found for s in r["tpot_s"]), "limit s": demand, "÷ limit": over,
            "read GB/s": rate / 1e9, "all experts raw s": once,
            "as stored s": once * found[-1]["stored_fraction"], "TTFT s": first, "2nd TTFT s": second,
            "TTFT ÷ raw": first / once, "2nd TTFT ÷ raw": second / once}
        if name.startswith("huffman"):
            bench.aim(f"{name}: TPOT ÷ on-demand limit", over, 1.2)
    if "huffman, 50%" in against:
        bench.aim("huffman, 50%: TTFT ÷ reading the experts once", against["huffman, 50%"]["TTFT ÷ raw"], 1.2)
    return {"budgets": rows, "against the limit": against}


def peers(bench: Bench) -> dict[str, Any]:
    """The same memory for everyone, page cache included: about 60 % and 37 % of the checkpoint."""
    whole = sum(path.stat().st_size for path in (bench.folder / "model").iterdir())
    stride = json.loads((bench.folder / "experts.json").read_text())["stride"]
    layer, sections = bench.spec.experts_bytes / bench.spec.L, {}
    for share in SHARES:
        memory = round(share * whole)
        others = whole - bench.spec.experts_bytes
        budget = int(memory - others - PROCESS)
        if budget <= 0:
            raise ValueError(f"{share:.0%} of the checkpoint are {memory / 1e6:,.0f} MB, not enough for a process "
                             "alone; compare peers on a larger model")
        arms: dict[str, Arm] = {
            "moelab": bench.moelab("huffman", budget, memory), "moelab, raw": bench.moelab("raw", budget, memory),
            "bare probe": ("probe", {"experts": str(bench.folder / "experts.bin"), "slots": budget // stride}, memory),
            "llama.cpp mmap": ("llama.cpp", {"gguf": str(bench.folder / "model.gguf")}, memory),
            "transformers mmap": ("mapped", {}, memory),
            "accelerate disk": ("accelerate", {"layers": max(0, int((memory - others - ACCELERATE) // layer)),
                                               "offload": str(bench.folder / "offload")}, memory),
            "ftllm": ("ftllm", {"checkpoint": str(bench.folder / "hub"), "cache": budget}, None)}
        title = f"peers in {memory / 1e9:.2f} GB"
        reports = bench.interleave(title, arms)
        rows = sections[title] = bench.table(title, arms, reports, "moelab")
        for name, aim in (("llama.cpp mmap", 2.5), ("accelerate disk", 6), ("ftllm", 1.3), ("bare probe", 1)):
            bench.aim(f"{title}: TPOT of {name} ÷ moelab", rows[name].get("÷ moelab"), aim, below=False)
    return sections


def throttled(bench: Bench) -> dict[str, Any]:
    """Reads slowed down to 500 MB/s: there bytes are all that counts."""
    sections = {}
    for share in (0.25, 0.5):
        arms = {codec: bench.moelab(codec, share, bandwidth=SLOW) for codec in ("huffman", "raw")}
        title = f"reads of {SLOW / 1e6:.0f} MB/s, budget {share:.0%}"
        reports = bench.interleave(title, arms)
        rows = sections[title] = bench.table(title, arms, reports, "raw")
        bench.aim(f"{title}: TPOT of huffman ÷ raw", rows["huffman"].get("÷ raw"), 0.72)
    return sections


def memory(bench: Bench, tokens: int = 64) -> dict[str, Any]:
    """Peak memory of a long run: VmHWM of the process, mapped libraries included; at the end, what is its own alone."""
    report = bench.contend(bench.moelab("huffman", 0.25), tokens)
    title = f"memory over {tokens:,} tokens"
    if "result" in report:
        return {title: report}
    parts = {key: report[key] for key in ("budget_bytes", "others_bytes", "kv_bytes")}
    above = report["peak_rss_bytes"] - sum(parts.values())
    bench.aim(f"{title}: MB above budget, other weights and KV cache", above / 1e6, 300)
    return {title: parts | {"peak_rss_bytes": report["peak_rss_bytes"], "above_bytes": above,
                            "anonymous_bytes": report["anonymous_bytes"], "imports_alone_rss_bytes": report["imports_rss_bytes"],
                            "TPOT seconds": statistics.median(report["tpot_s"]),
                            "major faults while decoding": report["decode_major_faults"]}}


def simulated(bench: Bench) -> dict[str, Any]:
    """The simulator on the engine's own steps: equal decisions, and its time beside the measured."""
    from moelab.cache.pools import Pools
    from moelab.cache.residency import Residency
    from moelab.runtime.profile import profile
    from moelab.runtime.simulator import simulate
    from moelab.store.layout import ExpertStore, run
    store, rows = ExpertStore(bench.folder / "huffman"), {}
    profiled = profile(store)
    for share in BUDGETS:
        with tempfile.TemporaryDirectory() as temporary:
            trace = Path(temporary) / "trace.json"
            report = bench.contend(bench.moelab("huffman", share, trace=trace))
            if "result" in report:
                rows[f"{share:.0%}"] = report
                continue
            run_of = json.loads(trace.read_text())
        steps = [[(layer, dict(experts)) for layer, experts in forward] for forward in run_of["steps"]]
        played = simulate(steps, run_of["forwards"], Residency(store.spec.L, store.spec.E, Pools(*run_of["pools"])),
                          profiled.delays(), workers=run_of["workers"], staging=run_of["staging"],
                          other=profiled.other, head=profiled.head)
        said = played.metrics()
        said["read_bytes"] = sum(run(store.entries(event.layer, event.expert), PARTS.get(event.kind, "both"))[1]
                                 for event in played.events if event.kind.startswith("read"))
        equal = [key for key, value in zip(FOUND, run_of["found"]) if said[key] == value]
        measured = statistics.median(report["tpot_s"])
        rows[f"{share:.0%}"] = {
            "measured TPOT s": measured, "simulated TPOT s": said["tpot_s"], "simulated ÷ measured":
            said["tpot_s"] / measured, "measured TTFT s": report["ttft_s"][-1], "simulated TTFT s": said["ttft_s"],
            "hit rate": report["decode_hit_rate"], "equal": ", ".join(equal) or "nothing"}
        bench.aim(f"simulator at {share:.0%}: off the measured TPOT", abs(said["tpot_s"] / measured - 1), 0.15)
        bench.aim(f"simulator at {share:.0%}: decisions that differ", len(FOUND) - len(equal), 0)
    return {"simulated": rows}


PARTS = {"read E": "E", "read SM": "SM"}
SECTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "resident": resident, "limit": limit, "peers": peers, "throttled": throttled, "memory": memory,
    "simulated": simulated}


def run(only: Iterable[str] = tuple(SECTIONS), folder: str | Path | None = None, rounds: int = 3, prompt: int = 128,
        decode: int = 32, quick: bool = False, long: bool = False, python: Sequence[str] = (), spec: MoESpec = SPEC
        ) -> dict[str, Any]:
    """Measure; returns sections of figures. The other arguments are those of the command line."""
    unknown = [name for name in only if name not in SECTIONS]
    if unknown:
        raise ValueError(f"there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    malformed = [given for given in python if "=" not in given]
    if malformed:
        raise ValueError(f"--python {malformed[0]}: write CONTENDER=INTERPRETER, such as llama.cpp=/opt/bin/python")
    if quick:
        rounds, decode = 1, 8
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with tempfile.TemporaryDirectory() as temporary:
        with disk(Path(folder or temporary).expanduser().resolve(), 7 * spec.experts_bytes + 3e9) as (place, words):
            bench = Bench(spec, place, prompt, decode, rounds, dict(given.split("=", 1) for given in python))
            bench.prepare(gguf=bool({"resident", "peers"} & set(only)))
            found: dict[str, Any] = {"conditions": {
                "file system": words, "tokens": f"random and given; prompts of {prompt}, then {decode} more, batch 1",
                "rounds": rounds, "load average before": load, "cores": os.cpu_count()}}
            for name in only:
                options = {"tokens": 1000} if name == "memory" and long else {}
                found |= SECTIONS[name](bench, **options)
    return found | {"aims": bench.aims, "samples": bench.samples}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), metavar="SECTIONS",
                        help=f"some of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--folder", help="where the model is kept, 30 GB, for the next time; else it is temporary")
    parser.add_argument("--rounds", type=int, default=3, help="of every contender (default: 3)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--decode", type=int, default=32, help="tokens after it (default: 32)")
    parser.add_argument("--quick", action="store_true", help="one round of 8 tokens: whether all of it runs")
    parser.add_argument("--long", action="store_true", help="watch the memory over 1,000 tokens instead of 64")
    parser.add_argument("--python", action="append", default=[], metavar="CONTENDER=INTERPRETER",
                        help="the Python that has a peer installed, such as llama.cpp=/opt/peers/bin/python")


TIMEOUT = 1800                          # seconds that a contender may take


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
