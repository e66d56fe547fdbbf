"""What is put on a model, by us and by others, against a list: in any order, and nothing left
behind."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import linecache
import pickle
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moelab.checkpoint.opening import open_checkpoint
from moelab.models import SeamExperts, discover, eager, patches, plug, plugged, unplug
from moelab.models.patches import Dressed, Patches, bare, change, dress, put
from moelab.models.stream import FOUND
from tests.depth import depth
from tests.models import tiny


class Toy(nn.Module):
    """Its forward says who was called, from the outside to the inside."""

    def forward(self, said=()):
        return [*said, "own"]

    def other(self):
        return ["other"]


def around(name):
    return lambda below: lambda said=(): below([*said, name])


# ------------------------------------------------------------------------------------- accelerate's
# hooks, or their like


def by_hand_add(module, before):
    """accelerate.hooks.add_hook_to_module, as far as it matters here."""
    old = (
        module._old_forward
        if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward")
        else module.forward
    )
    module._old_forward, module._hf_hook = old, before

    def forward(module, *args, **kwargs):
        args, kwargs = module._hf_hook(module, *args, **kwargs)
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(forward, module), old)


def by_hand_remove(module):
    vars(module).pop("_hf_hook", None)
    if hasattr(module, "_old_forward"):
        module.forward = module._old_forward
        del module._old_forward


def accelerate_add(module, before):
    hooks = pytest.importorskip("accelerate.hooks")

    class Hook(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            return before(module, *args, **kwargs)

    hooks.add_hook_to_module(module, Hook())


def accelerate_remove(module):
    pytest.importorskip("accelerate.hooks").remove_hook_from_module(module)


HOOKS = {
    "by hand": (by_hand_add, by_hand_remove),
    "accelerate": (accelerate_add, accelerate_remove),
}
kinds = pytest.mark.parametrize("kind", HOOKS)


def says(module, said=()):
    return ([*said, "hooked"],), {}


class User:
    """A forward that somebody assigns by hand, and puts back if it is still there."""

    def __init__(self):
        self.mine = self.before = None

    def assign(self, module):
        self.before = before = module.forward
        self.mine = module.forward = lambda said=(): before([*said, "user"])

    def restore(self, module):
        if vars(module).get("forward") is self.mine is not None:
            module.forward, self.mine = self.before, None


OWNERS = "ABC"
OPERATIONS = [*OWNERS, *OWNERS, "hook", "unhook", "assign", "restore"]


@pytest.mark.stress
@kinds
def test_methods_are_what_a_list_says(kind):
    add, remove = HOOKS[kind]

    @given(st.lists(st.sampled_from(OPERATIONS), max_size=14))
    @settings(max_examples=depth(60, 5000))
    def check(operations):
        toy, without = Toy(), Toy()  # with ours and without: the same is done to both by others
        users, open_patches = (User(), User()), {}
        stack = []  # what is on, bottom first
        for operation in operations:
            if operation in OWNERS and operation in open_patches:
                open_patches.pop(operation).close()
                stack = [name for name in stack if name != operation]
            elif operation in OWNERS:
                open_patches[operation] = Patches()
                open_patches[operation].wrap(toy, "forward", around(operation))
                stack.append(operation)
            elif operation == "hook":
                for module in (toy, without):
                    add(module, says)
                stack = [
                    *(stack[: stack.index("hooked")] if "hooked" in stack else stack),
                    "hooked",
                ]
            elif operation == "unhook":
                for module in (toy, without):
                    remove(module)
                stack = stack[: stack.index("hooked")] if "hooked" in stack else stack
            elif operation == "assign" and "user" not in stack:
                for user, module in zip(users, (toy, without)):
                    user.assign(module)
                stack.append("user")
            elif operation == "restore" and stack[-1:] == ["user"]:
                for user, module in zip(users, (toy, without)):
                    user.restore(module)
                stack.pop()
            assert toy() == [*reversed(stack), "own"]
        for mine in open_patches.values():
            mine.close()
        assert toy() == without() == [*(x for x in reversed(stack) if x not in OWNERS), "own"]
        missing = set(vars(without)) - set(vars(toy))
        assert not set(vars(toy)) - set(vars(without)) and (
            not missing or missing == {"forward"} and bare(without)
        )

    check()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "take", "assign", "dress", "undress"]), st.sampled_from(OWNERS)
        ),
        max_size=16,
    )
)
@settings(max_examples=200)
def test_values_and_classes_are_what_a_list_says(operations):
    toy, before = Toy(), set(vars(Toy()))
    owners = {name: Patches() for name in OWNERS}
    values, classes, number = [], [], 0
    for operation, name in operations:
        number += 1  # noqa: SIM113
        if operation == "put":
            put(owners[name], toy, "value", number)
            values = [(who, v) for who, v in values if who != name] + [(name, number)]
        elif operation == "dress":
            dress(owners[name], toy, louder)
            classes = [who for who in classes if who != name] + [name]
        elif operation == "assign":
            toy.value = number
            values.append((None, number))
        else:
            owners[name].close()
            values, classes = (
                [(who, v) for who, v in values if who != name],
                [who for who in classes if who != name],
            )
        assert getattr(toy, "value", None) == (values[-1][1] if values else None)
        assert type(toy) is (louder(Toy) if classes else Toy) and toy() == (
            ["louder"] if classes else []
        ) + ["own"]
    for patches_ in owners.values():
        patches_.close()
    assert set(vars(toy)) == before | (
        {"value"} if any(who is None for who, _ in values) else set()
    )


@functools.lru_cache(None)
def louder(cls):
    if issubclass(cls, Dressed):
        return cls

    def forward(self, said=()):
        return (cls.forward if isinstance(self, made) else type(self).forward)(
            self, [*said, "louder"] if isinstance(self, made) else said
        )

    made = type("Louder" + cls.__name__, (Dressed, cls), {"forward": forward})
    return made


def test_a_class_that_would_not_be_asked_is_refused():
    toy = Toy()
    toy.forward = lambda: ["mine"]
    before = dict(vars(toy))
    with pytest.raises(ValueError, match="forward of its own"):
        dress("plug", toy, louder)
    assert vars(toy) == before and type(toy) is Toy and toy() == ["mine"]


def test_a_step_that_fails_takes_everything_off():
    toy, before = Toy(), dict(vars(Toy()))

    def fail(*_):
        raise OSError("no")

    for last in (
        lambda p: p.wrap(toy, "forward", fail),
        lambda p: change(p, toy, "value", fail),
        lambda p: p.hook(fail, print),
        lambda p: fail(),
    ):
        with pytest.raises(OSError), Patches() as mine:
            mine.hook(toy.register_forward_hook, lambda *_: ["hook"])
            mine.wrap(toy, "forward", around("A"))
            dress(mine, toy, louder)
            put(mine, toy, "value", 1)
            assert toy() == ["hook"]
            last(mine)
        assert (
            set(vars(toy)) == set(before)
            and type(toy) is Toy
            and toy() == ["own"]
            and not toy._forward_hooks
        )


def test_an_interruption_at_any_line_takes_everything_off():
    def put_on(toy):
        with Patches() as mine:
            mine.wrap(toy, "forward", around("A"))
            dress(mine, toy, louder)
            put(mine, toy, "value", 1)
            return mine.pop_all()

    def interrupted_at(toy, line):
        seen, pairs = [0], {"wrap", "put", "change", "dress", "top", "found", "_read", "_write"}

        def trace(frame, event, _):
            if frame.f_code.co_filename != patches.__file__ or frame.f_code.co_name not in pairs:
                return None if event == "call" else trace
            # not where a lock is let go: no signal comes there, and the lock would stay locked
            if event == "line" and "_lock" not in linecache.getline(
                patches.__file__, frame.f_lineno
            ):
                seen[0] += 1
                if seen[0] == line:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            return put_on(toy)
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)

    line = 0
    while True:
        toy, line = Toy(), line + 1
        if (mine := interrupted_at(toy, line)) is not None:
            break
        assert set(vars(toy)) == set(vars(Toy())) and type(toy) is Toy and toy() == ["own"], line
    assert line > 25 and toy() == ["A", "louder", "own"]
    mine.close()
    assert set(vars(toy)) == set(vars(Toy()))


def test_a_model_can_go_while_it_is_patched():
    toy, mine = Toy(), Patches()
    mine.hook(toy.register_forward_hook, lambda *_: None)
    mine.wrap(toy, "forward", around("A"))
    mine.wrap(toy, "other", lambda below: below)
    gone = weakref.ref(toy)
    del toy  # no cycle: nothing waits for the collector
    assert gone() is None
    mine.close()
    toy, mine = Toy(), Patches()
    dress("plug", toy, louder)
    dress(mine, toy, louder)
    gone = weakref.ref(toy)
    del toy, mine
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
def test_a_copy_has_nothing_of_it_and_what_is_dressed_has_none(again):
    toy, calls = Toy(), []
    with Patches() as mine:
        mine.wrap(toy, "forward", around("A"))
        mine.wrap(toy, "forward", around("B"))
        mine.hook(toy.register_forward_pre_hook, lambda *_: calls.append(1), with_kwargs=True)
        mine.hook(toy.register_forward_hook, lambda *_: calls.append(2), always_call=True)
        other = again(toy)
        assert other() == ["own"] and not calls and bare(other)
        assert toy() == ["B", "A", "own"] and calls == [1, 2]
        dress(mine, toy, louder)
        with pytest.raises(TypeError, match="open it again"):
            again(toy)
    assert other() == again(toy)() == ["own"]


def test_the_signature_stays():
    toy, mine = Toy(), Patches()
    before = inspect.signature(toy.forward)
    mine.wrap(toy, "forward", around("A"))
    assert inspect.signature(toy.forward) == before and not bare(toy)
    mine.close()
    assert bare(toy)


def test_many_threads_put_on_and_take_off():
    toy, failed = Toy(), []

    def work(name):
        for _ in range(200):
            with Patches() as mine:
                mine.wrap(toy, "forward", around(name))
                dress(mine, toy, louder)
                put(mine, toy, name, 1)
                if name not in toy() or getattr(toy, name) != 1:
                    failed.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in OWNERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and set(vars(toy)) == set(vars(Toy())) and type(toy) is Toy


# ------------------------------------------------------------------------------------------------------
# the seam's own


def zero(x, ids, weights, experts):
    return torch.zeros_like(x)


def snapshot(model):
    """Everything that could be left behind: class, attributes and what they are, hooks."""
    found = {}
    for name, module in model.named_modules():
        hooks = [
            len(value)
            for key, value in vars(module).items()
            if "_hooks" in key and value is not None
        ]
        found[name] = (
            type(module),
            {key: id(value) for key, value in vars(module).items() if key != FOUND},
            hooks,
        )
    return found


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """name → a model, opened once; who uses it leaves it as it was."""
    return functools.lru_cache(None)(
        lambda name: open_checkpoint(tiny.save(name, tmp_path_factory.mktemp(name)))
    )


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return tiny.save("mixtral", tmp_path_factory.mktemp("mixtral"))


IDS = torch.arange(3, 14)[None]


def test_plug_inside_plugged_lasts(mixtral):
    model = open_checkpoint(mixtral)
    before, exact = snapshot(model), model(IDS).logits
    with plugged(model, zero):
        zeroed = model(IDS).logits
        plug(model)  # asks for nothing else
        assert torch.equal(model(IDS).logits, zeroed)
        with plugged(model, eager):
            assert torch.equal(model(IDS).logits, exact)
        assert torch.equal(model(IDS).logits, zeroed)
        unplug(model)  # what `plug` put on, no more
        assert torch.equal(model(IDS).logits, zeroed)
        plug(model, executor=eager)
        assert torch.equal(model(IDS).logits, exact)
    assert isinstance(discover(model)[0].experts, SeamExperts)
    unplug(model)
    assert snapshot(model) == before and torch.equal(model(IDS).logits, exact)


@pytest.mark.parametrize("name", ["mixtral", "llama4_text", "switch_transformers"])
@kinds
def test_hooks_of_others_that_came_later_stay(kind, name, model_of):
    """accelerate puts its hooks on every module; what was plugged beneath them may go before they
    do."""
    model, (add, remove) = model_of(name), HOOKS[kind]
    inputs = {"input_ids": IDS} | (
        {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    )
    exact, asked, hooked = model(**inputs).logits, [], []
    modules = [
        module for layer in discover(model) for module in (layer.block, layer.experts, layer.router)
    ]

    def counting(x, ids, weights, experts):
        asked.append(experts.layer)
        return eager(x, ids, weights, experts)

    with plugged(model, counting):
        for module in modules:
            add(module, lambda module, *args, **kwargs: (hooked.append(module), (args, kwargs))[1])
        assert torch.equal(model(**inputs).logits, exact) and asked and hooked
    asked.clear(), hooked.clear()
    assert torch.equal(model(**inputs).logits, exact) and hooked and not asked
    for module in modules:
        remove(module)
    hooked.clear()
    assert torch.equal(model(**inputs).logits, exact) and not hooked
    assert not any(isinstance(module, Dressed) for module in model.modules())
    with plugged(model, counting):  # over the class's own forward, which accelerate leaves
        assert torch.equal(model(**inputs).logits, exact) and asked


def test_plugging_where_it_would_be_passed_by_is_refused(mixtral):
    model = open_checkpoint(mixtral)
    experts = discover(model)[-1].experts
    experts.forward = lambda x, ids, weights: x
    before = snapshot(model)
    with pytest.raises(ValueError, match="forward of its own"):
        plug(model, executor=zero)
    with pytest.raises(ValueError, match="forward of its own"), plugged(model, zero):
        pass
    assert snapshot(model) == before


def test_an_executor_that_is_a_module_is_no_child(mixtral):
    model, names = open_checkpoint(mixtral), None
    names = [name for name, _ in model.named_parameters()]

    class Linear(nn.Linear):
        def forward(self, x, ids, weights, experts):
            return super().forward(x)

    with plugged(model, Linear(32, 32)):
        assert [name for name, _ in model.named_parameters()] == names
