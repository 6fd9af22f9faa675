"""Algorithms by name: rlctl's own table, a plugin's record, a user's function, and what is refused before a run."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.algorithms.calling import _PARAMETERS, call_advantages, call_policy_loss, settings_of
from rlctl.algorithms.lookup import BUILTIN, Algorithm, builtin, find
from rlctl.algorithms.table import ADVANTAGES, COSTLY, POLICY_LOSSES
from rlctl.config.schema import RunConfig
from rlctl.config.schema_algorithm import AlgorithmConfig, PolicyLossConfig
from rlctl.errors import AlgorithmError, ConfigError
from rlctl.records import AlgorithmKind, AlgorithmSpec
from rlctl.runtime.wire import decode, encode
from rlctl.trainers.algorithms import find_algorithms

ADVANTAGE, LOSS = AlgorithmKind.ADVANTAGE, AlgorithmKind.POLICY_LOSS
ALL = [(kind, name) for kind, table in BUILTIN.items() for name in table]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_record_says_what_the_signature_says(kind: AlgorithmKind, name: str) -> None:
    algorithm = builtin(kind, name)
    section = AlgorithmConfig if kind is ADVANTAGE else PolicyLossConfig
    taken = set(algorithm.parameters()) | (set() if algorithm.chooser is None else set(algorithm.chooser.parameters()))
    keys = {key for key in section.model_fields if _PARAMETERS.get(key, key) in taken}
    assert keys == set(algorithm.spec.settings)
    assert set(algorithm.spec.needs) == {need for need in COSTLY if kind is ADVANTAGE and algorithm.takes(need)}
    # Without a setting the section gives nothing, so that the signature's default holds, but what has a value of its own.
    given = settings_of(algorithm, section())
    assert set(given) == {_PARAMETERS.get(k, k) for k in keys if getattr(section(), k) is not None}
    for key, value in given.items():
        assert algorithm.parameters()[key].default == value


def test_the_table_imports_no_torch_and_no_algorithm() -> None:
    code = (
        "import sys, rlctl.config.schema, rlctl.algorithms.lookup\n"
        "print('torch' in sys.modules, any(m.startswith('rlctl.algorithms.policy_losses') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_an_algorithm_travels_to_the_ranks() -> None:
    for kind, name in ALL:
        algorithm = builtin(kind, name)
        assert decode(*encode(algorithm)) == algorithm


# ---- a user's function ------------------------------------------------------------------------------------------------
OWN = """
import torch
from helper import HALF

def centred(scores, groups, *, scale=1.0):
    return scale * (scores - scores.mean())

def by_greedy(scores, greedy_scores):
    return scores - greedy_scores

def plain(log_probs, advantages):
    return -HALF * advantages * log_probs

def one_number(log_probs, advantages):
    return (-advantages * log_probs).mean()

def no_gradient(log_probs, advantages):
    return -advantages * log_probs.detach()

def asks_for_more(log_probs, stars):
    return log_probs

def raises(log_probs):
    return log_probs / [][0]

def text(scores):
    return "high"

def not_finite(scores):
    return scores / 0.0
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("HALF = 0.5\n")
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def config(**sections: Any) -> RunConfig:
    values = {"model": {"path": "m"}, "data": {"task": {"name": "sum"}}, **sections}
    return RunConfig.model_validate(values)


def test_a_function_of_ones_own_is_called_with_what_it_names(own: Path) -> None:
    found = find_algorithms(
        config(
            algorithm={"adv_estimator": f"{own}:centred", "adv_args": {"scale": 2.0}},
            actor={"policy_loss": {"loss_mode": f"{own}:plain"}},
        ),
        None,
    )
    advantage, loss = found[ADVANTAGE], found[LOSS]
    assert not advantage.spec.needs
    assert not loss.spec.vanishes, "nobody knows, so no row is left out"
    scores, rows, mask = torch.tensor([1.0, 3.0]), torch.tensor([0, 0, 1]), torch.tensor([False, True, True])
    section = AlgorithmConfig(adv_args={"scale": 2.0})
    got = call_advantages(advantage, section, {"scores": scores, "groups": rows, "mask": mask}, rows, mask)
    assert got["advantages"].tolist() == [0.0, -2.0, 2.0]
    lp = torch.tensor([-1.0, -2.0, -3.0])
    out = call_policy_loss(loss, PolicyLossConfig(), {"log_probs": lp, "advantages": torch.ones(3)}, 3)
    assert out.loss.tolist() == [0.5, 1.0, 1.5]
    assert decode(*encode(loss)) == loss
    needs = find(ADVANTAGE, f"{own}:by_greedy", None).spec.needs
    assert needs == ("greedy_scores",)


