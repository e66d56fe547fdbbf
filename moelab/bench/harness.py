"""The engine benchmark: the same model and tokens for every engine, a process each, in interleaved
rounds; its tables.

Everything lies in one folder; what exists is not written again, and the system's cache of it is
dropped before each process. Times are medians over all tokens of all rounds. Ratios are between
medians of each token's least time of all rounds, as a machine that is busy for seconds at a time
would else decide them. Engines that compute as transformers does must agree bit for bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moelab.bench import measure, peers
from moelab.bench.external_engines import write_unstacked
from moelab.bench.lru_baseline import lay_out
from moelab.bench.memory_limit import drop_cached, memory_limit
from moelab.files import folder_bytes
from moelab.records import Record, Records
from moelab.results import tenths
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
class EngineBenchmark:
    """prompt, decode : tokens of each of `prompts` prompts, and after the last. python : engine →
        its interpreter.
    tokens : given to the engines, a row a sequence; one of random ones without. here : engines run
    in this process, without a limit."""

    spec: MoESpec
    folder: Path
    prompt: int
    decode: int
    rounds: int
    python: dict[str, str]
    samples: dict[str, list[float]] = field(default_factory=dict)
    aims: Records = field(default_factory=dict)
    reference: Record | None = None
    tokens: list[list[int]] | None = None
    here: bool = False
    prompts: int = 2
    missing: dict[str, str] = field(default_factory=dict)  # engine that is not installed → why

    def prepare(self, external: bool, forms: Iterable[str] = FORMS) -> None:
        """Write the model in every form that is missing, where an interrupted conversion is
        resumed."""
        from moelab.bench.synthesize import synthesize
        from moelab.checkpoint.convert import convert

        model, hub = self.folder / "model", self.folder / "hub"
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

    def report(self, arm: Arm, decode: int | None = None) -> Any:
        """One process of an engine: its report, or {"result": why there is none}; a list of them
        with "each"."""
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
        options = {
            "model": str(self.folder / "model"),
            "tokens": self.tokens or [tokens],
            "prompts": [self.prompt] * self.prompts,
        } | options
        if self.here:
            try:
                found = peers.run(name, options)
            except (ValueError, RuntimeError, OSError) as error:
                return {"result": f"failed: {error}"}
            return self._told(
                found,
                {"limit": "in one process, nothing was limited", "group_peak_bytes": None},
                name,
            )
        with memory_limit(limit) as group:
            options["cgroup"] = str(group.procs) if group.procs else None
            try:
                done = _python(
                    self.python.get(name), "-m", "moelab.bench.peers", name, json.dumps(options)
                )
            except OSError as error:
                return self._told({"missing": f"not installed (no interpreter: {error})"}, {}, name)
            except subprocess.TimeoutExpired:
                return {"result": f"gave up after {TIMEOUT / 60:.0f} minutes"}
            if done.returncode:
                last = (done.stderr.strip() or "no word").splitlines()[-1]
                return {
                    "result": "failed: "
                    f"{'killed, out of memory?' if done.returncode == -9 else last}"
                }
            report = measure.last_json(done.stdout)
            return self._told(
                report, {"limit": group.reason, "group_peak_bytes": group.peak_bytes}, name
            )

    def _told(self, found: Any, more: Record, engine: str) -> Any:
        if isinstance(found, list):
            return [self._told(one, more, engine) for one in found]
        if "missing" in found:  # it need not be tried again
            self.missing[engine] = found["missing"]
            return {"result": found["missing"]}
        return found | more

    def moelab(
        self,
        codec: str,
        budget: float,
        limit: int | None = None,
        trace: Path | None = None,
        predictor: str | None = None,
        compressed: bool = False,
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
        stride, layer = (
            json.loads((self.folder / "experts.json").read_text())["stride"],
            self.spec.experts_bytes / self.spec.L,
        )
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
            if "result" in found[-1]:
                rows[name] = {"result": found[-1]["result"]}
                continue
            tpot = [second for report in found for second in report["tpot_s"]]
            self.samples[f"{title}: {name}"] = tpot
            low, high = tenths(tpot)
            rows[name] = {
                "TPOT s": median(tpot),
                "undisturbed s": median(undisturbed(found)),
                "10 %": low,
                "90 %": high,
                f"÷ {base}": self.ratio(reports, name, base),
                "TTFT s": median(report["ttft_s"][0] for report in found),
                "2nd TTFT s": median(report["ttft_s"][-1] for report in found),
                "MB a token": mean(found, "decode_read_bytes", 1e6 * self.decode),
                "faults a token": mean(found, "decode_major_faults", self.decode),
                "hit rate": mean(found, "decode_hit_rate"),
                "peak GB": mean(found, "peak_rss_bytes", 1e9),
                "load s": median(report["load_s"] for report in found),
                "output": self.judge(arms[name], found),
                "result": found[-1]["limit"],
            }
        return rows, reports

    def ratio(self, reports: dict[str, list[Record]], name: str, base: str) -> float | None:
        """TPOT of one arm over that of another, both undisturbed; None where one of them could not
        run."""
        if any("result" in reports[arm][-1] for arm in (name, base)):
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
