"""Prompts behind a link: against transformers' eager, and against a link and a GPU that share a
clock, on which nothing takes any time but copies, products and what is between two layers' experts."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import convert, open_model
from moelab.experts import gemv, grouped_gemm
from moelab.experts.executor import Sorted
from moelab.models import eager
from moelab.offloading.link import Link
from moelab.offloading.prompts import Choices
from tests.depth import depth
from tests.experts.test_executors import close
from tests.experts.toy import make_experts, make_routing, naive
from tests.models import tiny
from tests.offloading.test_link import DEVICES, opened  # noqa: F401

EXPERT, PRODUCT, LAUNCH, BETWEEN = 1.0, 0.2, 0.05, 3.0  # seconds of the clock


class Moment:
    """An event: its time."""

    def __init__(self, clock, time):
        self.clock, self.time = clock, time

    def query(self):
        return self.time <= self.clock.host

    def synchronize(self):
        self.clock.host = max(self.clock.host, self.time)

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)


class Stream:
    """`time` : when it has done what it was told."""

    def __init__(self, clock):
        self.clock, self.time = clock, 0.0

    def wait_event(self, event):
        self.time = max(self.time, event.time)

    def record_event(self):
        return Moment(self.clock, self.time)

    def synchronize(self):
        self.record_event().synchronize()


class Clocked(Link):
    """host : when that is done with what it was told."""

    def __init__(self, device):
        self.host, self.gpu, self.used, self.keys, self.busy = 0.0, Stream(self), [], [], {}
        super().__init__(device)
        Clocked.last = self

    def new_stream(self):
        return Stream(self)

    def now(self):
        return self.gpu

    def run(self, stream, do):
        do()
        begin = max(stream.time, self.host)
        stream.time = begin + EXPERT
        return Moment(self, begin), Moment(self, stream.time)

    def send(self, what, source, out, slot, *given):
        end = super().send(what, source, out, slot, *given)
        self.keys.append(what)
        assert end.time - EXPERT >= self.busy.get(slot, 0.0), "overwritten while it is computed"
        return end

    def arrive(self, slots):
        self.used = list(slots)
        super().arrive(self.used)

    def product(self, experts):
        """The GPU is told to compute some experts."""
        self.host += LAUNCH
        self.gpu.time = max(self.gpu.time, self.host) + PRODUCT * experts
        self.busy |= dict.fromkeys(self.used, self.gpu.time)

    def wait(self):
        """The host waits for what the next layer's router has chosen."""
        self.gpu.time += BETWEEN
        self.host = self.gpu.time


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    tiny.save(
        "qwen3_moe",
        folder / "model",
        torch.float32,
        num_hidden_layers=5,
        num_experts=32,
        num_experts_per_tok=4,
        hidden_size=64,
        moe_intermediate_size=32,
        mlp_only_layers=[],
    )
    return convert(folder / "model", folder / "raw").folder


@pytest.fixture
def clocked(monkeypatch, opened):  # noqa: F811
    """Opens a model behind such a link."""
    from moelab.offloading import engine, prompts

    def opens(folder, memory, **options):
        return opened(folder, memory, "cpu", executor="fast", **options)

    execute, counts = prompts.execute, engine.counts

    def executed(executor, x, ids, *rest):
        y = execute(executor, x, ids, *rest)
        Clocked.last.product(len(set(ids.flatten().tolist())))
        return y

    monkeypatch.setattr(prompts, "execute", executed)
    monkeypatch.setattr(engine, "counts", lambda *of: Clocked.last.wait() or counts(*of))
    monkeypatch.setattr("tests.offloading.test_link.Delayed", Clocked)
    return opens


def logits(lm, ids):
    with torch.inference_mode():
        return lm(ids).logits.float()


def drawn(T, seed=0):
    return torch.randint(3, 96, (1, T), generator=torch.Generator().manual_seed(seed))


def crossed(lm, ids):
    """(seconds, experts that crossed the link, seconds that a batch takes, logits) of a prompt."""
    link = Clocked.last
    link.keys.clear()
    link.rest()
    link.gpu.time = begin = link.host = max(link.host, link.gpu.time)
    found = logits(lm, ids)
    batch = lm.moelab.run.settings.staging // 2 * (EXPERT + PRODUCT)
    return link.gpu.time - begin, [*link.keys], batch, found


@pytest.mark.parametrize("memory", depth([0.3], [0.1, 0.3, 0.6]))
def test_the_link_is_always_busy_and_nothing_crosses_it_twice(memory, folder, clocked):
    with open_model(folder) as lm:
        wanted = [logits(lm, drawn(90, seed)) for seed in range(3)]
    with clocked(folder, memory=memory, staging=8) as lm:
        for seed, of in enumerate(wanted):  # of nothing in memory, then of what was left there
            took, keys, batch, got = crossed(lm, drawn(90, seed))
            assert (got - of).norm() < 1e-4 * of.norm()
            assert len(keys) == len(set(keys)) > 30
            assert took <= 1.05 * EXPERT * len(keys) + batch + BETWEEN
            assert took >= EXPERT * len(keys)
    with clocked(folder, memory=memory, staging=8, prefetch="none") as lm:
        slower, alone, *_ = crossed(lm, drawn(90))
        metrics = lm.moelab.metrics()
        assert len(alone) == metrics.misses and metrics.prefetched["begun"] == 0
        assert slower > len(alone) * EXPERT + 4 * BETWEEN  # between all layers the link was idle


