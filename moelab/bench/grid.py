"""The experiment behind every bench of tokens: the same model and tokens for every arm, in
interleaved rounds, each in a process of its own; a row of figures an arm.

`moelab.bench.engine`, `end_to_end` and `scale` are its presets: which arms at which budgets, rates,
contexts and batches. Everything lies in one folder; what exists is not written again, and the
system's cache of it is dropped before each process. Times are medians over all tokens of all rounds.
Ratios are between medians of each token's least time of all rounds, as a machine that is busy for
seconds at a time would else decide them. What computes as transformers does must agree with its
eager experts bit for bit: a wrong output has no speed. Limits follow from a run's own bytes and times
and the best rate at which it read whole experts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from moelab.bench import measure, peers
from moelab.bench.external_engines import write_unstacked
from moelab.bench.lru_baseline import lay_out
from moelab.bench.machine import disk
from moelab.bench.memory_limit import drop_cached, memory_limit
from moelab.bench.peers import FOUND
from moelab.bench.results import tenths
from moelab.files import folder_bytes
from moelab.records import Numbers, Record, Records
from moelab.specs import MoESpec
from moelab.store import fewbit
from moelab.store.codecs import CODECS

Arm = tuple[str, Record, int | None]  # engine, options, memory limit in bytes
EXACT = ("moelab", "eager", "mapped", "accelerate", "lru baseline")  # these must agree on every bit
PROCESS, ACCELERATE = (
    400e6,
    650e6,
)  # of a limit, for the process; accelerate also loads whole layers
TIMEOUT = 1800  # seconds that an engine may take
GGUF = {
    "BF16": "model.gguf",
    "Q8_0": "Q8_0.gguf",
    "Q4_0": "Q4_0.gguf",
}  # llama.cpp's kinds → their files
FORMS = ("huffman", "bf12", "raw", "int8", "int4")  # stores: codecs, and formats of few bits


@dataclass
class Experiment:
    """prompt, decode : tokens of each of `prompts` prompts, and after the last. python : engine →
        its interpreter.
    tokens : given to the engines, a row a sequence; one of random ones without. here : engines run
        in this process, without a limit. loss : also the divergence from `reference`'s logits."""

    spec: MoESpec
    folder: Path
    prompt: int
    decode: int
    rounds: int
    python: dict[str, str]
    aims: Records = field(default_factory=dict)
    reference: Record | None = None
    tokens: list[list[int]] | None = None
    here: bool = False
    loss: bool = False
    prompts: int = 2
    missing: dict[str, str] = field(default_factory=dict)  # engine that is not installed → why

    def prepare(self, external: bool, forms: Iterable[str] = FORMS) -> None:
        """Write the model in every form that is missing, where an interrupted conversion is
        resumed."""
        from moelab.bench.synthesize import synthesize
        from moelab.checkpoint.convert import convert

        model = self.folder / "model"
        hub = self.folder / "hub"
        if not model.exists():
            synthesize(model, self.spec)
        for name in forms:
            if not (self.folder / name).exists():
                convert(
                    model, self.folder / name, **{"codec" if name in CODECS else "quantize": name}
                )
        if not (self.folder / "experts.bin").exists():
            lay_out(model, self.folder / "experts.bin")
        missing = {kind: file for kind, file in GGUF.items() if not (self.folder / file).exists()}
        if external and missing and self._imports("llama.cpp", "gguf, llama_cpp"):
            program = (
                "import sys; from moelab.bench.external_engines import write_gguf; "
                "write_gguf(*sys.argv[1:])"
            )
            for kind, file in missing.items():
                done = _python(
                    self.python.get("llama.cpp"),
                    "-c",
                    program,
                    str(model),
                    str(self.folder / file),
                    kind,
                )
                if done.returncode:
                    raise RuntimeError(f"{file} could not be written:\n{done.stderr}")
        if external and not hub.exists() and self._imports("ftllm", "ftllm"):
            write_unstacked(model, hub)

    def warm(self, forms: Iterable[str] = FORMS) -> None:
        """Run each form once, from disk and resident: kernels that are not compiled yet would take
        experts' memory within a limit, and a first token's time."""
        for name, budget in product(forms, (0.5, 1.0)):
            dense = {"dense": name} if name in fewbit.FORMATS else {}
            self.report(self.moelab(name, budget, executor="fast", **dense), decode=1)

    def _imports(self, engine: str, modules: str) -> bool:
        """Whether an engine's interpreter has its modules; if not, its process will say so."""
        try:
            return not _python(self.python.get(engine), "-c", f"import {modules}").returncode
        except OSError:
            return False

    def report(self, arm: Arm, decode: int | None = None) -> Record:
        """One process of an engine: its report, or {"result": why there is none}."""
        (name, options, limit), rng = arm, random.Random(0)
        if name in self.missing:
            return {"result": self.missing[name]}
        drop_cached(self.folder)
        if (self.folder / "model").is_symlink():
            drop_cached((self.folder / "model").resolve())
        tokens = [
            rng.randrange(self.spec.vocab)
            for _ in range(self.prompts * self.prompt + (decode or self.decode))
        ]
        kept = self.folder / "logits.npy"
        kept.unlink(missing_ok=True)
        options = {
            "model": str(self.folder / "model"),
            "tokens": self.tokens or [tokens],
            "prompts": [self.prompt] * self.prompts,
            "logits": str(kept) if self.loss else None,
        } | options
        found = self._here(name, options) if self.here else self._apart(name, options, limit)
        if "missing" in found:  # it need not be tried again
            self.missing[name] = found["missing"]
            return {"result": found["missing"]}
        return found | ({"logits": np.load(kept)} if kept.exists() else {})

    def _here(self, name: str, options: Record) -> Record:
        try:
            found = peers.run(name, options)
        except (ValueError, RuntimeError, OSError) as error:
            return {"result": f"failed: {error}"}
        return found | {"limit": "in one process, nothing was limited", "group_peak_bytes": None}

    def _apart(self, name: str, options: Record, limit: int | None) -> Record:
        with memory_limit(limit) as group:
            options["cgroup"] = str(group.procs) if group.procs else None
            try:
                done = _python(
                    self.python.get(name), "-m", "moelab.bench.peers", name, json.dumps(options)
                )
            except OSError as error:
                return {"missing": f"not installed (no interpreter: {error})"}
            except subprocess.TimeoutExpired:
                return {"result": f"gave up after {TIMEOUT / 60:.0f} minutes"}
            if done.returncode:
                last = (done.stderr.strip() or "no word").splitlines()[-1]
                killed = "killed, out of memory?" if done.returncode == -9 else last
                return {"result": f"failed: {killed}"}
            limits = {"limit": group.reason, "group_peak_bytes": group.peak_bytes}
            return measure.last_json(done.stdout) | limits

    def moelab(
        self,
        codec: str,
        budget: float,
        limit: int | None = None,
        trace: Path | None = None,
        predictor: str | None = None,
        compressed: bool = False,
        ungated: bool = False,
        **options: Any,
    ) -> Arm:
        """moelab on a store; the arguments are those of `peers.Moelab`."""
        return (
            "moelab",
            {
                "store": str(self.folder / codec),
                "budget": budget,
                "options": options,
                "trace": str(trace) if trace else None,
                "predictor": predictor,
                "compressed": compressed,
                "ungated": ungated,
            },
            limit,
        )

    def llama(self, kind: str, limit: int | None = None) -> Arm:
        """llama.cpp on a kind of `GGUF`, which was written if gguf is installed beside it."""
        return "llama.cpp", {"gguf": str(self.folder / GGUF[kind])}, limit

    @property
    def dense_bytes(self) -> int:
        """Of the checkpoint's files but for the routed experts."""
        return folder_bytes(self.folder / "model") - self.spec.experts_bytes

    def rounded_bytes(self, form: str) -> int:
        """By how much less attention's and the head's weights take in few bits, so that experts
        have more: what is mapped of their file gives way to them."""
        spec = self.spec
        rows = spec.num_layers * spec.head_dim * 2 * (spec.heads + spec.kv_heads) + spec.vocab
        return 2 * rows * spec.H - fewbit.find_format(form).nbytes((rows, spec.H))

    def others(self, budget: int, limit: int, kinds: Iterable[str] = GGUF) -> dict[str, Arm]:
        """Other engines with a budget for experts within a memory limit; llama.cpp and ftllm run
        Qwen3-MoE only."""
        stride = json.loads((self.folder / "experts.json").read_text())["stride"]
        layer = self.spec.experts_bytes / self.spec.L
        slots = {"experts": str(self.folder / "experts.bin"), "slots": budget // stride}
        layers = max(0, int((limit - self.dense_bytes - ACCELERATE) // layer))
        return {
            "LRU baseline": ("lru baseline", slots, limit),
            **{f"llama.cpp {kind} mmap": self.llama(kind, limit) for kind in kinds},
            "transformers mmap": ("mapped", {}, limit),
            "accelerate disk": (
                "accelerate",
                {"layers": layers, "offload": str(self.folder / "offload")},
                limit,
            ),
            "ftllm": ("ftllm", {"checkpoint": str(self.folder / "hub"), "cache": budget}, None),
        }

    def compare(
        self, title: str, arms: dict[str, Arm], base: str
    ) -> tuple[Records, dict[str, list[Record]]]:
        """Run all arms in turn, ratios being to `base`: (arm → row of figures, arm → reports of all
        rounds). An arm that cannot run is not tried again."""
        reports: dict[str, list[Record]] = {name: [] for name in arms}
        for _, name in measure.turns(list(arms), self.rounds, title):
            if not any("result" in report for report in reports[name]):
                reports[name].append(self.report(arms[name]))
        rows = {}
        for name, found in reports.items():
            output = "" if "result" in found[-1] else self.judge(arms[name], found)
            if "≠" in output:
                reports[name] = [{"result": f"{output}: its speed does not count"}]
            elif output:
                ratio = None if self.failed(reports, base) else self.ratio(reports, name, base)
                rows[name] = self.row(arms[name], found) | {f"÷ {base}": ratio, "output": output}
                rows[name] = {key: of for key, of in rows[name].items() if of is not None}
        failed = {name: of[-1]["result"] for name, of in reports.items() if "result" in of[-1]}
        self.aim(f"{title}: outputs that differ", sum("≠" in of for of in failed.values()), 0)
        return {name: rows.get(name, {"result": failed.get(name)}) for name in arms}, reports

    def row(self, arm: Arm, found: list[Record]) -> Record:
        """An arm's figures; those of a token are those of a sequence's."""
        tpot = [second for report in found for second in report["tpot_s"]]
        batch = len(self.tokens) if self.tokens else 1
        (low, high), tokens = tenths(tpot), self.decode * batch
        joules = mean(found, "decode_joules", tokens)
        figures = {
            "TPOT s": median(tpot),
            "undisturbed s": median(undisturbed(found)),
            "10 %": low,
            "90 %": high,
            "each token s": tpot,
            "TTFT s": median(report["ttft_s"][0] for report in found),
            "2nd TTFT s": median(report["ttft_s"][-1] for report in found),
            "tokens/s": batch * len(tpot) / sum(tpot),
            "MB a token": mean(found, "decode_read_bytes", 1e6 * tokens),
            "faults a token": mean(found, "decode_major_faults", tokens),
            "hit rate": mean(found, "decode_hit_rate"),
            "CPU s a token": mean(found, "decode_cpu_s", tokens),
            "J a token": joules if (joules or 0) > 0 else None,
            "peak GB": None if self.here else mean(found, "peak_rss_bytes", 1e9),
            "load s": median(report["load_s"] for report in found),
            "result": found[-1]["limit"],
        }
        if self.loss and "logits" in found[-1] and "logits" in (self.reference or {}):
            figures["KL"] = fmean(
                divergence(report["logits"], self.reference["logits"]) for report in found
            )
        if "metrics" in found[-1]:
            figures |= beside_limits(found, figures, bool(arm[1].get("predictor")))
        return figures

    def failed(self, reports: dict[str, list[Record]], name: str) -> bool:
        """Whether an arm could not run."""
        return "result" in reports[name][-1]

    def ratio(self, reports: dict[str, list[Record]], name: str, base: str) -> float | None:
        """TPOT of one arm over that of another, both undisturbed; None where one of them could not
        run."""
        if self.failed(reports, name) or self.failed(reports, base):
            return None
        return median(undisturbed(reports[name])) / median(undisturbed(reports[base]))

    def judge(self, arm: Arm, reports: list[Record]) -> str:
        """Whether the logits are those of transformers' eager experts."""
        if self.reference is None:
            self.reference = self.report(("eager", {}, None))
        if "result" in self.reference:
            return f"no reference: {self.reference['result']}"
        stored = Path(arm[1].get("store", "")).name
        executor = arm[1].get("options", {}).get("executor", "exact")
        if arm[0] in EXACT and stored not in fewbit.FORMATS and executor == "exact":
            return (
                "= eager"
                if all(r["digest"] == self.reference["digest"] for r in reports)
                else "≠ EAGER"
            )
        if not (best := reports[-1].get("best")):
            return "own tokens"
        return (
            f"best token {fmean(a == b for a, b in zip(best, self.reference['best'])):.0%} as eager"
        )

    def aim(self, name: str, value: float | str | None, aim: float, below: bool = True) -> None:
        """Note whether a value is at most, or at least, what was aimed at; None is left out."""
        if value is not None:
            self.aims[name] = measure.aim(value, aim, below)


def beside_limits(found: list[Record], figures: Record, ahead: bool) -> Record:
    """What our own engine's reports say of limits, of what waits, and of what overlaps; ahead :
    reads overlap with everything, not with a layer's own computing alone."""
    ran = [report["metrics"] for report in found]
    reading = median(
        (of["read_bytes_per_prefill_token"] or 0) * of["prefill_tokens"] / report["read_rate"]
        for of, report in zip(ran, found)
    )
    least = median(report["overlapped_s" if ahead else "on_demand_s"] for report in found)
    best = found[-1]["belady_hit_rate"]
    return {
        "MB a token": mean(ran, "read_bytes_per_token", 1e6),
        "TTFT limit s": reading,
        "TTFT ÷ limit": figures["TTFT s"] / reading if reading else None,
        "TPOT limit s": least,
        "TPOT ÷ limit": measure.multiple(figures["TPOT s"], least),
        "hits ÷ Belady's": measure.share(mean(ran, "hit_rate") / best) if best else None,
        "stall ms": mean(ran, "stall_per_step", 1e-3),
        "overlap": mean(ran, "overlap_efficiency"),
        "least GB": sum(found[-1][key] for key in ("budget_bytes", "others_bytes", "kv_bytes"))
        / 1e9,
    }


def against_limit(reports: list[Record]) -> Numbers:
    """An arm's times beside the least that its reads and its computing take: medians over
    rounds."""
    rate = max(report["read_rate"] for report in reports)
    once = reports[-1]["experts_bytes"] / rate
    first, second = (median(report["ttft_s"][i] for report in reports) for i in (0, -1))
    return {
        "mean TPOT s": fmean(s for r in reports for s in r["tpot_s"]),
        "limit s": median(report["on_demand_s"] for report in reports),
        "÷ limit": measure.multiple(
            median(fmean(r["tpot_s"]) / r["on_demand_s"] for r in reports), 1.0
        ),
        "read GB/s": rate / 1e9,
        "all experts raw s": once,
        "as stored s": once * reports[-1]["stored_fraction"],
        "stored fraction": reports[-1]["stored_fraction"],
        "TTFT s": first,
        "2nd TTFT s": second,
        "TTFT ÷ raw": first / once,
        "2nd TTFT ÷ raw": second / once,
    }


def replayed(trace: Path, spec: MoESpec, profiled: Any) -> tuple[Any, list[str]]:
    """The simulator's metrics for an engine's own steps, which it left in a file, on the machine that
    was profiled; and which of `FOUND` are equal to the engine's."""
    from moelab.cache.pools import Pools
    from moelab.cache.residency import Residency
    from moelab.simulation.simulator import simulate

    ran = json.loads(trace.read_text())
    steps = [[(layer, dict(experts)) for layer, experts in forward] for forward in ran["steps"]]
    residency = Residency(spec.L, spec.E, Pools(*ran["pools"]))
    residency.fill()  # as the engine does where everything fits
    machine = replace(profiled.machine, workers=ran["workers"])
    said = simulate(steps, ran["forwards"], residency, machine, staging=ran["staging"]).metrics()
    return said, [key for key, value in zip(FOUND, ran["found"]) if getattr(said, key) == value]


def divergence(logits: np.ndarray, reference: np.ndarray) -> float:
    """Mean over steps of KL(reference ‖ found) in nats, of logits [steps, V]: 0 where both predict
    alike."""
    p, q = (of.astype(np.float64) - of.max(1, keepdims=True) for of in (reference, logits))
    p, q = (of - np.log(np.exp(of).sum(1, keepdims=True)) for of in (p, q))
    return max(float((np.exp(p) * (p - q)).sum(1).mean()), 0.0)


@contextmanager
def place_of(folder: str | Path | None, spec: MoESpec, here: bool = False) -> Iterator[Any]:
    """(the folder for a model's forms, what its file system is): on a disk of its own where that can
    be, unless all runs in this process."""
    with measure.working(folder) as where:
        where.mkdir(parents=True, exist_ok=True)
        on = nullcontext((where, "as it is")) if here else disk(where, 9 * spec.experts_bytes + 3e9)
        with on as found:
            yield found


#: options that presets share
PYTHON = (
    {"action": "append", "metavar": "ENGINE=INTERPRETER"},
    "the Python that has an engine installed, such as llama.cpp=/opt/peers/bin/python",
)


def interpreters(given: Iterable[str]) -> dict[str, str]:
    """["llama.cpp=/opt/bin/python"] as engine → interpreter."""
    if malformed := [words for words in given if "=" not in words]:
        raise ValueError(
            f"--python {malformed[0]}: write ENGINE=INTERPRETER, such as llama.cpp=/opt/bin/python"
        )
    return dict(words.split("=", 1) for words in given)


def _python(interpreter: str | None, *words: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(
        filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    )
    return subprocess.run(
        [interpreter or sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {"PYTHONPATH": path},
    )


def mean(reports: list[Record], key: str, unit: float = 1.0) -> float | None:
    """Mean of a figure over the reports that have it; None where none has."""
    values = [report[key] / unit for report in reports if report.get(key) is not None]
    return fmean(values) if values else None


def undisturbed(reports: list[Record]) -> list[float]:
    """Seconds of each token, the least of all rounds: an engine does the same in each."""
    return [min(rounds) for rounds in zip(*(report["tpot_s"] for report in reports))]
