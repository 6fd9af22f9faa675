"""Model, optimizer, schedule and random state of all ranks, through torch.distributed.checkpoint.

Keys: ``model.<name>`` for weights, ``optim.<name>.<moment>`` for AdamW's moments and step counts. Each rank's random state is a
file of its own, ``rng_<rank>.safetensors``; ``engine.json`` holds the small numbers.

The DTensors of experts know of one rank's experts alone: written as they are, the shares of all ranks would be one and the same
tensor in the files. They are described over VeOmni's whole mesh of experts instead, as tensors of all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlctl import device as devices
from rlctl.errors import CheckpointError
from rlctl.parts.agreement import agreed
from rlctl.parts.state import check_present, in_one_line
from rlctl_veomni.families import is_fused
from rlctl_veomni.mesh import Place
from rlctl_veomni.optim import Stepper

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_WHOLE = f"weights, and {', '.join(_MOMENTS)} of every trained weight"
_NUMBERS = "engine.json"
_KEYS = {"num_steps", "world_size", "has_moments", "optimizer"}


def save_state(path: Path, model: nn.Module, stepper: Stepper, place: Place) -> None:
    """Write everything below ``path``; collective over all ranks."""
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    tensors: dict[str, Any] = _weights(model, place)
    for name, parameter in stepper.parameters.items():
        for moment, value in stepper.state_of(parameter).items():
            tensors[f"optim.{name}.{moment}"] = _described(name, value, place)
    save(tensors, checkpoint_id=path)
    save_file(_random_state(place.device), path / f"rng_{dist.get_rank():05d}.safetensors")
    if dist.get_rank() == 0:
        numbers = {
            "num_steps": stepper.num_steps,
            "world_size": place.topology.world_size,
            "has_moments": _has_moments(stepper),
            "optimizer": stepper.name,
        }
        (path / _NUMBERS).write_text(json.dumps(numbers, indent=1))
    dist.barrier()


def load_state(path: Path, model: nn.Module, stepper: Stepper, place: Place) -> None:
    """Read what :func:`save_state` wrote. Weights may have been spread along other axes by as many ranks.

    Everything is read beside what is there, which takes room for the weights once more, so that a refusal changes nothing.

    Raises:
        CheckpointError: files, weights, moments or step counts are missing or damaged, or another optimizer or another number
            of ranks wrote them; on every rank.
    """
    with agreed(place.device, place.topology.world_size, "read the checkpoint"):
        numbers = _numbers(path)
        _check_fit(numbers, stepper, place)
        random_state = _read_random_state(path)
        read = {n: torch.empty_like(p).detach() for n, p in model.named_parameters()}
        targets = {f"model.{n}": _described(n, t, place) for n, t in read.items()}
        moments = _empty_moments(stepper) if numbers["has_moments"] else {}
        for name, state in moments.items():
            targets |= {f"optim.{name}.{moment}": _described(name, value, place) for moment, value in state.items()}
        check_present(path, targets, _WHOLE)
    try:
        load(targets, checkpoint_id=path)
    except (Exception, CheckpointException) as error:
        # Readers of damaged files raise whatever they stumble over, and what torch gathers from all ranks is no Exception.
        raise CheckpointError(
            "the checkpoint cannot be read",
            found=f"{path}: {in_one_line(error)}",
            wanted="weights and moments as this model has them",
            next="resume with the model and backend that wrote it, or from an earlier checkpoint",
        ) from error
    _check_counts(moments, int(numbers["num_steps"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read.pop(name))
    for optimizer in stepper.optimizers:
        optimizer.state.clear()
    for name, state in moments.items():
        parameter = stepper.parameters[name]
        stepper.owner_of(parameter).state[parameter] = state
    stepper.num_steps = int(numbers["num_steps"])
    stepper.drop_gradients()
    _restore_random_state(random_state, place.device)


def _weights(model: nn.Module, place: Place) -> dict[str, Any]:
    return {f"model.{n}": _described(n, p.detach(), place) for n, p in model.named_parameters()}


def _described(name: str, value: torch.Tensor, place: Place) -> torch.Tensor:
    """``value`` as a part of the tensor that all ranks have together; shares its memory."""
    if not is_fused(name) or place.topology.ep == 1 or not isinstance(value, DTensor):
        return value
    mesh = place.state.extra_parallel_fsdp_device_mesh["ep"]  # (ep_replicate, if there are replicas, ep_fsdp, ep)
    assert mesh.mesh_dim_names[-2:] == ("ep_fsdp", "ep"), mesh.mesh_dim_names
    assert value.placements[-1] == Shard(1), value.placements
    placements = [*[Replicate()] * (mesh.ndim - 2), Shard(1), Shard(0)]
    return DTensor.from_local(value.to_local(), mesh, placements, run_check=False)


def _has_moments(stepper: Stepper) -> bool:
    return any(optimizer.state for optimizer in stepper.optimizers) and stepper.name == "adamw"


def _empty_moments(stepper: Stepper) -> dict[str, dict[str, torch.Tensor]]:
    """Moments shaped like AdamW's own, for the checkpoint to fill."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in stepper.parameters.items():
        # The fused kernel keeps step counts with the weights, the others on the CPU.
        fused = bool(stepper.owner_of(parameter).defaults.get("fused"))
        step_device = parameter.device if fused else torch.device("cpu")
        found[name] = {
            "step": torch.zeros((), dtype=torch.float32, device=step_device),
            "exp_avg": torch.zeros_like(parameter).detach(),
            "exp_avg_sq": torch.zeros_like(parameter).detach(),
        }
    return found


