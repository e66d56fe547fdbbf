"""Lossless compression of experts: size beside the entropy bound, and rates a thread beside memcpy
and zipnn.

Every codec packs and unpacks the same bf16 expert in turn with zipnn and memcpy; rates are medians,
in GB of weights a second. Rates "a thread" are per second of processor time; rates "together" are
per second on the clock, which is meaningful only while the machine is idle. `decode` is from packed
bytes to bf16 weights in a given buffer. Source: ZipMoE §2.2 and Fig. 3 (sizes; LZ4HC and ZSTD with
its settings are `lz4hc` and `zstd`), §2.3 and Fig. 4."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch

from moelab.base.records import Numbers, Records
from moelab.bench.results import load_average
from moelab.checkpoint.checkpoint import Checkpoint
from moelab.checkpoint.experts import CheckpointExperts
from moelab.evaluation.intervals import Interval
from moelab.experts.gemv import GEMV
from moelab.store import bits
from moelab.store.codecs import CODECS, compress_tensor, decompress_tensor
from moelab.store.headers import NAMES
from moelab.zipmoe.entropy import FORMATS, bound, joint_counts

from .layers import Layers, PackedExperts, rounds_of
from .reading import synthetic_expert
from .timing import Samples, gain, speed_up

EXPERT = 16 << 20  # bytes of the expert that is measured
MOST = 16  # experts of a token at most, of `DecodedExperts`
PEER = "zipnn"
CODED = "huffman"  # the codec that is measured on several threads
MISSING = "not installed"
LOOPS = 4  # decodes of a thread, where several run together
Work = Callable[[], Any]


class Coder(NamedTuple):
    """A way to pack one expert: its stored size in bytes, and functions of no arguments to be
    timed."""

    nbytes: int
    compress: Work
    decode: Work
    another: Callable[[], Work]  # a decode with buffers of its own, for one more thread


def coders(weights: torch.Tensor, names: Iterable[str] = CODECS) -> dict[str, Coder]:
    """A coder for each codec, and for zipnn where it is installed; ValueError for one that loses
    anything."""
    made = {name: _coder(weights, name) for name in names}
    with suppress(ImportError):
        made[PEER] = _zipnn(weights)
    return made


def _coder(weights: torch.Tensor, name: str) -> Coder:
    packed = compress_tensor(weights, name)
    out = torch.empty_like(weights)
    decompress_tensor(packed, out)
    _check(name, bits.as_bytes(out), weights)

    def another() -> Callable[[], None]:
        out = torch.zeros_like(weights).fill_(0)  # pre-faulted pages
        return lambda: decompress_tensor(packed, out)

    return Coder(packed.nbytes, lambda: compress_tensor(weights, name), another(), another)


def _zipnn(weights: torch.Tensor) -> Coder:
    """zipnn on bytes, one thread. It compresses in place, so its input is copied before each run, a
    small part."""
    import zipnn

    make = partial(zipnn.ZipNN, input_format="byte", bytearray_dtype="bfloat16", threads=1)
    data = bytes(bits.as_bytes(weights))
    buffer = bytearray(data)

    def compress() -> Any:
        buffer[:] = data
        return make().compress(buffer)

    packed = bytes(compress())

    def decode() -> Any:
        return make().decompress(packed)

    _check(PEER, np.frombuffer(decode(), np.uint8), weights)
    return Coder(len(packed), compress, decode, lambda: decode)


def _check(name: str, found: np.ndarray, weights: torch.Tensor) -> None:
    if not np.array_equal(found, bits.as_bytes(weights)):
        raise ValueError(f"{name} does not give the same bytes back; its rates would mean nothing")


def interleaved(
    arms: Mapping[str, Callable[[], Any]],
    repeats: int = 7,
    clock: Callable[[], float] = time.process_time,
    loops: int = 3,
) -> Samples:
    """Seconds of each arm in each of `repeats` rounds, in which all arms take turns: `loops` timed
    runs, after one that does not count, so that an arm that allocates its result does not wait for
    fresh pages."""
    samples: Samples = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            arm()
            start = clock()
            for _ in range(loops):
                arm()
            samples[name].append(
                max((clock() - start) / loops, 1e-9)
            )  # a coarse clock makes no rate infinite
    return samples


def copies(weights: torch.Tensor) -> dict[str, Work]:
    """Two arms for comparison: memcpy of the expert, and recovery alone, which writes as many
    bytes."""
    source = bits.as_bytes(weights)
    out = np.zeros(weights.numel() * 2, np.uint8)
    exponents, rest = bits.split(source.view(np.uint16))
    words = out.view(np.uint16)
    return {
        "memcpy": lambda: np.copyto(out, source),
        "recovery": lambda: bits.join(exponents, rest, words),
    }


def per_thread(weights: torch.Tensor, made: Mapping[str, Coder], repeats: int) -> Samples:
    """Seconds of processor time of "memcpy", "recovery" and "NAME decode" of every coder; "NAME
    compress", which takes up to seconds and is compared with nothing, by one run a round."""
    decode = copies(weights) | {f"{name} decode": coder.decode for name, coder in made.items()}
    compress = {f"{name} compress": coder.compress for name, coder in made.items()}
    return interleaved(decode, repeats) | interleaved(compress, repeats, loops=1)


