"""The route to an NPU, on doubles of Ascend's packages: prepared in order, trained, exported, and equal to megatron on a CPU.

Everything runs with the megatron-core that is installed; with the one that MindSpeed patches in the repository's own tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mindspeed_doubles import environment, install_doubles, write_metadata

ROUTE = Path(__file__).with_name("mindspeed_route.py")
OTHERS_FIRST = "order: torch, transformers and megatron's plugin first"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_doubles(tmp_path_factory.mktemp("doubles"))


def ask(what: str, *sites: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROUTE), what]
    done = subprocess.run(command, env=environment(*sites), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def npu(site: Path) -> dict[str, Any]:
    return ask("npu", site)


@pytest.fixture(scope="module")
def cpu() -> dict[str, Any]:
    return ask("cpu")


@pytest.mark.parametrize("model", ["llama", "values", "experts"])
def test_three_steps_checkpoint_and_export_equal_megatrons_on_a_cpu(npu, cpu, model) -> None:
    there, here = npu[model], cpu[model]
    assert there["device"] == "npu:0"
    assert here["device"] == "cpu"
    # The same numbers to the last bit: only names of devices differ between the two.
    for what in ("steps", "after", "resumed", "weights"):
        assert there[what] == here[what], what
    assert there["resumed"] == there["after"]
    losses = [loss for loss, _ in there["steps"]]
    assert losses[2] < losses[0], "and they are a training's"


def test_the_engine_says_that_its_device_is_simulated(npu, cpu) -> None:
    notes = npu["llama"]["notes"]
    assert notes["device"].startswith("simulated")
    assert notes["collectives"] == "cpu:gloo,npu:hccl"
    assert notes["compute_dtype"] == "float32", "as the CPU computes on which it stands"
    assert notes["megatron-core"].endswith("patched by MindSpeed")
    assert "device" not in cpu["llama"]["notes"]


def test_whatever_is_imported_first_the_patches_come_before_megatron_core(site, npu) -> None:
    assert npu["before"] == [], "mindspeed's plugin first: no module of megatron-core was there when MindSpeed patched"
    found = ask(OTHERS_FIRST, site)
    assert found["before"] == []
    assert found["steps"] == npu["llama"]["steps"]
    assert found["weights"] == npu["llama"]["weights"]
    assert found["repatched"] == []


def test_megatron_core_that_was_there_before_is_refused_in_words(site) -> None:
    found = ask("order: megatron-core first", site)
    assert found["error"] == "BackendUnavailableError"
    assert found["what"] == "megatron-core was imported in this process before MindSpeed could patch it"
    assert "of its modules are loaded, and mindspeed.megatron_adaptor is not" in found["found"]
    assert "runtime.launcher=process" in found["next"]


def test_mindspeed_gets_its_arguments_once_and_not_our_command_line(site) -> None:
    found = ask("settings", site)
    assert found["argv"] == ["rlctl"]
    assert found["kept"] == ["--tensor-model-parallel-size", "8"]
    assert found["repatched"] == [{"use_flash_attn": True}]
    assert "another engine here asked for others" in found["other"]["what"]


def prepared_without(*sites: Path) -> str:
    code = (
        "from rlctl import extensions; extensions.keep_from_loading()\n"
        "from rlctl.errors import RlctlError\n"
        "from rlctl_mindspeed.prepare import prepare\n"
        "try:\n    prepare({})\nexcept (RlctlError, ImportError) as error:\n    print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(*sites), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_torch_npu_or_mindspeed_the_preparation_says_which(tmp_path) -> None:
    assert "torch_npu is not installed, so torch knows no device npu" in prepared_without()
    alone = install_doubles(tmp_path / "alone", ("torch_npu",))
    assert prepared_without(alone).startswith("ModuleNotFoundError No module named 'mindspeed'")


def test_a_torch_npu_that_does_not_load_is_shown_with_its_whole_chain(tmp_path) -> None:
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(
        "try:\n    raise ImportError('libhccl.so: cannot open shared object file')\n"
        "except ImportError as e:\n    raise RuntimeError('it does not load') from e\n"
    )
    write_metadata(tmp_path, "torch_npu", "2.13.0")
    said = prepared_without(tmp_path)
    assert said.startswith("BackendUnavailableError torch_npu is installed and does not load")
    assert "because ImportError: libhccl.so: cannot open shared object file" in said
    assert "source /usr/local/Ascend/ascend-toolkit/set_env.sh" in said


def test_the_doubles_say_what_they_are() -> None:
    from mindspeed_doubles import DOUBLES, VERSIONS

    assert all(version.endswith("+double") for version in VERSIONS.values())
    assert "rlctl_simulated = True" in (DOUBLES / "torch_npu/torch_npu/npu.py").read_text()
    assert "simulated" in (DOUBLES / "README.md").read_text()
