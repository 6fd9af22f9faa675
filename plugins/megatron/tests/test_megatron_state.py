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
from megatron_tiny import CONFIGS, VOCAB, engine_on, exported, one_step, rows, run_ranks, save_model

from rlctl.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
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
        "another model": ("cannot be read", "resume with the model"),
    }[name]
    for _, read in ranks:
        for part in words:
            assert part in read[name]


# ---- one rank ----------------------------------------------------------------------------------------------------
def _saved(tmp_path: Path) -> Path:
    with engine_on(CONFIGS["llama"], optim=ADAMW) as engine:
        one_step(engine, rows())
        engine.save_state(tmp_path / "state")
    return tmp_path / "state"


def _cut(name: str) -> Callable[[Path], None]:
    def cut(state: Path) -> None:
        (file,) = state.glob(name)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return cut


def _remove(name: str) -> Callable[[Path], None]:
    return lambda state: next(iter(sorted(state.glob(name)))).unlink()


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
}


def test_damaged_checkpoints_are_refused_in_words(tmp_path) -> None:
    whole = _saved(tmp_path)
    names = sorted(p.name for p in whole.iterdir())
    with engine_on(CONFIGS["llama"], optim=ADAMW) as engine:
        for name, damage in DAMAGE.items():
            state = tmp_path / "damaged"
            shutil.copytree(whole, state)
            damage(state)
            with pytest.raises(CheckpointError) as error:
                engine.load_state(state)
            assert error.value.what, (name, names)
            shutil.rmtree(state, ignore_errors=True)
        engine.load_state(whole)


def test_moments_that_a_checkpoint_lacks_are_missed(tmp_path) -> None:
    with engine_on(CONFIGS["llama"], optim=ADAMW) as engine:
        engine.save_state(tmp_path / "fresh")
        one_step(engine, rows())
        numbers = tmp_path / "fresh" / "engine.json"
        numbers.write_text(json.dumps(json.loads(numbers.read_text()) | {"has_moments": True}))
        with pytest.raises(CheckpointError, match="cannot be read"):
            engine.load_state(tmp_path / "fresh")


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


def test_a_refused_checkpoint_changes_no_weight(tmp_path) -> None:
    whole = _saved(tmp_path)
    with engine_on(CONFIGS["llama"], optim={"name": "sgd"}) as engine:
        before = exported(engine)
        with pytest.raises(CheckpointError, match="another optimizer"):
            engine.load_state(whole)
        assert all(torch.equal(t, before[n]) for n, t in exported(engine).items())
