"""``engine.json`` of a checkpoint: its small numbers, and what the files beside it were written with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rlctl.errors import CheckpointError
from rlctl_megatron.build import Built
from rlctl_megatron.families import Family
from rlctl_megatron.mesh import Place
from rlctl_megatron.optim import Stepper

NAME = "engine.json"
_LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "etp")
"""Axes whose sizes a sharded optimizer's files are bound to."""


@dataclass(frozen=True)
class Written:
    """What an engine writes, or would write.

    Args:
        num_steps: that the optimizer has made.
        has_moments: the files hold moments.
        sharded_moments: over data parallel ranks.
        optimizer: its name.
        param_dtype: of weights in the computation.
        model_type, model_family: head, and what config.json calls the model.
        sizes: of the axes.
    """

    num_steps: int
    has_moments: bool
    sharded_moments: bool
    optimizer: str
    param_dtype: str
    model_type: str
    model_family: str
    sizes: dict[str, int]

    def write(self, path: Path) -> None:
        """Into the directory of a checkpoint."""
        (path / NAME).write_text(json.dumps(asdict(self), indent=1))


def describe(built: Built, stepper: Stepper, place: Place, family: Family) -> Written:
    """What this engine is."""
    t = place.topology
    return Written(
        num_steps=stepper.num_steps,
        has_moments=stepper.has_moments,
        sharded_moments=stepper.distributed,
        optimizer=stepper.name,
        param_dtype=str(built.config.params_dtype).removeprefix("torch."),
        model_type=str(family.head),
        model_family=family.model_type,
        sizes={name: int(getattr(t, name)) for name in (*_LAYOUT, "dp_shard", "dp_replicate")},
    )


def read(path: Path) -> Written:
    """What wrote the checkpoint in a directory.

    Raises:
        CheckpointError: the file is missing, damaged or of something else.
    """
    kinds = {"int": int, "bool": bool, "str": str, "dict[str, int]": dict}
    wanted = {f.name: kinds[str(f.type)] for f in fields(Written)}
    problem: Exception | str
    try:
        numbers = json.loads((path / NAME).read_text())
        good = isinstance(numbers, dict) and all(type(numbers.get(k)) is kind for k, kind in wanted.items())
        if good and numbers["sizes"].keys() >= set(_LAYOUT):
            return Written(**{k: numbers[k] for k in wanted})
        problem = f"{NAME} does not say {', '.join(wanted)}"
    except (OSError, ValueError) as error:
        problem = error
    raise CheckpointError(
        "this is no complete checkpoint of megatron",
        found=f"{path}: {problem}",
        wanted=f"a directory with {NAME}",
        next="resume from an earlier checkpoint",
    )


def check_fit(there: Written, here: Written) -> None:
    """Compare what wrote a checkpoint with who is to read it.

    Raises:
        CheckpointError: the files would not mean the same here; names both sides and what to change.
    """
    if (there.model_family, there.model_type) != (here.model_family, here.model_type):
        raise CheckpointError(
            "another model wrote the checkpoint",
            found=f"a {there.model_family} {there.model_type}",
            wanted=f"a {here.model_family} {here.model_type}, as here",
            next="resume with the model that wrote it, or take its weights from an export (model.path)",
        )
    if there.param_dtype != here.param_dtype:
        raise CheckpointError(
            "weights of another dtype wrote the checkpoint",
            found=there.param_dtype,
            wanted=f"{here.param_dtype}, as here",
            next=f"set actor.engine.param_dtype={there.param_dtype}",
        )
    if there.optimizer != here.optimizer:
        raise CheckpointError(
            "another optimizer wrote the checkpoint",
            found=there.optimizer,
            wanted=here.optimizer,
            next=f"set actor.optim.name={there.optimizer}",
        )
    if not there.has_moments:
        return
    if there.sharded_moments != here.sharded_moments:
        raise CheckpointError(
            "moments that were sharded over data parallel ranks, and whole ones, are different files",
            found=f"sharded: {str(there.sharded_moments).lower()}",
            wanted=str(here.sharded_moments).lower(),
            next=f"set actor.engine.distributed_optimizer={'always' if there.sharded_moments else 'never'}",
        )
    changed = [name for name in _LAYOUT if here.sizes[name] != there.sizes[name]]
    if there.sharded_moments and changed:
        raise CheckpointError(
            "sharded moments can be read by ranks of the same model parallel sizes only",
            found=", ".join(f"{name}={here.sizes[name]}" for name in changed),
            wanted=", ".join(f"{name}={there.sizes[name]}" for name in changed),
            next="resume with those sizes, or write the checkpoint with actor.engine.distributed_optimizer=never",
        )