def together(made: Mapping[str, Coder], counts: Sequence[int], repeats: int) -> Samples:
    """Seconds on the clock until each of n threads has decoded the expert `LOOPS` times: "NAME ×
    n"."""
    with ThreadPoolExecutor(max(counts)) as pool:

        def loop(decode: Work) -> None:
            for _ in range(LOOPS):
                decode()

        def arm(coder: Coder, n: int) -> Work:
            decoders = [coder.another() for _ in range(n)]
            return lambda: list(pool.map(loop, decoders))

        return interleaved(
            {f"{name} × {n}": arm(coder, n) for name, coder in made.items() for n in counts},
            repeats,
            time.perf_counter,
            loops=1,
        )


def rate(samples: Samples, name: str, nbytes: float) -> float:
    """GB of weights a second: `nbytes` over the median."""
    return nbytes / statistics.median(samples[name]) / 1e9


def sizes(weights: torch.Tensor, made: Mapping[str, Coder]) -> dict[str, Numbers]:
    """Of each coder, the compressed size and its distance from the order-0 bound: percent of the
    weights."""
    size = weights.numel() * 2
    least = bound(joint_counts(weights))
    return {
        name: {
            "fraction %": 100 * coder.nbytes / size,
            "bound %": 100 * least,
            "points above the bound": 100 * (coder.nbytes / size - least),
        }
        for name, coder in made.items()
    }


