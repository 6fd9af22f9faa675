"""Model, optimizer, schedule and random state of all ranks, through megatron-core's sharded checkpoints.

Weights and, with whole moments, moments too lie in the files under their place in the whole model, so that ranks with other
tp, pp or ep sizes can read them. Moments that the distributed optimizer sharded lie as its buffers do: then only the data
parallel size may change. ``engine.json`` holds the small numbers and what the files were written with.
"""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from rlctl.errors import CheckpointError
from rlctl_megatron.build import Built
from rlctl_megatron.mesh import Place
from rlctl_megatron.optim import Stepper

_NUMBERS = "engine.json"
_KEYS = {"num_steps", "has_moments", "sharded_moments", "optimizer", "sizes"}
_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}
_LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "etp")
"""Axes whose sizes a sharded optimizer's files are bound to."""


def save_state(path: Path, built: Built, stepper: Stepper, place: Place) -> None:
    """Write everything below ``path``; collective over all ranks."""
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    whole = _sharded(built, stepper, loading=False, moments=_has_moments(stepper))
    # Made by megatron-core it lives in a process of its own, which runs the user's main module again and stays. A save that is
    # waited for puts and gets in this process.
    filesystem_async._results_queue = queue.Queue()
    try:
        dist_checkpointing.save(whole, str(path))
    finally:
        filesystem_async._results_queue = None
    save_file(_random_state(place.device), path / f"rng_{dist.get_rank():05d}.safetensors")
    if mains := _mains(built, stepper):
        save_file(mains, path / f"mains_{dist.get_rank():05d}.safetensors")
    if dist.get_rank() == 0:
        numbers = {
            "num_steps": stepper.num_steps,
            "has_moments": _has_moments(stepper),
            "sharded_moments": stepper.distributed,
            "optimizer": stepper.name,
            "sizes": _sizes(place),
        }
        (path / _NUMBERS).write_text(json.dumps(numbers, indent=1))
    dist.barrier()


def load_state(path: Path, built: Built, stepper: Stepper, place: Place) -> None:
    """Read what :func:`save_state` wrote, in place.

    Raises:
        CheckpointError: files are missing or damaged, another optimizer wrote them, or moments were sharded by ranks with
            other sizes.
    """
    numbers = _numbers(path)
    _check_fit(numbers, stepper, place)
    random_state = _read_random_state(path)
    whole = _sharded(built, stepper, loading=True, moments=bool(numbers["has_moments"]))
    try:
        loaded: Any = dist_checkpointing.load(whole, str(path))
    except (Exception, CheckpointException) as error:
        # Readers of damaged files raise whatever they stumble over, and what torch gathers from all ranks is no Exception.
        raise CheckpointError(
            "the checkpoint cannot be read",
            found=f"{path}: {_in_one_line(error)}",
            wanted="weights and moments as this model has them",
            next="resume with the model and backend that wrote it",
        ) from error
    for key, model in _models(built).items():
        model.load_state_dict(loaded[key])
    if numbers["has_moments"]:
        with torch.no_grad():
            stepper.optimizer.load_state_dict(loaded["optimizer"])
        _count_steps(stepper, int(numbers["num_steps"]))
    else:
        for part in stepper.parts():
            if part.optimizer is not None:
                part.optimizer.state.clear()
        stepper.num_steps = int(numbers["num_steps"])
        _restore_mains(path, built, stepper)
    stepper.num_steps = int(numbers["num_steps"])
    stepper.drop_gradients()
    stepper.set_decay()
    torch.set_rng_state(random_state["cpu"])
    if place.device.type != "cpu" and place.device.type in random_state:
        torch.get_device_module(place.device).set_rng_state(random_state[place.device.type])


def _mains(built: Built, stepper: Stepper) -> dict[str, torch.Tensor]:
    """Main weights of this rank that are not the module's own, where they come into no other file: with moments they do."""
    if not built.config.bf16 or _has_moments(stepper):
        return {}
    return {
        f"{p}.{g}.{w}": weight.detach().contiguous()
        for p, part in enumerate(stepper.parts())
        if part.optimizer is not None
        for g, group in enumerate(part.optimizer.param_groups)
        for w, weight in enumerate(group["params"])
    }


