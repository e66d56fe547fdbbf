"""49 published numbers on real models, each answered by a replay: equal, within, off, or not
computable.

`data/published.toml` says who found what, and how it is answered:

    engine trace   exactly, on a trace that the engine's authors published with its own hits and misses
    trace          on another recorded trace of the same model
    routing        on routing drawn from the model's fit (`moelab.simulation.routing`), or its family's
    stated         by arithmetic on what the source states

`--traces DIR` is where the traces are (BigMoeOnEdge's *.route.csv and *-curve.csv, and those that
`moelab.trace.load` reads); without it, what needs them is left unanswered. A hit rate is within if
it is 5 points away at most, everything else if it is 20 % away; equal is what rounds to the same.
Engines take a prompt as one batch, layer by layer, and decode token by token."""

from __future__ import annotations

import ast
import csv
import hashlib
import operator
import random
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from moelab.base.arguments import folder, whole
from moelab.base.files import absolute, shipped
from moelab.base.progress import progress
from moelab.base.records import Record, Records
from moelab.base.schema import Count, Size, naming, typed
from moelab.base.specs import ExpertKey
from moelab.cache.policies import LFU, Belady
from moelab.cards import load_model
from moelab.simulation.routing import families, routing_of
from moelab.trace import load as load_trace

from .engines import Costs, Replay, SizedCache, played
from .most_hits import belady_hits, request_count


class Folder:
    """A folder from a user, of which results keep the name only."""

    def __init__(self, path: str | Path) -> None:
        self.path = absolute(folder(str(path)))

    def __str__(self) -> str:
        return self.path.name


KIND = "simulated"
MEASURES = ("moelab/simulation", "moelab/cache", "data/published.toml")
OPTIONS = {
    "traces": (Folder, "folder of the recorded traces; without it, what needs them stays open"),
    "seed": (whole(), "of the drawn routing"),
}
EQUAL, WITHIN, OFF, OPEN = ANSWERS = ("equal", "within", "off", "not computable")
POINTS = 5.0
SHARE = 0.2
MIB = 2**20
#: of a drawn model, whose layers are alike, so many stand for all where each has a pool of its own
LAYERS = 12
#: where the recorded traces lie, and of which model they are
TRACES = {
    "qwen": "bigmoeonedge/qwen.route.csv",
    "gemma": "bigmoeonedge/gemma.route.csv",
    "gptoss": "bigmoeonedge/gptoss.route.csv",
    "olmoe": "olmoe-mmlu-logits/trace.npz",
}
CARDS = {"olmoe": "OLMoE-1B-7B"}


@dataclass(frozen=True)
class Answer:
    """How some of a row's numbers are answered, one for each of `at`.

    at : experts that fit, of the model or of each layer (`scope`); MiB for an engine trace or with
        `expert_bytes`; hit rates in % for what is stated.
    between : the two numbers published are the ends of a range.
    trace : a key of `TRACES`.    card, L, E, K : the model, and where it differs from its card.
    tokens, texts : drawn; `batch` texts at once, counted `after` so many tokens, `cleared` between
        them.    one_by_one : a token's experts may evict each other.    statistic : what is counted, a key of `STATISTICS`, or hits.
    costs : of `Costs`, with "seconds" for reading so many "MiB".    dense_bytes : of a layer, for a
        mapped file.    formula : of "stated", with `miss`, the share of requests missed.
    source : where else what is used stands, or what is assumed.    reason : why it may be off.
    chosen : what of the counting was chosen by these very numbers, which then prove less.
    """

    what: str
    by: Literal["engine trace", "trace", "routing", "stated"]
    published: tuple[float, ...]
    at: tuple[float, ...] = (0.0,)
    between: bool = False
    unit: str = "%"
    trace: str = ""
    card: str = ""
    L: Count = 0
    E: Count = 0
    K: Count = 0
    policy: Literal["lru", "lfu", "random", "belady", "belady-bypass"] = "lru"
    scope: Literal["model", "layer"] = "model"
    statistic: str = "hits"
    tokens: Size = 256
    texts: Size = 1
    batch: Size = 1
    after: Count = 0
    cleared: bool = False
    one_by_one: bool = False
    expert_bytes: Count = 0
    dense_bytes: Count = 0
    costs: dict[str, float] = field(default_factory=dict)
    formula: tuple[str, ...] = ()
    source: str = ""
    reason: str = ""
    chosen: str = ""

    @property
    def kind(self) -> str:
        exact = {"engine trace": "exact", "trace": "exact", "stated": "modelled"}
        return exact.get(self.by, KIND)


