"""Models opened beside a converted folder: tokens, memory, the timeline, refusals, the command."""

import json
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("coremltools")

import moelab
from moelab.__main__ import main
from moelab.ane.backends import TorchBackend
from moelab.ane.coreml.convert import convert_model
from moelab.ane.plan import PlannedGroup
from moelab.ane.runtime import PlannedExperts, prefill_through
from moelab.base.specs import State
from moelab.models import discover
from moelab.models.patches import Patches
from tests.ane.test_backends import make_plan, prompt
from tests.ane.test_runtime import GROUPS, TOY, E, H, K, plan_of
from tests.experts.toy import make_experts, make_routing
from tests.models import tiny

#: largest difference of a logit that weights and arithmetic in fp16 make of these models
TOLERANCE = 2e-2


def convert(checkpoint, folder, plan, context=64):
    return convert_model(checkpoint, folder, plan, context=context).folder


@pytest.fixture(scope="module")
def folder(checkpoint, model, tmp_path_factory):
    return convert(checkpoint, tmp_path_factory.mktemp("opened") / "ane", make_plan(model.spec))


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "mixtral", "phimoe"])
@torch.inference_mode()
def test_what_it_generates_is_the_models_own(name, tmp_path):
    checkpoint = tiny.save(name, tmp_path / "model", seed=3)
    alone, ids = moelab.open_model(checkpoint), prompt(41, 5)
    half = alone.spec.E // 2
    members = tuple(range(alone.spec.E))
    groups = PlannedGroup(members[:half], 4, "ane", 1), PlannedGroup(members[half:], 16, "cpu", 1)
    folder = convert(checkpoint, tmp_path / "ane", plan_of(alone.spec, 16, groups))
    wanted = alone.generate(ids, max_new_tokens=8, do_sample=False)
    with moelab.open_model(checkpoint, ane=folder, overflow="pad") as lm:
        found = lm(ids).logits[0]
        expected = alone(ids).logits[0]
        close = (found - expected).abs().amax(-1) < TOLERANCE
        assert close.float().mean() > 0.9  # fp16 decides a near tie of a router otherwise
        decided = close & (expected.topk(2).values.diff().abs().flatten() > 2 * TOLERANCE)
        assert decided.float().mean() > 0.5
        assert torch.equal(found.argmax(-1)[decided], expected.argmax(-1)[decided])
        lm.moelab.reset()
        tokens = lm.generate(ids, max_new_tokens=8, do_sample=False)
        if decided[-1]:
            assert tokens[0, 41] == wanted[0, 41]
        metrics = lm.moelab.metrics()
        assert metrics.launches == lm.moelab.planned.total.launches / 2 > 0
        assert metrics.tpot > 0 and metrics.cpu_seconds > 0 and metrics.energy is None
        kinds = {name.partition(" on ")[0] for name in metrics.ttft_split}
        assert {"attention", "router", "gather", "launch", "expert", "scatter", "wait"} <= kinds
        of_caller = [s for name, s in metrics.ttft_split.items() if name.endswith("on compute")]
        for row in {e.resource for e in lm.moelab.timeline}:  # each does one thing at a time
            mine = sorted((e.start, e.end) for e in lm.moelab.timeline if e.resource == row)
            assert all(end <= start for (_, end), (start, _) in zip(mine, mine[1:])), row
        assert 0 < sum(of_caller) < 1.01 * metrics.ttft  # nothing counts twice


def test_decoding_is_bit_equal_and_any_executor_and_budget_will_do(folder, checkpoint, model):
    """From one and the same cache, the model decodes as it does without packages."""
    ids, less = prompt(35, 1), {"memory": "50%", "cache": "lru"}
    for options in ({}, {"executor": "fast"}, less):
        with moelab.open_model(checkpoint, ane=folder, **options) as lm, torch.inference_mode():
            cache = lm(ids).past_key_values
            engine = lm.moelab.engine
            assert engine.residency.holds_all == (options is not less)
            found = lm(ids[:, :1], past_key_values=cache).logits
            cache.crop(-1)
            expected = model(ids[:, :1], past_key_values=cache).logits
            assert torch.allclose(found, expected, atol=1e-5)
            assert "executor" in options or torch.equal(found, expected)
            if options is less:
                run = lm.moelab.run
                with pytest.raises(ValueError, match="not simulated.*since"):
                    moelab.simulate(run, device="jetson-agx-orin-32gb")
                later = moelab.simulate(run.since(1), device="jetson-agx-orin-32gb")
                assert later.tpot > 0 and later.ttft is None
        if options is less:  # a prompt asks for no expert whose graph is on the device
            with moelab.open_model(checkpoint, ane=folder, **less) as lm, torch.inference_mode():
                lm(ids)
                asked = {e for step in lm.moelab.steps for _, chosen in step for e in chosen}
                assert asked <= {1, 3, 4, 6}


