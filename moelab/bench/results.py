"""One record of every result: a value, its unit and kind, and the run that found it.

    with measuring({"rounds": 3}) as run:          # commit, versions, processor, load, date
        sections = {"resident": {"moelab": {"TPOT s": 0.026}}}
    write(path, "engine", run, sections)           # keeps rows that it did not measure
    sections_of(path)                              # the same sections again
    pandas.DataFrame(rows(path))                   # a record a row

A file of results/bench has runs, each with its provenance, and records, each of which says which
run found it: sections may be of different commits and machines. A metric's name ends in its unit
("TPOT s"), as Prometheus' do; one with a kind in it, or in its section's ("simulated TPOT s",
"plan (exact)"), is of that kind, all else of the bench's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, TypeVar

import numpy as np

from moelab.base.files import CHECKOUT, beside, read_json, results_root, write_text
from moelab.base.records import Record, Value
from moelab.base.schema import Count
from moelab.comparison import KINDS, KeptMetric

T = TypeVar("T")
Sections = dict[str, Any]  # section → row → metric → value, or section → metric → value
TABLES = beside(__file__)
#: words in a name that say of which kind its values are
WORDS = TABLES["words"] | dict(zip(KINDS, KINDS))
#: a machine is quiet below these: processes that want to run, a core; a small computation's 90 %
#: quantile over its 10 %; cores that others, the kernel's reads among them, keep busy meanwhile
LOAD = 0.5
SCATTER = 1.25
OTHERS = 0.5
OTHERS_CORES = "cores of others"


class BenchRun(TypedDict):
    """How and on what something was measured, as far as it is known: `provenance`."""

    git: str | None
    date: str | None
    system: str
    cpu: str
    cores: int | None
    versions: dict[str, str]
    parameters: dict[str, Any]
    conditions: dict[str, Any]
    quiet: NotRequired[bool | None]


class BenchRecord(TypedDict):
    """One value that a run has found; samples : what it is the median of."""

    run: Count
    section: str
    row: str
    metric: str
    value: Value | None
    unit: str
    kind: Literal[KINDS]
    spread: NotRequired[list[float]]
    samples: NotRequired[list[float]]


class BenchFile(TypedDict):
    """results/bench/NAME.json."""

    bench: str
    runs: list[BenchRun]
    records: list[BenchRecord]


def load_average() -> float:
    """Of the last minute."""
    import psutil

    return psutil.getloadavg()[0]


def scatter() -> float:
    """The 90 % over the 10 % quantile of the times of one small computation: 1 on a quiet
    machine."""
    seconds = []
    block = bytes(1 << 22)
    for _ in range(24):
        start = time.perf_counter()
        hashlib.sha256(block)
        seconds.append(time.perf_counter() - start)
    low, high = tenths(seconds)
    return high / low


def others_seconds() -> float:
    """Seconds that cores have worked, so far, for others than this process and its children that
    have ended."""
    import psutil

    now = psutil.cpu_times()
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(now, name, 0.0) for name in busy) - sum(os.times()[:4])


class Watch:
    """Seconds since it was made, and how many cores others have kept busy meanwhile."""

    def __init__(self) -> None:
        self.before, self.start = others_seconds(), time.monotonic()

    def read(self) -> tuple[float, float]:
        """(seconds, cores)."""
        seconds = time.monotonic() - self.start
        return seconds, max(others_seconds() - self.before, 0) / max(seconds, 1e-3)


def watched(work: Callable[[], T]) -> tuple[T, float]:
    """What work returns, and how many cores others kept busy meanwhile."""
    watch = Watch()
    return work(), watch.read()[1]


def why_busy() -> str | None:
    """Why what is measured now would mean little; None on a quiet machine."""
    load = load_average()
    spread = scatter()
    cores = os.cpu_count() or 1
    if load > LOAD * cores:
        return f"the load average is {load:.1f} on {cores} cores"
    return f"equal work takes {spread:.2f} times as long now and then" if spread > SCATTER else None


@contextmanager
def measuring(parameters: Mapping[str, Any], busy: bool = False) -> Iterator[Record]:
    """The provenance of what is measured within the block: one of a file's runs.

    Raises ValueError on a busy machine, unless `busy` says to measure there all the same."""
    if (why := why_busy()) and not busy:
        raise ValueError(
            f"this machine is busy: {why}. Wait until it is quiet, or measure all the same and let "
            "the record say so: --busy"
        )
    run = provenance(parameters)
    load = load_average()
    watch = Watch()
    yield run
    seconds, others = watch.read()
    run["seconds"], run["load"] = round(seconds, 1), [load, load_average()]
    run[OTHERS_CORES] = round(others, 2)
    run["quiet"] = why is None and others <= OTHERS
    if not run["quiet"]:
        why = why or f"others used {run[OTHERS_CORES]} cores meanwhile"
        print(f"WARNING: {why}; the record says that the machine was busy", file=sys.stderr)


def provenance(parameters: Mapping[str, Any]) -> Record:
    """When, with what and on what something is measured; of files and folders, their names."""
    import psutil

    said = json.loads(json.dumps(parameters, default=str))
    absolute = {k: v for k, v in said.items() if isinstance(v, str) and Path(v).is_absolute()}
    return environment() | {
        "memory GB": round(psutil.virtual_memory().total / 1e9, 1),
        "parameters": said | {name: Path(path).name for name, path in absolute.items()},
    }


def write(path: Path, bench: str, run: Record, sections: Sections, kind: str = "measured") -> Path:
    """Write what a run has found, a record a line; rows of a file there that it did not measure
    stay, with their own runs."""
    old = read_json(path, BenchFile) if path.exists() else {"runs": [], "records": []}
    runs = [*old["runs"], run | {"conditions": sections.get("conditions", {})}]
    new = list(records_of(sections, len(old["runs"]), kind))
    rows = {(of["section"], of["row"]) for of in new}
    kept = [of for of in old["records"] if (of["section"], of["row"]) not in rows]
    order = {name: i for i, name in enumerate(sections)}
    records = sorted(kept + new, key=lambda of: order.get(of["section"], -1))
    used = sorted({of["run"] for of in records} | {len(runs) - 1})
    place = {number: i for i, number in enumerate(used)}
    lines = [json.dumps(of | {"run": place[of["run"]]}, ensure_ascii=False) for of in records]
    about = json.dumps(
        {"bench": bench, "runs": [runs[i] for i in used]}, indent=1, ensure_ascii=False
    )
    return write_text(path, about[:-2] + ',\n "records": [\n' + ",\n".join(lines) + "\n]}\n")


def records_of(sections: Sections, run: int, kind: str) -> Iterator[Record]:
    """A record for each value of sections, but of "conditions", which are the run's. Of samples,
    the value is their median and the spread their 10 and 90 % quantiles."""
    for section, rows in sections.items():
        for name, row in rows.items() if section != "conditions" else ():
            of, metrics = (name, row) if isinstance(row, dict) else ("", {name: row})
            for metric, value in metrics.items():
                found = {
                    "run": run,
                    "section": section,
                    "row": of,
                    "metric": metric,
                    "value": value,
                }
                if isinstance(value, list):
                    low, high = tenths(value)
                    found |= {"value": statistics.median(value), "spread": [low, high]}
                    found["samples"] = value
                yield found | {"unit": unit_of(metric), "kind": kind_of(metric, section) or kind}


def tenths(values: list[float]) -> tuple[float, float]:
    """The 10 % and 90 % quantiles."""
    low, high = np.quantile(values, (0.1, 0.9)).tolist()
    return low, high


def unit_of(metric: str) -> str:
    """The unit that a metric's name ends in; "" without one."""
    last = metric.split(" ")[-1]
    return last if last in TABLES["units"] else ""


