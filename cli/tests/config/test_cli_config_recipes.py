"""rlctl recipes, and the recipes themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.check import check
from rlctl.config.paths import resolve_paths
from rlctl.config.schema import RunConfig
from rlctl.config.yaml_source import parse, read
from rlctl_cli.commands.recipes import used_files
from rlctl_cli.plugin import RECIPES, rlctl_recipes

Call = Callable[..., Any]

SHIPPED = [record.name for record in rlctl_recipes()]


def test_the_list_has_every_shipped_file_with_its_first_line(rlctl: Call) -> None:
    assert "quickstart" in SHIPPED
    assert sorted(SHIPPED) == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    payload = json.loads(rlctl("recipes", "--json").out)
    assert [recipe["name"] for recipe in payload["recipes"]] == sorted(SHIPPED)
    for recipe in payload["recipes"]:
        assert recipe["dist"] == "rlctl"
        assert recipe["summary"], recipe["name"]
        assert Path(recipe["path"]).read_text().startswith("# " + recipe["summary"])
    text = rlctl("recipes").out
    assert all(name in text for name in SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_fits_the_schema_and_has_its_files(name: str) -> None:
    path = RECIPES / f"{name}.yaml"
    document, problems = parse(read(path, path.name), path.name)
    assert problems == []
    if document.get(("data", "train_files")) is None:
        assert resolve_paths(document, RECIPES, lambda text: None) == []
    config, problems = check(RunConfig, document)
    assert problems == []
    assert config is not None


def test_a_recipe_is_shown_as_it_is(rlctl: Call) -> None:
    assert rlctl("recipes", "quickstart").out == (RECIPES / "quickstart.yaml").read_text()
    payload = json.loads(rlctl("recipes", "quickstart", "--json").out)
    assert payload["text"] == (RECIPES / "quickstart.yaml").read_text()


def test_a_copy_runs_where_it_lies_and_nothing_is_overwritten(rlctl: Call, tmp_path: Path) -> None:
    done = rlctl("recipes", "quickstart", "--copy", "mine/run.yaml")
    assert done.code == 0
    copy = tmp_path / "mine" / "run.yaml"
    assert copy.read_text() == (RECIPES / "quickstart.yaml").read_text()
    model = tmp_path / "mine" / "quickstart" / "model"
    assert {p.name for p in model.iterdir()} == {p.name for p in (RECIPES / "quickstart" / "model").iterdir()}
    assert done.out.splitlines() == ["mine/run.yaml", "mine/quickstart/model"]
    overrides = ["actor.backend=clitrain", "rollout.backend=cliroll"]
    shown = json.loads(rlctl("config", "show", "mine/run.yaml", *overrides, "--json").out)
    assert shown["config"]["model"]["path"] == str(model)
    copy.write_text("mine now")
    again = rlctl("recipes", "quickstart", "--copy", "mine/run.yaml")
    assert again.code == 1
    assert "is left as it is" in again.err
    assert copy.read_text() == "mine now"
    # The YAML file is free, but the model directory is not: nothing at all is written.
    assert rlctl("recipes", "quickstart", "--copy", "mine/other.yaml").code == 1
    assert not (tmp_path / "mine" / "other.yaml").exists()


def test_a_copy_into_a_directory_keeps_the_name(rlctl: Call, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert rlctl("recipes", "quickstart", "--copy", "here").out.splitlines()[0] == "here/quickstart.yaml"
    assert rlctl("recipes", "quickstart", "--copy", "there").out.splitlines()[0] == "there.yaml"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("recipes", "quikstart"), 1, "Did you mean quickstart?"),
        (("recipes", "--copy", "x"), 2, "needs the name of a recipe"),
        (("recipes", "quickstart", "--copy", "/proc/nothing/x.yaml"), 1, "cannot be written"),
    ],
)
def test_what_is_wrong_is_said(args: tuple[str, ...], code: int, words: str, rlctl: Call) -> None:
    done = rlctl(*args)
    assert done.code == code
    assert words in done.err


def test_only_relative_names_next_to_the_recipe_are_taken_along(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "other.yaml").write_text("a: 1")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "# See other.yaml, ../x and /etc/passwd.\ndata: {train_files: [rows.jsonl]}\nmodel: {path: org/name}\n"
    )
    assert used_files(recipe) == [tmp_path / "rows.jsonl"]
