"""Model, optimizer, schedule and random state of all ranks, through torch.distributed.checkpoint.

Keys: ``model.<name>`` for weights and kept buffers (of a model with adapters for what is trained alone: the base comes from where
the run took it, and a fingerprint says whether it is the same), ``optim.<name>.<moment>`` for AdamW's moments and step counts. Each
rank's random state is a file of its own, ``rng_<rank>.safetensors``; ``engine.json`` holds the small numbers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlctl import device as devices
from rlctl.errors import CheckpointError
from rlctl.parts.job import Root
from rlctl.parts.state import check_present
from rlctl_fsdp.export import persistent_tensors
from rlctl_fsdp.optim import Stepper

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_WHOLE = f"weights, and {', '.join(_MOMENTS)} of every trained weight"
_NUMBERS = "engine.json"


def save_state(
    path: Path, root: Root, stepper: Stepper, rank: int, world_size: int, device: torch.device, base: str | None = None
) -> None:
    """Write everything below ``path``; collective over all ranks of the engine.

    Args:
        base: fingerprint of frozen weights under adapters; None where every weight is trained.

    One rank saves for itself, also in a process that belongs to a larger group for other reasons.
    """
    tensors = _weights(root, stepper, base)
    for name, parameter in stepper.parameters.items():
        for moment, value in stepper.optimizer.state.get(parameter, {}).items():
            tensors[f"optim.{name}.{moment}"] = value
    path.mkdir(parents=True, exist_ok=True)
    with _alone_in_silence():
        save(tensors, checkpoint_id=path, no_dist=world_size == 1)
    save_file(_random_state(device), path / f"rng_{rank:05d}.safetensors")
    if rank == 0:
        numbers = {
            "num_steps": stepper.num_steps,
            "world_size": world_size,
            "has_moments": _has_moments(stepper),
            "base": base,
            "lora_rank": _lora_rank(stepper),
        }
        (path / _NUMBERS).write_text(json.dumps(numbers, indent=1))
    if world_size > 1:
        dist.barrier()


def load_state(
    path: Path, root: Root, stepper: Stepper, rank: int, world_size: int, device: torch.device, base: str | None = None
) -> None:
    """Read what :func:`save_state` wrote, in place.

    Raises:
        CheckpointError: files, weights, moments or step counts are missing, the world size is another one, or adapters
            belong to another base model.
    """
    numbers = _numbers(path)
    if numbers["world_size"] != world_size:
        raise CheckpointError(
            "the checkpoint was written by another number of ranks",
            found=f"{numbers['world_size']} ranks",
            wanted=f"{world_size} ranks",
            next=f"resume with --nproc {numbers['world_size']}",
        )
    _same_base(numbers.get("base"), base)
    stored, mine = numbers.get("lora_rank"), _lora_rank(stepper)
    if stored is not None and mine is not None and stored != mine:
        raise CheckpointError(
            "the checkpoint's adapters have another rank",
            found=f"model.lora.rank={mine}",
            wanted=f"model.lora.rank={stored}, which the run began with",
            next=f"resume with model.lora.rank={stored}, or begin a new run",
        )
    targets = _weights(root, stepper, base)
    moments = _empty_moments(stepper) if numbers["has_moments"] else {}
    for name, state in moments.items():
        targets |= {f"optim.{name}.{moment}": value for moment, value in state.items()}
    check_present(path, targets, _WHOLE)
    with _alone_in_silence():
        load(targets, checkpoint_id=path, no_dist=world_size == 1)
    stepper.optimizer.state.clear()
    for name, state in moments.items():
        stepper.optimizer.state[stepper.parameters[name]] = state
    stepper.num_steps = int(numbers["num_steps"])
    _restore_random_state(path / f"rng_{rank:05d}.safetensors", device)


def _weights(root: Root, stepper: Stepper, base: str | None) -> dict[str, Any]:
    held = persistent_tensors(root.model) if base is None else stepper.parameters
    return {f"model.{n}": t for n, t in held.items()}


def _lora_rank(stepper: Stepper) -> int | None:
    """The rank of the adapters; None where there are none."""
    return next((int(p.shape[0]) for name, p in stepper.parameters.items() if ".lora_A." in name), None)


def _same_base(stored: str | None, mine: str | None) -> None:
    if stored == mine:
        return
    words = "all weights" if stored is None else "adapters"
    raise CheckpointError(
        "the checkpoint does not belong to this model",
        found=f"{words} in the checkpoint, "
        + ("adapters on another base model here" if stored and mine else "adapters here" if mine else "none here"),
        wanted="the base model and the model.lora that it was written with",
        next="resume with the run's own model.path and model.lora",
    )


@contextmanager
def _alone_in_silence() -> Iterator[None]:
    """torch warns whenever one process saves for itself; that is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _numbers(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / _NUMBERS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "this is no complete engine checkpoint", found=f"{path}: {error}", wanted=f"a directory with {_NUMBERS}"
        ) from error


def _has_moments(stepper: Stepper) -> bool:
    return len(stepper.optimizer.state) > 0


def _empty_moments(stepper: Stepper) -> dict[str, dict[str, torch.Tensor]]:
    """Moments shaped like AdamW's own, for the checkpoint to fill."""
    return {
        name: {
            "step": torch.zeros((), dtype=torch.float32, device=_step_device(stepper, parameter)),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
        }
        for name, parameter in stepper.parameters.items()
    }


def _step_device(stepper: Stepper, parameter: nn.Parameter) -> torch.device:
    # The fused kernel keeps step counts with the weights, the plain one on the CPU.
    return parameter.device if stepper.optimizer.defaults.get("fused") else torch.device("cpu")


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    there = devices.random_state(device)
    return state if there is None else {**state, device.type: there}


def _restore_random_state(path: Path, device: torch.device) -> None:
    if not path.is_file():
        raise CheckpointError("the random state of this rank is missing", found=f"no {path.name}", wanted=str(path))
    state = load_file(path)
    torch.set_rng_state(state["cpu"])
    devices.set_random_state(device, state.get(device.type))
