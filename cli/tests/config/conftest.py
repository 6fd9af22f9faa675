"""A tiny installed dist with one training backend and one rollout, and the command line called in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from rlctl_cli.main import main

LIGHT = """
    from rlctl.hookspecs import hookimpl
    from rlctl.records import *

    def spec(name, kind):
        return BackendSpec(
            name=name, kind=kind, engine="clitoy_engine:Engine", config="clitoy_settings:Settings", api_version=(1, 0),
            model_types=(ModelType.LANGUAGE_MODEL,), devices=(("cpu", None),), capabilities=(), requirements=(),
            imports=("clitoy_engine",), install_hint="pip install clitoy", aliases=(name + "-alias",),
        )

    @hookimpl
    def rlctl_backends():
        return [spec("clitrain", BackendKind.TRAIN), spec("cliroll", BackendKind.ROLLOUT)]
"""

SETTINGS = """
    from rlctl.config.schema import Strict

    class Settings(Strict):
        chunk: int = 4
"""


@pytest.fixture(autouse=True)
def clitoy(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The dist on sys.path, and of the installed plugins only this dist's own."""
    site = tmp_path_factory.mktemp("clitoy-site")
    (site / "clitoy_light.py").write_text(dedent(LIGHT))
    (site / "clitoy_settings.py").write_text(dedent(SETTINGS))
    info = site / "clitoy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: clitoy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlctl.plugins]\nclitoy = clitoy_light\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv(
        "RLCTL_DISABLE_PLUGINS",
        "rlctl-plugin-fsdp,rlctl-plugin-megatron,rlctl-plugin-mindspeed,rlctl-plugin-veomni,rlctl-plugin-vllm",
    )
    monkeypatch.delenv("RLCTL_DEBUG", raising=False)
    yield
    import sys

    for name in ("clitoy_light", "clitoy_settings"):
        sys.modules.pop(name, None)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def rlctl(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Call the command line with arguments, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Done(int(caught.value.code or 0), out, err)

    return call