def _check_counts(moments: Mapping[str, Mapping[str, torch.Tensor]], num_steps: int) -> None:
    """Every trained weight is stepped in every step, so one number says how often for all."""
    for name, state in moments.items():
        found = float(state["step"])
        if found != num_steps:
            raise CheckpointError(
                "the checkpoint's optimizer state is that of another step",
                found=f"{name} was stepped {found:g} times",
                wanted=f"{num_steps} times, as {_NUMBERS} says",
                next="resume from an earlier checkpoint",
            )


def _numbers(path: Path) -> dict[str, Any]:
    problem: Exception | str
    try:
        numbers = json.loads((path / _NUMBERS).read_text())
        if isinstance(numbers, dict) and numbers.keys() >= _KEYS:
            return numbers
        problem = f"{_NUMBERS} does not say {', '.join(sorted(_KEYS))}"
    except (OSError, ValueError) as error:
        problem = error
    raise CheckpointError(
        "this is no complete checkpoint of veomni",
        found=f"{path}: {problem}",
        wanted=f"a directory with {_NUMBERS}",
        next="resume from an earlier checkpoint",
    )


def _check_fit(numbers: Mapping[str, Any], stepper: Stepper, place: Place) -> None:
    if numbers["optimizer"] != stepper.name:
        raise CheckpointError(
            "another optimizer wrote the checkpoint",
            found=numbers["optimizer"],
            wanted=stepper.name,
            next=f"set actor.optim.name={numbers['optimizer']}",
        )
    if numbers["world_size"] != place.topology.world_size:
        raise CheckpointError(
            "the checkpoint was written by another number of ranks",
            found=f"{numbers['world_size']} ranks",
            wanted=f"{place.topology.world_size} ranks",
            next=f"resume with --nproc {numbers['world_size']}",
        )


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    there = devices.random_state(device)
    return state if there is None else {**state, device.type: there}


def _read_random_state(path: Path) -> dict[str, torch.Tensor]:
    file = path / f"rng_{dist.get_rank():05d}.safetensors"
    try:
        state = load_file(file)
        if "cpu" not in state:
            raise SafetensorError("it holds no state of the CPU")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            "the random state of this rank cannot be read",
            found=f"{file.name}: {error}",
            wanted=str(file),
            next="resume from an earlier checkpoint",
        ) from error
    return state


def _restore_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    devices.set_random_state(device, state.get(device.type))
