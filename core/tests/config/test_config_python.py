"""Interpreters of roles and pools: what a role's own is short for, and what does not fit together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from rlctl.config.document import Document, Origin
from rlctl.config.placement import place_roles, python_of
from rlctl.config.schema import RunConfig

BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train_files": ["rows.jsonl"]}}


def placed(**sections: Any) -> RunConfig:
    """The configuration that a file with these sections comes to."""
    document = Document(copy.deepcopy({**BASE, **sections}), {(): Origin("file", "run.yaml", 1)})
    place_roles(document)
    return RunConfig.model_validate(document.data)


def pools(config: RunConfig) -> dict[str, tuple[int, str | None]]:
    return {name: (pool.nproc, pool.python) for name, pool in config.runtime.pools.items()}


def test_a_role_alone_gets_a_pool_under_its_own_name() -> None:
    config = placed(rollout={"python": "/v"})
    assert pools(config) == {"rollout": (1, "/v")}
    assert config.roles_used() == {"actor": "main", "rollout": "rollout"}
    assert config.runtime.chosen_launcher() == "process"


def test_a_pool_of_that_name_is_its_and_keeps_its_size() -> None:
    assert pools(placed(rollout={"python": "/v"}, runtime={"pools": {"rollout": {"nproc": 3}}})) == {
        "rollout": (3, "/v")
    }
    named = placed(rollout={"python": "/v", "pool": "gen"}, runtime={"pools": {"gen": {"nproc": 2}}})
    assert pools(named) == {"gen": (2, "/v")}
    assert pools(placed(rollout={"python": "/v", "pool": "rollout"})) == {"rollout": (1, "/v")}


def test_the_pool_is_the_one_place() -> None:
    config = placed(rollout={"pool": "gen"}, runtime={"pools": {"gen": {"python": "/v"}}})
    assert config.runtime.python_of("gen") == "/v"
    assert config.rollout.python is None
    whole = placed(runtime={"python": "/v"})
    assert (whole.runtime.python_of("main"), whole.runtime.chosen_launcher()) == ("/v", "process")


def test_a_pool_that_nobody_sized_holds_the_axes() -> None:
    assert pools(placed(rollout={"python": "/v", "parallel": {"tp": 2, "dp_replicate": 2}}))["rollout"][0] == 4
    moe = {"python": "/v", "parallel": {"ep": 4, "tp": 2}}
    assert pools(placed(rollout=moe))["rollout"][0] == 4
    kl = {"use_kl_loss": True, "parallel": {"usp": 2, "dp_replicate": 2}}
    assert pools(placed(actor=kl, runtime={"nproc": 4}, ref={"python": "/v"}))["ref"][0] == 2, "the actor's, without dp"
    own = {"python": "/v", "backend": "other"}
    assert pools(placed(actor=kl, runtime={"nproc": 4}, ref=own))["ref"][0] == 1


def test_an_actor_takes_its_ranks_and_its_followers_along() -> None:
    config = placed(actor={"python": "/v", "use_kl_loss": True}, runtime={"nproc": 2})
    assert pools(config) == {"actor": (2, "/v")}
    assert config.roles_used() == {"actor": "actor", "rollout": "main", "ref": "actor"}
    alone = placed(actor={"python": "/v"}, runtime={"nproc": 2}, trainer={"type": "sft"})
    assert alone.pools_used() == {"actor": 2}


def test_roles_of_one_pool_have_one_interpreter() -> None:
    both = {"runtime": {"pools": {"x": {}}}, "rollout": {"pool": "x", "python": "/v"}}
    with pytest.raises(ValidationError, match=r"rollout\.python is /v, and the processes of its pool, x, run in /w"):
        placed(**both, ref={"pool": "x", "python": "/w"})
    assert pools(placed(**both, ref={"pool": "x", "python": "/v"})) == {"x": (1, "/v")}
    assert pools(placed(**both, ref={"pool": "x"})) == {"x": (1, "/v")}
    with pytest.raises(ValidationError, match=r"run in /w: rollout\.pool=rollout gives it"):
        placed(rollout={"pool": "x", "python": "/v"}, runtime={"pools": {"x": {"python": "/w"}}})


def test_the_main_pool_is_not_moved_by_one_of_its_roles() -> None:
    """As a run writes its configuration down, with every default: the actor lives there too."""
    written = {"rollout": {"pool": "main", "python": "/v"}}
    with pytest.raises(ValidationError, match=r"pool, main, run in this interpreter: rollout\.pool=rollout gives it"):
        placed(**written)
    assert placed(**written, runtime={"python": "/v"}).runtime.python_of("main") == "/v"


def test_what_is_no_name_is_left_to_the_schema() -> None:
    for sections in (
        {"rollout": {"python": 3}},
        {"rollout": {"python": "/v", "pool": 3}},
        {"rollout": {"python": "/v"}, "runtime": {"pools": 3}},
        {"rollout": {"python": "/v"}, "runtime": {"pools": {"rollout": 3}}},
        {"rollout": {"python": "/v", "pool": "gone"}},
    ):
        with pytest.raises(ValidationError):
            placed(**sections)


@pytest.mark.parametrize("where", [{"rollout": {"python": "/v"}}, {"runtime": {"python": "/v"}}])
def test_the_inline_launcher_has_one_interpreter(where: dict[str, Any]) -> None:
    sections = {"runtime": {}, **where}
    sections["runtime"] = {**sections["runtime"], "launcher": "inline"}
    with pytest.raises(ValidationError, match=r"one interpreter, and pool \w+ has another: take python out"):
        placed(**sections)


def test_the_interpreter_of_a_role_is_that_of_its_pool() -> None:
    document = Document({"runtime": {"pools": {"x": {"python": "/v"}}}, "actor": {"pool": "x"}})
    assert python_of(document, "ref") == ("/v", ("runtime", "pools", "x", "python"))
    assert python_of(document, "rollout") is None
    document = Document({"rollout": {"python": "/w"}})
    place_roles(document)
    assert python_of(document, "rollout") == ("/w", ("rollout", "python"))
