"""The one way in: what an opened model is, resident and offloaded, and how it is run otherwise for
a while."""

from functools import partial

import pytest
import torch
import transformers

import moelab
from moelab.experts.executor import Sorted
from moelab.models import discover
from moelab.offloading.prefetch_gate import ungated
from moelab.speculate import Predictor
from tests.models import tiny
from tests.speculate.conftest import Oracle

IDS = torch.tensor([[5, 9, 33, 12, 60, 7, 8]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("opening") / "model", torch.bfloat16)


def tokens(model, new=4):
    return model.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
    )


@pytest.mark.parametrize("memory", [None, "60%"])
def test_an_opened_model_is_transformers_and_closes_itself(folder, memory, tmp_path):
    with moelab.open_model(folder, memory=memory) as lm:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation="eager"
        )
        assert isinstance(lm, type(theirs)) and type(lm).__name__ == type(theirs).__name__
        assert torch.equal(tokens(lm), tokens(theirs))
        found, run = lm.moelab.metrics(), lm.moelab.run
        assert found.tpot > 0 and found.prefill_tokens == IDS.numel() and found.decode_tokens == 3
        assert (found.hit_rate is None) == (memory is None)
    assert len(run.steps) == len(run.forwards) == 4
    tokens(theirs)
    if memory is None:  # its hooks are gone, and it is a model as before
        tokens(lm)
        assert len(run.steps) == 4
    else:
        with pytest.raises(RuntimeError, match="closed"):
            tokens(lm)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "llama4_text", "switch_transformers", "gpt_oss", "deepseek_v3"]
)
def test_a_resident_model_says_the_steps_that_the_engine_sees(name, tmp_path):
    folder, runs = tiny.save(name, tmp_path / "model"), []
    for memory in (None, "60%"):
        with moelab.open_model(folder, memory=memory) as lm:
            tokens(lm)
            runs.append(lm.moelab.run)
    assert runs[0].steps == runs[1].steps and len(runs[0].steps) > 1
    assert [forward[2:6] for forward in runs[0].forwards] == [
        forward[2:6] for forward in runs[1].forwards
    ]


@pytest.mark.parametrize("memory", [None, "60%"])
def test_using_is_for_a_block(folder, memory):
    with moelab.open_model(folder, memory=memory) as lm:
        expected, calls = tokens(lm), []

        def listening(x, ids, weights, experts):
            calls.append(len(ids))
            return moelab.models.eager(x, ids, weights, experts)

        with moelab.using(lm, executor=listening), moelab.using(lm, executor="exact"):
            assert torch.equal(tokens(lm), expected) and not calls
        with moelab.using(lm, executor=listening):
            assert torch.equal(tokens(lm), expected) and calls
        calls.clear()
        assert torch.equal(tokens(lm), expected) and not calls
        for name in moelab.names("executor"):
            with moelab.using(lm, executor=name):
                assert (lm.moelab.executor is moelab.models.eager) == (name == "exact")


def test_fast_is_fast_everywhere(folder):
    """The fused decode kernels come with the executor, and go with it."""
    own = moelab.open_model(folder)
    forwards = lambda model: sum("forward" in vars(module) for module in model.modules())  # noqa: E731
    before = forwards(own)
    with moelab.using(own, executor="fast"):
        assert forwards(own) > before
    assert forwards(own) == before
    for memory in (None, "60%"):
        with moelab.open_model(folder, memory=memory, executor="fast") as lm:
            assert forwards(lm) > before
            assert tokens(lm).shape == tokens(own).shape


class Same(Predictor):
    def predict(self, layer, s, r, ids, weights):
        return (ids, weights) if layer in self.targets else None


@pytest.mark.parametrize("prefetch", ["auto", "router", "previous", Same])
def test_prefetching_changes_no_token(folder, prefetch):
    with moelab.open_model(folder, memory="60%", prefetch=prefetch) as lm:
        assert not lm.moelab.run.forwards  # what measured default vectors does not count
        with ungated(lm.moelab.engine):
            assert torch.equal(tokens(lm, 8), tokens(moelab.open_model(folder), 8))
            assert lm.moelab.run.settings.ahead > 0 and lm.moelab.speculation.requests.sum() > 0
            first = lm.moelab.speculation.requests.sum()
            with moelab.using(lm, prefetch="random"):  # the other one rests
                assert type(lm.moelab.speculation.predictor).__name__ == "Random"
                tokens(lm, 4)
                assert lm.moelab.speculation.requests.sum() > 0
            assert lm.moelab.speculation.requests.sum() == first
            with moelab.using(lm, prefetch="none"):
                tokens(lm, 4)
                assert lm.moelab.speculation is None
            tokens(lm, 4)
            assert lm.moelab.speculation.requests.sum() > first