@dataclass(frozen=True)
class Rates:
    """What coders do on one expert: alone by processor time, together by the clock; GB of weights a
    second."""

    nbytes: int
    single: Samples  # of `per_thread`
    several: Samples  # of `together`
    threads: list[int]
    load: float | None  # of the machine, before threads ran together

    @classmethod
    def of(
        cls, weights: torch.Tensor, made: Mapping[str, Coder], repeats: int, threads: list[int]
    ) -> Rates:
        """Time each coder on the weights, alone and in several threads at once."""
        samples = per_thread(weights, made, repeats)
        load = load_average()
        real = {name: coder for name, coder in made.items() if name != "raw"}
        return cls(weights.numel() * 2, samples, together(real, threads, repeats), threads, load)

    def alone(self) -> Records:
        """Of each coder, the rates of a thread and their ratios to zipnn and memcpy."""
        peer = f"{PEER} decode" in self.single
        rows = {}
        for name in self.single:
            if not name.endswith(" decode"):
                continue
            coder = name.removesuffix(" decode")
            rows[coder] = {
                "compress GB/s": rate(self.single, f"{coder} compress", self.nbytes),
                "decode GB/s": rate(self.single, name, self.nbytes),
                f"decode ÷ {PEER}": speed_up(self.single, name, f"{PEER} decode")
                if peer
                else MISSING,
                "decode ÷ memcpy": speed_up(self.single, name, "memcpy"),
            }
        return rows

    @property
    def memcpy(self) -> float:
        """GB a second of copying the weights."""
        return rate(self.single, "memcpy", self.nbytes)

    @property
    def recovery(self) -> Interval:
        """Time of recovery alone over that of memcpy."""
        return gain(self.single, "memcpy", "recovery")

    def over(self, base: str) -> Interval:
        """How many times as fast `CODED` decodes on one thread as `base`, a name of
        `single`."""
        return gain(self.single, f"{CODED} decode", base)

    @property
    def over_peer(self) -> Interval | None:
        """The same against zipnn, if it is installed."""
        return self.over(f"{PEER} decode") if f"{PEER} decode" in self.single else None

    def by_task(self) -> dict[str, Numbers]:
        """Task → coder → GB/s of weights in one thread; of decoding also the joining of planes
        alone."""
        rows = {name: row for name, row in self.alone().items() if name != "raw"}
        found = {
            what: {name: row[f"{what} GB/s"] for name, row in rows.items()}
            for what in ("compress", "decode")
        }
        found["decode"]["recovery alone"] = self.memcpy / self.recovery[0]
        return found

    def decode(self, n: int) -> float:
        """Of `CODED` by n threads together."""
        return rate(self.several, f"{CODED} × {n}", self.nbytes * n * LOOPS)

    def scaling(self, n: int) -> Interval:
        """Of `CODED`, n threads over one."""
        return tuple(n * x for x in gain(self.several, f"{CODED} × {n}", f"{CODED} × 1"))

    def metrics(self) -> dict[str, Numbers]:
        """Unit → name of a metric → value."""
        alone = {
            f"{what}_{name.replace('-', '_')}": value
            for what, row in self.by_task().items()
            for name, value in row.items()
            if name != "recovery alone"
        }
        more = {n: self.scaling(n)[0] for n in self.threads if n > 1}
        return {
            "GB/s": {"memcpy_rate": self.memcpy},
            "× the time": {"recovery_over_memcpy": self.recovery[0]},
            "GB of weights/s a thread": alone,
            "processes": {"load_before_threads": self.load},
            "× one thread": {f"decode_scaling_{n}_threads": of for n, of in more.items()},
            "×": {f"decode_over_{PEER}": self.over_peer[0]} if self.over_peer else {},
        }


