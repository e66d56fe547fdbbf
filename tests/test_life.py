"""Models in threads, in forked processes, and after nobody wants them any more."""

import gc
import os
import subprocess
import sys
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice, product
from pathlib import Path

import pytest
import torch
import transformers

import moelab
from moelab.models import SeamExperts, compat
from moelab.offloading.prefetch_gate import ungated
from moelab.speculate import default_vectors
from tests.depth import depth
from tests.models import tiny

PROMPTS = [
    torch.randint(3, 96, (1, n), generator=torch.Generator().manual_seed(n)) for n in (5, 9, 14, 20)
]


def tokens(model, prompt=PROMPTS[1], new=8, **options):
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        **options,
    )[0].tolist()


def eager(folder, **options):
    """transformers' own; weights at aligned addresses, as torch allocates them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager", **options
    ).eval()
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("life")
    return {
        "fp32": tiny.save("qwen3_moe", home / "fp32"),
        "bf16": tiny.save("mixtral", home / "bf16", torch.bfloat16),
        "tied": tiny.save("olmoe", home / "tied", torch.bfloat16, tie_word_embeddings=True),
        "switch": tiny.save("switch_transformers", home / "switch"),
        "wide": tiny.save(
            "qwen3_moe", home / "wide", torch.bfloat16, hidden_size=64, moe_intermediate_size=64
        ),
        "fp8": tiny.save_fp8(home / "fp8", "qwen3_moe"),
    }


# ---- opening


def test_a_twin_has_the_dtypes_that_transformers_gives_it():
    """What is constructed without torch's default dtype, against what is with it."""
    few = ("jamba", "gemma4_text", "switch_transformers")
    for name, dtype in product(
        depth(few, tiny.every()), (torch.bfloat16, torch.float32, torch.float16)
    ):
        if name == "nllb-moe":  # asks torch for its default dtype, and is refused
            continue
        try:
            config = tiny.config(name)
            config.dtype = dtype
            with torch.device("meta"):
                theirs = compat.model_class(config)._from_config(config)
        except Exception:  # transformers itself cannot build it
            continue
        ours = compat.meta_twin(config)
        assert (
            type(ours) is type(theirs)
            and ours.all_tied_weights_keys == theirs.all_tied_weights_keys
        )
        assert {key: (w.dtype, w.shape) for key, w in ours.state_dict().items()} == {
            key: (w.dtype, w.shape) for key, w in theirs.state_dict().items()
        }, name
        assert [(key, w.dtype) for key, w in ours.named_buffers()] == [
            (key, w.dtype) for key, w in theirs.named_buffers()
        ], name


def test_openings_in_threads_beside_transformers_own(folders):
    """Nothing global is changed meanwhile (huggingface/transformers#44924)."""
    ways = [
        ("fp32", {"memory": "50%"}),
        ("bf16", {}),
        ("tied", {"memory": "40%", "executor": "fast"}),
        ("fp8", {}),
        ("fp32", {"dtype": torch.bfloat16}),
        ("fp8", {"memory": "50%"}),
        ("switch", {"memory": "60%"}),
        ("tied", {"executor": "fast"}),
    ]
    theirs = {name: eager(folders[name]) for name in ("fp32", "tied")}
    wanted, expected = {}, {name: tokens(model) for name, model in theirs.items()}
    for i, (name, options) in enumerate(ways):
        with moelab.open_model(folders[name], **options) as lm:
            wanted[i] = tokens(lm, new=3)
    patched = {
        key: vars(transformers.PreTrainedModel)[key] for key in ("tie_weights", "init_weights")
    }
    ended, wrong = threading.Event(), []

    def transformers_alone():
        for name in cycle(theirs):
            model = eager(folders[name])
            same = all(
                torch.equal(a, b) and a.dtype == b.dtype
                for a, b in zip(
                    model.state_dict().values(), theirs[name].state_dict().values(), strict=True
                )
            )
            if (
                not same
                or tokens(model) != expected[name]
                or any(isinstance(m, SeamExperts) for m in model.modules())
            ):
                wrong.append(name)
            if ended.is_set():
                return

    def work(i):
        name, options = ways[i]
        with moelab.open_model(folders[name], **options) as lm:
            return tokens(lm, new=3) == wanted[i]

    with ThreadPoolExecutor(5) as pool:
        beside = pool.submit(transformers_alone)
        try:
            assert all(pool.map(work, islice(cycle(range(len(ways))), depth(16, 200))))
        finally:
            ended.set()
        beside.result()
    assert not wrong and torch.get_default_dtype() == torch.float32
    assert patched == {key: vars(transformers.PreTrainedModel)[key] for key in patched}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_memory_does_not_depend_on_the_dtype_that_another_thread_sets(folders, dtype):
    """`from_pretrained` sets torch's default dtype for all threads: once kernels wrote fp32 past the
    end of memory for bf16."""
    ways = [("tied", {}), ("tied", {"memory": "40%"}), ("fp8", {"memory": "50%"})]
    for (name, options), prompt in product(ways, (PROMPTS[0], PROMPTS[-1])):
        with moelab.open_model(folders[name], executor="fast", **options) as lm:
            wanted = lm(prompt).logits, tokens(lm, prompt)
        torch.set_default_dtype(dtype)
        try:
            with moelab.open_model(folders[name], executor="fast", **options) as lm:
                found = lm(prompt).logits, tokens(lm, prompt)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(wanted[0], found[0]) and wanted[1] == found[1]


