"""Save and resume in fresh processes, at the same and at other sizes of the axes, and what cannot be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_state_ranks import ADAMW, READ, REFUSED
from megatron_tiny import CONFIGS, VOCAB, engine_on, exported, one_step, provider, rows, run_ranks, save_model

from rlctl.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from rlctl.engine import Engine
from rlctl.errors import CheckpointError
from rlctl.rundir import RunDirectory


# ---- two ranks, and two others -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(what wrote, what read) of each rank; every checkpoint is read by processes that did not write it."""
    scratch = tmp_path_factory.mktemp("state")
    for name in ("llama", "llama-tied", "qwen2", "qwen3-moe"):
        save_model(scratch / name, CONFIGS[name])
        save_model(scratch / f"{name}-other", CONFIGS[name], seed=12)
    save_model(scratch / "qwen2-value", CONFIGS["qwen2"], value=True)
    save_model(scratch / "qwen2-value-other", CONFIGS["qwen2"], value=True, seed=12)
    run_ranks("megatron_state_ranks.py", "write", scratch)
    run_ranks("megatron_state_ranks.py", "read", scratch)
    return [(torch.load(scratch / f"write{rank}.pt"), torch.load(scratch / f"read{rank}.pt")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_other_processes_take_the_next_step(ranks, name) -> None:
    written, _ = READ[name]
    for wrote, read in ranks:
        wanted, found = wrote[written], read[name]
        assert list(found["saved"]) == list(wanted["saved"])
        for weight, value in wanted["saved"].items():
            assert torch.equal(found["saved"][weight], value), weight
        same = name == f"{written} at {written.partition('-')[0]}"
        assert found["step"] == pytest.approx(wanted["step"], rel=1e-6 if same else 1e-5)
        for weight, value in wanted["after"].items():
            off = float((found["after"][weight] - value).abs().max())
            # AdamW's third step turns rounding of a gradient near zero into some part of the rate.
            assert off <= (0.0 if same else 1e-4), weight
        assert any(not torch.equal(wanted["after"][w], v) for w, v in wanted["saved"].items())


def test_the_vocabulary_of_these_checkpoints_is_filled_in_other_ways() -> None:
    assert VOCAB % 2, "rows that only fill are at the end of tp's second rank, and nowhere else"


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_other_ranks_cannot_read_is_refused_in_words(ranks, name) -> None:
    words = {
        "sharded moments at tp2": ("same model parallel sizes", "tp=2", "distributed_optimizer=never"),
        "sharded moments, whole here": ("different files", "distributed_optimizer=always"),
        "whole moments, sharded here": ("different files", "distributed_optimizer=never"),
        "another optimizer": ("another optimizer", "actor.optim.name=adamw"),
        "another model": ("another model wrote", "a llama language_model", "a qwen2 language_model, as here"),
    }[name]
    for _, read in ranks:
        for part in words:
            assert part in read[name]


# ---- one rank ----------------------------------------------------------------------------------------------------
def _saved(tmp_path: Path, **settings: Any) -> Path:
    with engine_on(CONFIGS["llama"], optim=ADAMW, **settings) as engine:
        one_step(engine, rows())
        engine.save_state(tmp_path / "state")
    return tmp_path / "state"


def _alive(engine: Engine) -> dict[str, Any]:
    """Everything of an engine that a checkpoint could change, copied."""
    stepper = provider(engine)._stepper
    found: dict[str, Any] = {"num_steps": stepper.num_steps, "random": torch.get_rng_state(), **exported(engine)}
    for p, part in enumerate(stepper.parts()):
        for g, group in enumerate(part.optimizer.param_groups):
            found[f"{p}.{g}"] = {k: v for k, v in group.items() if k != "params"}
            for w, weight in enumerate(group["params"]):
                state = part.optimizer.state.get(weight, {})
                found[f"{p}.{g}.{w}"] = {k: torch.as_tensor(v).clone() for k, v in state.items()}
    return found


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        return a == b

    return [
        k for k in found.keys() | wanted.keys() if k not in found or k not in wanted or not same(found[k], wanted[k])
    ]


def _cut(name: str) -> Callable[[Path], None]:
    def cut(state: Path) -> None:
        (file,) = state.glob(name)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return cut


def _spoil(name: str) -> Callable[[Path], None]:
    """The file keeps its length, and its second half becomes something else."""

    def spoil(state: Path) -> None:
        (file,) = state.glob(name)
        half = file.stat().st_size // 2
        file.write_bytes(file.read_bytes()[:half] + b"\xff" * (file.stat().st_size - half))

    return spoil


def _remove(name: str) -> Callable[[Path], None]:
    return lambda state: next(iter(sorted(state.glob(name)))).unlink()


def _say(**numbers: Any) -> Callable[[Path], None]:
    """Other numbers in engine.json."""

    def say(state: Path) -> None:
        file = state / "engine.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | numbers))

    return say


DAMAGE: dict[str, Callable[[Path], object]] = {
    "everything is missing": lambda state: shutil.rmtree(state),
    "no numbers": _remove("engine.json"),
    "half the numbers": _cut("engine.json"),
    "numbers of something else": lambda state: (state / "engine.json").write_text(json.dumps({"num_steps": 1})),
    "numbers that are a list": lambda state: (state / "engine.json").write_text("[]"),
    "no random state": _remove("rng_*"),
    "half a random state": _cut("rng_*"),
    "no description": _remove(".metadata"),
    "half a description": _cut(".metadata"),
    "no kind of file": _remove("metadata.json"),
    "half a kind of file": _cut("metadata.json"),
    "no common part": _remove("common.pt"),
    "half a common part": _cut("common.pt"),
    "no weights": _remove("*.distcp"),
    "half the weights": _cut("__0_0.distcp"),
    "other bytes as weights": _spoil("__0_0.distcp"),
}
OTHERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "dtype": (_say(param_dtype="bfloat16"), ("bfloat16", "float32, as here", "actor.engine.param_dtype=bfloat16")),
    "head": (_say(model_type="value_model"), ("a llama value_model", "a llama language_model, as here")),
    "family": (_say(model_family="qwen3"), ("a qwen3 language_model", "a llama language_model, as here")),
    "optimizer": (_say(optimizer="sgd"), ("another optimizer", "sgd", "adamw", "actor.optim.name=sgd")),
    "steps in words": (_say(num_steps="one"), ("no complete checkpoint", "num_steps")),
    "moments": (_say(sharded_moments=True), ("different files", "distributed_optimizer=always")),
}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole moments": (2, {}),
    "no moments yet": (0, {}),
    "sharded moments": (2, {"distributed_optimizer": "always"}),
    "no sharded moments yet": (0, {"distributed_optimizer": "always"}),
}
"""name -> (steps that were made before, settings)."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_changes_nothing(tmp_path, kind) -> None:
    steps, settings = KINDS[kind]
    whole = _saved(tmp_path, **settings)
    with engine_on(CONFIGS["llama"], optim=ADAMW, **settings) as engine:
        for number in range(steps):
            one_step(engine, rows(seed=number))
        before = _alive(engine)
        for name, damage in DAMAGE.items():
            state = tmp_path / "damaged"
            shutil.copytree(whole, state)
            damage(state)
            with pytest.raises(CheckpointError) as error:
                engine.load_state(state)
            assert error.value.found, name
            assert not _differences(_alive(engine), before), name
            shutil.rmtree(state, ignore_errors=True)
        went_on = one_step(engine, rows(seed=7))
        found = exported(engine)
        engine.load_state(whole)
        assert _differences(_alive(engine), before), "a whole one is read, and seen by this comparison"
    with engine_on(CONFIGS["llama"], optim=ADAMW, **settings) as engine:
        for number in range(steps):
            one_step(engine, rows(seed=number))
        untouched = one_step(engine, rows(seed=7))
        assert went_on.grad_norm == untouched.grad_norm
        assert all(torch.equal(t, found[n]) for n, t in exported(engine).items())


def test_what_something_else_wrote_is_refused_in_words_of_both(tmp_path) -> None:
    whole = _saved(tmp_path)
    with engine_on(CONFIGS["llama"], optim=ADAMW) as engine:
        before = _alive(engine)
        for name, (change, words) in OTHERS.items():
            state = tmp_path / "other"
            shutil.copytree(whole, state)
            change(state)
            with pytest.raises(CheckpointError) as error:
                engine.load_state(state)
            assert all(word in str(error.value) for word in words), (name, str(error.value))
            assert not _differences(_alive(engine), before), name
            shutil.rmtree(state)


def test_a_checkpoint_says_what_wrote_it(tmp_path) -> None:
    numbers = json.loads((_saved(tmp_path) / "engine.json").read_text())
    assert (numbers["model_family"], numbers["model_type"]) == ("llama", "language_model")
    assert (numbers["param_dtype"], numbers["optimizer"], numbers["num_steps"]) == ("float32", "adamw", 1)


def test_another_size_of_the_same_family_changes_nothing(tmp_path) -> None:
    whole = _saved(tmp_path)
    with engine_on({**CONFIGS["llama"], "intermediate_size": 64}, optim=ADAMW) as engine:
        one_step(engine, rows())
        before = _alive(engine)
        with pytest.raises(CheckpointError, match="cannot be read"):
            engine.load_state(whole)
        assert not _differences(_alive(engine), before)


def test_moments_that_a_checkpoint_lacks_are_missed(tmp_path) -> None:
    with engine_on(CONFIGS["llama"], optim=ADAMW) as engine:
        engine.save_state(tmp_path / "fresh")
        one_step(engine, rows())
        before = _alive(engine)
        _say(has_moments=True, num_steps=1)(tmp_path / "fresh")
        with pytest.raises(CheckpointError, match="cannot be read"):
            engine.load_state(tmp_path / "fresh")
        assert not _differences(_alive(engine), before)


def test_a_checkpoint_of_the_start_takes_the_moments_away(tmp_path) -> None:
    with engine_on(CONFIGS["llama"], optim=ADAMW) as engine:
        engine.save_state(tmp_path / "fresh")
        first = [one_step(engine, rows(seed=s)) for s in (0, 1)]
        after = exported(engine)
        engine.load_state(tmp_path / "fresh")
        again = [one_step(engine, rows(seed=s)) for s in (0, 1)]
        assert [a.grad_norm for a in again] == [a.grad_norm for a in first]
        assert all(torch.equal(t, after[n]) for n, t in exported(engine).items())


def test_core_refuses_another_number_of_ranks(tmp_path) -> None:
    run = RunDirectory(tmp_path / "run")
    with engine_on(CONFIGS["llama"], optim=ADAMW) as engine:
        checkpoint = save_checkpoint(run, 1, engine, {}, keep=1)
        load_checkpoint(checkpoint, engine)
        manifest = checkpoint.path / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"world_size": 2}))
        other = latest_checkpoint(run.path)
        assert other is not None
        with pytest.raises(CheckpointError, match="another number of ranks"):
            load_checkpoint(other, engine)
