"""What to verify, from what a user typed. Imports no torch: wrong requests are refused at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rlctl.config.engine_sections import config_model
from rlctl.config.suggest import nearest
from rlctl.device import Device
from rlctl.errors import CapabilityError, ConfigError, UsageError
from rlctl.plugins import BackendRecord, PluginSet
from rlctl.records import BackendKind, ModelType
from rlctl.registry import resolve_backend
from rlctl.topology import Topology
from rlctl.verify.models import require_model
from rlctl.verify.selection import DEFAULT_MODELS, TINY, Choice, LeftOut, choose_all, choose_one
from rlctl.verify.tiny import FAMILIES
from rlctl.verify.topologies import parse_topology


@dataclass(frozen=True)
class Request:
    """What to verify.

    Args:
        choices: in the order in which they run; sorted by world size they share worker groups.
        settings: the backend's ``engine`` section, complete.
        dtype: of the computation; ``master``: of the weights.
        record: keep evidence.
        timeout_s: limit of a rank without progress.
        every: all topologies were asked for, so that one which a model does not fit is left out; else it is an error.
        left_out: what is not run by the rules of ``every``.
    """

    backend: BackendRecord
    device: Device
    choices: tuple[Choice, ...]
    settings: Mapping[str, Any]
    dtype: str = "float32"
    master: str = "float32"
    record: bool = True
    timeout_s: float = 300.0
    every: bool = False
    left_out: tuple[LeftOut, ...] = ()

    @property
    def topologies(self) -> tuple[Topology, ...]:
        """Each once."""
        return tuple(dict.fromkeys(c.topology for c in self.choices))

    @property
    def models(self) -> tuple[str, ...]:
        """Each once: ``tiny:FAMILY`` or a directory."""
        return tuple(dict.fromkeys(c.model for c in self.choices))


def make_request(
    plugins: PluginSet,
    backend: str,
    device: Device,
    *,
    topology: str | None = None,
    every: bool = False,
    nproc: int | None = None,
    models: Sequence[str] = (),
    dtype: str = "float32",
    engine: Sequence[str] = (),
    record: bool = True,
    timeout_s: float = 300.0,
    notice: Callable[[str], None] | None = None,
) -> Request:
    """Check everything that can be checked before anything is launched.

    Args:
        topology: ``axis=size`` pairs; ``every``: every axis that the backend declares, up to ``nproc`` ranks (see
            :mod:`rlctl.verify.selection`).
        models: ``tiny:FAMILY``, ``tiny:all`` or directories; none for the default.
        engine: ``key=value`` settings of the backend's engine.

    Raises:
        UsageError: the request contradicts itself or cannot be read.
        BackendUnavailableError: no such training backend here.
        ConfigError: a setting that the backend does not take, or a model that is not there.
        CapabilityError: nothing is left to run.
    """
    if every and topology is not None:
        raise UsageError(
            "--all and --topology exclude each other",
            found=f"--all --topology {topology}",
            wanted="one of them",
            next=f"rlctl verify --backend {backend} --all",
        )
    found = resolve_backend(
        plugins, backend, BackendKind.TRAIN, ModelType.LANGUAGE_MODEL, device.type, device.vendor, notice
    )
    chosen, left_out = _models(models), []
    if every:
        choices, left_out = choose_all(found.spec, device, chosen, nproc or _default_ranks(device))
        if not choices:
            raise CapabilityError(
                f"backend {found.spec.name!r} can run none of these models",
                details=[f"{e.model}: {e.reason}" for e in left_out],
                next=f"rlctl capabilities --backend {found.spec.name}",
            )
    else:
        choices = choose_one(found.spec, parse_topology(topology, nproc), chosen or DEFAULT_MODELS)
    settings, master = complete_settings(config_model(found.spec), _pairs(engine), dtype, found.spec.name)
    return Request(
        backend=found,
        device=device,
        choices=tuple(choices),
        settings=settings,
        dtype=dtype,
        master=master,
        record=record,
        timeout_s=timeout_s,
        every=every,
        left_out=tuple(left_out),
    )


def _default_ranks(device: Device) -> int:
    """As many as there are devices; four processes on a CPU."""
    if device.type == "cpu":
        return 4
    from rlctl.device import device_count

    return device_count(device)


def _models(given: Sequence[str]) -> tuple[str, ...]:
    chosen: list[str] = []
    for model in given:
        if model == f"{TINY}all":
            chosen += [f"{TINY}{family}" for family in FAMILIES]
        elif model.startswith(TINY):
            family = model.removeprefix(TINY)
            if family not in FAMILIES:
                near = nearest(family, FAMILIES, 0.6)
                raise UsageError(
                    f"there is no tiny model of the family {family!r}",
                    found=model,
                    wanted=", ".join(f"{TINY}{f}" for f in (*FAMILIES, "all")),
                    next=f"--model {TINY}{near}" if near else "--model DIR takes a Hugging Face directory",
                )
            chosen.append(model)
        else:
            require_model(Path(model))
            chosen.append(str(Path(model).resolve()))
    return tuple(dict.fromkeys(chosen))


def _pairs(texts: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise _unreadable(text)
        try:
            out[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise _unreadable(text) from error
    return out


def _unreadable(text: str) -> UsageError:
    return UsageError(
        "an engine setting cannot be read",
        found=f"--engine {text}",
        wanted="key=value, the value a number, a word, true or false",
        next="for example --engine activation_checkpointing=true",
    )


def complete_settings(
    config: type[BaseModel], given: Mapping[str, Any], dtype: str, name: str
) -> tuple[dict[str, Any], str]:
    """(the complete ``engine`` section, dtype of the master weights) for a computation in ``dtype``.

    A backend whose section has ``param_dtype`` computes in it over float32 master weights; another one computes in the dtype
    of its weights.

    Raises:
        ConfigError: a setting that the backend does not have or does not take.
    """
    values = dict(given)
    has_own = "param_dtype" in config.model_fields
    if has_own:
        values.setdefault("param_dtype", dtype)
    try:
        section = config.model_validate(values).model_dump(mode="json")
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(
            f"the backend {name!r} does not take these settings",
            details=lines,
            wanted="its own keys: " + ", ".join(config.model_fields),
            next="--engine key=value, once for each",
        ) from error
    return section, "float32" if has_own else dtype