class Sample(NamedTuple):
    """Expert weights of a model, spread evenly over its experts and read one expert at a time."""

    spec: Any
    source: Callable[[int, int], dict[str, torch.Tensor]]  # (layer, expert) → its tensors
    tensors: list[torch.Tensor]
    dtype: str
    counts: np.ndarray  # joint histogram of their bits, [65536]

    @classmethod
    def of(cls, model: str | None, nbytes: int) -> Sample:
        """About `nbytes` of a checkpoint's. ValueError: weights that are not all of one float type
        of `FORMATS`."""
        checkpoint = Checkpoint.at(model)
        source = CheckpointExperts(checkpoint)
        spec = checkpoint.spec
        every = [(layer, expert) for layer in range(spec.L) for expert in range(spec.E)]
        step = max(1, -(-len(every) * spec.expert_bytes // nbytes))
        tensors = [tensor for key in every[::step] for tensor in source(*key).values()]
        dtype = NAMES[tensors[0].dtype]
        if dtype not in FORMATS or len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(
                f"the experts of {spec.name} are {dtype}; their entropy is known of "
                f"{', '.join(FORMATS)}"
            )
        counts = np.zeros(1 << 16, np.int64)
        for tensor in tensors:
            counts += joint_counts(tensor, dtype)
        return cls(spec, source, tensors, dtype, counts)

    @property
    def weights(self) -> int:
        """How many weights were looked at."""
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def sigma(self) -> float:
        """Standard deviation of a part of the weights."""
        return (
            torch.cat([tensor.flatten()[:65536].float() for tensor in self.tensors[:64]])
            .std()
            .item()
        )

    def fractions(self) -> Numbers:
        """Compressed size over size by each codec, all weights in one piece."""
        joined = torch.cat([tensor.flatten() for tensor in self.tensors])[None]
        return {
            name: compress_tensor(joined, name).nbytes / joined.nbytes
            for name in CODECS
            if name != "raw"
        }

    def microscope(
        self, layer: int, expert: int, tensor: str, codec: str
    ) -> tuple[np.ndarray, str]:
        """(joint histogram of one tensor, what its entropy allows and a codec reaches, in
        words)."""
        weights = self.source(layer, expert)[tensor]
        counts, (size, same) = joint_counts(weights, self.dtype), round_trip(weights, codec)
        return counts, (
            f"Layer {layer}, expert {expert}, {tensor}: {weights.numel():,} weights; entropy "
            f"bound {bound(counts, self.dtype):.2%}, stored by {codec} in {size:.2%} "
            f"of the size; round trip {'bit-identical' if same else 'FAILED'} (exact)."
        )

    def round_trips(self) -> bool:
        """Whether some fifty tensors come back from every codec bit for bit."""
        return all(
            round_trip(tensor, codec)[1]
            for tensor in self.tensors[:: max(1, len(self.tensors) // 50)]
            for codec in CODECS
        )


def round_trip(weights: torch.Tensor, codec: str) -> tuple[float, bool]:
    """(compressed size over size, whether the same bytes come back)."""
    packed = compress_tensor(weights, codec)
    back = torch.zeros_like(weights)
    decompress_tensor(packed, back)
    return packed.nbytes / weights.nbytes, np.array_equal(
        bits.as_bytes(back), bits.as_bytes(weights)
    )


class DecodedExperts:
    """A layer's experts compressed in memory by a codec, each decoded by one thread whenever it is
    used."""

    def __init__(self, experts: Any, codec: str) -> None:
        self.packed = [
            {name: compress_tensor(w, codec) for name, w in experts.own(e).items()}
            for e in range(experts.num_experts)
        ]
        self.nbytes = sum(one.nbytes for of in self.packed for one in of.values())
        own = experts.own(0).items()
        self.out = cycle([{name: torch.empty_like(w) for name, w in own} for _ in range(MOST)])

    def __call__(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        out = next(self.out)
        for name, packed in self.packed[expert].items():
            decompress_tensor(packed, out[name])
        return out


def stored_ways(
    codec: str, K: int = 8, H: int = 1024, I: int = 512, rounds: int = 12, cold: float = 2.5e8
) -> tuple[Samples, Numbers, float]:
    """Seconds of one token's K experts in a layer whose weights are in memory but in no cache: as
    bf16, as bf12, and kept in a codec and decoded first. Also what each takes of the weights' size,
    and the bound of their entropy."""
    layers = Layers(4 * K, K, H, I, torch.bfloat16, cold)
    steps = layers.steps(1, rounds + 1)
    coded = f"{codec}, decoded first"
    sources: dict[str, list[Any]] = {
        "bf16": [None] * len(layers.seam),
        "bf12": [PackedExperts(seam, "bf12") for seam in layers.seam],
        coded: [DecodedExperts(seam, codec) for seam in layers.seam],
    }
    whole = 4 * K * layers.expert_bytes
    stored = {"bf16": 1.0} | {name: sources[name][0].nbytes / whole for name in ("bf12", coded)}

    def arm(kept: list[Any]) -> Callable[[int], torch.Tensor]:
        return lambda i: GEMV()(*steps[i][1:], kept[steps[i][0]])

    arms = {name: arm(layers.from_sources(of)) for name, of in sources.items()}
    weights = torch.cat([bank.flatten() for bank in layers.stock[0].parameters()])
    least = bound(joint_counts(weights))
    return rounds_of(arms, rounds + 1, "a token's experts"), stored, least


def run(nbytes: int = EXPERT, repeats: int = 7) -> Records:
    weights = synthetic_expert(nbytes)
    made = coders(weights)
    of = Rates.of(weights, made, repeats, sorted({1, 2, os.cpu_count() or 1}))
    found = {
        "conditions": {
            "expert bytes": of.nbytes,
            "memcpy GB/s": of.memcpy,
            "recovery time ÷ memcpy time": of.recovery[0],
            PEER: "in this run" if PEER in made else MISSING,
        }
    }
    first = sizes(weights, made)
    second = of.alone()
    found |= {f"{name}, one thread": first[name] | second[name] for name in made}
    threads = found["threads together, by the clock"] = {}
    for arm in of.several:
        name, n = arm.rsplit(" × ", 1)
        threads[f"{arm} GB/s"] = rate(of.several, arm, of.nbytes * int(n) * LOOPS)
        if n != "1":
            threads[f"{arm} ÷ × 1"] = int(n) * speed_up(of.several, arm, f"{name} × 1")
    return found | {"samples": of.single | of.several}
