"""The Engine facade: exactly one provider, wrappers that only wrap, answers that are answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from facade_toys import ToyTrain, batch_of, built, loss

from rlctl import hookspecs
from rlctl.batch import PackedBatch
from rlctl.engine import Engine, EngineInfo, MeshInfo, StepOutput, load_target
from rlctl.errors import ConfigError, EngineError
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams, ScoreRequest
from rlctl.hookspecs import EngineHooks, EngineSpecs, hookimpl
from rlctl.logits import LossOutput
from rlctl.microbatch import MicroBatchPlan
from rlctl.records import BackendKind
from rlctl.topology import Topology


# ---- the hooks themselves -----------------------------------------------------------------------------------------
def hooks_of(cls: type) -> dict[str, Callable[..., Any]]:
    return {name: f for name, f in vars(cls).items() if name.startswith("rlctl_")}


def test_typed_view_and_specs_agree() -> None:
    specs, typed = hooks_of(EngineSpecs), hooks_of(EngineHooks)
    assert list(specs)
    assert set(specs) == set(typed)
    for name, spec in specs.items():
        wanted = inspect.signature(spec).parameters
        found = inspect.signature(typed[name]).parameters
        assert list(wanted) == list(found), name
        for argument, parameter in found.items():
            if argument != "self":
                assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, (name, argument)
                assert parameter.annotation == wanted[argument].annotation, (name, argument)
        assert spec.__doc__, f"{name} has no description"


def test_every_engine_hook_takes_one_answer() -> None:
    for name, spec in hooks_of(EngineSpecs).items():
        assert spec.rlctl_spec["firstresult"] is True, name  # type: ignore[attr-defined]
    for name, spec in hooks_of(hookspecs.DiscoverySpecs).items():
        assert not spec.rlctl_spec["firstresult"], name  # type: ignore[attr-defined]


def test_required_hooks_exist() -> None:
    names = set(hooks_of(EngineSpecs))
    assert set(hookspecs.TRAIN_HOOKS) <= names
    assert set(hookspecs.ROLLOUT_HOOKS) <= names
    assert set(hookspecs.COMMON_HOOKS) == set(hookspecs.TRAIN_HOOKS) & set(hookspecs.ROLLOUT_HOOKS)
    assert len(set(hookspecs.TRAIN_HOOKS)) == len(hookspecs.TRAIN_HOOKS)


# ---- one provider -------------------------------------------------------------------------------------------------
def test_missing_hooks_are_listed() -> None:
    class Half:
        rlctl_build_mesh = ToyTrain.rlctl_build_mesh
        rlctl_engine_init = ToyTrain.rlctl_engine_init

    with pytest.raises(EngineError) as caught:
        Engine(Half(), BackendKind.TRAIN, "half")
    found = caught.value.found or ""
    assert [h for h in hookspecs.TRAIN_HOOKS if h in found] == list(hookspecs.TRAIN_HOOKS[2:])
    with pytest.raises(EngineError, match="rlctl_generate"):
        Engine(ToyTrain(), BackendKind.ROLLOUT, "toy")


def test_a_provider_that_only_wraps_is_none() -> None:
    class Wraps(ToyTrain):
        @hookimpl(wrapper=True)
        def rlctl_optimizer_step(self) -> Iterator[None]:  # type: ignore[override]
            return (yield)

    with pytest.raises(EngineError, match="missing rlctl_optimizer_step"):
        Engine(Wraps(), BackendKind.TRAIN, "toy")


@pytest.mark.parametrize("bad", ["name", "argument"])
def test_a_misspelt_hook_is_refused(bad: str) -> None:
    class Name(ToyTrain):
        @hookimpl
        def rlctl_optimiser_step(self) -> None: ...

    class Argument(ToyTrain):
        @hookimpl
        def rlctl_move(self, device: str, part: str) -> bool:  # type: ignore[override]
            return True

    with pytest.raises(EngineError, match="does not fit the hooks") as caught:
        Engine((Name if bad == "name" else Argument)(), BackendKind.TRAIN, "toy")
    assert ("rlctl_optimiser_step" if bad == "name" else "part") in (caught.value.found or "")


class Second:
    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        return StepOutput(grad_norm=2.0, lr=0.2, skipped=False)


class OldStyle:
    @hookimpl(hookwrapper=True)
    def rlctl_optimizer_step(self) -> Iterator[None]:
        yield


class Mixed:
    @hookimpl(wrapper=True)
    def rlctl_forward_backward(self) -> Iterator[None]:
        return (yield)

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput:
        return StepOutput(grad_norm=2.0, lr=0.2, skipped=False)


class Nothing:
    def rlctl_optimizer_step(self) -> None:
        """Not marked: pluggy does not see it."""


@pytest.mark.parametrize(
    ("wrapper", "found"),
    [
        (Second, "rlctl_optimizer_step"),
        (OldStyle, "rlctl_optimizer_step"),
        (Mixed, "rlctl_optimizer_step"),
        (Nothing, "no hook"),
    ],
)
def test_only_wrappers_beside_the_provider(wrapper: type, found: str) -> None:
    class Captured(Engine):
        """The half-built facade, to look at after it refused."""

        last: Any = None

        def _register(self, name: str, plugin: object) -> None:
            Captured.last = self
            super()._register(name, plugin)

    offender = wrapper()
    with pytest.raises(EngineError, match="may only wrap") as caught:
        Captured(ToyTrain(), BackendKind.TRAIN, "toy", [("second", offender)])
    assert found in (caught.value.found or "")
    assert "forward_backward" not in (caught.value.found or "")
    assert not Captured.last._pm.is_registered(offender)


def test_a_wrapper_is_named_once() -> None:
    class Wrap:
        @hookimpl(wrapper=True)
        def rlctl_optimizer_step(self) -> Iterator[None]:
            return (yield)

    one = Wrap()
    for wrappers in ([("w", one), ("w", Wrap())], [("w", one), ("v", one)], [("provider", one)]):
        with pytest.raises(EngineError, match="registered twice"):
            Engine(ToyTrain(), BackendKind.TRAIN, "toy", wrappers)


# ---- wrappers ------------------------------------------------------------------------------------------------------
def test_wrappers_run_around_the_provider_and_change_its_answer() -> None:
    order: list[str] = []

    def make(name: str) -> object:
        class Wrap:
            @hookimpl(wrapper=True)
            def rlctl_optimizer_step(self) -> Iterator[None]:
                order.append(f"{name} before")
                out: StepOutput = yield  # type: ignore[assignment]
                order.append(f"{name} after")
                return StepOutput(out.grad_norm * 2, out.lr, out.skipped)  # type: ignore[return-value]

        return Wrap()

    engine = built(wrappers=[("one", make("one")), ("two", make("two"))])
    assert engine.optimizer_step().grad_norm == 4.0
    assert order == ["two before", "one before", "one after", "two after"]


class Doubler:
    """A wrapper around an export wraps the iterator and closes it."""

    def __init__(self) -> None:
        self.ended = False

    @hookimpl(wrapper=True)
    def rlctl_export_weights(self) -> Iterator[Any]:
        inner: Any = yield

        def doubled() -> Iterator[tuple[str, torch.Tensor]]:
            try:
                for name, tensor in inner:
                    yield name, tensor * 2
            finally:
                inner.close()
                self.ended = True

        return doubled()  # type: ignore[return-value]


def test_export_wrappers_are_lazy_and_closed() -> None:
    provider, wrapper = ToyTrain(), Doubler()
    engine = built(provider, [("doubler", wrapper)])
    stream = engine.export_weights()
    assert provider.exported == 0, "nothing is made before it is asked for"
    name, tensor = next(stream)
    assert (name, tensor.tolist(), provider.exported) == ("w0", [0.0, 0.0], 1)
    assert next(stream)[1].tolist() == [2.0, 2.0]
    assert not provider.closed
    stream.close()  # type: ignore[attr-defined]
    assert wrapper.ended
    assert provider.closed
    assert provider.exported == 2
    assert [n for n, _ in engine.export_weights()] == ["w0", "w1", "w2"]


class OddError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


@pytest.mark.parametrize("error", [OddError(3, "x"), KeyboardInterrupt(), TimeoutError("t"), MemoryError()])
def test_exceptions_keep_their_type_through_wrappers(error: BaseException) -> None:
    seen: list[type[BaseException]] = []

    class Timer:
        @hookimpl(wrapper=True)
        def rlctl_forward_backward(self) -> Iterator[None]:
            try:
                return (yield)
            except BaseException as e:
                seen.append(type(e))
                raise

    def failing(reader: Any, batch: PackedBatch) -> LossOutput:
        raise error

    engine = built(wrappers=[("one", Timer()), ("two", Timer())])
    with pytest.raises(type(error)) as caught:
        engine.forward_backward([batch_of([2])], failing, forward_only=False)
    assert caught.value is error
    assert seen == [type(error)] * 2


# ---- answers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("rlctl_optimizer_step", lambda e: e.optimizer_step()),
        ("rlctl_forward_backward", lambda e: e.forward_backward([], loss, False)),
        ("rlctl_export_weights", lambda e: e.export_weights()),
        ("rlctl_save_state", lambda e: e.save_state("x")),
        ("rlctl_load_state", lambda e: e.load_state("x")),
        ("rlctl_build_mesh", lambda e: e.build(Topology(), {}, {})),
        ("rlctl_engine_init", lambda e: e.build(Topology(), {}, {})),
    ],
)
def test_none_is_no_answer(hook: str, call: Callable[[Engine], Any]) -> None:
    silent = type("Silent", (ToyTrain,), {hook: hookimpl(lambda self: None)})
    engine = Engine(silent(), BackendKind.TRAIN, "toy")
    engine.mesh = MeshInfo()
    with pytest.raises(EngineError, match=f"{hook} of 'toy' returned nothing"):
        call(engine)


def test_a_hook_of_another_kind_is_named() -> None:
    with pytest.raises(EngineError, match="'toy' has no rlctl_generate"):
        built().generate(GenerateRequest([[1]], SamplingParams()))
    with pytest.raises(EngineError, match="'toy' has no rlctl_score"):
        built().score(ScoreRequest([[1]]))
    assert built().attach_module(object(), 1) is False
    assert built().local_module() is None
    assert built().release("weights") is False


class ToyRollout:
    rlctl_build_mesh = ToyTrain.rlctl_build_mesh
    rlctl_engine_init = ToyTrain.rlctl_engine_init
    mesh = MeshInfo()

    def __init__(self, drop: int = 0) -> None:
        self.log: list[str] = []
        self.drop = drop

    @hookimpl
    def rlctl_generate(self, request: GenerateRequest) -> list[Completion]:
        made = [
            Completion(p, s, [1], [0.0], FinishReason.STOP)
            for p in range(len(request.prompts))
            for s in range(request.params.n)
        ]
        return made[: len(made) - self.drop]

    @hookimpl
    def rlctl_load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        return {"loaded": [n for n, _ in weights], "missing": []}

    @hookimpl
    def rlctl_weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(names, "0")


class Refuses(ToyTrain):
    """Its model cannot be had."""

    @hookimpl
    def rlctl_engine_init(self) -> EngineInfo:
        raise ConfigError("no such model")

    @hookimpl
    def rlctl_shutdown(self) -> bool:
        self.log.append("shutdown")
        return True


class WorseAtTheEnd(Refuses):
    """Nor can it be shut down."""

    @hookimpl
    def rlctl_shutdown(self) -> bool:
        raise OSError("stuck")


def test_an_engine_that_refuses_is_shut_down() -> None:
    """A wrapper's patch of the library, a process group: nobody else could give them back."""
    undone: list[str] = []

    class Patches:
        @hookimpl(wrapper=True)
        def rlctl_shutdown(self) -> Any:
            undone.append("patch")
            return (yield)

    provider = Refuses()
    with pytest.raises(ConfigError, match="no such model"):
        built(provider, [("patches", Patches())])
    assert provider.log == ["mesh", "shutdown"]
    assert undone == ["patch"]
    with pytest.raises(ConfigError, match="no such model") as caught:
        built(WorseAtTheEnd())
    assert "stuck" in caught.value.__notes__[0]