def kind_of(metric: str, section: str) -> str | None:
    """The least sure of the kinds that a metric's name has in it, or else its section's."""
    for name in (metric, section):
        if found := [WORDS[word] for word in re.findall(r"\w+", name) if word in WORDS]:
            return max(found, key=KINDS.index)
    return None


def sections_of(path: Path) -> Sections:
    """A file's sections as its bench gave them; "conditions" are those of all its runs."""
    found = read_json(path, BenchFile)
    sections: Sections = {"conditions": {}}
    for run in found["runs"]:
        sections["conditions"] |= run["conditions"]
    for of in found["records"]:
        rows = sections.setdefault(of["section"], {})
        rows = rows.setdefault(of["row"], {}) if of["row"] else rows
        rows[of["metric"]] = of.get("samples", of["value"])
    return sections


def bench_file(name: str, results: str | Path | None = None) -> Path:
    """Where a bench's results are."""
    return results_root(results) / "bench" / f"{name}.json"


def rows(path: Path) -> list[Record]:
    """The records of a bench's file, each with its run's commit, date and processor: what
    `pandas.DataFrame` takes."""
    found = read_json(path, BenchFile)
    about = [
        {key: run.get(key) for key in ("git", "date", "cpu", "device")} for run in found["runs"]
    ]
    return [of | about[of["run"]] for of in found["records"]]


def environment() -> Record:
    """What a run ran on, and when: git commit, versions, device, processor by LLVM's name of its kind,
    which says what instructions it has, cores."""
    from llvmlite.binding import get_host_cpu_name

    versions = {"python": platform.python_version()}
    for name in TABLES["packages"]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    commit = git("rev-parse", "HEAD")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": commit and commit + ("+changes" if git("status", "--porcelain", "-uno") else ""),
        "versions": versions,
        "device": _device(),
        "system": platform.platform(),
        "cpu": get_host_cpu_name(),
        "cores": os.cpu_count(),
    }


def git(*words: str) -> str | None:
    """What git says in the clone that this is; None where it says nothing."""
    if CHECKOUT is None:
        return None
    try:
        return subprocess.run(
            ["git", *words], cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _device() -> str:
    """The accelerator that torch sees, if the run has loaded torch at all."""
    if torch := sys.modules.get("torch"):
        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
        if torch.backends.mps.is_available():
            return "Apple GPU (mps)"
    return "cpu"


def metrics_of(path: Path) -> dict[str, KeptMetric]:
    """A bench's values as metrics of a notebook: "section | row | metric" → value, unit, kind. Also
    those of the runs' conditions, as measured."""
    found = read_json(path, BenchFile)
    given = {name: value for run in found["runs"] for name, value in run["conditions"].items()}
    metrics = {
        f"conditions | {name}": {"value": value, "unit": unit_of(name), "kind": "measured"}
        for name, value in given.items()
    }
    for of in found["records"]:
        name = " | ".join(filter(None, (of["section"], of["row"], of["metric"])))
        metrics[name] = {key: of[key] for key in ("value", "unit", "kind")}
    return metrics