def test_a_slot_that_is_not_left_would_be_overwritten(folder, clocked, monkeypatch):
    """The clock notices what it is there to notice."""
    monkeypatch.setattr(Clocked, "leave", lambda link, slot: Moment(link, 0.0))
    monkeypatch.setattr("tests.offloading.test_prompts.PRODUCT", 5.0)
    with (
        clocked(folder, memory=0.1, staging=8) as lm,
        pytest.raises(AssertionError, match="overwritten"),
    ):
        logits(lm, drawn(90))


@given(st.data())
def test_batches_of_any_experts_in_any_order_are_the_sum(data):
    E, T = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    K, seed = data.draw(st.integers(1, E)), data.draw(st.integers(0, 99))
    layout = data.draw(st.sampled_from(["gated", "interleaved", "ungated bias"]))
    experts = make_experts(E, 16, 8, layout, seed=seed)
    ids, weights = make_routing(T, E, K, 1.0, seed)
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(T, 16, generator=random)
    ids = torch.where(
        torch.rand(ids.shape, generator=random) < data.draw(st.sampled_from([0, 0.5])), E, ids
    )
    tokens = {e: n for e in range(E) if (n := int((ids == e).sum()))}
    choices, left, computed = Choices(x, ids, weights, tokens), [*tokens], []
    experts.executor = lambda *of: computed.append(len(of[0])) or eager(*of)
    while left:
        order = data.draw(st.permutations(left))
        n = data.draw(st.integers(1, len(order)))
        batch, left = order[:n], order[n:]
        choices.compute(experts, batch)
        assert computed[-1] == sum(tokens[e] for e in batch)
    close(choices.sum(), naive(x, ids, weights, experts), x.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe", "llama4_text", "nemotron_h"])
def test_prompts_and_batches_of_many_architectures(name, device, opened, tmp_path, monkeypatch):  # noqa: F811
    """Biases, a clamped gate and the transposed layout; a shared expert; experts that are not plain;
    no gate."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = tiny.save(name, tmp_path / "model", dtype)
    ids = torch.cat([drawn(30), drawn(30, 1)]).to(device)
    with open_model(model, device=device) as lm:
        wanted = logits(lm, ids)
    found, grouped, computed = [], [], grouped_gemm.feed_forward
    with monkeypatch.context() as patch, open_model(model, device=device, executor="fast") as lm:
        patch.setattr(gemv, "GPUS", (device,))
        patch.setattr(
            grouped_gemm, "feed_forward", lambda *of: grouped.append(computed(*of)) or grouped[-1]
        )
        found.append(logits(lm, ids))
    if device == "cpu":
        assert bool(grouped) is (name != "llama4_text") and all(y is not None for y in grouped)
    with opened(convert(model, tmp_path / "raw").folder, 0.3, device, executor="fast") as lm:
        found.append(logits(lm, ids))
        assert lm.moelab.metrics().misses
    for got in found:
        assert (got - wanted).norm() < (1e-4 if device == "cpu" else 5e-2) * wanted.norm()


def test_batches_are_multiplied_from_where_they_are(triton_device, opened, tmp_path, monkeypatch):  # noqa: F811
    """By Triton's kernels, without asking the GPU which experts they are."""
    model = tiny.save("gpt_oss", tmp_path / "model", torch.float32, num_hidden_layers=2)
    with open_model(model, device=triton_device) as lm:
        wanted = logits(lm, ids := drawn(7).to(triton_device))
    monkeypatch.setattr(gemv, "GPUS", (triton_device,))
    monkeypatch.setattr(Sorted, "run", None)
    with opened(convert(model, tmp_path / "raw").folder, 0.4, triton_device, executor="fast") as lm:
        got = logits(lm, ids)
        assert lm.moelab.metrics().misses and (got - wanted).norm() < 1e-3 * wanted.norm()


def test_the_host_computes_its_share_beside_the_link(folder, clocked, monkeypatch):
    away = []
    monkeypatch.setattr(
        "moelab.offloading.hybrid.Balance.away",
        lambda self, layer, tokens, there: (
            away.append({e for e, n in tokens.items() if n == 1}) or away[-1]
        ),
    )
    monkeypatch.setattr("moelab.offloading.hybrid.Balance.end_forward", lambda *_: None)
    with open_model(folder) as lm:
        wanted = logits(lm, drawn(20))
    with clocked(folder, memory=0.3, hybrid=1) as lm:
        got = logits(lm, drawn(20))
        assert (got - wanted).norm() < 1e-4 * wanted.norm()
        there = [event.expert for event in lm.moelab.timeline if event.resource == "host"]
        assert len(there) == sum(map(len, away)) > 5 and Clocked.last.keys
        assert {key.expert for *_, key in Clocked.last.keys if key.layer == 0}.isdisjoint(away[0])


@pytest.mark.parametrize("memory", [0.3, 1.0])
def test_a_prompt_in_chunks_says_what_it_reads_again(memory, folder):
    told = pytest.warns(UserWarning, match="in chunks.* MB") if memory < 1 else nullcontext()
    with open_model(folder, memory=memory) as lm, warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"max_new_tokens": 2, "do_sample": False}
        lm.generate(drawn(60), **options)
        with told:
            lm.generate(drawn(60), prefill_chunk_size=20, **options)
        lm.generate(drawn(60), prefill_chunk_size=20, **options)  # once is enough