def _restore_mains(path: Path, built: Built, stepper: Stepper) -> None:
    """Main weights as they were, not as the module's rounded ones would give them again."""
    wanted = _mains(built, stepper) if built.config.bf16 else {}
    if not wanted:
        stepper.optimizer.reload_model_params()
        return
    file = path / f"mains_{dist.get_rank():05d}.safetensors"
    found = load_file(file) if file.is_file() else {}
    if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in wanted.items()}:
        raise CheckpointError(
            "the checkpoint's float32 main weights do not fit",
            found=f"{file.name} with {len(found)} of {len(wanted)} weights",
            wanted="main weights of the same ranks, sizes and optimizer",
            next="resume with the parallel sizes that wrote it",
        )
    with torch.no_grad():
        for name, weight in wanted.items():
            weight.copy_(found[name])


def _models(built: Built) -> dict[str, Any]:
    models = built.models
    return {"model": models[0]} if len(models) == 1 else {f"model{i}": m for i, m in enumerate(models)}


def _sharded(built: Built, stepper: Stepper, *, loading: bool, moments: bool) -> dict[str, Any]:
    """The state of this rank's part, with its place in the whole."""
    weights: dict[str, Any] = {key: model.sharded_state_dict() for key, model in _models(built).items()}
    whole = dict(weights)
    if moments:
        if loading:
            _make_room(stepper)
        whole["optimizer"] = stepper.optimizer.sharded_state_dict(
            weights if len(weights) > 1 else weights["model"], is_loading=loading, metadata=_METADATA
        )
    return whole


def _make_room(stepper: Stepper) -> None:
    """Give an optimizer that has made no step yet the moments that loading fills. With torch's AdamW megatron-core's distributed
    optimizer asks each weight for its step count even when it only describes what is to be read."""
    for part in stepper.parts():
        if stepper.distributed and isinstance(part.optimizer, torch.optim.AdamW) and not part.optimizer.state:
            for weight in (w for group in part.optimizer.param_groups for w in group["params"]):
                moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                part.optimizer.state[weight] = {"step": torch.zeros(()), **moments}


def _has_moments(stepper: Stepper) -> bool:
    return stepper.name == "adamw" and stepper.num_steps > 0


def _sizes(place: Place) -> dict[str, int]:
    t = place.topology
    return {name: int(getattr(t, name)) for name in (*_LAYOUT, "dp_shard", "dp_replicate")}


def _in_one_line(error: BaseException) -> str:
    """The last line of what an error says (of a quoted traceback, the error itself), and no more than fits a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:200] + " ..."


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
        "this is no complete checkpoint of megatron",
        found=f"{path}: {problem}",
        wanted=f"a directory with {_NUMBERS}",
        next="resume from an earlier checkpoint",
    )


def _check_fit(numbers: dict[str, Any], stepper: Stepper, place: Place) -> None:
    if numbers["optimizer"] != stepper.name:
        raise CheckpointError(
            "another optimizer wrote the checkpoint",
            found=numbers["optimizer"],
            wanted=stepper.name,
            next=f"set actor.optim.name={numbers['optimizer']}",
        )
    if not numbers["has_moments"]:
        return
    here, there = _sizes(place), numbers["sizes"]
    if numbers["sharded_moments"] != stepper.distributed:
        raise CheckpointError(
            "moments that were sharded over data parallel ranks, and whole ones, are different files",
            found=f"sharded: {str(numbers['sharded_moments']).lower()}",
            wanted=str(stepper.distributed).lower(),
            next=f"set actor.engine.distributed_optimizer={'always' if numbers['sharded_moments'] else 'never'}",
        )
    changed = [name for name in _LAYOUT if here[name] != there[name]]
    if numbers["sharded_moments"] and changed:
        raise CheckpointError(
            "sharded moments can be read by ranks of the same model parallel sizes only",
            found=", ".join(f"{name}={here[name]}" for name in changed),
            wanted=", ".join(f"{name}={there[name]}" for name in changed),
            next="resume with those sizes, or write the checkpoint with actor.engine.distributed_optimizer=never",
        )


def _count_steps(stepper: Stepper, num_steps: int) -> None:
    """Give every weight the step count that the checkpoint tells, and see that it has both moments.

    torch's AdamW counts steps for each weight. Loading sharded moments gives all weights one and the same counter, which every
    weight's step then raises: bias correction would go on from another step, without a word. A weight is stepped in every step
    here, so one number says it for all.
    """
    for part in stepper.parts():
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = num_steps  # fused kernels count for the group
            for weight in group["params"]:
                state = part.optimizer.state.get(weight, {})
                if not {"exp_avg", "exp_avg_sq"} <= set(state):
                    raise CheckpointError(
                        "the checkpoint lacks moments",
                        found=f"a weight of {tuple(weight.shape)} without",
                        wanted="both",
                    )
                if isinstance(part.optimizer, torch.optim.AdamW):
                    state["step"] = torch.tensor(float(num_steps))


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


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