@dataclass(frozen=True)
class Published:
    """One row: what was found, on what, and by whom.

    unanswered : why it cannot be computed, although a number of it may be.    rest : what of it is
        not answered, where most is."""

    n: Size
    part: str
    model: str
    setting: str
    result: str
    source: str
    kind: str = ""
    unanswered: str = ""
    rest: str = ""
    answer: tuple[Answer, ...] = ()

    def __post_init__(self) -> None:
        if not (self.unanswered or self.answer):
            raise ValueError("a row has answers, or says why it is unanswered")


def rows(path: str | Path | None = None) -> list[Published]:
    """The shipped rows, or those of another file. ValueError: one that is not complete."""
    path = Path(path or shipped("published.toml"))
    with naming(path, "table of published numbers", "writing it as data/published.toml"):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return [typed(of, Published, f"row {of.get('n')}") for of in content["row"]]


# ---- policies and engines


class Frequent(LFU):
    """LFU whose ties leave in order of last use within a batch, too."""

    clock = 0

    def touch(self, key: ExpertKey, step: int) -> None:
        self.clock += 1
        super().touch(key, self.clock)


class RandomVictim:
    """Any expert leaves, as BigMoeOnEdge's replay draws it."""

    def __init__(self) -> None:
        self._random = random.Random(1234)

    def touch(self, key: ExpertKey, step: int) -> None:
        pass

    def victim(self, resident: Iterable[ExpertKey]) -> ExpertKey:
        return self._random.choice(list(resident))


def policy_of(name: str, batches: Sequence[Sequence[tuple[int, Sequence[int]]]]) -> Any:
    """What `SizedCache` takes."""
    if name == "belady":
        return Belady((layer, dict.fromkeys(ids, 1)) for batch in batches for layer, ids in batch)
    return {"lfu": Frequent, "random": RandomVictim}.get(name, name)


class Engine(NamedTuple):
    """A trace with what the engine itself hit. prompt, decode : batches of (layer, experts).

    hit : of each batch's layers in decode, whether each expert was there.    expert_bytes : of a layer.
    """

    prompt: list[list[tuple[int, list[int]]]]
    decode: list[list[tuple[int, list[int]]]]
    hit: list[list[list[bool]]]
    expert_bytes: dict[int, int]

    def size(self, key: ExpertKey) -> int:
        return self.expert_bytes[key.layer]

    def cache(self, mib: float, policy: str, scope: str = "model") -> SizedCache:
        kind = policy_of(policy, self.prompt + self.decode)
        layers = len(self.expert_bytes) if scope == "layer" else 0
        return SizedCache(mib * MIB, self.size, kind, layers)

    def hits(self, mib: float, policy: str, scope: str = "model") -> tuple[float, float]:
        """(of all, of decode) hit rates in %."""
        cache = self.cache(mib, policy, scope)
        first, then = (
            played(of, cache, Costs(1.0), self.size) for of in (self.prompt, self.decode)
        )
        missed = (first.misses + then.misses) / (first.requests + then.requests)
        return 100 * (1 - missed), 100 * then.hit_rate

    def outcomes(self, mib: float) -> tuple[int, int]:
        """(equal, all) of what the engine hit or missed in decode, by a replay under LRU."""
        cache = self.cache(mib, "lru")
        played(self.prompt, cache, Costs(1.0), self.size)
        same = total = 0
        for batch, recorded in zip(self.decode, self.hit, strict=True):
            for (layer, experts), there in zip(batch, recorded, strict=True):
                missed = {key.expert for key in cache.ask(layer, experts)}
                same += sum((e not in missed) == hit for e, hit in zip(experts, there))
                total += len(experts)
        return same, total