def test_a_prompt_counts_for_the_cache_whoever_computes_it(folder, checkpoint, model):
    """What is kept for the answer is what the whole prompt chose, on the device or on the CPU."""
    ids, chosen = prompt(48, 2), []
    with model.moelab.turn, torch.inference_mode():
        discover(model)[0].listen(patches := Patches(), lambda ids, _: chosen.append(ids))
        model(ids)
        patches.close()
    most = torch.bincount(torch.cat(chosen).flatten(), minlength=8).argsort(descending=True)
    options = {"memory": "50%", "cache": "prompt", "prefetch": "none"}
    with moelab.open_model(checkpoint, ane=folder, **options) as lm:
        lm.generate(ids, max_new_tokens=2, do_sample=False)
        kept = {key.expert for key in lm.moelab.residency.resident(State.FULL)}
    assert kept == {*most[:4].tolist()} and not kept & {1, 3, 4}  # those of the CPU, but 6


class Sleeping(TorchBackend):
    """A device that takes its time, and no CPU."""

    def experts(self, *launch):
        time.sleep(0.04)
        return super().experts(*launch)


@pytest.mark.parametrize("seed", range(3))
def test_cpu_and_device_overlap_and_the_sum_is_that_of_one_after_the_other(seed):
    experts, (ids, weights) = make_experts(E, H, 8, seed=seed), make_routing(40, E, K, 1.0, seed)
    x = torch.randn(40, H, generator=torch.Generator().manual_seed(seed))
    plan = plan_of(TOY, 64)
    real, cold = experts.weights, GROUPS[2].experts

    def slow(expert):
        time.sleep(0.002 * (expert in cold))
        return real(expert)

    experts.weights = slow
    planned = PlannedExperts(Sleeping(plan), overflow="pad")
    found = planned(x, ids, weights, experts)
    experts.weights = real

    events = list(planned.timeline)
    launches = [e for e in events if e.kind == "launch"]
    (on_cpu,) = [e for e in events if e.kind == "expert"]
    assert {e.resource for e in events} == {"torch", "compute"}
    shared = sum(max(0, min(e.end, on_cpu.end) - max(e.start, on_cpu.start)) for e in launches)
    assert shared > (on_cpu.end - on_cpu.start) / 2, "the experts on the CPU wait for the device"
    for resource in ("torch", "compute"):  # each does one thing at a time
        mine = sorted((e.start, e.end) for e in events if e.resource == resource)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:]))

    backend = TorchBackend(plan)  # in this thread, one launch after the other, in the plan's order
    out = experts.executor(
        x, torch.where(torch.isin(ids, torch.tensor(cold)), ids, E), weights, experts
    )
    for number, group in enumerate(GROUPS[:2]):
        rows = [
            [(t, k) for t in range(40) for k in range(K) if ids[t, k] == e] for e in group.experts
        ]
        for n in range(-(-max(map(len, rows)) // group.capacity)):
            now = [row[n * group.capacity : (n + 1) * group.capacity] for row in rows]
            buffer = torch.zeros(len(now), group.capacity, H)
            scale = torch.zeros(len(now), group.capacity)
            for g, row in enumerate(now):
                for i, (t, k) in enumerate(row):
                    buffer[g, i], scale[g, i] = x[t], weights[t, k]
            y = backend.experts(0, number, buffer, scale, experts)
            for g, row in enumerate(now):
                for i, (t, _) in enumerate(row):
                    out[t] += y[g, i]
    assert torch.equal(found, out)


def test_an_error_of_either_side_ends_the_layer(model):
    class Broken(TorchBackend):
        def experts(self, *launch):
            raise RuntimeError("the device is gone")

    plan = make_plan(model.spec)
    with prefill_through(model, Broken(plan), overflow="pad"), torch.no_grad():
        with pytest.raises(RuntimeError, match="the device is gone"):
            model(prompt(20))
    with prefill_through(model, plan, overflow="pad"), torch.no_grad():
        assert model(prompt(20)).logits.isfinite().all()


@torch.inference_mode()
def test_a_run_takes_the_memory_that_the_plan_says(tmp_path):
    """Weights in bf16 beside fp16 packages: what is held is added up, tensor by tensor."""
    size = {"hidden_size": 128, "moe_intermediate_size": 256, "vocab_size": 512}
    checkpoint = tiny.save(
        "qwen3_moe", tmp_path / "model", torch.bfloat16, mlp_only_layers=[], **size
    )
    with moelab.open_model(checkpoint) as alone:
        spec = alone.spec
    bytes_ = spec.expert_bytes
    groups = tuple(replace(g, weight_bytes=bytes_ * len(g.experts)) for g in GROUPS)
    plan = plan_of(spec, 16, groups)
    folder = convert(checkpoint, tmp_path / "ane", plan)
    budget = spec.experts_bytes // 2
    with moelab.open_model(checkpoint, ane=folder, memory=budget, dtype="bfloat16") as lm:
        cache = lm(prompt(64)).past_key_values
        backend = lm.moelab.planned.backend
        packages = [backend.converted.package(entry) for entry in backend.converted.packages]
        slots = lm.moelab.engine.residency.pools.F + lm.moelab.run.settings.staging
        held = {
            "packages": sum(
                file.stat().st_size for path in packages for file in path.rglob("weights/*")
            ),
            "experts on the CPU": slots * bytes_,
            "other weights": sum(p.nbytes for p in lm.parameters()),
            "KV cache": sum(l.keys.nbytes + l.values.nbytes for l in cache.layers),
        }
    says = plan.memory(64, experts=budget)
    assert sum(held.values()) == pytest.approx(sum(says.values()), rel=0.1)
    for name, size in held.items():
        assert size == pytest.approx(says[name], rel=0.25), name


def test_what_does_not_belong_together_is_refused(folder, checkpoint, tmp_path, monkeypatch):
    other = tiny.save(
        "qwen3_moe", tmp_path / "other", seed=1, num_hidden_layers=2, mlp_only_layers=[0]
    )
    with pytest.raises(ValueError, match="other is not the checkpoint"):
        moelab.open_model(other, ane=folder)
    with pytest.raises(FileNotFoundError, match="no converted model"):
        moelab.open_model(checkpoint, ane=tmp_path)
    for options, told in (
        ({"overflow": "pad"}, "overflow: .* give ane="),
        ({"ane": folder, "overflow": "spill"}, "overflow"),
        ({"ane": folder, "order": "best"}, "order"),
        ({"cache": "lru"}, "cache: .* give memory="),
    ):
        with pytest.raises(ValueError, match=told):
            moelab.open_model(checkpoint, **options)
    monkeypatch.setattr("moelab.ane.opening.available", lambda: 1 << 20)
    with pytest.raises(ValueError, match="takes more memory than there is.*packages"):
        moelab.open_model(checkpoint, ane=folder)


def test_the_command(tmp_path, capsys):
    folder, text = tmp_path / "ane", tmp_path / "prompt.txt"
    text.write_text("a red fox runs over the hill")
    plan = str(tmp_path / "plan.json")
    assert (
        main(["ane", "plan", "small", "--chunk", "32", "--system", "npumoe", "--save", plan]) == 0
    )
    assert main(["ane", "convert", "small", str(folder), "--plan", plan]) == 0
    capsys.readouterr()
    line = ["generate", "--ane", str(folder), "--prompt-file", str(text), "--max-new-tokens", "4"]
    assert main([*line, "--overflow", "pad", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ane"].startswith("the evaluator") and found["launches"] > 0
    assert found["prompt"] == text.read_text() and found["drop_rate"] == 0
    assert found["energy"] is None and found["ttft_split"]["launch on evaluator"] > 0
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert "launches" in out and "prompts run by the evaluator" in err
    assert main(["generate", "--order", "router"]) == 2
    assert "give ane=" in capsys.readouterr().err
