"""Every combination of what the paper leaves open: which ones fit its numbers, and how far apart
those lie.

`sweep.quantities` for all of the millions of combinations of `fit.CHOICES`: a figure is an array
with an axis an assumption, one long where that one does not matter, and numpy's broadcasting
combines them. A layer's time is the closed form written again for arrays, for the paper's seven
systems only; a test holds it to the sweep.

A prompt needs its counts [L, E]; an answer only how often each situation occurs: how many of K
experts are resident, how many are on which module. Rates are [mapping, clock, 1] for modules, [1,
1, efficiency] for all else."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from typing import Any

import numpy as np

from moelab.ndp.balance import balance, most_on_gpu
from moelab.ndp.costs import Costs
from moelab.ndp.fit import CHOICES, CLAIMS, FIT, JUDGED, error
from moelab.ndp.prefetch import experts_that_fit, hits, most_used
from moelab.ndp.routing import PromptRouting
from moelab.ndp.simulation import place
from moelab.ndp.sweep import MODELS, Assumptions, modules_needed
from moelab.ndp.systems import ROUND, SHARES
from moelab.progress import progress

AXES = tuple(CHOICES)
Choices = Mapping[str, tuple[Any, ...]]
Cell = dict[str, np.ndarray]  # phase and system → seconds, an axis an assumption


def on(array: Any, *names: str) -> np.ndarray:
    """An array whose axes are those assumptions, in the order of `AXES`, with one axis for each of
    all."""
    sizes = iter(np.shape(array))
    return np.reshape(array, [next(sizes) if name in names else 1 for name in AXES])


@dataclass(frozen=True, eq=False)
class Readings:
    """Name of a claim → its value under every combination of choices."""

    choices: Choices
    figures: dict[str, np.ndarray]

    @cached_property
    def fits(self) -> np.ndarray:
        """Which combinations agree with all figures that choose: bool, an axis an assumption."""
        agree = reduce(np.logical_and, (CLAIMS[name].agrees(self.figures[name]) for name in FIT))
        return np.broadcast_to(agree, [len(options) for options in self.choices.values()])

    @cached_property
    def judged(self) -> np.ndarray:
        """How many of the figures that judge agree, of every combination that fits: int [n]."""
        return sum(
            self._of_fits(CLAIMS[name].agrees(self.figures[name])).astype(int) for name in JUDGED
        )

    @cached_property
    def errors(self) -> np.ndarray:
        """Of the fitted figures, of every combination that fits: [n]."""
        return error({name: self._of_fits(self.figures[name]) for name in FIT})

    def _of_fits(self, array: np.ndarray) -> np.ndarray:
        return np.broadcast_to(array, self.fits.shape)[self.fits]

    def band(self, name: str) -> tuple[float, float]:
        """Least and most of a figure over the combinations that fit; nan where none does."""
        of = self._of_fits(self.figures[name])
        return (float(of.min()), float(of.max())) if of.size else (math.nan, math.nan)

    def at(self, assumptions: Assumptions) -> dict[str, float]:
        """The figures under one combination. ValueError: it is not among the choices."""
        place = tuple(
            options.index(getattr(assumptions, name)) for name, options in self.choices.items()
        )
        return {
            name: float(array[tuple(i % size for i, size in zip(place, array.shape, strict=True))])
            for name, array in self.figures.items()
        }

    def left(self) -> dict[str, dict[str, int]]:
        """Assumption → choice → how many combinations with it fit."""
        every = range(len(AXES))
        return {
            name: dict(
                zip(map(str, options), self.fits.sum(tuple(a for a in every if a != axis)).tolist())
            )
            for axis, (name, options) in enumerate(self.choices.items())
        }

    def agreement(self) -> dict[int, int]:
        """Figures that judge and agree → how many of the combinations that fit have so many."""
        return dict(sorted(Counter(self.judged.tolist()).items()))


def readings(
    choices: Choices = CHOICES, seed: int = 0, prompt: int = 512, answer: int = 512
) -> Readings:
    """All combinations, for one seed of the routing; a minute for `CHOICES`, and shows progress."""
    if tuple(choices) != AXES:
        raise ValueError(
            f"choices are of {', '.join(choices)}; they must be of {', '.join(AXES)}, in that order"
        )
    units = sorted({2, *(N for some in choices["averaged"] for N in some)})
    needed, cells = {model: modules_needed(model) for model in MODELS}, {}
    grid = list(product(choices["zipf"], choices["bias"]))
    jobs = list(product(MODELS, grid))

    def of_routing(job: tuple[str, tuple[float, float]]) -> dict[int, Cell]:
        (model, (zipf, bias)) = job
        assumed = Assumptions(zipf=zipf, bias=bias)
        world = _World(choices, assumed, assumed.routing(model, seed, prompt, answer))
        return {N: world.cell(N) for N in units if needed[model] <= N}

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy gives up the interpreter's lock
        for (model, _), found in progress(
            zip(jobs, pool.map(of_routing, jobs)), "readings", total=len(jobs), unit="routing"
        ):
            for N, cell in found.items():
                cells.setdefault((model, N), []).append(cell)
    sizes = len(choices["zipf"]), len(choices["bias"])
    joined = {
        key: {
            what: np.stack([cell[what] for cell in of]).reshape(*sizes, *of[0][what].shape[2:])
            for what in of[0]
        }
        for key, of in cells.items()
    }
    return Readings(choices, _figures(choices, joined))


def _figures(choices: Choices, cells: dict[tuple[str, int], Cell]) -> dict[str, np.ndarray]:
    """`sweep.quantities` of all combinations."""

    def over(
        keys: list[tuple[str, int]], system: str, other: str, phase: str
    ) -> Iterator[np.ndarray]:
        return (cells[key][f"{phase} {other}"] / cells[key][f"{phase} {system}"] for key in keys)

    every, found = "NDP+TP+LB+PRE", {}
    for N_of in choices["averaged"]:
        keys = [key for key in cells if key[1] in N_of]
        qwen = [key for key in keys if key[0] == "Qwen3-30B-A3B"]
        one = {
            f"{phase} {name}": sum(over(keys, name, "MoNDE", phase)) / len(keys)
            for phase, names in (
                ("prefill", ("NDP+TP", "NDP+TP+LB")),
                ("decode", ("NDP+TP", "NDP+TP+LB", "NDP+TP+PRE", every)),
            )
            for name in names
        }
        one |= {
            f"Qwen3 {phase}": sum(over(qwen, name, "MoNDE", phase)) / len(qwen)
            for phase, name in (("prefill", "NDP+TP+LB"), ("decode", every))
        }
        one |= {
            f"end to end ÷ {name}": reduce(np.maximum, over(keys, every, name, "all"))
            for name in ("MoE-OnDemand", "Fiddler", "MoNDE")
        }
        for name, array in one.items():
            found.setdefault(name, []).append(array)
    joined = {name: np.concatenate(arrays, -1) for name, arrays in found.items()}
    return joined | {
        f"{short}, N=2, decode NDP+TP": next(over([(model, 2)], "NDP+TP", "MoNDE", "decode"))
        for short, model in (("DeepSeek", MODELS[0]), ("Qwen3", MODELS[1]))
    }


class _World:
    """One model under one routing, with every machine, system and number of modules.

    Arrays of seconds begin with [mapping, clock, efficiency], each of its size or 1; c columns
    follow."""

    def __init__(self, choices: Choices, assumed: Assumptions, routing: PromptRouting) -> None:
        self.choices, self.assumed, self.routing, self.spec = (
            choices,
            assumed,
            routing,
            routing.spec,
        )
        self.S, self.D = len(routing.prefill), len(routing.decode)
        modules = [
            [self._costs(1, mapping=m, clock_ghz=c) for c in choices["clock_ghz"]]
            for m in choices["mapping"]
        ]
        self.others = others = [self._costs(1, efficiency=e) for e in choices["efficiency"]]
        self.unit = lambda n: np.array([[c.unit(n) for c in row] for row in modules])[:, :, None]
        self.gpu = lambda n: np.array([c.gpu(n) for c in others])[None, None]
        self.T_w, self.T_a = (
            np.array([f(c) for c in others])[None, None]
            for f in (Costs.transfer, lambda c: c.activation)
        )
        counts = routing.counts()  # [L, E]
        self.order = np.array(
            [np.lexsort((-h, -n)) for h, n in zip(routing.history, counts)]
        )  # hottest first
        self.tokens = np.take_along_axis(counts, self.order, 1)
        self.active = (counts > 0).sum(1)  # [L]
        ids = routing.decode_by_popularity
        on_gpu = [
            [
                experts_that_fit(
                    self._costs(1, gpu_gb=gb), self.S + self.D, {"K": self.spec.K}.get(limit)
                )
                for limit in choices["limit"]
            ]
            for gb in choices["gpu_gb"]
        ]
        self.x = np.array(on_gpu)  # [memory, limit]
        self.hit = np.array(
            [
                [
                    np.bincount(
                        hits(most_used(counts, x), ids).sum(-1).ravel(), minlength=self.spec.K + 1
                    )
                    for x in row
                ]
                for row in on_gpu
            ]
        )  # [memory, limit, K + 1]
        dense = [
            c.dense_prefill(self.S) + c.dense_decode(self.S + np.arange(self.D)).sum()
            for c in others
        ]
        self.dense = on(dense, "efficiency")
        self.host = self._on_host()

    def _costs(self, N: int, **changed: Any) -> Costs:
        return Costs(self.spec, replace(self.assumed, **changed).hardware(N))

    def _on_host(self) -> Cell:
        """End to end of the two that know no modules."""
        ids, K, fewest = self.routing.decode_by_popularity, self.spec.K, self.dense.reshape(-1)
        shares = np.arange(K) < np.arange(K + 1)[:, None]  # of K experts 0 … K resident

        def end(x: int, fiddler: bool) -> np.ndarray:
            popular = most_used(self.routing.history, x)
            times = np.bincount(hits(popular, ids).sum(-1).ravel(), minlength=K + 1)
            prefill = self._at_host(
                self.tokens, np.take_along_axis(popular, self.order, 1), self.S, fiddler
            ).sum(-1)
            return (
                prefill
                + self._at_host(np.ones_like(shares, int), shares, 1, fiddler) @ times
                + fewest
            )

        full = [
            [
                experts_that_fit(self._costs(1, gpu_gb=gb), self.S + self.D) * (who == "Fiddler")
                for who in self.choices["cached"]
            ]
            for gb in self.choices["gpu_gb"]
        ]
        of = {x: end(x, True) for x in {x for row in full for x in row}}
        fiddler = np.array([[of[x] for x in row] for row in full])  # [memory, cached, efficiency]
        return {
            "MoE-OnDemand": on(end(0, False), "efficiency"),
            "Fiddler": on(np.moveaxis(fiddler, -1, 0), "efficiency", "gpu_gb", "cached"),
        }

    def _at_host(self, n: np.ndarray, resident: np.ndarray, S: int, fiddler: bool) -> np.ndarray:
        """Layers whose experts of n [B, c] tokens are on the GPU or in host memory: seconds
        [efficiency, B]."""
        gpu, cpu = self.gpu(n)[0, 0], np.array([c.cpu(n) for c in self.others])
        T_w, T_a = self.T_w[0, 0, :, None], self.T_a[0, 0, :, None]
        here = resident & (n > 0)
        on_cpu = (n > 0) & ~here & (cpu <= T_w[..., None] + gpu) & fiddler
        moved = (n > 0) & ~here & ~on_cpu
        receives = np.minimum((n * on_cpu).sum(-1), S)
        far = np.where(receives > 0, (cpu * on_cpu).sum(-1) + 2 * T_a, 0.0)
        near = _pipeline(
            moved * T_w[..., None],
            moved * gpu,
            np.maximum(0, 2 * receives - 1) * T_a,
            1,
            (here * gpu).sum(-1),
        )
        return np.maximum(np.maximum(far, near), 2 * receives * T_a + moved.sum(-1) * T_w)

    def cell(self, N: int) -> Cell:
        """Seconds by phase and system on N modules."""
        prefill, decode = self._split_prefill(N), self._split_decode(N)
        monde = {
            phase: np.concatenate(
                [of(N, placement) for placement in self.choices["placement"]],
                AXES.index("placement"),
            )
            for phase, of in (("prefill", self._monde_prefill), ("decode", self._monde_decode))
        }
        loading = on(
            self.x[None] * self.spec.L * self.T_w.reshape(-1, 1, 1), "efficiency", "gpu_gb", "limit"
        )
        ours = "NDP+TP+LB+PRE"
        ends = {
            "MoNDE": monde["prefill"] + monde["decode"] + self.dense,
            ours: prefill["NDP+TP+LB"] + decode[ours] + loading + self.dense,
            **self.host,
        }
        return {
            **{
                f"prefill {name}": of
                for name, of in (prefill | {"MoNDE": monde["prefill"]}).items()
            },
            **{f"decode {name}": of for name, of in (decode | {"MoNDE": monde["decode"]}).items()},
            **{f"all {name}": of for name, of in ends.items()},
        }

    # tensor parallelism

    def _split(
        self,
        N: int,
        S: int,
        n: np.ndarray,
        moved: Any,
        resident: Any,
        work: np.ndarray,
        tokens: Any,
    ) -> np.ndarray:
        """A layer whose first c experts, of n [c] tokens, are on the GPU by those shares, and the
        rest on N modules.

        work, tokens : seconds on one module, and tokens, of all its experts.
        """
        gpu, stays = (
            self.gpu(n),
            np.broadcast_to(
                (1 - moved - resident) * (n > 0),
                np.broadcast_shapes(np.shape(moved), np.shape(resident), n.shape),
            ),
        )
        left = tokens - (n * (stays <= 0)).sum(-1)
        T_w, T_a = (of.reshape(of.shape + (1,) * (left.ndim - 3)) for of in (self.T_w, self.T_a))
        receives = np.minimum(left, S)
        work = work - (self.unit(n) * (1 - stays)).sum(-1)
        far = np.where(left > 0, work / N + (1 + N) * T_a, 0.0)
        waits = np.where(left > 0, (1 + N) * receives - N, 0) * T_a
        near = _pipeline(moved * T_w[..., None], moved * gpu, waits, N, (resident * gpu).sum(-1))
        link = (1 + N) * receives * T_a + np.sum(np.broadcast_to(moved, stays.shape), -1) * T_w
        return np.maximum(np.maximum(far, near), link)

    def _terms(self, n: np.ndarray | float, N: int) -> dict[str, Any]:
        """Of `balance`, [mapping, clock, efficiency, …] of n."""
        ones = (1,) * np.ndim(n)
        return {
            "T_g": self.gpu(n),
            "T_n": self.unit(n) / N,
            "T_a": self.T_a.reshape(self.T_a.shape + ones),
            "N": N,
        }

    def _split_prefill(self, N: int) -> Cell:
        K, S, E = self.spec.K, self.S, self.spec.E
        n, total = self.tokens[:, :K], self.tokens.sum(1)
        work, most = self.unit(self.tokens).sum(-1), np.minimum(K, self.active)
        T_w = self.T_w[..., None]

        def at(E_g: Any) -> np.ndarray:
            moved = np.clip(np.asarray(E_g)[..., None] - np.arange(min(K, E)), 0, 1)
            return self._split(N, S, n, moved, 0.0, work, total).sum(-1)

        asked = [
            balance(T_w=T_w, K=most, S=S, **self._terms(tokens, N))
            for tokens in (
                {"mean": total / self.active, "prompt": np.full(len(n), float(S))}[how]
                for how in self.choices["eq2_tokens"]
            )
        ]  # each [m, c, e, L]
        balanced = np.array(
            [[at(SHARES[how](E_g)) for E_g in asked] for how in self.choices["rounding"]]
        )
        by = "mapping", "clock_ghz", "efficiency"
        return {
            "NDP+TP": on(at(np.zeros((1, 1, 1, 1))), *by),
            "NDP+TP+LB": on(np.moveaxis(balanced, (0, 1), (3, 4)), *by, "rounding", "eq2_tokens"),
        }

    def _split_decode(self, N: int) -> Cell:
        """Of the answer; hits are computed first, by Eq. 3; without one Eq. 1 balances."""
        K, one, each = self.spec.K, np.ones(self.spec.K, int), np.arange(self.spec.K)
        work, terms, by = (
            K * self.unit(1.0),
            self._terms(1.0, N),
            ("mapping", "clock_ghz", "efficiency"),
        )
        E_g = balance(T_w=self.T_w, K=K, **terms)
        E_max = np.floor(most_on_gpu(K=K, **terms))

        def at(moved: Any, resident: Any) -> np.ndarray:
            shares = (np.clip(np.asarray(of)[..., None] - each, 0, 1) for of in (moved, resident))
            return self._split(N, 1, one, *shares, work, K)

        zero = np.zeros((1, 1, 1))
        alone = at(zero, zero)
        balanced = np.stack([at(SHARES[how](E_g), zero) for how in self.choices["rounding"]], -1)
        hit = np.stack(
            [at(zero, np.minimum(h, E_max)) for h in range(1, K + 1)], -1
        )  # [m, c, e, K]
        some = np.einsum(
            "mcek,glk->mcegl", hit, self.hit[..., 1:].astype(float)
        )  # g, l: memory, limit
        none, steps = self.hit[..., 0], self.D * self.spec.L
        hits_axes = (*by, "gpu_gb", "limit")
        with_lb = some[:, :, :, :, None] + none[:, None] * balanced[:, :, :, None, :, None]
        return {
            "NDP+TP": on(steps * alone, *by),
            "NDP+TP+LB": on(steps * balanced, *by, "rounding"),
            "NDP+TP+PRE": on(some + none * alone[..., None, None], *hits_axes),
            "NDP+TP+LB+PRE": on(with_lb, *hits_axes, "rounding"),
        }

    # whole experts

    def _ratio(self, N: int) -> np.ndarray:
        """MoNDE's share of the active experts: [mapping, efficiency]."""
        link = [self._costs(N, efficiency=e).hardware.link for e in self.choices["efficiency"]]
        rate = [
            [self._costs(N, mapping=m).hardware.unit_bandwidth] for m in self.choices["mapping"]
        ]
        return np.array(link) / (np.array(link) + N * np.array(rate))

    def _monde_prefill(self, N: int, placement: str) -> np.ndarray:
        n, S, E = self.tokens, self.S, self.spec.E
        home = np.take_along_axis(place(self.routing.history, N, placement), self.order, 1)
        at = (home[..., None] == np.arange(N)) & (n > 0)[..., None]  # [L, E, N]
        receives = np.minimum(_rest(n[..., None] * at, -2), S)  # [L, m, N], m ≤ E moved
        busy, crossing = (receives > 0).sum(-1), receives.sum(-1)
        unit, gpu = self.unit(n), self.gpu(n)
        load = -np.sort(-_rest(unit[..., None] * at, -2), axis=-1)  # [m, c, 1, L, m, N]
        T_w, T_a = self.T_w[..., None, None], self.T_a[..., None, None]
        far = np.full(np.broadcast_shapes(load.shape[:-1], T_a.shape), -np.inf)
        for k in range(N):  # the one that ends k-th to last sends k outputs later
            far = np.where(busy > k, np.maximum(far, load[..., k] + (k + 1) * T_a), far)
        far = np.where(busy > 0, far + busy * T_a, 0.0)
        before = np.cumsum(gpu, -1) - gpu
        last = np.maximum.accumulate((np.arange(E) + 1) * T_w - before, -1) + np.cumsum(gpu, -1)
        near = np.concatenate(
            [np.zeros_like(last[..., :1]), last + ((2 * crossing - busy) * T_a)[..., 1:]], -1
        )
        link = 2 * crossing * T_a + np.arange(E + 1) * T_w
        layer = np.maximum(np.maximum(far, near), link)  # [m, c, e, L, m]
        share = np.stack(
            [
                ROUND[how](self._ratio(N)[..., None] * self.active)
                for how in self.choices["monde_rounding"]
            ],
            -1,
        ).astype(int)  # [m, e, L, r]
        taken = np.take_along_axis(layer, share[:, None], -1).sum(-2)  # [m, c, e, r]
        of = {
            "none": layer[..., 0].sum(-1)[..., None] + 0 * taken,
            "share": taken,
            "tuned": layer.min(-1).sum(-1)[..., None] + 0 * taken,
        }
        return on(
            np.stack([of[how] for how in self.choices["monde_prefill"]], -2),
            "mapping",
            "clock_ghz",
            "efficiency",
            "monde_prefill",
            "monde_rounding",
        )

    def _monde_decode(self, N: int, placement: str) -> np.ndarray:
        K, ids = self.spec.K, self.routing.decode_by_popularity
        homes = place(self.routing.history, N, placement)[
            np.arange(self.spec.L)[:, None], ids
        ].reshape(-1, K)
        flat = homes + N * np.arange(len(homes))[:, None]
        share = np.stack(
            [ROUND[how](self._ratio(N) * K) for how in self.choices["monde_rounding"]], -1
        ).astype(int)
        unit, gpu, T_w, T_a = self.unit(1.0)[..., None], self.gpu(1.0), self.T_w, self.T_a
        of = {}  # (which leave, how many) → seconds [m, c, e]
        for who, s in product(self.choices["monde_relieves"], np.unique(share).tolist()):
            stay = flat[:, s * (who == "popular") :]
            load, times = _patterns(
                np.bincount(stay.ravel(), minlength=homes.shape[0] * N).reshape(-1, N), K
            )
            for _ in range(s * (who == "busiest")):
                load[np.arange(len(load)), load.argmax(1)] -= 1
            load = -np.sort(-load, axis=1)
            busy = (load > 0).sum(1)
            far = np.max(
                [
                    np.where(busy > k, load[:, k] * unit + (k + 1) * T_a[..., None], 0)
                    for k in range(N)
                ],
                0,
            )
            near = (np.maximum(s * T_w + gpu, T_w + s * gpu) * (s > 0))[..., None] + busy * T_a[
                ..., None
            ] * (s > 0)
            link = 2 * busy * T_a[..., None] + s * T_w[..., None]
            of[who, s] = np.maximum(np.maximum(far + busy * T_a[..., None], near), link) @ times
        found = [
            [
                np.choose(
                    np.searchsorted(np.unique(share), share[..., r])[:, None],
                    [of[who, s] for s in np.unique(share).tolist()],
                )
                for r in range(share.shape[-1])
            ]
            for who in self.choices["monde_relieves"]
        ]
        return on(
            np.moveaxis(np.array(found), (0, 1), (3, 4)),
            "mapping",
            "clock_ghz",
            "efficiency",
            "monde_relieves",
            "monde_rounding",
        )