@cache
def engine(path: Path) -> Engine:
    """A route.csv of BigMoeOnEdge, in the order of execution. ValueError: it is none."""
    with naming(path, "route.csv of BigMoeOnEdge", "its --route-trace"):
        sizes, found = {}, defaultdict(list)
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("# layer="):
                of = dict(word.split("=") for word in line[2:].split())
                sizes[int(of["layer"])] = int(of["expert_bytes"])
            elif line[:1].isdigit():
                _, phase, step, layer, _, expert, _, there, _ = line.split(",")
                place = (int(phase), int(step) if phase == "1" else 0, int(layer))
                found[place].append((int(expert), there == "1"))
        batches: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for phase, step, layer in sorted(found):
            of = found[phase, step, layer]
            batches[phase, step].append((layer, [e for e, _ in of], [hit for _, hit in of]))
        routed = {
            place: [(layer, ids) for layer, ids, _ in batch] for place, batch in batches.items()
        }
        decode = [place for place in batches if place[0]]
        return Engine(
            [routed[place] for place in batches if not place[0]],
            [routed[place] for place in decode],
            [[hit for *_, hit in batches[place]] for place in decode],
            sizes,
        )


# ---- texts, drawn or recorded: arrays of ids [tokens, L, K]


class Texts(NamedTuple):
    ids: list[np.ndarray]
    E: int
    said: str  # which routing

    @property
    def L(self) -> int:
        return self.ids[0].shape[1]


def drawn(of: Answer, seed: int, family: str = "") -> Texts:
    """Texts of a model's fitted routing, or of another family's."""
    spec = load_model(of.card)
    L, E, K = of.L or spec.L, of.E or spec.E, of.K or spec.K
    if of.scope == "layer" and of.unit == "%":
        L = min(L, LAYERS)
    routing, said = (families()[family], family) if family else routing_of(spec)
    ids = routing.draw(L, E, K, [of.tokens] * of.texts, seed)
    return Texts(np.split(ids, of.texts), E, said)


def recorded(path: Path, card: str) -> Texts:
    """Texts of a recorded trace."""
    trace = load_trace(path, model=card)
    ids, sequence = trace.ids.numpy(), trace.sequence.numpy()
    return Texts([ids[sequence == s] for s in np.unique(sequence)], trace.spec.E, path.parent.name)


def batches_of(texts: Texts, of: Answer, layers: Sequence[int]) -> Iterator[list[list[Any]]]:
    """Batches of some layers, in lists between which a cache is cleared."""
    found = []
    for first in range(0, len(texts.ids), of.batch):
        for step in zip(*texts.ids[first : first + of.batch]):
            asked = []
            for layer in layers:
                ids = [int(e) for one in step for e in one[layer] if e < texts.E]
                asked += [(layer, [e]) for e in ids] if of.one_by_one else [(layer, ids)]
            found.append(asked)
        if of.cleared:
            yield found
            found = []
    if found:
        yield found


