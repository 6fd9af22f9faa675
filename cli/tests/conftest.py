"""Tiny real distributions: a dist-info and modules in a directory on ``PYTHONPATH``, nothing mocked."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


class TinySite:
    """A directory of tiny distributions, and an environment in which a process sees them and no first-party plugin."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "site"
        self.path.mkdir()

    def add(self, dist: str, name: str, target: str, version: str = "1.0", **modules: str) -> None:
        """A dist with one entry point ``name = target``; ``modules`` maps module names to their source."""
        info = self.path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[rlctl.plugins]\n{name} = {target}\n")
        for module, source in modules.items():
            (self.path / f"{module}.py").write_text(textwrap.dedent(source))

    def add_backend(self, name: str, engine_source: str = "", kind: str = "train", /, **spec: str) -> None:
        """A dist ``rlctl-NAME`` whose light module is sound and whose engine module starts with ``engine_source``.

        ``spec`` replaces fields of its record, as Python source.
        """
        engine = textwrap.dedent(engine_source) + "\n\nclass Engine:\n    pass\n"
        config = "from pydantic import BaseModel\n\n\nclass Config(BaseModel):\n    size: int = 1\n"
        self.add(
            f"rlctl-{name}",
            name,
            f"{name}_light",
            **{f"{name}_light": light(name, kind, **spec), f"{name}_engine": engine, f"{name}_config": config},
        )

    def env(self, **more: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RLCTL_")}
        return {
            **inherited,
            "PYTHONPATH": str(self.path),
            "RLCTL_DISABLE_PLUGINS": "rlctl-plugin-fsdp,rlctl-plugin-megatron,rlctl-plugin-mindspeed,rlctl",
            "RLCTL_CACHE_DIR": str(self.root / "cache"),
            "RLCTL_DATA_DIR": str(self.root / "data"),
            **more,
        }

    def python(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run code in a process of its own in that environment."""
        command = [sys.executable, "-c", textwrap.dedent(code)]
        return subprocess.run(command, env=self.env(**env), capture_output=True, text=True, timeout=120, check=False)


def light(name: str, kind: str = "train", /, **spec: str) -> str:
    """Source of a light module with one backend."""
    fields = {
        "name": repr(name),
        "kind": f"BackendKind({kind!r})",
        "engine": repr(f"{name}_engine:Engine"),
        "config": repr(f"{name}_config:Config"),
        "api_version": "API_VERSION",
        "model_types": "(ModelType.LANGUAGE_MODEL,)",
        "devices": "(('cpu', None),)",
        "capabilities": "(Capability(Axis.DP_SHARD, Support.SUPPORTED, 'shards'),)",
        "requirements": "()",
        "imports": "()",
        "install_hint": repr(f"pip install rlctl-{name}"),
        **spec,
    }
    body = ", ".join(f"{k}={v}" for k, v in fields.items())
    return (
        "from rlctl.hookspecs import hookimpl\n"
        "from rlctl.records import *\n"
        "from rlctl.records import API_VERSION\n\n\n"
        "@hookimpl\n"
        "def rlctl_backends():\n"
        f"    return [BackendSpec({body})]\n"
    )


@pytest.fixture
def site(tmp_path: Path) -> TinySite:
    return TinySite(tmp_path)


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> TinySite:
    return TinySite(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def here(site: TinySite, monkeypatch: pytest.MonkeyPatch):
    """The tiny site, visible to this very process until the test ends."""
    for name in [n for n in os.environ if n.startswith("RLCTL_")]:
        monkeypatch.delenv(name)
    for name, value in site.env().items():
        if name.startswith("RLCTL_"):
            monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(site.path))
    yield site
    own = [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(site.path))]
    for name in own:
        del sys.modules[name]
