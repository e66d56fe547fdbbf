"""moelab beside llama.cpp and ik_llama.cpp on the same GGUF file: tokens, prompts, memory, bytes from
the disk.

The model of `engine`, 5 GB in bf16 and routed as real models are, as one GGUF file, and rounded by
llama.cpp's own quantizer. An engine runs in a process of its own with 2 threads on 2 cores, from a
cold cache, and all that it takes, page cache included, is limited to a share of the file. All get
the same tokens. Logits are compared with llama.cpp's of the same file: whose best tokens are others
has no speed. llama.cpp runs as it comes (mapped, and repacked into its own memory where it has
kernels for that), mapped as it lies, and by direct reading.

One process is a line of `FOLDER/runs.journal`: a bench that was ended goes on there, and measures
anew once the code has changed. Rounds come one after another, and within them what `--limits`,
`--prompts` and `--kinds` name first."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from moelab.base.arguments import number, one_of, several, whole
from moelab.base.journal import Journal
from moelab.base.progress import progress
from moelab.base.records import Record, Records
from moelab.base.specs import MoESpec
from moelab.bench.implant import drawn, tokens_of
from moelab.bench.memory_limit import drop_cached, in_process
from moelab.bench.results import git

from . import peers
from .engine import SPEC
from .external_engines import FILE_TYPES, write_gguf
from .grid import divergence, mean, place_of, undisturbed
from .timing import ENGINE

KINDS = ("Q8_0", "Q4_0", "Q4_K_M", "BF16")
#: of the file, for the whole process: what decides most comes first
LIMITS = (1.5, 0.5, 0.25, 1.0, 0.75, 0.15)
#: arm → engine, its options
ARMS: dict[str, tuple[str, Record]] = {
    "moelab": ("moelab", {"options": {"executor": "fast"}, "predictor": "auto"}),
    "llama.cpp": ("llama.cpp", {}),
    "llama.cpp as it lies": ("llama.cpp", {"how": {"use_extra_bufts": False}}),
    "llama.cpp direct reading": ("llama.cpp", {"how": {"load_mode": 4}}),
    "ik_llama.cpp": ("ik_llama.cpp", {}),
    "ik_llama.cpp repacked": ("ik_llama.cpp", {"how": {"repack_tensors": True}}),
}
REFERENCE = "llama.cpp"
#: best tokens that agree, at least; the norm of what logits differ by over theirs, at most: the two
#: llama.cpp's, which round inputs alike, are 0.06 (Q8_0) and 0.08 (Q4_0) apart
AGREE, APART = 0.9, 0.2
OWN = 420e6  # bytes of moelab's process that are no weights: of a limit, what experts do not get
QUANTIZE = (
    "import sys; from notebooks.studies.external_engines import quantize_gguf; "
    "quantize_gguf(*sys.argv[1:]); print({})"
)


class Cell(NamedTuple):
    """What engines share: a kind of the file, a prompt's tokens, a share of the file's bytes."""

    kind: str
    share: float
    prompt: int

    @property
    def title(self) -> str:
        return f"{self.kind}, {self.share:.0%} of the file, prompt {self.prompt}"


@dataclass
class Bench:
    """files : where GGUF files and tokens are. logits : where those of runs are kept. pythons :
    engine → its interpreter. shares : all limits. here : in this process, without limits."""

    spec: MoESpec
    files: Path
    logits: Path
    pythons: dict[str, str | None]
    decode: int
    shares: Sequence[float]
    here: bool = False
    missing: dict[str, str] = field(default_factory=dict)

    def prepare(self, kinds: Iterable[str], different: int) -> None:
        """Write the files that are missing: by llama.cpp's quantizer or, where that runs nothing, by
        gguf's. Of the checkpoint from which they are, tokens are kept."""
        from moelab.bench.synthesize import synthesize

        model, base = self.files / "model", self.file("BF16")
        if not base.exists():
            if not model.exists():
                synthesize(model, self.spec, routing=drawn(self.spec, different)[0])
            write_gguf(model, base)
        for kind in kinds:
            if not (file := self.file(kind)).exists():
                if self.here:
                    write_gguf(model, file, kind)
                else:
                    words = "-c", QUANTIZE, str(base), str(file), kind
                    in_process(words, python=self.pythons["llama.cpp"])
        for weights in () if self.here else model.glob("*.safetensors"):
            weights.unlink()
        self.tokens = tokens_of(model)

    def file(self, kind: str) -> Path:
        return self.files / f"{kind}.gguf"

    def report(self, cell: Cell, arm: str) -> Record:
        """One process: its report, or {"result": why there is none}."""
        name, options = ARMS[arm]
        if name in self.missing:
            return {"result": self.missing[name]}
        file = self.file(cell.kind)
        size = file.stat().st_size
        limit = None if self.here else int(cell.share * size)
        count = cell.prompt + self.decode
        tokens = (self.tokens * (count // len(self.tokens) + 1))[:count]
        given = {"tokens": [tokens], "prompt": cell.prompt, "logits": str(self.kept(cell, arm))}
        if name == "moelab":
            given |= {"store": str(file), "budget": self.budget(cell, size)}
        else:
            given |= {"gguf": str(file)}
        drop_cached(self.files)
        try:
            if self.here:
                found = peers.run(name, given | options) | {"limit": "nothing was limited"}
            else:
                words = "-m", "notebooks.studies.peers", name, json.dumps(given | options)
                found = in_process(words, limit, self.pythons.get(name), timeout=300)
        except (ValueError, RuntimeError, OSError) as error:
            return {"result": f"failed: {error}"}
        if "missing" in found:
            self.missing[name] = found["missing"]
            return {"result": found["missing"]}
        keep = {"ttft_s", "tpot_s", "open_s", "decode_read_bytes", "decode_hit_rate"}
        keep |= {"least_read_bytes", "peak_rss_bytes", "peak_group_bytes", "limit"}
        return {key: of for key, of in found.items() if key in keep}

    def budget(self, cell: Cell, size: int) -> float | int:
        """Of moelab for experts: the limit less its process and the file's other weights; all of
        them where there is room."""
        experts = size * self.spec.experts_bytes / self.file("BF16").stat().st_size
        room = cell.share * size - OWN - (size - experts)
        return 1.0 if self.here or room > experts else max(int(room), 0)

    def kept(self, cell: Cell, arm: str) -> Path:
        """The logits of a cell's arm; of its last process."""
        return self.logits / f"{cell.title}, {arm}.npy"

    def rows(self, cell: Cell, reports: dict[str, list[Record]]) -> Records:
        """Arm → its figures, ratios being to llama.cpp's fastest arm."""
        rows = {arm: self.row(cell, arm, found) for arm, found in reports.items()}
        of = [row for arm, row in rows.items() if arm.startswith(REFERENCE)]
        for key in ("undisturbed s", "TTFT s"):
            if theirs := [row[key] for row in of if key in row]:
                for row in rows.values():
                    if key in row:
                        row[f"{key.split()[0]} ÷ llama.cpp"] = row[key] / min(theirs)
        return rows

    def row(self, cell: Cell, arm: str, found: list[Record]) -> Record:
        if "result" in found[-1]:
            return {"result": found[-1]["result"]}
        row = {
            "TPOT s": [second for report in found for second in report["tpot_s"]],
            "undisturbed s": median(undisturbed(found)),
            "TTFT s": median(report["ttft_s"] for report in found),
            "opening s": median(report["open_s"] for report in found),
            "MB a token": mean(found, "decode_read_bytes", 1e6 * self.decode),
            "simulated MB a token of Belady": mean(found, "least_read_bytes", 1e6),
            "hit rate": mean(found, "decode_hit_rate"),
            "peak GB": mean(found, "peak_group_bytes", 1e9),
            "peak of the process GB": mean(found, "peak_rss_bytes", 1e9),
            "result": found[-1]["limit"],
        } | self.compared(cell, arm)
        if row.get("best token", 1) < AGREE or row.get("logits apart", 0) > APART:
            said = f"best token {row['best token']:.0%} as {REFERENCE}, logits {row['logits apart']:.0%}"
            return {"result": f"{said} apart: its speed does not count"}
        return {key: of for key, of in row.items() if of is not None}

    def compared(self, cell: Cell, arm: str) -> Record:
        """Logits beside llama.cpp's of the same file and prompt, at the largest limit where it ran."""
        for share in sorted(self.shares, reverse=True):
            file = self.kept(cell._replace(share=share), REFERENCE)
            if file.exists():
                ours, theirs = np.load(self.kept(cell, arm)), np.load(file)
                best = fmean((ours.argmax(1) == theirs.argmax(1)).tolist())
                apart = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
                return {"KL": divergence(ours, theirs), "best token": best, "logits apart": apart}
        return {}


def run(
    kinds: Sequence[str] = KINDS,
    limits: Sequence[float] = LIMITS,
    prompts: Sequence[int] = (128, 1024),
    arms: Sequence[str] = tuple(ARMS),
    decode: int = 32,
    rounds: int = 1,
    minutes: float = 1e9,
    folder: str | Path | None = None,
    python: str | None = None,
    ik: str | None = None,
    spec: MoESpec = SPEC,
    here: bool = False,
) -> Record:
    end = time.monotonic() + 60 * minutes
    cells = [Cell(kind, share, n) for share, n, kind in product(limits, prompts, kinds)]
    with place_of(folder, spec, here) as (files, words):
        base = Path(folder).expanduser().resolve() if folder else files
        (logits := base / "logits").mkdir(exist_ok=True)
        pythons = {"llama.cpp": python, "ik_llama.cpp": ik}
        bench = Bench(spec, files, logits, pythons, decode, limits, here)
        bench.prepare(kinds, min(spec.H, max(prompts) + decode))
        conditions = {
            "model": f"{spec.name}: " + ", ".join(sizes(bench, kinds)),
            "tokens": f"given; {drawn(spec, 1)[1]}; then {decode} more, batch 1",
            "rounds": rounds,
            "file system": words,
            "processor's instructions": instructions(),
            "limit": "of the whole process, page cache included; the same for all",
        }
        with closing(Journal(base / "runs.journal")) as journal:
            found = measured(bench, cells, list(arms), rounds, end, journal)
            return {"conditions": conditions} | {
                cell.title: bench.rows(cell, reports) for cell, reports in found
            }


def measured(
    bench: Bench, cells: list[Cell], arms: list[str], rounds: int, end: float, journal: Journal
) -> Iterator[tuple[Cell, dict[str, list[Record]]]]:
    """(cell, arm → its reports, one a round) of all cells that were begun; what the journal has of
    this code is not run again, nor what could not run."""
    code = git("log", "-1", "--format=%h", "--", *MEASURES)
    done = {tuple(key): report for *key, report in journal.lines}
    for i, cell in progress(list(product(range(rounds), cells)), "engines"):
        for arm in arms[::-1] if i % 2 else arms:
            key = code, *cell, bench.decode, arm
            failed = i and "result" in done.get((*key, i - 1), {})
            if (*key, i) not in done and time.monotonic() < end:
                done[*key, i] = done[*key, i - 1] if failed else bench.report(cell, arm)
                if ARMS[arm][0] not in bench.missing:  # it may be installed the next time
                    journal.append([[*key, i, done[*key, i]]])
    for cell in cells:
        reports = {
            arm: [
                done[key]
                for i in range(rounds)
                if (key := (code, *cell, bench.decode, arm, i)) in done
            ]
            for arm in arms
        }
        if any(reports.values()):
            yield cell, {arm: found for arm, found in reports.items() if found}


def sizes(bench: Bench, kinds: Iterable[str]) -> Iterator[str]:
    """Of each file, in words."""
    for kind in kinds:
        yield f"{kind} {bench.file(kind).stat().st_size / 1e9:.2f} GB"


def instructions() -> str:
    """Whether the processor has AVX-512, by which both have other kernels."""
    try:
        return "AVX-512" if "avx512f" in Path("/proc/cpuinfo").read_text() else "AVX2 at most"
    except OSError:
        return "unknown"


MEASURES = (*ENGINE, "moelab/checkpoint")
OPTIONS: dict[str, Any] = {
    "kinds": (several(one_of([*FILE_TYPES, "BF16"])), "of the file"),
    "limits": (several(number(above=0)), "shares of the file: memory of a process"),
    "prompts": (several(whole(1)), "tokens of a prompt"),
    "arms": (several(one_of(ARMS)), "engines: " + "; ".join(ARMS)),
    "decode": (whole(1), "tokens after it"),
    "rounds": (whole(1), "processes an arm"),
    "minutes": (number(above=0), "after which no process begins; the next run goes on"),
    "folder": (None, "where files and finished runs are kept, 20 GB; else they are temporary"),
    "python": (None, "the Python that has llama_cpp (default: this one)"),
    "ik": (None, "the Python that has ik_llama_cpp (default: this one)"),
}