def replayed(texts: Texts, of: Answer, at: float) -> Replay:
    """An answer's cache on texts, layer by layer if it has pools of layers."""
    L = texts.L
    groups = [[layer] for layer in range(L)] if of.scope == "layer" else [range(L)]
    parts = []
    for layers in groups:
        for batches in batches_of(texts, of, layers):
            parts.append(_part(batches, of, at * MIB if of.expert_bytes else at, len(layers) / L))
    total = map(sum, zip(*((p.requests, p.misses, p.read, p.computing, p.waiting) for p in parts)))
    return Replay(sum(p.batches for p in parts) // len(groups), *total)


def _part(batches: list[list[Any]], of: Answer, budget: float, share: float) -> Replay:
    """Batches of some layers, a share of all, which one cache sees."""
    if of.policy == "belady-bypass":
        steps = [(layer, dict.fromkeys(ids, 1)) for batch in batches for layer, ids in batch]
        n = request_count(steps)
        return Replay(len(batches), n, n - belady_hits(steps, int(budget)), 0.0, 0.0, 0.0)
    if of.dense_bytes:
        batches = [[(layer, [-1, *ids]) for layer, ids in batch] for batch in batches]

    def size(key: ExpertKey) -> float:
        return (of.expert_bytes or 1) if key.expert >= 0 else of.dense_bytes

    stated = of.costs
    costs = Costs(
        stated.get("token", 0.0) * share,
        miss=stated.get("miss", 0.0),
        byte=stated.get("seconds", 0.0) / (stated.get("MiB", 1.0) * MIB),
        hidden=stated.get("hidden", 0.0),
    )
    holder = SizedCache(budget, size, policy_of(of.policy, batches))
    if of.after:
        played(batches[: of.after], holder, costs, size)
    return played(batches[of.after :], holder, costs, size)


# ---- statistics of texts


def counts(texts: Iterable[np.ndarray], E: int) -> np.ndarray:
    """Of each layer's experts, [L, E]."""
    every = np.concatenate(list(texts))
    return np.stack([np.bincount(of.ravel(), minlength=E + 1)[:E] for of in every.swapaxes(0, 1)])


def static(texts: Texts, of: Answer, at: float) -> float:
    """Hit rate of the most popular experts, in hindsight, or of the other texts' (each text left out
    in turn)."""
    hits = total = 0
    for i, one in enumerate(texts.ids):
        own = counts([one], texts.E)
        others = of.statistic.endswith("other texts")
        known = (
            counts(texts.ids[:i] + texts.ids[i + 1 :], texts.E)
            if others
            else counts(texts.ids, texts.E)
        )
        if of.scope == "layer":
            best = np.argsort(-known, axis=1, kind="stable")[:, : int(at)]
            hits += np.take_along_axis(own, best, 1).sum()
        else:
            hits += own.ravel()[np.argsort(-known.ravel(), kind="stable")[: int(at)]].sum()
        total += own.sum()
    return 100 * hits / total


def reuse(texts: Texts, _: Answer, at: float) -> float:
    """Share of a token's experts that one of the `at` tokens before it had, in its text and layer."""
    hits = total = 0
    for one in texts.ids:
        one_hot = np.zeros((*one.shape[:2], texts.E + 1), bool)
        np.put_along_axis(one_hot, one.astype(np.int64), True, 2)
        one_hot = one_hot[..., : texts.E]
        before = np.zeros_like(one_hot)
        for n in range(1, int(at) + 1):
            before[n:] |= one_hot[:-n]
        hits += (one_hot & before)[int(at) :].sum()
        total += one_hot[int(at) :].sum()
    return 100 * hits / total


def distinct(texts: Texts, *_: Any) -> float:
    """Experts that were used at all."""
    return float((counts(texts.ids, texts.E) > 0).sum())


def union(texts: Texts, _: Answer, at: float) -> float:
    """Experts of a layer that `at` tokens of different texts touch together, mean."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        picked = rng.choice(len(texts.ids), int(at), replace=False)
        ids = np.stack([texts.ids[i][rng.integers(len(texts.ids[i]))] for i in picked])
        found.append(np.mean([len(np.unique(ids[:, layer])) for layer in range(texts.L)]))
    return float(np.mean(found))


def rate(texts: Texts, of: Answer, at: float) -> float:
    """Hit rate, or tokens a second."""
    run = replayed(texts, of, at)
    return run.pace if of.unit == "tokens/s" else 100 * run.hit_rate


STATISTICS: dict[str, Callable[[Texts, Answer, float], float]] = {
    "hits": rate,
    "static": static,
    "static, other texts": static,
    "reuse": reuse,
    "distinct": distinct,
    "union": union,
}


def engine_statistic(of: Engine, answer: Answer, at: float) -> float:
    """Of an engine's own trace: hit rates, or what a guess at each decode token's experts hits."""
    if answer.statistic in ("hits", "all hits"):
        return of.hits(at, answer.policy, answer.scope)[answer.statistic == "hits"]
    last = {layer: set() for layer, _ in of.decode[0]}
    hot: dict[int, Counter] = defaultdict(Counter)
    of_run = answer.statistic == "hottest of the run"
    for batch in of.decode if of_run else of.prompt:
        for layer, experts in batch:
            hot[layer].update(experts)
    hits = total = 0
    for i, batch in enumerate(of.decode):
        for layer, experts in batch:
            if answer.statistic == "previous token":
                guess, counted = last[layer], i > 0
            else:
                guess, counted = {e for e, _ in hot[layer].most_common(len(experts))}, True
            hits += counted * len(guess.intersection(experts))
            total += counted * len(experts)
            last[layer] = set(experts)
    return 100 * hits / total


# ---- answers


def value_of(formula: str, miss: float) -> float:
    """What a formula of numbers, + − × ÷, powers and `miss` gives. ValueError: it has more."""
    signs = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.Pow: operator.pow,
    }

    def of(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in signs:
            return signs[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.Name) and node.id == "miss":
            return miss
        raise ValueError(f"the formula {formula!r} may have numbers, + - * / ** and miss only")

    return float(of(ast.parse(formula, mode="eval").body))


class Found(NamedTuple):
    """One published number, ours, and the verdict; band : least and most over the fits of all
    models, where there is none of this one."""

    published: float | tuple[float, float]
    ours: float | None
    answer: str
    band: tuple[float, float] | None = None


def judged(of: Answer, published: Any, ours: float | None) -> Found:
    """By the rules above; published : a number, or the ends of a range."""
    if ours is None:
        return Found(published, None, OPEN)
    low, high = published if of.between else (published, published)
    away = max(low - ours, ours - high, 0.0)
    digits = len(str(low).partition(".")[2])  # as published
    close = away <= POINTS if of.unit == "%" else away <= SHARE * high
    equal = not of.between and round(float(ours), digits) == low
    return Found(published, ours, EQUAL if equal else WITHIN if close else OFF)


def answered(of: Answer, traces: Path | None, seed: int) -> tuple[list[Found], str]:
    """(an answer's numbers, which routing it is by)."""
    said, bands = "", [None] * len(of.at)
    if of.by in ("engine trace", "trace") and traces is None:
        ours = [None] * len(of.at)
    elif of.by == "engine trace":
        recording = engine(traces / TRACES[of.trace])
        ours = [engine_statistic(recording, of, at) for at in of.at]
    elif of.by == "stated":
        formulas = of.formula * (len(of.at) // len(of.formula))
        ours = [value_of(one, 1 - at / 100) for one, at in zip(formulas, of.at)]
    elif of.by == "trace":
        ours, said = _of_texts(recorded(traces / TRACES[of.trace], CARDS[of.trace]), of)
    else:
        ours, said = _of_texts(drawn(of, seed), of)
        if of.E:
            said = f"{said}, no trace of this model"
            every = [_of_texts(drawn(of, seed, family), of)[0] for family in families()]
            bands = [(min(values), max(values)) for values in zip(*every)]
    published = [of.published] if of.between else of.published
    pairs = zip(published, ours, bands, strict=True)
    return [judged(of, value, own)._replace(band=band) for value, own, band in pairs], said


def _of_texts(texts: Texts, of: Answer) -> tuple[list[float], str]:
    """(one number for each of `at`, which routing)."""
    return [float(STATISTICS[of.statistic](texts, of, at)) for at in of.at], texts.said


def worst(found: Iterable[Found]) -> str:
    """The least of the answers to a row's numbers, of those that have one."""
    had = [one.answer for one in found if one.answer != OPEN]
    return max(had, key=ANSWERS.index) if had else OPEN


def _why(row: Published, found: Sequence[tuple[Answer, list[Found], str]]) -> str:
    """How a row was answered, and why it may be off."""
    if not found:
        return row.unanswered
    said = dict.fromkeys(said for _, _, said in found if said)
    off = dict.fromkeys(
        of.reason for of, values, _ in found if of.reason and worst(values) in (OFF, OPEN)
    )
    every = [one for _, values, _ in found for one in values]
    close = sum(one.answer in (EQUAL, WITHIN) for one in every)
    chosen = dict.fromkeys(f"chosen: {of.chosen}" for of, *_ in found if of.chosen)
    if bands := [(of, one) for of, values, _ in found for one in values if one.band]:
        inside = sum(_inside(of, one) for of, one in bands)
        said[f"{inside} of {len(bands)} within the band over all fits"] = None
    open_ = [text for text in (row.unanswered, row.rest) if text]
    return "; ".join([*open_, f"{close} of {len(every)} numbers", *said, *chosen, *off])


def _inside(of: Answer, one: Found) -> bool:
    """Whether what was published is in the band over all models."""
    low, high = one.published if of.between else (one.published, one.published)
    return one.band[0] <= high and low <= one.band[1]


def curves(folder: Path) -> Records:
    """BigMoeOnEdge's own replay: points of six policies' curves that ours gives, to the digits that
    it prints; and its engine's decode outcomes."""
    names = {"layer": ("lru", "layer"), "layerlfu": ("lfu", "layer")}
    found = {}
    for name, mib in {"qwen": 4000, "gemma": 4000, "gptoss": 3000}.items():
        recording = engine(folder / f"{name}.route.csv")
        with open(folder / f"{name}-curve.csv", encoding="utf-8", newline="") as file:
            points = list(csv.DictReader(file))
        same = 0
        for point in progress(points, f"{name}'s curves", unit="point"):
            policy, scope = names.get(point["policy"], (point["policy"], "model"))
            ours = recording.hits(float(point["budget_mib"]), policy, scope)
            known = float(point["hit_pct_cum"]), float(point["hit_pct_decode"])
            same += all(abs(a - b) < 6e-4 for a, b in zip(ours, known))
        outcomes = recording.outcomes(mib)
        keys = ("outcomes equal", "outcomes", "points equal", "points")
        found[name] = dict(zip(keys, (*outcomes, same, len(points))))
    return found


def run(traces: Folder | None = None, seed: int = 0) -> Record:
    """Sections "rows" (an answer a row), "values" (a number a row), "summary", and what the engine's
    own recordings say: "BigMoeOnEdge (exact)"."""
    folder = traces.path if traces else None
    sections: Record = {"conditions": {}, "rows": {}, "values": {}, "summary": {}}
    for row in progress(rows(), "published numbers", unit="row"):
        found = [(of, *answered(of, folder, seed)) for of in row.answer]
        every = [one for _, values, _ in found for one in values]
        verdict = OPEN if row.unanswered else worst(every)
        sections["rows"][str(row.n)] = {
            "model": row.model,
            "setting": row.setting,
            "published (paper)": row.result,
            "answer": verdict,
            "why": _why(row, found),
            "source": row.source,
        }
        for of, values, _ in found:
            for at, one in zip(of.at, values):
                name = f"{row.n}: {of.what}, {at:g}"
                sections["values"][name] = _value_row(of, one)
    answers = Counter(of["answer"] for of in sections["rows"].values())
    chosen = sum(any(of.chosen for of in row.answer) for row in rows())
    counted = {name: answers[name] for name in ANSWERS}
    sections["summary"] = {"rows": counted | {"counted as their own numbers suggest": chosen}}
    if folder:
        sections["BigMoeOnEdge (exact)"] = curves(folder / "bigmoeonedge")
        sections["conditions"] = {f"sha256 of {p}": digest(folder / p) for p in TRACES.values()}
    return sections


def _value_row(of: Answer, one: Found) -> Record:
    ends = one.published if of.between else (one.published,)
    names = ("published from", "published to") if of.between else ("published",)
    row: Record = {f"{name} (paper) {of.unit}": end for name, end in zip(names, ends)}
    if one.ours is not None:
        row[f"ours ({of.kind}) {of.unit}"] = round(one.ours, 4)
    if one.band:
        ends = zip(("least", "most"), one.band)
        row |= {f"{end} of all fits ({of.kind}) {of.unit}": round(x, 4) for end, x in ends}
    return row | {"answer": one.answer}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