class Rotated(Predictor):
    """Other experts than the routers', with their weights."""

    def predict(self, layer, s, r, ids, weights):
        return (ids + 1) % self.spec.E, weights


@pytest.mark.parametrize("speculate", ["router", "previous", "random", Rotated])
@pytest.mark.parametrize("memory", [None, "60%"])
def test_one_argument_executes_predictions_and_loads_those_alone(folder, memory, speculate):
    """Algorithm 1: from the second layer on, a token's experts are those that were predicted a layer
    before; where they are loaded, they are loaded ahead and none for nothing."""
    chosen = []

    def watching(x, ids, weights, experts):
        chosen.append((experts.layer, ids.tolist()))
        return moelab.models.eager(x, ids, weights, experts)

    with moelab.open_model(folder, memory=memory, speculate=speculate) as lm:
        predictor = lm.moelab.speculation.predictor
        said, ask = {}, predictor.predict

        def predicting(layer, *signals):
            prediction = ask(layer, *signals)
            said[predictor.targets[layer].index] = prediction and prediction[0].tolist()
            return prediction

        predictor.predict = predicting
        out = tokens(lm, 8)
        if memory is None:
            with moelab.using(lm, executor=watching):
                tokens(lm, 8)
                at = max(i for i, (layer, _) in enumerate(chosen) if layer == 0)
                for layer, ids in chosen[at + 1 :]:  # the last token
                    assert ids == said[layer]
        else:
            past = lm(IDS, use_cache=True).past_key_values
            lm.moelab.reset()  # in prefill predictions are hints
            for token in range(8):
                lm(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            fetched = lm.moelab.metrics().prefetched
            assert fetched["used"] == fetched["begun"] > 0 and fetched["wasted"] == 0
            with moelab.open_model(folder, speculate=speculate) as resident:
                assert torch.equal(tokens(resident, 8), out)
        assert lm.moelab.speculation.recall()[1:].min() >= 0
        with moelab.using(lm, speculate="none"):
            true = tokens(moelab.open_model(folder), 8)
            assert torch.equal(tokens(lm, 8), true) and lm.moelab.speculation is None
        with moelab.using(moelab.open_model(folder), speculate=speculate) as other:
            assert torch.equal(tokens(other, 8), out)


def test_what_a_layer_will_execute_has_room_to_be_loaded_ahead():
    for speculate, ahead in (("router", 4), (None, 2)):
        with moelab.open_model(memory="50%", speculate=speculate) as lm:
            assert lm.moelab.run.settings.ahead == ahead and lm.spec.K == 4
    with moelab.open_model(memory="50%", speculate="router", prefetch="none") as lm:
        assert lm.moelab.run.settings.ahead == 0  # executed, and loaded on demand


@pytest.mark.parametrize("executor", ["exact", "fast"])
@pytest.mark.parametrize("memory", [None, "60%"])
def test_executing_the_truth_costs_nothing(folder, executor, memory):
    with moelab.open_model(folder, executor=executor) as lm:
        how = {"max_new_tokens": 8, "min_new_tokens": 8}
        trace = moelab.record(lm, IDS.tolist(), **how)
        expected = tokens(lm, 8)
    given = {"executor": executor, "memory": memory, "speculate": partial(Oracle, trace=trace)}
    with moelab.open_model(folder, **given) as lm:
        assert torch.equal(tokens(lm, 8), expected)
        assert lm.moelab.speculation.recall()[1:].min() == 1


def test_experts_are_prefetched_unless_nobody_can_or_shall(folder, tmp_path):
    with moelab.open_model(folder, memory="60%", prefetch="none") as lm:
        assert lm.moelab.speculation is None and lm.moelab.run.settings.ahead == 0
    with moelab.open_model(
        tiny.save("deepseek_v4", tmp_path / "hash", torch.float32), memory=0.6
    ) as lm:
        assert lm.moelab.speculation is None  # its router wants the tokens themselves


@pytest.mark.parametrize(
    "options, told",
    [
        ({"cache": "lfu"}, "cache: for experts that are loaded"),
        ({"verify": False}, "verify: for experts"),
        ({"prefetch": "router"}, "memory="),
        ({"executor": "fsat"}, "there is no executor 'fsat'. Did you mean 'fast'"),
        ({"memory": "60%", "cache": "lur"}, "'lur'"),
        (
            {"memory": "60%", "prefetch": "static"},
            "needs calibration=.*`moelab calibrate MODEL FILE`",
        ),
        ({"speculate": "estimator"}, "needs estimator=.*`moelab train estimator MODEL FILE`"),
        ({"speculate": "router-free"}, "needs estimator=.*`moelab train estimator MODEL FILE`"),
        ({"memory": "60%", "prefetch": "hybrid"}, "`moelab train estimator MODEL FILE`"),
        ({"speculate": "psychic"}, "no predictor 'psychic'"),
        ({"memory": "60%", "speculate": "quasi", "prefetch": "router"}, "leave prefetch out"),
        ({"memory": "1kB"}, "the least that works"),
        ({"memory": "60%", "workers": 0}, "at least one thread"),
        ({"memory": "130%"}, "the budget is '130%'"),
        ({"memory": "0%"}, "bytes.* are the least that works"),
        ({"memory": "8"}, "would be 8 bytes: write .8GB."),
        ({"memory": "60%", "cache": "belady"}, r"needs the future.*simulate\(run"),
    ],
)
def test_what_cannot_be_is_explained(folder, options, told):
    with pytest.raises(ValueError, match=told):
        moelab.open_model(folder, **options)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"executor": True}, "the executor is True; it must be a function of"),
        ({"executor": Sorted}, "the executor is <class"),
        ({"cache": lambda: 1}, "the cache is <function"),
        ({"cache": 7}, r"the cache is 7; it must be .* touch\(key, step\)"),
        ({"prefetch": True}, "the predictor is True; it must be a Predictor.*, or one of router"),
        (
            {"calibration": 7},
            "the calibration is 7; it must be a file, or what Calibration.load reads",
        ),
        ({"speculate": 7}, "the predictor is 7"),
        ({"estimator": 7}, "estimator is 7; it must be a file"),
        ({"prefetch": lambda model: 3}, "the predictor is 3"),
    ],
)
def test_what_is_no_part_of_a_model_is_refused(folder, options, told):
    with pytest.raises(TypeError, match=told):
        moelab.open_model(folder, memory="60%", **options)