# ---- generating


def predictors(model):
    """One of each."""
    with moelab.using(model, executor="exact"):
        vectors = default_vectors(model, [PROMPTS[0][0].tolist()])
    random, spec = torch.Generator().manual_seed(0), model.spec
    matrices = torch.randn(spec.L, spec.E, spec.H, generator=random)
    made = {
        "vectors": vectors,
        "estimator": lambda q, layer: q.float() @ matrices[layer].T,
        "choice": [layer % 2 == 0 for layer in range(spec.L)],
        "seed": 1,
        "trace": moelab.record(model, [PROMPTS[2][0].tolist()], max_new_tokens=3),
    }
    return {
        name: lambda model, name=name: moelab.base.registry.make(
            "predictor", name, model, **{part: made[part] for part in moelab.speculate.takes(name)}
        )
        for name in moelab.names("predictor")
    }


def in_threads(lm, wanted, rounds):
    """Four threads generate from four prompts, so many times; what was not as wanted."""

    def work(i):
        return [i for _ in range(rounds) if tokens(lm, PROMPTS[i], 6) != wanted[i]]

    with ThreadPoolExecutor(4) as pool:
        return [one for found in pool.map(work, range(4)) for one in found]


@pytest.mark.parametrize("executor", depth(["fast"], ["exact", "fast"]))
def test_generations_in_threads_with_every_prefetcher(folders, executor):
    """As in one thread; its metrics and its run are valid (huggingface/transformers#25197)."""
    model = eager(folders["fp32"])
    wanted = [tokens(model, prompt, 6) for prompt in PROMPTS]
    with (
        moelab.open_model(folders["fp32"], memory="40%", ahead=2, executor=executor) as lm,
        ungated(lm.moelab.engine),
    ):
        assert not in_threads(lm, wanted, depth(2, 40))
        for name, make in predictors(lm).items():
            with moelab.using(lm, prefetch=make):
                lm.moelab.reset()
                assert not in_threads(lm, wanted, depth(1, 30)), name
                assert lm.moelab.metrics().prefill_tokens == depth(1, 30) * sum(
                    p.numel() for p in PROMPTS
                )
                run = lm.moelab.run.since()
            assert moelab.simulate(run).counters.requests == run.counters.requests


@pytest.mark.parametrize("options", [{}, {"memory": "50%"}], ids=str)
def test_a_recording_is_of_its_own_thread(folders, options):
    """While others generate, record, or call a part of the model."""
    with moelab.open_model(folders["fp32"], **options) as lm:
        prompts = [prompt[0].tolist() for prompt in PROMPTS]
        alone, ended = (
            [moelab.record(lm, [prompt], max_new_tokens=4) for prompt in prompts],
            threading.Event(),
        )

        def others():
            while not ended.is_set():
                tokens(lm, new=3)
                lm.model(PROMPTS[3])

        with ThreadPoolExecutor(5) as pool:
            beside = pool.submit(others)
            try:
                traces = list(
                    pool.map(lambda prompt: moelab.record(lm, [prompt], max_new_tokens=4), prompts)
                )
            finally:
                ended.set()
            beside.result()
    for trace, expected in zip(traces, alone):
        assert torch.equal(trace.ids, expected.ids) and torch.equal(trace.tokens, expected.tokens)


# ---- forking

