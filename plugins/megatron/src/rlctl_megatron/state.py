"""Model, optimizer, schedule and random state of all ranks, through megatron-core's sharded checkpoints.

Weights and, with whole moments, moments too lie in the files under their place in the whole model, so that ranks with other
tp, pp or ep sizes can read them. Moments that the distributed optimizer sharded lie as its buffers do: then only the data
parallel size may change. ``engine.json`` (:mod:`rlctl_megatron.written`) holds the small numbers and what the files were
written with.

A checkpoint is read to the host first, and taken over once all ranks have all of it: one that is refused changes nothing. A
rank's part of weights and moments must fit into the host's memory once more for that.
"""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rlctl import device as devices
from rlctl.errors import CheckpointError
from rlctl_megatron import compat, written
from rlctl_megatron.agreement import together
from rlctl_megatron.build import Built
from rlctl_megatron.families import Family
from rlctl_megatron.mesh import Place
from rlctl_megatron.optim import Stepper
from rlctl_megatron.written import Written


def save_state(path: Path, built: Built, stepper: Stepper, place: Place, family: Family) -> None:
    """Write everything below ``path``; collective over all ranks.

    Raises:
        EngineError: another rank could not write; that one raises what it met with itself.
    """
    words = "write its part of the checkpoint"
    together(place, words, lambda: path.mkdir(parents=True, exist_ok=True))
    whole = _sharded(built, stepper, loading=False, moments=stepper.has_moments)
    # Made by megatron-core it lives in a process of its own, which runs the user's main module again and stays. A save that is
    # waited for puts and gets in this process.
    filesystem_async._results_queue = queue.Queue()
    try:
        compat.save_sharded(whole, str(path))
    finally:
        filesystem_async._results_queue = None

    def beside() -> None:
        save_file(_random_state(place.device), path / f"rng_{dist.get_rank():05d}.safetensors")
        if built.config.bf16 and not stepper.has_moments:
            save_file(_mains(stepper), _mains_file(path))  # with moments they are among the optimizer's
        if dist.get_rank() == 0:
            written.describe(built, stepper, place, family).write(path)

    together(place, words, beside)


def load_state(path: Path, built: Built, stepper: Stepper, place: Place, family: Family) -> None:
    """Read what :func:`save_state` wrote, in place; collective over all ranks.

    All ranks fail, and before anything is changed, where one of them does.

    Raises:
        CheckpointError: files are missing or damaged, another model or optimizer wrote them, or moments were sharded by ranks
            with other sizes.
        EngineError: another rank found this.
    """
    words = "read its part of the checkpoint"

    def before() -> tuple[Written, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        there = written.read(path)
        written.check_fit(there, written.describe(built, stepper, place, family))
        random_state = _read_random_state(path)
        _check_files(path)
        mains = {} if there.has_moments or not built.config.bf16 else _read_mains(path, stepper)
        return there, random_state, mains

    there, random_state, mains = together(place, words, before)
    loaded = together(place, words, lambda: _read(path, built, stepper, there))
    # Nothing below fails for what a file holds.
    for key, model in _models(built).items():
        model.load_state_dict(loaded[key])
    if there.has_moments:
        with torch.no_grad():
            compat.load_moments(stepper.optimizer, stepper.parts(), loaded["optimizer"])
        _count_steps(stepper, there.num_steps)
    else:
        for part in stepper.parts():
            if part.optimizer is not None:
                part.optimizer.state.clear()
        stepper.optimizer.reload_model_params()
        with torch.no_grad():
            # As they were, not as the module's rounded ones would give them again.
            for name, weight in _mains(stepper).items() if mains else ():
                weight.copy_(mains[name])
    stepper.num_steps = there.num_steps
    stepper.drop_gradients()
    stepper.set_decay()
    torch.set_rng_state(random_state["cpu"])
    devices.set_random_state(place.device, random_state.get(place.device.type))


def _read(path: Path, built: Built, stepper: Stepper, there: Written) -> dict[str, Any]:
    """This rank's part of weights and moments, on the host. Collective."""
    before = _outlines(stepper)
    try:
        whole = _sharded(built, stepper, loading=True, moments=there.has_moments)
        # megatron-core reads into the tensors that describe what is wanted: the live ones, until they are replaced.
        return compat.load_sharded(dict_list_map_outplace(_on_host, whole), str(path))
    except (Exception, CheckpointException) as error:
        # Readers of damaged files raise whatever they stumble over, and what torch gathers from all ranks is no Exception.
        _restore(stepper, before)
        raise _unreadable(path, error) from error


def _on_host(value: Any) -> Any:
    if isinstance(value, ShardedTensor | ShardedTensorFactory):
        data = value.data
        assert isinstance(data, torch.Tensor), "what is to be read is described by a tensor"
        return replace(value, data=torch.empty_like(data, device="cpu", requires_grad=False))
    return value


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        "the checkpoint cannot be read",
        found=f"{path}: {_in_one_line(error)}",
        wanted="weights and moments as this model has them",
        next="resume with the model and backend that wrote it, or from an earlier checkpoint",
    )