REFUSED = [
    ("actor", "one_number", "no loss of each token", r"a tensor of shape \(\)"),
    ("actor", "no_gradient", "has no gradient", "does not depend on log_probs"),
    ("actor", "asks_for_more", "cannot be called", "it needs stars"),
    ("actor", "raises", "failed", r"IndexError: .* \(line 24\)"),
    ("actor", "plane", "has no function 'plane'", "plain"),
    ("algorithm", "text", "returned no advantages", "str"),
    ("algorithm", "not_finite", "returned no advantages", "not finite"),
]


@pytest.mark.parametrize(("section", "function", "what", "found"), REFUSED)
def test_a_fault_of_ones_own_function_shows_before_a_model_is_loaded(
    own: Path, section: str, function: str, what: str, found: str
) -> None:
    name = f"{own}:{function}"
    chosen = {"policy_loss": {"loss_mode": name}} if section == "actor" else {"adv_estimator": name}
    with pytest.raises(AlgorithmError, match=what) as caught:
        find_algorithms(config(**{section: chosen}), None)
    assert re.search(found, str(caught.value)), caught.value
    assert caught.value.next


def test_arguments_that_a_function_does_not_take_are_refused(own: Path) -> None:
    with pytest.raises(AlgorithmError, match="cannot be called") as caught:
        find_algorithms(config(algorithm={"adv_estimator": f"{own}:centred", "adv_args": {"size": 1}}), None)
    assert "it does not take size" in str(caught.value)


@pytest.mark.parametrize("fault", ["def broken(:\n", "import nothing_of_this_name\n", "raise RuntimeError('no')\n"])
def test_a_file_that_does_not_load_is_named(own: Path, fault: str) -> None:
    own.write_text(fault)
    with pytest.raises(AlgorithmError, match="does not load") as caught:
        find(LOSS, f"{own}:plain", None).function()
    assert str(own) in str(caught.value)
    assert "(line 1)" in str(caught.value)


def test_a_file_that_changed_or_went_is_refused_on_the_rank(own: Path) -> None:
    algorithm = find(LOSS, f"{own}:plain", None)
    own.write_text(OWN + "\n")
    with pytest.raises(AlgorithmError, match="not the one that the run began with"):
        algorithm.function()
    own.unlink()
    with pytest.raises(AlgorithmError, match="cannot be read") as caught:
        algorithm.function()
    assert "on every host" in str(caught.value)


def test_a_module_s_function_is_found_by_its_name() -> None:
    found = find(LOSS, "rlctl.algorithms.policy_losses.gpg:gpg_policy_loss", None)
    assert found.function() is builtin(LOSS, "gpg").function()


# ---- a plugin's record ------------------------------------------------------------------------------------------------
class Plugins:
    """What two dists declare."""

    def __init__(self, *records: tuple[str, AlgorithmSpec]) -> None:
        self._records = records

    def records(self, hook: str) -> list[tuple[str, AlgorithmSpec]]:
        assert hook == "rlctl_algorithms"
        return list(self._records)


def test_a_plugin_s_record_is_a_name(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own.parent))
    plugins: Any = Plugins(("dist-a", AlgorithmSpec("mine", LOSS, "own:plain", vanishes=True)))
    found = find_algorithms(config(actor={"policy_loss": {"loss_mode": "mine"}}), plugins)[LOSS]
    assert (found.dist, found.spec.vanishes) == ("dist-a", True)
    with pytest.raises(ConfigError, match="there is no policy loss 'mien'") as caught:
        find(LOSS, "mien", plugins)
    assert "did you mean 'mine'?" in str(caught.value)
    with pytest.raises(ConfigError, match="there is no advantage estimator 'mine'"):
        find(ADVANTAGE, "mine", plugins)
    twice: Any = Plugins(("dist-a", AlgorithmSpec("gspo", LOSS, "own:plain")))
    with pytest.raises(ConfigError, match="two distributions claim the policy loss 'gspo'"):
        find(LOSS, "gspo", twice)
    gone: Any = Plugins(("dist-a", AlgorithmSpec("gone", LOSS, "no_such_module:f")))
    with pytest.raises(AlgorithmError, match="does not load") as lost:
        find(LOSS, "gone", gone)
    assert "pip install --upgrade dist-a" in str(lost.value)


