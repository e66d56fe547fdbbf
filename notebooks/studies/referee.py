"""The referee: engines of every kind on the same routing, in simulated time, and what follows for the
questions that the field quarrels about.

Do static hot sets work, when does prefetching pay, what does a larger batch of a prompt read, what
does K cost? Routing is drawn from each model's fit (`moelab.simulation.routing`), of models whose
card has one of its own; `--traces DIR` also takes recorded traces, by `moelab.trace.load`. Experts
are in four bits; a machine is its card. Intervals, 95 %, are over texts; of "all models", over
models. Left out: attention's growth, kernels' launches, contention.

Hit rates are of one pool for all layers, cold at the start, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from moelab.advice.model import find_model
from moelab.base.arguments import number, one_of, several, whole
from moelab.base.progress import progress
from moelab.base.records import Numbers, Record, Records
from moelab.base.specs import ExpertKey, MoESpec, State
from moelab.cache.policies import DEFAULT_POLICY, Belady
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.cards import load_device
from moelab.evaluation.intervals import Interval, interval
from moelab.simulation.costs import Delays, Machine, MachineRates
from moelab.simulation.routing import families, routing_of
from moelab.simulation.simulator import Prefetching, Simulation, simulate
from moelab.trace import RoutingTrace
from moelab.trace import load as load_trace

from . import zipmoe
from .engines import Costs, Holder, SizedCache, StaticSet, played
from .published import Folder, Texts, counts, digest
from .ratios import ratio

KIND = "simulated"
MEASURES = ("moelab/simulation", "moelab/cache", "moelab/cards")
OPTIONS = {
    "traces": (Folder, "folder of recorded traces to look at beside the fits"),
    "models": (
        several(one_of(families())),
        "cards, A,B,…; by default all that have a fit of their own",
    ),
    "shares": (several(number(above=0, most=1)), "of the experts in memory, A,B,…"),
    "tokens": (whole(8), "of a text"),
    "texts": (whole(2), "that are drawn"),
    "seed": (whole(), "of the drawn routing"),
}
#: recorded traces → the card of their model
RECORDED = {
    "gpt-oss-20b-fingerprinting": "GPT-OSS-20B",
    "esft-deepseek-v2-lite": "DeepSeek-V2-Lite",
    "moe-beyond-deepseek-v2-lite": "DeepSeek-V2-Lite",
    "olmoe-mmlu-logits": "OLMoE-1B-7B",
    "speculative-moe-mixtral": "Mixtral-8x7B",
}
#: fits to one text, in which a layer's popularity and the text's preference cannot be told apart:
#: they say nothing of static sets
ONE_TEXT = ("Qwen3-30B-A3B", "Gemma-4-26B-A4B", "GPT-OSS-120B")
#: tokens of a long trace that are looked at, but for static sets, which see all texts
MOST = 2500
#: a phone, whose experts come from its disk; a GPU, whose experts come from the host's memory
PHONE, GPU, HOST = "oneplus-12", "rtx-5080", "i7-14700"
#: a model of ZipMoE's whose fit saw many texts
PLANNED = "DeepSeek-V2-Lite"
PLAN, COMPRESSED = "planned, ZipMoE's rule", "only C, LRU"
#: tokens that are timed, after as many that fill the cache
TIMED = 32
PRECISIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Subject(NamedTuple):
    """Routing of a model: its name, its texts, and its geometry with experts in four bits."""

    name: str
    texts: Texts
    spec: MoESpec
    dense: float

    @property
    def experts(self) -> int:
        return self.texts.L * self.texts.E

    @property
    def one_text(self) -> bool:
        """Whether nothing is known of other texts."""
        return len(self.texts.ids) < 2 or any(f"of {name}" in self.texts.said for name in ONE_TEXT)

    @property
    def K(self) -> int:
        return self.texts.ids[0].shape[2]

    def only(self, ids: list[np.ndarray]) -> Subject:
        """The same with other texts."""
        return self._replace(texts=self.texts._replace(ids=ids))


def tokens_of(texts: Iterable[np.ndarray], E: int) -> list[list[tuple[int, list[int]]]]:
    """A batch a token: (layer, experts) of its layers."""
    return [
        [(layer, [e for e in ids if e != E]) for layer, ids in enumerate(token)]
        for one in texts
        for token in one.tolist()
    ]


def drawn(model: str, tokens: int, texts: int, seed: int) -> Subject:
    """Texts of a model's fit, or its family's; model : a card's name, a hub id or a folder."""
    found = find_model(model)
    spec = found.spec.with_dtype("int4")
    routing, said = routing_of(found.spec)
    ids = routing.draw(spec.L, spec.E, spec.K, [tokens] * texts, seed)
    dense = found.dense * spec.expert_bytes / found.spec.expert_bytes
    return Subject(spec.name, Texts(np.split(ids, texts), spec.E, said), spec, dense)