def _check_files(path: Path) -> None:
    """Look for what one rank alone may lack before all of them read together: the descriptions, and the bytes that they name."""
    try:
        dist_checkpointing.load_common_state_dict(str(path))
        sizes: dict[str, int] = {}
        for entry in FileSystemReader(path).read_metadata().storage_data.values():
            end = entry.offset + entry.length
            sizes[entry.relative_path] = max(end, sizes.get(entry.relative_path, 0))
        for name, size in sizes.items():
            if (found := (path / name).stat().st_size) < size:
                raise OSError(f"{name} ends after {found} of {size} bytes")
    except Exception as error:
        # They are pickles, and damaged ones raise anything.
        raise _unreadable(path, error) from error


def _mains(stepper: Stepper) -> dict[str, torch.Tensor]:
    """Main weights of this rank, where they are not the module's own."""
    return {
        f"{p}.{g}.{w}": weight.detach().contiguous()
        for p, part in enumerate(stepper.parts())
        if part.optimizer is not None
        for g, group in enumerate(part.optimizer.param_groups)
        for w, weight in enumerate(group["params"])
    }


def _mains_file(path: Path) -> Path:
    return path / f"mains_{dist.get_rank():05d}.safetensors"


def _read_mains(path: Path, stepper: Stepper) -> dict[str, torch.Tensor]:
    wanted, file = _mains(stepper), _mains_file(path)
    try:
        found = load_file(file) if file.is_file() or wanted else {}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in wanted.items()}:
        raise CheckpointError(
            "the checkpoint's float32 main weights do not fit",
            found=f"{file.name} with {len(found)} of {len(wanted)} weights",
            wanted="main weights of the same ranks, sizes and optimizer",
            next="resume with the parallel sizes that wrote it",
        )
    return found


def _models(built: Built) -> dict[str, Any]:
    models = built.models
    return {"model": models[0]} if len(models) == 1 else {f"model{i}": m for i, m in enumerate(models)}


def _sharded(built: Built, stepper: Stepper, *, loading: bool, moments: bool) -> dict[str, Any]:
    """The state of this rank's part, with its place in the whole."""
    weights: dict[str, Any] = {}
    for stage, (key, model) in enumerate(_models(built).items()):
        with compat.at_stage(stage if len(built.models) > 1 else None):
            weights[key] = model.sharded_state_dict()
    whole = dict(weights)
    if moments:
        if loading:
            _make_room(stepper)
        whole["optimizer"] = compat.sharded_moments(
            stepper.optimizer,
            stepper.parts(),
            weights if len(weights) > 1 else weights["model"],
            loading=loading,
            distributed=stepper.distributed,
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


def _outlines(stepper: Stepper) -> list[tuple[set[torch.Tensor], list[dict[str, Any]]]]:
    """Of each part of the optimizer: which weights have state, and its groups' settings."""
    optimizers = [part.optimizer for part in stepper.parts() if part.optimizer is not None]
    return [(set(o.state), [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]) for o in optimizers]


def _restore(stepper: Stepper, before: list[tuple[set[torch.Tensor], list[dict[str, Any]]]]) -> None:
    """The optimizer as it was before its checkpoint was described: that gives it moments that it had not, and one step count for
    all weights."""
    optimizers = [part.optimizer for part in stepper.parts() if part.optimizer is not None]
    for optimizer, (weights, groups) in zip(optimizers, before, strict=True):
        for weight in set(optimizer.state) - weights:
            del optimizer.state[weight]
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
    if stepper.has_moments:
        _count_steps(stepper, stepper.num_steps)


def _in_one_line(error: BaseException) -> str:
    """The last line of what an error says (of a quoted traceback, the error itself), and no more than fits a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:200] + " ..."


def _count_steps(stepper: Stepper, num_steps: int) -> None:
    """Give every weight the step count that the checkpoint tells.

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
                state = part.optimizer.state[weight]
                # Moments that a file lacks were missed by its reader.
                assert {"exp_avg", "exp_avg_sq"} <= set(state), f"a weight of {tuple(weight.shape)} has no moments"
                if isinstance(part.optimizer, torch.optim.AdamW):
                    state["step"] = torch.tensor(float(num_steps))


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