def test_a_rollout_engine_answers_each_sample() -> None:
    request = GenerateRequest([[1], [2]], SamplingParams(n=3))
    engine = Engine(ToyRollout(), BackendKind.ROLLOUT, "toy")
    assert [(c.prompt_index, c.sample_index) for c in engine.generate(request)] == [
        (p, s) for p in range(2) for s in range(3)
    ]
    assert engine.load_weights(iter([("a", torch.ones(1))]), 1) == {"loaded": ["a"], "missing": []}
    assert engine.weight_fingerprint(["a"]) == {"a": "0"}
    with pytest.raises(EngineError, match="another number of completions") as caught:
        Engine(ToyRollout(drop=1), BackendKind.ROLLOUT, "toy").generate(request)
    assert (caught.value.found, caught.value.wanted) == ("5", "6")


def test_load_target_imports_by_name() -> None:
    assert load_target("rlctl.topology:Topology") is Topology
    with pytest.raises(ModuleNotFoundError):
        load_target("rlctl.no_such_module:X")
    with pytest.raises(AttributeError):
        load_target("rlctl.topology:NoSuchClass")


# ---- adapters -----------------------------------------------------------------------------------------------------
class Adapted(ToyTrain):
    """Writes down what it is told of its adapters, and what it computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    @hookimpl
    def rlctl_set_adapters(self, enabled: bool) -> bool:
        self.told.append(enabled)
        return True

    @hookimpl
    def rlctl_forward_backward(self, micro_batches: Sequence[PackedBatch], loss_fn: Any) -> list[Any] | None:
        self.told.append("pass")
        return super().rlctl_forward_backward(micro_batches, loss_fn)


def test_adapters_are_asked_only_of_an_engine_that_has_them() -> None:
    def build(provider: ToyTrain, lora: object) -> None:
        Engine(provider, BackendKind.TRAIN, "toy").build(Topology(), {}, {"lora": lora}, {})

    with pytest.raises(EngineError, match="trains no adapters: it would train every weight"):
        build(ToyTrain(), {"rank": 4})
    build(ToyTrain(), None)
    build(Adapted(), {"rank": 4})


def test_the_base_model_answers_while_its_adapters_are_off() -> None:
    provider = Adapted()
    engine = built(provider)
    engine.infer_batch(batch_of([3]), MicroBatchPlan(max_rows=1))
    engine.infer_batch(batch_of([3]), MicroBatchPlan(max_rows=1), base=True)
    assert provider.told == ["pass", False, "pass", True]
    with pytest.raises(EngineError, match="cannot score as its base model"):
        built(ToyTrain()).infer_batch(batch_of([3]), MicroBatchPlan(max_rows=1), base=True)