def recorded(trace: RoutingTrace, name: str) -> Subject:
    """Of a trace, all texts. Without a model, nothing is known of other weights."""
    order = np.argsort(-trace.weights.float().numpy(), axis=2, kind="stable")  # best expert first
    ids, sequence = np.take_along_axis(trace.ids.numpy(), order, 2), trace.sequence.numpy()
    said = "recorded" if float(trace.weights.std()) else "recorded, without weights"
    texts = Texts([ids[sequence == s] for s in np.unique(sequence)], trace.spec.E, said)
    return Subject(name, texts, trace.spec.with_dtype("int4"), 0.0)


def part(of: Subject) -> Subject:
    """About `MOST` tokens, of texts spread over all."""
    tokens = sum(map(len, of.texts.ids))
    return of.only(of.texts.ids[:: -(-tokens // MOST)])


def subjects(
    models: Sequence[str], tokens: int, texts: int, seed: int, traces: Folder | None = None
) -> Iterator[Subject]:
    """Drawn from the fits of `models`, by default of all cards with one; and recorded."""
    yield from (drawn(name, tokens, texts, seed) for name in models or families())
    for folder, card in RECORDED.items() if traces else ():
        trace = load_trace(traces.path / folder / "trace.npz", model=card)
        yield recorded(trace, f"{card}, {folder}")


# ---- hit rates of texts


def by_text(of: Subject, holder: Holder) -> tuple[np.ndarray, np.ndarray]:
    """(hits, requests) of each text, one after another."""
    runs = [
        played(tokens_of([one], of.texts.E), holder, Costs(1.0), lambda _: 1)
        for one in of.texts.ids
    ]
    requests = np.array([run.requests for run in runs])
    return requests - [run.misses for run in runs], requests


class Resident(NamedTuple):
    """Our own cache as a `Holder`."""

    residency: Residency

    def ask(self, layer: int, experts: Sequence[int]) -> list[ExpertKey]:
        asked = self.residency.begin(layer, dict.fromkeys(experts, 1)).requests
        return [request.key for request in asked if request.state is State.MISSED]


def popular(texts: Sequence[np.ndarray], E: int, held: int) -> StaticSet:
    """The most popular experts of texts."""
    order = np.argsort(-counts(texts, E).ravel(), kind="stable")[:held]
    return StaticSet({ExpertKey(*divmod(int(key), E)) for key in order})


def static_hits(of: Subject, held: int, others: bool) -> tuple[np.ndarray, np.ndarray]:
    """(hits, requests) of each text with its own most popular experts, or those of the others."""
    own = np.stack([counts([one], of.texts.E).ravel() for one in of.texts.ids])
    known = own.sum(0) - own if others else own
    best = np.argsort(-known, axis=1, kind="stable")[:, :held]
    return np.take_along_axis(own, best, 1).sum(1), own.sum(1)


def static_sets(of: Subject, share: float) -> dict[str, Interval]:
    """Hit rates of LRU and of static sets; and the static set's of other texts less LRU's, if there
    are others."""
    held = round(share * of.experts)
    lru, requests = by_text(of, SizedCache(held, lambda _: 1))
    rows = {"LRU": (lru, requests), "static, own text": static_hits(of, held, False)}
    if not of.one_text:
        rows["static, other texts"] = hits, requests = static_hits(of, held, True)
        rows["static, other texts, less LRU"] = hits - lru, requests
    return {name: ratio(*each) for name, each in rows.items()}


def policies(of: Subject, share: float, only: Sequence[str] = ()) -> dict[str, Interval]:
    """Hit rates of the default, of the optimum, and of what was found good on small models; or of
    some of them only."""
    held, L = round(share * of.experts), of.texts.L
    future = tokens_of(of.texts.ids, of.texts.E)
    belady = Belady((layer, dict.fromkeys(ids, 1)) for token in future for layer, ids in token)
    holders = {
        "default": SizedCache(held, lambda _: 1, DEFAULT_POLICY),
        "LRFU": SizedCache(held, lambda _: 1, "lrfu"),
        "LRU of each layer": SizedCache(held, lambda _: 1, "lru", L),
        "LFU of each layer": SizedCache(held, lambda _: 1, "lfu", L),
        "ZipMoE's rule": Resident(Residency(L, of.texts.E, Pools(F=held), "zipmoe")),
        "Belady": SizedCache(held, lambda _: 1, belady),
    }
    return {name: ratio(*by_text(of, holders[name])) for name in only or holders}


def union(of: Subject) -> Numbers:
    """Experts that n neighbouring tokens of a text touch in a layer, over n times K."""
    found = {}
    for n in BATCHES:
        sizes = [
            len(np.unique(one[at : at + n, layer]))
            for one in of.texts.ids
            for at in range(0, len(one) - n + 1, max(n, len(one) // 4))
            for layer in range(0, of.texts.L, max(1, of.texts.L // 8))
        ]
        if sizes:
            found[str(n)] = float(np.mean(sizes)) / (n * of.K)
    return found


def of_k(of: Subject, share: float) -> Numbers:
    """Missed experts of a token that goes to its first k experts only, under LRU."""
    held = round(share * of.experts)
    found = {}
    for name, part in {"half of K": 0.5, "three quarters": 0.75, "K": 1.0}.items():
        fewer = of.only([one[..., : max(1, int(part * of.K))] for one in of.texts.ids])
        hits, requests = by_text(fewer, SizedCache(held, lambda _: 1))
        found[name] = float((requests - hits).sum() / sum(map(len, of.texts.ids)))
    return found


# ---- engines in time


def engines(of: Subject, share: float) -> Records:
    """Tokens a second of each engine, and where the time goes.

    The static set is of another text. Where the CPU helps, it computes what the GPU lacks, and
    uploads hide behind that; --n-cpu-moe has all experts of some layers on the GPU."""
    held, E, L = round(share * of.experts), of.texts.E, of.texts.L
    nbytes, disk = of.spec.expert_bytes, MachineRates.of(load_device(PHONE))
    fast, host = MachineRates.of(load_device(GPU), reached=0), MachineRates.of(_with_disk(HOST))
    first, then = of.texts.ids[0][: 2 * TIMED], of.texts.ids[-1][: 2 * TIMED]
    hot = popular([first], E, held)
    on_phone = Costs(of.dense / disk.memory, *[nbytes / disk.memory] * 2, 1 / disk.read)
    on_gpu = Costs(of.dense / fast.memory, *[nbytes / fast.memory] * 2, 1 / fast.read)
    by_cpu = Costs(of.dense / fast.memory, nbytes / fast.memory, nbytes / host.memory)

    def lru(size: Any = lambda _: nbytes, more: float = 0.0) -> SizedCache:
        return SizedCache(held * nbytes + more, size)

    def page(key: ExpertKey) -> float:
        return nbytes if key.expert >= 0 else of.dense / L

    split = StaticSet({ExpertKey(n, e) for n in range(round(share * L)) for e in range(E)})
    rows = {
        "phone: LRU, then computes": (lru(), on_phone),
        "phone: LRU, overlapped": (lru(), replace(on_phone, hidden=1.0)),
        "phone: mapped file": (lru(page, of.dense), on_phone),
        "phone: static set": (hot, on_phone),
        "GPU: LRU, uploads": (lru(), on_gpu),
        "GPU: LRU, CPU helps": (lru(), by_cpu),
        "GPU: static set, CPU helps": (hot, by_cpu),
        "GPU: --n-cpu-moe": (split, by_cpu),
    }
    found = {}
    for name, (holder, costs) in rows.items():
        mapped = name.endswith("mapped file")
        size = page if mapped else lambda key: nbytes
        tokens = tokens_of([then], E)
        if mapped:
            tokens = [[(layer, [-1, *ids]) for layer, ids in token] for token in tokens]
        if costs is by_cpu:
            size = lambda key: 0  # noqa: E731
        played(tokens[:TIMED], holder, costs, size)
        run = played(tokens[TIMED:], holder, costs, size)
        waiting = run.waiting / run.batches
        found[name] = {"tokens/s": run.pace, "hits %": 100 * run.hit_rate, "waiting s": waiting}
    ours = ours_on(of, share, machine_of(of, disk))
    hits = 100 * ours.hit_rate
    return found | {"phone: moelab": {"tokens/s": 1 / ours.tpot, "hits %": hits}}


def _with_disk(name: str) -> Any:
    """A card with a disk's rate if it has none, as only its memory counts here."""
    device, disk = load_device(name), load_device(PHONE).figures["storage_read_gbs"]
    return replace(device, figures={"storage_read_gbs": disk} | device.figures)


def machine_of(of: Subject, rates: MachineRates) -> Machine:
    """What our engine's simulator takes: reads from a disk or over a link."""
    nbytes = of.spec.expert_bytes
    delays = Delays(nbytes / rates.read, 0.0, 0.0, 0.0, nbytes / rates.memory, 0.0, e_bytes=nbytes)
    return Machine(delays, other=(of.dense / of.texts.L / rates.memory, 0.0))


def ours_on(
    of: Subject, share: float, machine: Machine, precision: float | None = None
) -> Simulation:
    """Our engine on the last text; with a precision, each layer's experts are announced during the
    one before, each right with so much probability."""
    L, E = of.texts.L, of.texts.E
    tokens = tokens_of([of.texts.ids[-1][: 2 * TIMED]], E)
    steps = [[(layer, dict.fromkeys(ids, 1)) for layer, ids in token] for token in tokens]
    rng = np.random.default_rng(0)

    def guess(ids: Iterable[int]) -> list[int]:
        wrong = rng.permutation([e for e in range(E) if e not in ids]).tolist()
        return [e if rng.random() < precision else wrong.pop() for e in ids]

    prefetching = None
    if precision is not None:
        told = [[(layer, guess(ids)) for layer, ids in token[1:]] for token in steps]
        prefetching = Prefetching(told, of.K)
    residency = Residency(L, E, Pools(F=round(share * of.experts)))
    forwards = [(1, "decode")] * len(steps)
    warm, timed = steps[:TIMED], steps[TIMED:]
    simulate(warm, forwards[:TIMED], residency, machine)
    if prefetching:
        prefetching = prefetching._replace(predictions=prefetching.predictions[TIMED:])
    return simulate(timed, forwards[TIMED:], residency, machine, prefetching=prefetching)


def prefetching(of: Subject, share: float) -> Records:
    """What guesses of each precision gain in time, by the precision on experts that are absent."""
    found = {}
    for where, card in {"phone": PHONE, "GPU": GPU}.items():
        machine = machine_of(of, MachineRates.of(load_device(card), reached=0))
        plain = ours_on(of, share, machine)
        for precision in PRECISIONS:
            run = ours_on(of, share, machine, precision)
            begun = run.fetched.begun
            found[f"{where}, {precision:.0%} of guesses right"] = {
                "right of absent": run.fetched.used / begun if begun else float("nan"),
                "speed ×": plain.tpot / run.tpot,
            }
    return found


def guessed(of: Subject, share: float) -> Interval:
    """Of guesses at absent experts, how many are right: K for the next layer, those that followed
    this layer's experts most often in every other text; of the texts between, under LRU."""
    E, L, held = of.texts.E, of.texts.L, round(share * of.experts)
    followed = np.zeros((L, E + 1, E + 1))
    for one in of.texts.ids[::2]:
        for layer in range(L - 1):
            pairs = one[:, layer, :, None], one[:, layer + 1, None, :]
            np.add.at(followed[layer], np.broadcast_arrays(*pairs), 1)
    cache = SizedCache(held, lambda _: 1)
    right, told = [], []
    for one in of.texts.ids[1::2]:
        found = np.zeros(2, np.int64)
        for token in one:
            for layer in range(L):
                chosen = [int(e) for e in token[layer] if e != E]
                if layer:
                    score = followed[layer - 1][token[layer - 1]].sum(0)[:E]
                    guess = np.argsort(-score, kind="stable")[: of.K].tolist()
                    absent = [e for e in guess if not cache.has(layer, e)]
                    found += len(set(absent).intersection(chosen)), len(absent)
                cache.ask(layer, chosen)
        right.append(found[0])
        told.append(found[1])
    return ratio(right, told)


def break_even(rows: Records, where: str) -> float:
    """The precision on absent experts at which prefetching neither gains nor loses; 0 if it always
    gains, 1 if it never does."""
    points = sorted(
        (of["right of absent"], of["speed ×"])
        for name, of in rows.items()
        if name.startswith(where) and of["right of absent"] == of["right of absent"]
    )
    if not points or points[-1][1] <= 1:
        return 1.0
    if points[0][1] >= 1:
        return 0.0
    right, speed = zip(*points)
    return float(np.interp(1.0, np.maximum.accumulate(speed), right))


def planned(model: str, gb: int = 7, tokens: int = 8, draws: int = 4) -> Records:
    """Milliseconds of a token on an Orin with ZipMoE's planned pools and with one state under LRU,
    mean of draws with the interval of the plan's time over compressed experts': on fitted routing,
    and on independent draws of its popularity. The plan knows the popularity of other texts."""
    board = zipmoe.Machine.of(model, "jetson-agx-orin-32gb", 1.2, 6)
    took: dict[str, list[Numbers]] = {"fitted routing": [], "independent draws": []}
    for seed in range(draws):
        of = drawn(model, 160, 6, seed)
        known = counts(of.texts.ids[:-1], of.texts.E)
        f = np.sort(known, 1)[:, ::-1].mean(0) / sum(map(len, of.texts.ids[:-1]))
        real = [
            [(layer, dict.fromkeys(ids, 1)) for layer, ids in token]
            for token in tokens_of([of.texts.ids[-1][: 6 * tokens]], of.texts.E)
        ]
        alone = zipmoe.stretched(f, board.spec, tokens, seed)
        for name, routed in zip(took, ((f, real, tokens), alone)):
            ways = zipmoe.caching(board, [gb], *routed)
            took[name].append({way: 1e3 * times[gb] for way, times in ways.items()})
    found = {}
    for name, rows in took.items():
        plan, compressed = ([row[way] for row in rows] for way in (PLAN, COMPRESSED))
        over = zip(("plan ÷ compressed", "from", "to"), ratio(plan, compressed))
        found[name] = {f"{way} ms": float(np.mean([r[way] for r in rows])) for way in rows[0]}
        found[name] |= dict(over)
    return found


# ---- all of it


def over_models(rows: Records, name: str) -> Numbers:
    """Mean over models with its interval."""
    return dict(zip(("mean", "from", "to"), interval([of[name] for of in rows.values()])))


def run(
    traces: Folder | None = None,
    models: Sequence[str] = (),
    shares: Sequence[float] = (0.1, 0.25, 0.5),
    tokens: int = 160,
    texts: int = 6,
    seed: int = 0,
) -> Record:
    """Sections of tables: engines, static sets at each share, a prompt's batch, K, prefetching."""
    names = ("engines", "union of a batch", "K", "guesses at absent experts", "prefetching")
    sections: dict[str, Any] = {name: {} for name in names}
    sections |= {f"static sets, {share:.0%}": {} for share in shares}
    share = shares[len(shares) // 2]
    sections["policies"] = {}
    for of in progress(list(subjects(models, tokens, texts, seed, traces)), "models", unit="model"):
        for each in shares:
            sections[f"static sets, {each:.0%}"][of.name] = _percent(static_sets(of, each))
        of = part(of)  # noqa: PLW2901
        sections["policies"][of.name] = _percent(policies(of, share))
        sections["union of a batch"][of.name] = union(of)
        if not of.texts.said.endswith("without weights"):  # which say who is first
            sections["K"][of.name] = of_k(of, share)
        if len(of.texts.ids) > 3 and not of.one_text:
            found = zip(("precision %", "from %", "to %"), guessed(of, share))
            sections["guesses at absent experts"][of.name] = {end: 100 * x for end, x in found}
        if of.texts.said.startswith("recorded"):
            continue
        for name, row in engines(of, share).items():
            sections["engines"][f"{of.name}, {name}"] = row
        guesses = prefetching(of, share)
        perfect = "{}, 100% of guesses right"
        sections["prefetching"][of.name] = {
            f"pays above, {where}": break_even(guesses, where) for where in ("phone", "GPU")
        } | {
            f"perfect, {where} ×": guesses[perfect.format(where)]["speed ×"]
            for where in ("phone", "GPU")
        }
    if not models or PLANNED in models:
        sections["planned pools"] = planned(PLANNED)
    if traces:
        sections["conditions"] = {
            f"sha256 of {name}": digest(traces.path / name / "trace.npz") for name in RECORDED
        }
    return sections


def _percent(found: dict[str, Interval]) -> Numbers:
    """Hit rates in %, each with its interval if it has one."""
    return {
        f"{name} {end}".strip(): 100 * x
        for name, ends in found.items()
        for end, x in zip(("", "from", "to"), ends)
        if x == x  # one text has no interval
    }
