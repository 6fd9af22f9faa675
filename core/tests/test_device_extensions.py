"""Device extensions of torch: loaded when they are asked for, hidden when they are broken; and who may call a device."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rlctl
from rlctl import device, extensions
from rlctl.errors import CapabilityError

pytest.importorskip("torch")

BROKEN = """
import os
assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
import torch_npu.part
try:
    raise ImportError("libhccl.so: cannot open shared object file")
except ImportError as error:
    raise RuntimeError("the extension of Ascend does not load") from error
"""
SOUND = """
import torch
import types

runtime = types.ModuleType("npu")
runtime.is_available = lambda: True
runtime.device_count = lambda: 2
runtime.current_device = lambda: 1
runtime.get_device_name = lambda index=None: "a fake"
runtime.get_rng_state = lambda: torch.ones(4, dtype=torch.uint8)
runtime.seen = []
runtime.set_rng_state = runtime.seen.append
runtime.rlctl_simulated = True
torch.npu = runtime
"""


def run(folder: Path, code: str, **env: str) -> str:
    """What ``code`` prints in a process that sees ``folder``."""
    import os

    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RLCTL_", "TORCH_DEVICE"))}
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, env={**inherited, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A directory with a package torch_npu that does not load, as one without its vendor's libraries."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN)
    (package / "part.py").write_text("")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


def test_a_plain_import_of_torch_fails_beside_a_broken_extension_and_not_in_our_processes(wheel) -> None:
    said = run(
        wheel,
        """
        import subprocess, sys
        plain = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
        print(plain.returncode, "Failed to load the backend extension" in plain.stderr)
        from rlctl import extensions
        extensions.keep_from_loading()
        import torch
        child = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
        print(child.returncode)
        """,
    )
    assert said.split() == ["1", "True", "0"]
    kept = "from rlctl import extensions; extensions.keep_from_loading(); import os; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    assert run(wheel, kept, TORCH_DEVICE_BACKEND_AUTOLOAD="1").strip() == "1", "what a user has set stays"


def test_a_broken_extension_is_hidden_from_libraries_that_look_for_its_files(wheel) -> None:
    said = run(
        wheel,
        """
        from rlctl import extensions
        extensions.keep_from_loading()
        import importlib.util, os, sys
        before = importlib.util.find_spec("torch_npu") is not None
        extensions.shield(spared=("torch_npu",))
        print(before, importlib.util.find_spec("torch_npu") is not None)
        extensions.shield()
        left = [m for m in sys.modules if m.startswith("torch_npu.")]
        print(importlib.util.find_spec("torch_npu"), left, os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"])
        from transformers.utils import is_torch_npu_available
        print(is_torch_npu_available())
        from rlctl import device
        print(device.is_available("npu"), *device.absence_words("npu"), sep="|")
        """,
    )
    lines = said.splitlines()
    assert lines[:3] == ["True True", "None [] 0", "False"]
    available, first, second = lines[3].split("|")
    assert available == "False"
    assert first.startswith("RuntimeError: the extension of Ascend does not load")
    assert second.startswith("because ImportError: libhccl.so: cannot open shared object file")


def test_a_device_that_was_asked_for_is_refused_with_the_whole_chain(wheel) -> None:
    said = run(
        wheel,
        """
        from rlctl import extensions
        extensions.keep_from_loading()
        from rlctl.device import detect_device
        from rlctl.errors import CapabilityError
        from rlctl.parts.ranks import take_device
        for ask in (lambda: detect_device("npu"), lambda: take_device("mine", "npu", 1)):
            try:
                ask()
            except CapabilityError as error:
                print(error.details[-1])
        """,
    )
    assert said.count("because ImportError: libhccl.so") == 2


def test_an_absent_extension_costs_nothing_and_has_no_reason(tmp_path) -> None:
    said = run(
        tmp_path,
        """
        import sys
        from rlctl import device, extensions
        extensions.shield()
        print("torch" in sys.modules, extensions.why_not("npu"), device.absence_words("npu"))
        """,
    )
    assert said.strip() == "False None []"


def test_a_sound_extension_is_a_device_whose_calls_are_its_own(tmp_path) -> None:
    (tmp_path / "torch_npu.py").write_text(SOUND)
    said = run(
        tmp_path,
        """
        import torch
        from rlctl import device
        from rlctl.parts.ranks import take_device
        print(device.detect_device(), device.device_name("npu:1"), device.device_count("npu"), device.indexed("npu"))
        print(device.is_simulated("npu"), device.tensor_type("npu"), device.is_simulated("cpu"), device.tensor_type("cpu"))
        with device.kept_random_state("npu"):
            torch.manual_seed(1)
        print(len(torch.npu.seen), device.random_state("cpu"), device.collective_backend("npu"))
        torch.npu.rlctl_simulated = False
        print(device.is_simulated("npu"), device.tensor_type("npu"))
        """,
    )
    assert said.splitlines() == [
        "npu/huawei a fake 2 npu:1",
        "True cpu False cpu",
        "1 None cpu:gloo,npu:hccl",
        "False npu",
    ]


def test_random_state_is_kept_on_a_cpu() -> None:
    import torch

    before = torch.get_rng_state()
    with device.kept_random_state("cpu"):
        torch.manual_seed(5)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_in_sight_is_told_by_files_and_by_the_variable(monkeypatch) -> None:
    assert device.in_sight("cpu")
    monkeypatch.delenv("RLCTL_DEVICE", raising=False)
    assert not device.in_sight("abacus")
    monkeypatch.setenv("RLCTL_DEVICE", "npu")
    assert device.in_sight("npu")
    assert device.named_device() == device.Device("npu", "huawei")
    assert device.named_device("cpu") == device.Device("cpu")
    monkeypatch.delenv("RLCTL_DEVICE")
    assert device.named_device() is None


def test_a_device_without_collectives_is_refused() -> None:
    with pytest.raises(CapabilityError, match="no collectives"):
        device.collective_backend("abacus")
    assert extensions.MODULES == {"npu": "torch_npu"}


# ---- the one module --------------------------------------------------------------------------------------------------------
ROOT = Path(rlctl.__file__).parents[3]
CALLS = re.compile(r"torch\.(cuda|npu|accelerator)\b|get_device_module|import torch_npu|import_module\(.torch_npu")
MAY = {
    "core/src/rlctl/device.py",
    # What answers a library's own calls of torch.cuda: on a CPU there is no device to ask.
    "plugins/megatron/src/rlctl_megatron/standins.py",
    "plugins/veomni/src/rlctl_veomni/standins.py",
}


def device_calls(source: str) -> list[str]:
    """Lines that ask a device, comments and documentation left out."""
    code = re.sub(r'"""(?:[^"\\]|\\.|"(?!""))*"""', lambda m: "\n" * m[0].count("\n"), source)
    return [line.strip() for line in code.splitlines() if CALLS.search(line.partition("#")[0])]


def test_nothing_but_the_device_module_asks_a_device() -> None:
    files = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("cli/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    if len(files) < 100:
        pytest.skip("tests without the repository")
    found = {str(p.relative_to(ROOT)): device_calls(p.read_text(encoding="utf-8")) for p in files}
    assert {name: lines for name, lines in found.items() if lines and name not in MAY} == {}


def test_the_search_for_device_calls_finds_them() -> None:
    source = (
        '"""torch.cuda in words"""\nimport torch\n# torch.npu\nx = torch.cuda.current_device()\ny = torch.accelerator\n'
    )
    assert device_calls(source) == ["x = torch.cuda.current_device()", "y = torch.accelerator"]