@pytest.mark.parametrize(
    "returned, told",
    [
        (lambda x: None, "None"),
        (lambda x: x[:, :-1], r"bfloat16 \[7, 31\].*here torch.bfloat16 \[7, 32\]"),
        (lambda x: x.double(), "float64"),
        (lambda x: x[None], r"\[1, 7, 32\]"),
        (lambda x: [x], r"\[tensor"),
    ],
)
@pytest.mark.parametrize("memory", [None, "60%"])
def test_what_an_executor_returns_is_checked(folder, returned, told, memory):
    def mine(x, ids, weights, experts):
        return returned(x)

    with moelab.open_model(folder, memory=memory, executor=mine) as lm:
        with pytest.raises(
            ValueError, match=f"the executor mine returned.*{told if memory is None else ''}"
        ):
            lm(IDS)
        with moelab.using(lm, executor="exact"):
            assert lm(IDS).logits.isfinite().all()


def test_using_is_for_opened_models(folder):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    moelab.models.plug(theirs)
    with (
        pytest.raises(ValueError, match="not opened by moelab.open_model"),
        moelab.using(theirs, executor="sorted"),
    ):
        pass


def test_another_models_calibration_is_refused(folder):
    lm = moelab.open_model()
    calibration = moelab.calibrate(moelab.record(lm, [[5, 6, 7]]))
    assert moelab.open_model(calibration=calibration).moelab
    with pytest.raises(ValueError, match="belongs to small"):
        moelab.open_model(folder, memory="60%", calibration=calibration)
    with moelab.using(lm, executor="tiered", calibration=calibration):
        assert discover(lm)[0].seam.executor.capacities(0, 8, 2, lm.spec.E)


def test_a_model_whose_experts_are_elsewhere_is_not_saved(tmp_path):
    """transformers would write it without them, and fill them with random numbers when it is
    loaded."""
    for options in ({"memory": "50%"}, {"experts": "external"}):
        with (
            moelab.open_model(**options) as lm,
            pytest.raises(ValueError, match="not in memory, so they would not be saved"),
        ):
            lm.save_pretrained(tmp_path / "saved")
    with moelab.open_model() as lm:
        lm.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size > 5e6


@pytest.mark.parametrize(
    "options", [{"device_map": "auto"}, {"memory": "50%", "load_in_8bit": True}]
)
def test_an_unknown_option_is_named(options):
    with pytest.raises(TypeError, match=list(options)[-1]):
        moelab.open_model(**options)
