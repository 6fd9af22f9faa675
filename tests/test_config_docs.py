"""docs/configuration.md against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlctl.config.check import check
from rlctl.config.document import dotted
from rlctl.config.overrides import FLAGS, REPLACES
from rlctl.config.reference import key_tables, update
from rlctl.config.schema import RunConfig
from rlctl.config.schema_paths import item_of, model_of, walk
from rlctl.config.yaml_source import MAX_BYTES, parse

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def test_the_key_table_is_the_schema() -> None:
    text = PAGE.read_text()
    assert update(text) == text, f"run: python -m rlctl.config.reference {PAGE.relative_to(Path(__file__).parents[1])}"


def test_every_leaf_of_the_schema_is_in_the_table_with_a_meaning() -> None:
    rows = dict(re.findall(r"^\| `([^`]+)` \|.*\| ([^|]*) \|$", key_tables(), flags=re.M))
    spelt_out = ("actor.optim.", "actor.parallel.")
    for loc, field in walk():
        path = dotted(loc)
        again = re.search(r"\.(optim|parallel)\.", path) and not path.startswith(spelt_out)
        item = item_of(field.annotation)
        if again or model_of(field.annotation) or (item is not None and model_of(item)):
            continue
        assert rows.get(path), path


def test_the_example_is_a_valid_configuration() -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.S)
    document, problems = parse(example, "example")
    config, faults = check(RunConfig, document)
    assert (problems, faults) == ([], [])
    assert config is not None
    assert config.rollout.n == 8


@pytest.mark.parametrize("flag", ["model", "data"])
def test_what_a_flag_replaces_is_documented(flag: str) -> None:
    text = PAGE.read_text()
    assert flag in FLAGS
    assert all(f"`{path}`" in text for path in REPLACES[flag])


def test_the_limit_on_the_size_is_documented() -> None:
    assert f"over {MAX_BYTES // 1024} KiB" in PAGE.read_text()