def _rest(array: np.ndarray, axis: int) -> np.ndarray:
    """Sums of what is left when the first 0, 1 … all are gone, along an axis that becomes one
    longer."""
    gone = np.flip(np.cumsum(np.flip(array, axis), axis), axis)
    return np.concatenate([gone, np.zeros_like(np.take(gone, [0], axis))], axis)


def _patterns(load: np.ndarray, K: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows of loads [T, N], each ≤ K, in whatever order of the modules, and how often they
    occur."""
    weights = (K + 1) ** np.arange(load.shape[1])
    _, first, times = np.unique(
        np.sort(load, axis=1) @ weights, return_index=True, return_counts=True
    )
    return load[first], times


def _pipeline(
    send: np.ndarray, compute: np.ndarray, start: np.ndarray, pieces: int, done: np.ndarray
) -> np.ndarray:
    """Seconds until the GPU, busy until `done`, has computed what arrives from `start` on: [..., c]
    → [...]."""
    arrived = start[..., None] + np.cumsum(send, -1)
    earliest = np.maximum(arrived + compute / pieces, arrived - send * (1 - 1 / pieces) + compute)
    later = compute.sum(-1, keepdims=True) - np.cumsum(compute, -1)
    there = send > 0
    last = np.max(np.where(there, earliest + later, 0.0), -1)
    return np.maximum(last, done + compute.sum(-1))
