"""The Engine facade: exactly one provider, wrappers that only wrap, answers that are answers, dp arithmetic."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from rlctl import hookspecs
from rlctl.batch import PackedBatch, pack, padding_like
from rlctl.engine import Engine, EngineInfo, MeshInfo, MicroOutput, StepOutput, load_target
from rlctl.errors import BatchError, EngineError
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams, ScoreRequest
from rlctl.hookspecs import EngineHooks, EngineSpecs, hookimpl
from rlctl.logits import LossOutput
from rlctl.microbatch import MicroBatchPlan
from rlctl.records import BackendKind
from rlctl.topology import Topology


class ToyTrain:
    """A provider of every training hook; it records calls and does no learning."""

    def __init__(self, mesh: MeshInfo | None = None) -> None:
        self.mesh = mesh or MeshInfo()
        self.log: list[str] = []
        self.exported = 0
        self.closed = False

    @hookimpl
    def rlctl_build_mesh(self, topology: Topology) -> MeshInfo:
        self.log.append("mesh")
        return self.mesh

    @hookimpl
    def rlctl_engine_init(self, mesh: MeshInfo, forward_only: bool) -> EngineInfo | None:
        self.log.append(f"init {forward_only}")
        return EngineInfo(num_parameters=1, vocab_size=4, model_family="toy")

    @hookimpl
    def rlctl_forward_backward(self, micro_batches: Sequence[PackedBatch], loss_fn: Any) -> list[MicroOutput] | None:
        self.log.append(f"forward {[b.is_padding for b in micro_batches]}")
        outputs = []
        for batch in micro_batches:
            out: LossOutput = loss_fn(Reader(batch), batch)
            outputs.append(
                MicroOutput(
                    float(out.loss),
                    {k: float(v) for k, v in out.sums.items()},
                    {k: float(v) for k, v in out.maxes.items()},
                    out.items,
                )
            )
        return outputs

    @hookimpl
    def rlctl_optimizer_step(self) -> StepOutput | None:
        self.log.append("step")
        return StepOutput(grad_norm=1.0, lr=0.1, skipped=False)

    @hookimpl
    def rlctl_export_weights(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for i in range(3):
                self.exported += 1
                yield f"w{i}", torch.full((2,), float(i))
        finally:
            self.closed = True

    @hookimpl
    def rlctl_set_mode(self, train: bool) -> bool:
        self.log.append(f"train {train}")
        return True

    @hookimpl
    def rlctl_move(self, device: str, parts: Sequence[str]) -> bool:
        self.log.append(f"move {device} {list(parts)}")
        return True

    @hookimpl
    def rlctl_save_state(self, path: Any) -> bool:
        return True

    @hookimpl
    def rlctl_load_state(self, path: Any) -> bool:
        return True

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float] | None:
        self.log.append(f"reduce {op}")
        return list(values)


class Reader:
    """Log-prob of a token is minus its id: enough to see which token an answer belongs to."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch

    def log_prob(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        return torch.where(self.batch.items["loss_mask"], -self.batch.items["input_ids"].float(), 0.0)

    def entropy(self) -> torch.Tensor:
        return torch.where(self.batch.items["loss_mask"], self.batch.items["input_ids"].float() * 10, 0.0)

    def log_prob_and_entropy(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_prob(), self.entropy()


def batch_of(lengths: Sequence[int]) -> PackedBatch:
    at, rows = 1, []
    for n in lengths:
        rows.append(list(range(at, at + n)))
        at += n
    return pack({"input_ids": rows, "loss_mask": [[i > 0 for i in range(n)] for n in lengths]})


def loss(reader: Any, batch: PackedBatch) -> LossOutput:
    value = (reader.log_prob() * batch.items["item_weight"]).sum()
    top = reader.log_prob()[batch.items["loss_mask"]]
    return LossOutput(
        value, {"a": value, "b": float(batch.num_rows)}, {"top": top.max() if len(top) else torch.tensor(0.0)}
    )


def built(provider: object | None = None, wrappers: Sequence[tuple[str, object]] = ()) -> Engine:
    engine = Engine(provider or ToyTrain(), BackendKind.TRAIN, "toy", wrappers)
    engine.build(Topology(), {}, {}, {})
    return engine


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


# ---- what the facade works out ---------------------------------------------------------------------------------------
def test_train_batch_runs_in_order() -> None:
    provider = ToyTrain()
    out = built(provider).train_batch(batch_of([3, 2, 4]), loss, MicroBatchPlan(max_rows=2))
    assert provider.log == ["mesh", "init False", "train True", "forward [False, False]", "step"]
    # Scored ids: 2, 3 | 5 | 7, 8, 9; token-mean of minus the id.
    assert out.loss == pytest.approx(-34 / 6)
    assert out.sums == pytest.approx({"a": -34 / 6, "b": 3.0})
    assert out.maxes == {"top": -2.0}
    assert (out.num_micro_batches, out.step.grad_norm) == (2, 1.0)


def test_weights_that_the_caller_gives_are_kept() -> None:
    batch = batch_of([3]).with_items(item_weight=torch.tensor([0.0, 10.0, 0.0]))
    assert built().train_batch(batch, loss, MicroBatchPlan(max_rows=1)).loss == -20.0
    assert built().eval_loss(batch, loss, MicroBatchPlan(max_rows=1))[0] == -20.0


@pytest.mark.parametrize("plan", [MicroBatchPlan(max_rows=1), MicroBatchPlan(max_rows=9), MicroBatchPlan(max_tokens=6)])
def test_infer_batch_keeps_the_order_of_its_batch(plan: MicroBatchPlan) -> None:
    provider = ToyTrain()
    batch = batch_of([2, 6, 1, 3])
    out = built(provider).infer_batch(batch, plan, ("log_probs", "entropy"))
    assert torch.equal(out["log_probs"], Reader(batch).log_prob())
    assert torch.equal(out["entropy"], Reader(batch).entropy())
    assert "train False" in provider.log
    assert "step" not in provider.log


def test_infer_batch_needs_something_to_compute() -> None:
    with pytest.raises(AssertionError):
        built().infer_batch(batch_of([2]), MicroBatchPlan(max_rows=1), ())


class OneOfTwo(ToyTrain):
    """Rank 0 of two; ``other`` is what rank 1 would have sent to each reduction, in order."""

    def __init__(self, other: list[list[float]], **mesh: Any) -> None:
        super().__init__(MeshInfo(world_size=2, dp_size=2, **mesh))
        self.other = list(other)
        self.seen: list[list[float]] = []

    @hookimpl
    def rlctl_reduce(self, values: Sequence[float], op: str) -> list[float]:
        self.seen.append(list(values))
        theirs = self.other.pop(0) if self.other else list(values)
        join = {"sum": lambda a, b: a + b, "max": max, "min": min}[op]
        return [join(a, b) for a, b in zip(values, theirs, strict=True)]


def test_the_count_is_the_largest_of_all_ranks() -> None:
    # Reductions in order: longest row and rows scored from their start, then the number of micro-batches.
    engine = built(OneOfTwo([[4, 0], [5]], count_multiple=4))
    micro_batches, groups = engine.micro_batches(batch_of([4, 2]), MicroBatchPlan(max_tokens=4))
    assert len(micro_batches) == len(groups) == 8
    assert [b.is_padding for b in micro_batches] == [False] * 2 + [True] * 6
    assert groups == [[0], [1]] + [[]] * 6


def test_the_token_budget_grows_with_the_sequence_parallel_size() -> None:
    engine = built(ToyTrain(MeshInfo(token_multiplier=2)))
    micro_batches, _ = engine.micro_batches(batch_of([4, 4]), MicroBatchPlan(max_tokens=4))
    assert len(micro_batches) == 1
    micro_batches, _ = engine.micro_batches(batch_of([4, 4]), MicroBatchPlan(max_rows=1))
    assert len(micro_batches) == 2


def test_every_rank_refuses_an_over_long_row() -> None:
    plan = MicroBatchPlan(max_tokens=4)
    with pytest.raises(BatchError, match="another rank has a row longer"):
        built(OneOfTwo([[9, 0]])).micro_batches(batch_of([3]), plan)
    own = OneOfTwo([[3, 0]])
    with pytest.raises(BatchError, match="1 row is longer"):
        built(own).micro_batches(batch_of([9]), plan)
    assert own.seen == [[9, 0]], "this rank took part in the reduction that its peers wait for"


def test_every_rank_refuses_a_first_token_in_the_loss() -> None:
    batch = batch_of([2, 3]).with_items(loss_mask=torch.tensor([False, True, True, True, True]))
    with pytest.raises(BatchError, match="first token") as caught:
        built(OneOfTwo([[3, 0]])).micro_batches(batch, MicroBatchPlan(max_rows=2))
    assert caught.value.found == "rows 1"
    with pytest.raises(BatchError, match="first token") as caught:
        built(OneOfTwo([[3, 1]])).micro_batches(batch_of([2]), MicroBatchPlan(max_rows=2))
    assert caught.value.found == "a row of another rank"


def test_metrics_add_up_over_ranks() -> None:
    # Reductions: global counts, row checks, number of micro-batches, agreement on names, sums, maxima.
    provider = OneOfTwo([[2, 1], [3, 0], [1]])
    engine = built(provider)
    out = engine.train_batch(batch_of([3]), loss, MicroBatchPlan(max_rows=1))
    assert provider.seen[0] == [2.0, 1.0]
    # Two of four scored tokens are here (ids 2 and 3); the other rank, by default, sends the same as this one.
    assert out.loss == pytest.approx(2 * -(2 + 3) / 4)
    assert out.sums["b"] == 2.0
    assert out.maxes == {"top": -2.0}


def test_padding_never_wins_a_maximum() -> None:
    # This rank has no row at all: its padding micro-batch reports 0, which is more than every real value.
    provider = OneOfTwo([[2, 1], [3, 0], [1]])
    out = built(provider).train_batch(batch_of([3]).select([]), loss, MicroBatchPlan(max_rows=1))
    assert "forward [True]" in provider.log
    assert out.maxes == {"top": float("-inf")}


def test_ranks_with_other_metric_names_are_told_so() -> None:
    provider = OneOfTwo([[2, 1], [3, 0], [1], [-5.0, 5.0]])
    with pytest.raises(EngineError, match="metrics of different names") as caught:
        built(provider).train_batch(batch_of([3]), loss, MicroBatchPlan(max_rows=1))
    assert caught.value.found == "a, b, top"


def test_one_output_for_each_micro_batch() -> None:
    class Drops(ToyTrain):
        @hookimpl
        def rlctl_forward_backward(self, micro_batches: Sequence[PackedBatch], loss_fn: Any) -> list[MicroOutput]:
            return [MicroOutput(0.0, {}, {}, {}) for b in micro_batches if not b.is_padding]

    engine = built(Drops(MeshInfo(count_multiple=2)))
    with pytest.raises(EngineError, match="left micro-batches out"):
        engine.train_batch(batch_of([3]), loss, MicroBatchPlan(max_rows=1))


def test_the_facade_calls_hooks_completely() -> None:
    """pluggy only warns about a keyword that a call leaves out; here such a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = built()
        batch = batch_of([3, 2])
        engine.train_batch(batch, loss, MicroBatchPlan(max_rows=1))
        engine.infer_batch(batch, MicroBatchPlan(max_rows=1))
        engine.eval_loss(batch, loss, MicroBatchPlan(max_rows=1), "seq-mean-token-sum-norm", norm_length=4)
        list(engine.export_weights("float32"))
        engine.move("cpu", "model")
        engine.set_mode(True)
        engine.save_state("x")  # type: ignore[arg-type]
        engine.load_state("x")  # type: ignore[arg-type]
        engine.forward_backward([padding_like(batch)], lambda r, b: LossOutput(torch.tensor(0.0)), forward_only=True)
        engine.release("weights")
        engine.resume("weights")
        engine.shutdown()


def test_load_target_imports_by_name() -> None:
    assert load_target("rlctl.topology:Topology") is Topology
    with pytest.raises(ModuleNotFoundError):
        load_target("rlctl.no_such_module:X")
    with pytest.raises(AttributeError):
        load_target("rlctl.topology:NoSuchClass")