FORKS = """
import multiprocessing, os, select, signal, sys, threading
import torch, moelab

folder, count, ways = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)                                                # torch's own teams do not survive a fork
PROMPT = torch.arange(3, 12)[None]


def tokens(new=5):
    return lm.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=new, do_sample=False,
                       eos_token_id=None)[0].tolist()


def child(work, seconds=200):
    '''What a forked process says.'''
    r, w = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(w, str(work()).encode())
        except BaseException as error:
            os.write(w, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(w)
    said = os.read(r, 1 << 16).decode() if select.select([r], [], [], seconds)[0] else "it hangs"
    os.close(r), os.kill(pid, signal.SIGKILL), os.waitpid(pid, 0)
    return said


def close():
    lm.moelab.metrics(), lm.moelab.close()
    return "closed"


class Rows(torch.utils.data.Dataset):
    __len__ = lambda self: 2
    __getitem__ = lambda self, i: torch.tensor(tokens())


WAYS = [{"memory": "50%", "executor": "fast", "prefetch": "router", "ahead": 2}, {"memory": "100%"}, {},
        {"memory": "50%"}, {"memory": "50%", "prefetch": "router", "ahead": 2}, {"memory": "100%", "executor": "fast"}]
for options in WAYS[:ways]:
    lm = moelab.open_model(folder, **options)
    wanted = tokens()
    assert child(tokens) == str(wanted), options
    assert child(lambda: eval(child(tokens)) == wanted) == "True", options      # and its child
    assert child(close) == "closed" and tokens() == wanted, options
    running, errors = True, []

    def others():
        while running:
            try:
                assert tokens() == wanted
            except BaseException as error:
                errors.append(error)
    thread = threading.Thread(target=others, daemon=True)
    thread.start()
    for i in range(count):                                              # at any moment of a generation
        assert child((tokens, close)[i % 2]) in (str(wanted), "closed"), options
    running = False
    thread.join()
    assert not errors, errors
    if options == WAYS[0]:
        fork = multiprocessing.get_context("fork")
        with fork.Pool(2) as pool:
            assert pool.map_async(tokens, [5] * 4).get(120) == [wanted] * 4
        loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context=fork, timeout=200)
        assert [row[0].tolist() for row in loader] == [wanted] * 2
        if not (pid := os.fork()):                                      # one that only exits
            sys.exit(3)
        signal.alarm(60)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        signal.alarm(0)
    lm.moelab.close()
print("forked")
"""


def test_forks(folders):
    """At rest and within a generation, by hand, in a pool, as a loader's workers
    (pytorch/pytorch#49555)."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, folders["bf16"], str(depth(2, 32)), str(depth(2, 6))],
        capture_output=True,
        text=True,
        timeout=depth(280, 3000),
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert done.stdout.endswith("forked\n"), done.stderr[-3000:]


# ---- the end

KEPT = [
    {},
    {"executor": "fast", "dense": "bf12"},
    {"quantize": "int8"},
    {"memory": "50%"},
    {"memory": "50%", "executor": "sorted"},
    {"memory": "50%", "prefetch": "router"},
    {"memory": "100%", "executor": "fast"},
    {"executor": "fast"},
    {"memory": "50%", "executor": "fast", "prefetch": "quasi"},
]


def files(folder):
    return sum(
        str(Path(folder)) in os.path.realpath(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
    )


@pytest.mark.parametrize("options", depth(KEPT[-3:], KEPT), ids=str)
def test_a_model_that_is_dropped_leaves_nothing(folders, options, monkeypatch):
    """Nor do its threads, files and memory stay (huggingface/transformers#26026)."""
    folder, left, said = folders["wide" if "dense" in options else "bf16"], [], []
    if "prefetch" in options:
        monkeypatch.setattr(moelab.api, "token_count", lambda _: None)
        monkeypatch.setattr(moelab.api, "passages", lambda *_: [PROMPTS[0][0].tolist()])
    for _ in range(2):
        lm = moelab.open_model(folder, **options)
        engine = lm.moelab.engine
        left += [
            weakref.ref(one)
            for one in (lm, lm.moelab, engine, engine and engine.loader.slots)
            if one
        ]
        del engine
        tokens(lm, new=3)
        lm.moelab.metrics(), repr(lm.moelab), lm.moelab.run.since()
        try:
            tokens(lm, logits_processor=[lambda *_: 1 / 0])
        except ZeroDivisionError:
            said.append(traceback.format_exc())
    del lm
    gc.collect()
    assert len(said) == 2 and not [one() for one in left if one() is not None]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("moelab")]
    if sys.platform == "linux":
        assert not files(folder)


def test_an_error_of_reading_does_not_keep_the_model(folders):
    """It hangs on the frames through which it went, and the model on those."""
    lm = moelab.open_model(folders["bf16"], memory="30%", prefetch="router", ahead=1)
    reader, gone = lm.moelab.engine.loader.reader, weakref.ref(lm)

    def fails(*_):
        raise OSError("the disk is gone")

    reader.read_parts = fails
    with pytest.raises(OSError, match="the disk is gone"):
        tokens(lm)
    del lm
    gc.collect()
    assert gone() is None
