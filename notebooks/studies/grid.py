"""The experiment behind every bench of tokens: the same model and tokens for every arm, in
interleaved rounds, each in a process of its own; a row of figures an arm.

`engine`, `end_to_end`, `scale` and `prefetch` are its presets: which arms at which
budgets, rates, contexts and batches. Everything lies in one folder; what exists is not written
again, and the system's cache of it is dropped before each process. Times are medians over all
tokens of all rounds. Ratios are between medians of each token's least time of all rounds, as a
machine that is busy for seconds at a time would else decide them. What computes as transformers
does must agree with its eager experts bit for bit: a wrong output has no speed. Limits follow from a
run's own bytes and times and the highest rate of its reads in any forward: Σ over layers of
(attention, router + max(read, decode, compute)) on demand, the longest of these sums when
prefetching; the bytes that must be in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from moelab.base.files import folder_bytes
from moelab.base.records import Record, Records
from moelab.base.specs import MoESpec
from moelab.bench.implant import TOKENS, drawn, tokens_of
from moelab.bench.memory_limit import drop_cached, in_process
from moelab.store import fewbit
from moelab.store.codecs import CODECS

from . import peers
from .disk import disk
from .timing import turns, working

Arm = tuple[str, Record, int | None]  # engine, options, memory limit in bytes
EXACT = ("moelab", "eager", "mapped", "accelerate", "lru baseline")  # these must agree on every bit
#: of a limit, bytes for the process with torch; llama.cpp's takes 34 MB, and all else would be page
#: cache, in which a small model fits whole; accelerate also loads whole layers
PROCESS, LLAMA, ACCELERATE = 400e6, 60e6, 650e6
#: llama.cpp's kinds → their files
GGUF = {"BF16": "model.gguf", "Q8_0": "Q8_0.gguf", "Q4_0": "Q4_0.gguf"}
WRITE_GGUF = (
    "import sys; from notebooks.studies.external_engines import write_gguf; write_gguf(*sys.argv[1:]); "
    "print({})"
)


def synthetic(name: str, L: int, E: int, K: int, H: int, I: int, heads: int = 16) -> MoESpec:
    """The geometry of a small Qwen3-MoE."""
    sizes = {"vocab": 8192, "heads": heads, "kv_heads": 4, "head_dim": 64}
    return MoESpec(name, "qwen3_moe", L, tuple(range(L)), E, K, H, I, **sizes)


@dataclass
class Experiment:
    """prompt, decode : tokens of a prompt, and after it. python : llama.cpp's interpreter.
    tokens : given to the engines, a row a sequence; `prepare` finds one where none are.
    routing : of the model that is synthesized, of `ROUTINGS`. here : engines run
        in this process, without a limit. loss : also the divergence from `reference`'s logits.
    simulated : also what the simulator says of arms that read on demand."""

    spec: MoESpec
    folder: Path
    prompt: int
    decode: int
    rounds: int
    python: str | None = None
    reference: Record | None = None
    tokens: list[list[int]] | None = None
    routing: str = "fitted"
    here: bool = False
    loss: bool = False
    simulated: bool = False
    missing: dict[str, str] = field(default_factory=dict)  # engine that is not installed → why
    profiles: dict[Any, Any] = field(default_factory=dict)

    def prepare(self, forms: Iterable[str], external: bool = False) -> None:
        """Write the model in every form that is missing; those in processes run once, as kernels
        that are not compiled yet would take experts' memory within a limit, and a first token's
        time."""
        from moelab.bench.synthesize import synthesize
        from moelab.checkpoint.convert import convert

        model = self.folder / "model"
        if not model.exists():
            synthesize(model, self.spec, routing=self.wanted())
        if self.tokens is None:
            self.tokens = [self.sequence(model)]
        for name in forms:
            if not (self.folder / name).exists():
                how = {"codec" if name in CODECS else "quantize": name}
                convert(model, self.folder / name, **how)
            for budget in () if self.here else (0.5, 1.0):
                self.report(self.moelab(name, budget, executor="fast"), decode=1)
        for kind, name in GGUF.items() if external and not self.here else ():
            file = self.folder / name
            if not file.exists():
                words = "-c", WRITE_GGUF, str(model), str(file), kind
                try:
                    in_process(words, python=self.python)
                except (RuntimeError, OSError) as error:
                    self.missing["llama.cpp"] = f"its file was not written: {error}"
                    break

    @property
    def different(self) -> int:
        """Tokens of a sequence that is implanted; a longer one begins again after them."""
        return min(max(self.prompt + self.decode, TOKENS), self.spec.H)

    def wanted(self) -> np.ndarray | None:
        """The ids [T, L, K] that a synthesized model is to choose."""
        return None if self.routing == "uniform" else drawn(self.spec, self.different)[0]

    def sequence(self, model: Path) -> list[int]:
        """The tokens of a model's folder; random ones where its routers are. ValueError: it was
        synthesized for another routing, or fewer tokens."""
        known = tokens_of(model)
        count = self.prompt + self.decode
        uniform = self.routing == "uniform"
        if known if uniform else len(known) < self.different:
            raise ValueError(
                f"{model} was made for {len(known) or 'no'} tokens of fitted routing; this bench needs "
                f"{count} of {self.routing} routing: give another folder"
            )
        if uniform:
            return random.Random(0).choices(range(self.spec.vocab), k=count)
        return list(islice(cycle(known), count))

    @property
    def routed(self) -> str:
        """How the tokens are routed, in words."""
        if self.routing == "uniform":
            return "uniform routing: random tokens through random routers"
        return f"routing as in real models, {drawn(self.spec, 1)[1]}"

    def report(self, arm: Arm, decode: int | None = None) -> Record:
        """One process of an engine: its report, or {"result": why there is none}."""
        name, options, limit = arm
        if name in self.missing:
            return {"result": self.missing[name]}
        if options.get("options", {}).get("mode") != "buffered":  # which reads from that cache
            drop_cached(self.folder)
            drop_cached((self.folder / "model").resolve())
        kept = self.folder / "logits.npy"
        kept.unlink(missing_ok=True)
        options = {
            "model": str(self.folder / "model"),
            "tokens": [row[: self.prompt + (decode or self.decode)] for row in self.tokens],
            "prompt": self.prompt,
            "logits": str(kept) if self.loss else None,
        } | options
        try:
            found = self._here(name, options) if self.here else self._apart(name, options, limit)
        except (ValueError, RuntimeError, OSError) as error:
            return {"result": f"failed: {error}"}
        if "missing" in found:  # it need not be tried again
            self.missing[name] = found["missing"]
            return {"result": found["missing"]}
        return found | ({"logits": np.load(kept)} if kept.exists() else {})

    def _here(self, name: str, options: Record) -> Record:
        found = peers.run(name, options)
        return found | {"limit": "in one process, nothing was limited", "peak_rss_bytes": None}

    def _apart(self, name: str, options: Record, limit: int | None) -> Record:
        words = "-m", "notebooks.studies.peers", name, json.dumps(options)
        return in_process(words, limit, self.python if name == "llama.cpp" else None)

    def moelab(
        self, form: str, budget: float, limit: int | None = None, *, options: Any = None, **how: Any
    ) -> Arm:
        """moelab on a store in a form; options : of `peers.Moelab`; all else : of `open_model`."""
        given = {"store": str(self.folder / form), "budget": budget, "options": how}
        return "moelab", given | (options or {}), limit

    def llama(self, kind: str, limit: int | None = None) -> Arm:
        """llama.cpp on a kind of `GGUF`."""
        return "llama.cpp", {"gguf": str(self.folder / GGUF[kind])}, limit

    @property
    def dense_bytes(self) -> int:
        """Of the checkpoint's files but for the routed experts."""
        return folder_bytes(self.folder / "model") - self.spec.experts_bytes

    def others(self, budget: int, limit: int, kinds: Iterable[str] = GGUF) -> dict[str, Arm]:
        """Other engines with a budget for experts within a memory limit, llama.cpp with as much for
        weights as they have; it runs Qwen3-MoE only."""
        layer = self.spec.experts_bytes / self.spec.L
        raw = {"store": str(self.folder / "raw"), "budget": budget}
        slim = int(limit - PROCESS + LLAMA)
        layers = max(0, int((limit - self.dense_bytes - ACCELERATE) // layer))
        kept = {"layers": layers, "offload": str(self.folder / "offload")}
        external = kinds if self.spec.model_type == "qwen3_moe" and not self.here else ()
        return {
            "LRU baseline": ("lru baseline", raw, limit),
            **{f"llama.cpp {kind} mmap": self.llama(kind, slim) for kind in external},
            "transformers mmap": ("mapped", {}, limit),
            "accelerate disk": ("accelerate", kept, limit),
        }

    def compare(self, title: str, arms: dict[str, Arm], base: str) -> Records:
        """Run all arms in turn: arm → row of figures, ratios being to `base`. An arm that cannot run
        is not tried again, and its row says why."""
        reports: dict[str, list[Record]] = {name: [] for name in arms}
        for _, name in turns(list(arms), self.rounds, title):
            if not any("result" in report for report in reports[name]):
                reports[name].append(self.report(arms[name]))
        output = {}
        for name, found in reports.items():
            output[name] = "" if "result" in found[-1] else self.judge(arms[name], found)
            if "≠" in output[name]:
                reports[name] = [{"result": f"{output[name]}: its speed does not count"}]
        rows = {}
        for name, found in reports.items():
            if "result" in found[-1]:
                rows[name] = {"result": found[-1]["result"]}
                continue
            row = self.row(arms[name], found)
            if "result" not in reports[base][-1]:
                row[f"÷ {base}"] = row["undisturbed s"] / median(undisturbed(reports[base]))
            row |= {"output": output[name]}
            rows[name] = {key: of for key, of in row.items() if of is not None}
        return rows

    def row(self, arm: Arm, found: list[Record]) -> Record:
        """An arm's figures; those of a token are those of a sequence's."""
        tpot = [second for report in found for second in report["tpot_s"]]
        batch = len(self.tokens) if self.tokens else 1
        figures = {
            "TPOT s": median(tpot),
            "undisturbed s": median(undisturbed(found)),
            "each token s": tpot,
            "TTFT s": median(report["ttft_s"] for report in found),
            "tokens/s": batch * len(tpot) / sum(tpot),
            "MB a token": mean(found, "decode_read_bytes", 1e6 * self.decode * batch),
            "hit rate": mean(found, "decode_hit_rate"),
            "peak GB": mean(found, "peak_rss_bytes", 1e9),
            "result": found[-1]["limit"],
        }
        if self.loss and "logits" in found[-1] and "logits" in (self.reference or {}):
            reference = self.reference["logits"]
            figures["KL"] = fmean(divergence(report["logits"], reference) for report in found)
        if "metrics" not in found[-1]:
            return figures
        options = arm[1]["options"]
        predicted = bool(arm[1].get("predictor") or options.get("speculate"))
        figures |= beside_limits(found, figures, predicted)
        executor = options.get("executor", "exact")
        plain = not (predicted or arm[1].get("compressed") or arm[1].get("serial"))
        if self.simulated and plain and executor in ("exact", "fast"):
            said = self.replayed(arm, found[-1]["replay"])
            figures |= {"simulated TPOT s": said, "simulated ÷ measured": said / figures["TPOT s"]}
        return figures

    def replayed(self, arm: Arm, ran: Record) -> float:
        """TPOT of the simulator for an engine's own steps and this machine's profile, which is kept:
        no budget changes it."""
        from moelab.bench.profile import profile
        from moelab.cache.pools import Pools
        from moelab.cache.residency import Residency
        from moelab.simulation.simulator import simulate

        options = arm[1]["options"]
        key = (arm[1]["store"], *sorted(options.items()))
        if key not in self.profiles:
            self.profiles[key] = profile(arm[1]["store"], seconds=0.5, **options)
        steps = [[(layer, dict(experts)) for layer, experts in forward] for forward in ran["steps"]]
        residency = Residency(self.spec.L, self.spec.E, Pools(*ran["pools"]))
        residency.fill()  # as the engine does where everything fits
        machine = replace(self.profiles[key].machine, workers=ran["workers"])
        forwards = [forward[2:] for forward in ran["forwards"]]
        return simulate(steps, forwards, residency, machine, staging=ran["staging"]).metrics().tpot

    def judge(self, arm: Arm, reports: list[Record]) -> str:
        """Whether the logits are those of transformers' eager experts."""
        if self.reference is None:  # one by one: the same bits in little memory
            one_by_one = ("mapped", {"opened": "external"}, None)
            self.reference = self.report(one_by_one if self.here else ("eager", {}, None))
        if "result" in self.reference:
            return f"no reference: {self.reference['result']}"
        stored = Path(arm[1].get("store", "")).name
        options = arm[1].get("options", {})
        exact = options.get("executor", "exact") == "exact" and not options.get("speculate")
        if arm[0] in EXACT and stored not in fewbit.FORMATS and exact:
            same = all(report["digest"] == self.reference["digest"] for report in reports)
            return "= eager" if same else "≠ EAGER"
        agreed = zip(reports[-1]["best"], self.reference["best"])
        return f"best token {fmean(a == b for a, b in agreed):.0%} as eager"


Tables = Iterable[tuple[str, Experiment, str, dict[str, Arm]]]  # title, where, base, arms


def measured(tables: Tables, conditions: Record) -> Record:
    """A bench's sections: the conditions, and a table of rows for each title, which may come in
    parts. Ctrl-C keeps what is done, as tables take minutes."""
    found: Record = {"conditions": conditions}
    try:
        for title, bench, base, arms in tables:
            found[title] = found.get(title, {}) | bench.compare(title, arms, base)
    except KeyboardInterrupt:
        conditions["stopped"] = f"after {len(found) - 1} tables"
    return found


def beside_limits(found: list[Record], figures: Record, ahead: bool) -> Record:
    """What our own engine's reports say of limits, of what waits, and of what overlaps; ahead :
    reads overlap with everything, not with a layer's own computing alone."""
    ran = [report["metrics"] for report in found]
    least = median(report["overlapped_s" if ahead else "on_demand_s"] for report in found)
    return {
        "mean TPOT s": fmean(figures["each token s"]),  # a mean, as the limit is
        "MB a token": mean(ran, "read_bytes_per_token", 1e6),
        "TPOT limit s": least,
        "stall ms": mean(ran, "stall_per_step", 1e-3),
        "stored fraction": found[-1]["stored_fraction"],
        "other weights GB": found[-1]["others_bytes"] / 1e9,
    }


def divergence(logits: np.ndarray, reference: np.ndarray) -> float:
    """Mean over steps of KL(reference ‖ found) in nats, of logits [steps, V]: 0 where both predict
    alike."""
    from scipy.special import log_softmax

    p, q = (log_softmax(of.astype(np.float64), axis=1) for of in (reference, logits))
    return max(float((np.exp(p) * (p - q)).sum(1).mean()), 0.0)


@contextmanager
def place_of(folder: str | Path | None, spec: MoESpec, here: bool = False) -> Iterator[Any]:
    """(the folder for a model's forms, what its file system is): on a disk of its own where that can
    be, unless all runs in this process."""
    with working(folder) as where:
        where.mkdir(parents=True, exist_ok=True)
        on = nullcontext((where, "as it is")) if here else disk(where, 9 * spec.experts_bytes + 3e9)
        with on as found:
            yield found


#: of a synthesized model: as real models do it (`moelab.bench.implant`), or the stress case
ROUTINGS = ("fitted", "uniform")
#: options that presets share
ROUTING = {"choices": ROUTINGS}, "of the synthesized model: as fitted to real traces, or uniform"
PYTHON = None, "the Python that has llama_cpp and gguf installed (default: this one)"


def mean(reports: list[Record], key: str, unit: float = 1.0) -> float | None:
    """Mean of a figure over the reports that have it; None where none has."""
    values = [report[key] / unit for report in reports if report.get(key) is not None]
    return fmean(values) if values else None


def undisturbed(reports: list[Record]) -> list[float]:
    """Seconds of each token, the least of all rounds: an engine does the same in each."""
    return [min(rounds) for rounds in zip(*(report["tpot_s"] for report in reports))]