def test_the_hook_collects_records(here) -> None:
    from rlctl.plugins import load_plugins

    light = (
        "from rlctl.hookspecs import hookimpl\nfrom rlctl.records import AlgorithmKind, AlgorithmSpec\n\n\n"
        "@hookimpl\ndef rlctl_algorithms():\n    yield AlgorithmSpec('mine', AlgorithmKind.POLICY_LOSS, 'm:f')\n"
    )
    here.add("rlctl-mine", "mine", "mine_light", mine_light=light)
    assert [(d, r.name) for d, r in load_plugins().records("rlctl_algorithms")] == [("rlctl-mine", "mine")]


# ---- what is refused --------------------------------------------------------------------------------------------------
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": {"adv_estimator": "rloo"}, "rollout": {"n": 1}}, "rloo compares the samples of one prompt"),
    ({"actor": {"policy_loss": {"tau_pos": 2.0}}}, "vanilla does not read it (sapo does)"),
    (
        {"actor": {"policy_loss": {"loss_mode": "gpg", "clip_ratio_high": 0.3}}},
        "gpg does not read it (vanilla, gspo, cispo, clip_cov, geo_mean, dppo_tv, dppo_kl do)",
    ),
    ({"algorithm": {"gamma": 0.9}}, "grpo does not read it"),
    (
        {"algorithm": {"adv_estimator": "rloo", "norm_adv_by_std_in_grpo": False}},
        "algorithm.norm_adv_by_std_in_grpo is False, and rloo does not read it",
    ),
    ({"algorithm": {"adv_args": {"a": 1}}}, "for a function of your own, and grpo takes none"),
    (
        {
            "algorithm": {"adv_estimator": "optimal_token_baseline"},
            "actor": {"policy_loss": {"loss_mode": "geo_mean"}},
        },
        "geo_mean has one advantage a row",
    ),
    (
        {"distillation": {"loss_mode": "k3"}, "algorithm": {"adv_estimator": "remax"}},
        "nothing learns from its advantages",
    ),
    (
        {"distillation": {"loss_mode": "k3"}, "actor": {"policy_loss": {"loss_mode": "sapo"}}},
        "has no policy loss without",
    ),
    (
        {"distillation": {"loss_mode": "k1"}, "actor": {"policy_loss": {"loss_mode": "kl_cov"}}},
        "is a reward at each token, which kl_cov cannot take",
    ),
]


@pytest.mark.parametrize(("sections", "words"), FAULTS)
def test_combinations_that_make_no_sense_are_refused(sections: dict[str, Any], words: str) -> None:
    teacher = {"teacher": {"model": {"path": "t"}}} if "distillation" in sections else {}
    with pytest.raises(ValueError, match="validation error") as caught:
        config(**sections, **teacher)
    assert words in str(caught.value)


def test_what_makes_sense_is_taken() -> None:
    for name, spec in ADVANTAGES.items():
        if "values" not in spec.needs:
            made = config(algorithm={"adv_estimator": name}, rollout={"n": 2 if spec.groups else 1})
            assert made.algorithm.adv_estimator == name
    for name in POLICY_LOSSES:
        assert config(actor={"policy_loss": {"loss_mode": name}}).actor.policy_loss.loss_mode == name
    taught = {"distillation": {"loss_mode": "k1"}, "teacher": {"model": {"path": "t"}}}
    assert config(**taught, actor={"policy_loss": {"loss_mode": "gspo"}}).distillation is not None


def test_every_function_has_a_docstring_and_its_paper() -> None:
    for kind, name in ALL:
        algorithm = builtin(kind, name)
        assert inspect.getdoc(algorithm.function())
        assert algorithm.spec.summary
        number = algorithm.spec.paper.removeprefix("arXiv ")
        module = sys.modules[algorithm.spec.target.partition(":")[0]]
        assert number in (module.__doc__ or ""), name
    assert isinstance(builtin(LOSS, "vanilla"), Algorithm)
