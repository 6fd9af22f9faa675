"""Dotted overrides: YAML-typed values, list items, quoting, and what cannot be set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.document import Document, Origin, PlaceError, dotted
from rlctl.config.load import load_config
from rlctl.config.overrides import parse_key
from rlctl.config.problems import InvalidConfigError
from rlctl.config.yaml_dump import dump, dump_inline
from rlctl.config.yaml_source import parse, parse_value
from rlctl.plugins import PluginSet

Write = Callable[..., str]

BASE = (
    "model: {path: org/tiny}\ndata: {task: {name: sort_digits, args: {length: 4}}}\n"
    "actor: {backend: plain}\nrollout: {backend: sampler}\n"
    "reward: {components: [{name: exact_match}, {name: regex, args: {pattern: a}}]}\n"
)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("actor.optim.lr=1e-6", "actor.optim.lr", 1e-6),
        ("actor.optim.lr=2", "actor.optim.lr", 2.0),
        ("actor.optim.betas=[0.5,0.9]", "actor.optim.betas", (0.5, 0.9)),
        ("actor.use_kl_loss=true", "actor.use_kl_loss", True),
        ("actor.ppo_mini_batch_size=null", "actor.ppo_mini_batch_size", None),
        ("rollout.stop=[a, 'b c', \"\\n\"]", "rollout.stop", ("a", "b c", "\n")),
        ("rollout.stop=END", "rollout.stop", ("END",)),
        ("trainer.logger=[]", "trainer.logger", ()),
        ("trainer.experiment_name=123", "trainer.experiment_name", "123"),
        ("trainer.experiment_name=1e-6", "trainer.experiment_name", "1e-6"),
        ("trainer.experiment_name='null'", "trainer.experiment_name", "null"),
        ("trainer.experiment_name=null", "trainer.experiment_name", None),
        ("data.system_prompt=Answer: be short # really", "data.system_prompt", "Answer: be short # really"),
        ("data.prompt_template=Q: {prompt}\nA:", "data.prompt_template", "Q: {prompt}\nA:"),
        ('data.prompt_template="{prompt}\\n"', "data.prompt_template", "{prompt}\n"),
        ("data.system_prompt=a=b", "data.system_prompt", "a=b"),
        ("reward.components[1].weight=0.5", "reward.components.1.weight", 0.5),
        ("reward.components.0.weight=2", "reward.components.0.weight", 2.0),
        ("reward.components[1].args.pattern=[0-9]+", "reward.components.1.args.pattern", "[0-9]+"),
        ("data.task.args.length=7", "data.task.args.length", 7),
        ("warm_start.steps=5", "warm_start.steps", 5),
        ("warm_start={steps: 6, batch_size: 2}", "warm_start.batch_size", 2),
    ],
)
def test_values(override: str, path: str, value: object, plugins: PluginSet, run_file: Write) -> None:
    if "pattern=" in override:
        override = override.replace("[0-9]+", "'[0-9]+'")
    here: Any = load_config(run_file(BASE), [override], plugins=plugins).config
    for part in path.split("."):
        here = here[int(part)] if part.isdecimal() else here[part] if isinstance(here, dict) else getattr(here, part)
    assert here == value
    assert type(here) is type(value)


def test_of_two_overrides_the_later_one_wins(plugins: PluginSet, run_file: Write) -> None:
    resolved = load_config(run_file(BASE), ["trainer.seed=1", "trainer.seed=2"], plugins=plugins)
    assert resolved.config.trainer.seed == 2
    assert resolved.origins["trainer.seed"] == "override trainer.seed=2"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.optim.lr", "no value is given. Write actor.optim.lr=VALUE"),
        ("=3", "is no dotted key"),
        ("+actor.optim.lr=3", "without + or ~ in front"),
        ("actor..lr=3", "is no dotted key"),
        ("[0]=3", "is no dotted key"),
        ("actor.optim.lr.x=3", "actor.optim.lr.x"),
        ("model.path.x=3", "model.path cannot be gone into, found the text 'org/tiny', wanted a section"),
        ("reward.components[9].weight=1", "wanted an index from 0 to 1"),
        ("actor[0]=1", "actor cannot be gone into, found a mapping with backend, wanted a list"),
        ("trainer.seed=[1", "the value is no YAML"),
        ("trainer.seed=*a", "the value is no YAML"),
        ("trainer.seed=!!python/name:os.x 1", "the value is no YAML"),
        ("trainer.experiment_name=\udcff", "not UTF-8"),
        ("reward.components[99999999999].x=1", "is no dotted key"),
    ],
)
def test_what_cannot_be_set(override: str, words: str, plugins: PluginSet, run_file: Write) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(run_file(BASE), [override], plugins=plugins)
    assert words in str(caught.value)
    assert "override" in caught.value.problems[0].origin


KEYS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
    | st.sampled_from(
        ["1e-6", "yes", "~", "<<", "0o7", ".5", "1_0", "+1", "-", "? a", "# c", "2020-01-01", "1:30", "=", "null"]
    )
)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=4))
def test_whatever_is_dumped_is_read_back_as_it_was(data: dict[str, Any]) -> None:
    document, problems = parse(dump(data), "x.yaml")
    assert problems == []
    assert document.data == data
    assert parse_value(dump_inline(data)) == data


@given(
    st.lists(
        st.sampled_from(["actor", "optim", "a_b", "x y", "a.b", "[0]"]) | st.integers(0, 99), min_size=1, max_size=4
    )
)
def test_a_dotted_place_is_read_back(parts: list[str | int]) -> None:
    loc = ("top", *parts)
    assert parse_key(dotted(loc)) == loc


def test_setting_a_value_forgets_the_origins_below_it() -> None:
    document, _ = parse("a: {b: {c: 1, d: [1, {e: 2}]}}\n", "x.yaml")
    document.set(("a", "b"), {"f": 3}, Origin("override", "override a.b={f: 3}"))
    assert document.data == {"a": {"b": {"f": 3}}}
    assert {dotted(loc): str(origin) for loc, origin in document.origins.items()} == {
        "": "x.yaml:1",
        "a": "x.yaml:1",
        "a.b": "override a.b={f: 3}",
        "a.b.f": "override a.b={f: 3}",
    }
    with pytest.raises(PlaceError):
        document.set(("a", "b", "f", "g"), 1, Origin("flag", "flag --x"))
    assert Document({}).get(("a", 0), "none") == "none"
