"""Backends and their ``engine`` sections, checked before anything is launched.

Only the chosen backends' config models are imported. When a key is not known to the chosen one, the others' models are
looked at too, to name the backend that such a leftover belongs to.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rlctl import catalogue
from rlctl.config.adapters import adapter_problems
from rlctl.config.axes import axis_problems, condition_problems, head_of, layout_problem
from rlctl.config.document import Document, Loc, Origin, dotted
from rlctl.config.engine_sections import ROLE_KINDS, config_model, find_of_role, kind_of_role
from rlctl.config.homes import Home, Homes
from rlctl.config.problems import Problem, from_error
from rlctl.config.schema import ActorConfig, CriticConfig, RefConfig, RolloutConfig, TeacherConfig
from rlctl.config.schema_critic import needs_critic
from rlctl.config.schema_preference import dpo_has_reference
from rlctl.config.schema_runtime import MAIN_POOL
from rlctl.config.staleness import add_correction
from rlctl.config.teacher_engine import teacher_problems
from rlctl.errors import RlctlError
from rlctl.records import BackendSpec

if TYPE_CHECKING:
    from rlctl.plugins import PluginSet

_ROLE_MODELS: dict[str, type[BaseModel]] = {
    "actor": ActorConfig,
    "ref": RefConfig,
    "critic": CriticConfig,
    "teacher": TeacherConfig,
    "rollout": RolloutConfig,
}
_DEFAULT_BACKENDS = {role: cls.model_fields["backend"].default for role, cls in _ROLE_MODELS.items()}
FOLLOWERS = ("ref", "critic", "teacher")
"""Roles that take from the actor what they do not state."""
OPTIONAL = ("critic", "teacher")
"""Roles that a run without their section does not have."""
FOLLOWED = ("engine", "parallel", "micro_batch_size_per_device", "max_tokens_per_device")


@dataclass
class Engines:
    """What the backends had to say.

    Args:
        models: config model of each role's ``engine`` section; of roles that live in this interpreter.
        specs: record of each role's backend.
        problems: what is wrong.
    """

    models: dict[str, type[BaseModel]] = field(default_factory=dict)
    specs: dict[str, BackendSpec] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def resolve_engines(document: Document, plugins: PluginSet, notice: Callable[[str], None]) -> Engines:
    """Check each role's backend and complete its ``engine`` section, so that the resolved configuration says all of it.

    A role that takes no part in the run, and whose backend nobody wrote down, may lack its backend.
    """
    out = Engines()
    homes = Homes(document, plugins)
    actor = document.get(("actor", "backend"), _DEFAULT_BACKENDS["actor"])
    _add_critic(document)
    add_correction(document)
    absent = {role for role in OPTIONAL if not isinstance(document.get((role,)), dict)}
    if isinstance(actor, str):
        for role in FOLLOWERS:
            if role not in absent:
                _follow_actor(document, actor, role)
    for role, default in _DEFAULT_BACKENDS.items():
        if role in absent:
            continue
        name = document.get((role, "backend"), default)
        if isinstance(name, str) and isinstance(document.get((role,), {}), dict):
            _one_role(document, role, name, homes, notice, out)
    for role in FOLLOWERS:
        if {role, "actor"} <= out.specs.keys() and _needed(document, role) and not _own_pool(document, role):
            out.problems += _same_layout(document, role, out.specs[role])
    out.problems += homes.problems
    return out


def _add_critic(document: Document) -> None:
    """Choosing an estimator that needs a critic makes one, of defaults."""
    estimator = document.get(("algorithm", "adv_estimator"))
    if document.get(("critic",)) is None and _trainer(document) == "rl" and needs_critic(estimator):
        document.set(("critic",), {}, Origin("derived", f"as algorithm.adv_estimator is {estimator}"))


def _same_layout(document: Document, role: str, spec: BackendSpec) -> list[Problem]:
    """Sizes other than the actor's in its processes, where the backend cannot have both."""
    if not spec.one_layout or document.get(("actor", "backend")) != spec.name:
        return []
    problem = layout_problem(document, role, spec)
    return [] if problem is None else [problem]


def _needed(document: Document, role: str) -> bool:
    """True for a role that takes part, or whose backend was written down although it does not."""
    return _takes_part(document, role) or (document.has((role, "backend")) and not _derived(document, role))


def _takes_part(document: Document, role: str) -> bool:
    rl = _trainer(document) == "rl"
    kl = True in (document.get(("actor", "use_kl_loss")), document.get(("algorithm", "use_kl_in_reward")))
    if role == "ref":
        return kl if rl else _trainer(document) == "dpo" and dpo_has_reference(document.get(("dpo",)))
    return rl or role != "rollout"


def _trainer(document: Document) -> object:
    return document.get(("trainer", "type"), "rl")


_ABSENT = {
    "ref": "there is no KL to a reference (actor.use_kl_loss, algorithm.use_kl_in_reward), and no DPO that has one",
    "rollout": "only trainer.type rl samples",
}
"""Why a role takes no part."""


def _derived(document: Document, role: str) -> bool:
    return document.leaf_origin((role, "backend")).kind == "derived"


def _follow_actor(document: Document, actor: str, role: str) -> None:
    """A follower takes from the actor what it does not state, unless it has a backend of its own."""
    section = document.get((role,), {})
    if not isinstance(section, dict) or section.get("backend"):
        return
    derived = Origin("derived", "as actor.backend")
    document.set((role, "backend"), actor, derived)
    bounds = FOLLOWED[2:]
    for key in FOLLOWED:
        value = document.get(("actor", key))
        if value is None or (key in bounds and any(section.get(bound) is not None for bound in bounds)):
            continue
        if isinstance(value, dict):
            for name, item in value.items():
                if key == "parallel" and name.startswith("dp_") and _own_pool(document, role):
                    continue  # they are sizes of the actor's pool
                if isinstance(document.get((role, key), {}), dict) and not document.has((role, key, name)):
                    document.set(
                        (role, key, name), copy.deepcopy(item), Origin("derived", f"as {dotted(('actor', key, name))}")
                    )
        else:
            document.set((role, key), value, Origin("derived", f"as actor.{key}"))


def _own_pool(document: Document, role: str) -> bool:
    """True for a follower that does not share the actor's pool."""
    pool = document.get((role, "pool"))
    return bool(pool) and pool != document.get(("actor", "pool"), MAIN_POOL)


def _own_sizes(document: Document, role: str) -> bool:
    """True where somebody wrote a size of the role's own down."""
    sizes = document.get((role, "parallel"), {})
    written = ("file", "override", "flag")
    return isinstance(sizes, dict) and any(
        document.leaf_origin((role, "parallel", axis)).kind in written for axis in sizes
    )


def _one_role(
    document: Document, role: str, name: str, homes: Homes, notice: Callable[[str], None], out: Engines
) -> None:
    loc: Loc = (role, "backend")
    device = _device(document)
    if homes.python_of(role) is not None and not _takes_part(document, role):
        if document.get((role, "python")) is not None:
            notice(f"{role}.python does nothing: {_ABSENT[role]}")
        return  # nobody is asked for a role that takes no part
    home = homes.of(role, (name, ROLE_KINDS[role][0]))
    if home is None:
        return  # its interpreter does not answer, which is said
    record = find_of_role(home.plugins, role, name, device)
    derived = _derived(document, role)
    if record is None:
        # Where the reference follows the actor, also in its environment, the actor's own complaint is enough.
        if _needed(document, role) and not (derived and home.python == homes.python_of("actor")):
            out.problems.append(_unavailable(document, loc, name, home))
            known = catalogue.find(name, kind_of_role(home.plugins, role, name))
            if known is not None:
                # What is known of its axes is said too: with another backend it may be the reason to choose it.
                out.problems += axis_problems(document, role, known.spec, device, notice)
                out.problems += condition_problems(document, role, known.spec, device)
        return
    spec = record.spec
    if name != spec.name:
        if not derived:
            notice(f"{dotted(loc)}: {name} is another name of {spec.name}, which is used")
        document.set(loc, spec.name, document.origin(loc))
    if home.python is None:
        try:
            out.models[role] = config_model(spec)
        except RlctlError as error:
            if not derived:
                out.problems.append(from_error(loc, document, error))
            return
    out.specs[role] = spec
    if head_of(document, role) not in spec.model_types:
        out.problems.append(_without_head(document, role, spec, home.plugins, derived))
        return
    out.problems += adapter_problems(document, role, spec, home.plugins)
    if role == "teacher":
        out.problems += teacher_problems(document, spec, home.plugins)
    _engine_section(document, role, spec, home, out)
    if not derived or (role in FOLLOWERS and (_own_pool(document, role) or _own_sizes(document, role))):
        out.problems += axis_problems(document, role, spec, device, notice)


def _without_head(document: Document, role: str, spec: BackendSpec, plugins: PluginSet, derived: bool) -> Problem:
    """A backend whose models have another head than the role needs."""
    loc: Loc = ("actor" if derived else role, "backend")
    known = {
        spec.name: spec for spec in (*(e.spec for e in catalogue.entries()), *(r.spec for r in plugins.backends()))
    }
    names = sorted(n for n, s in known.items() if s.kind is spec.kind and head_of(document, role) in s.model_types)
    installed = [r.spec.name for r in plugins.backends() if r.spec.name in names]
    return Problem(
        dotted(loc),
        str(document.origin(loc)),
        f"{spec.name} has no {head_of(document, role)}, which a {'reward model' if role == 'actor' else role} is",
        wanted=f"one of {', '.join(names)}" if names else "a backend that has one; rlctl capabilities shows none",
        hint=f"set {role}.backend={(installed or names or ['NAME'])[0]}" + ("" if installed else "; install it first"),
    )


def _unavailable(document: Document, loc: Loc, name: str, home: Home) -> Problem:
    from rlctl.registry import short_name

    role = str(loc[0])
    kinds, kind = ROLE_KINDS[role], kind_of_role(home.plugins, role, name)
    try:
        home.require_backend(name, kind)
    except RlctlError as error:
        return from_error(loc, document, error)
    names = sorted({r.spec.name for r in home.plugins.backends() if r.spec.kind in kinds})
    return Problem(
        dotted(loc),
        str(document.origin(loc)),
        f"no {kind} backend is called {short_name(name)!r}",
        wanted=" or ".join(names) or "an installed backend",
        hint="rlctl plugins lists what is installed",
    )


def _engine_section(document: Document, role: str, spec: BackendSpec, home: Home, out: Engines) -> None:
    loc: Loc = (role, "engine")
    if not isinstance(document.get(loc, {}), dict):
        return  # the schema says what it wants there
    try:
        values, problems = home.checked_section(document, role, spec)
    except RlctlError as error:
        if not _derived(document, role):
            out.problems.append(from_error(loc, document, error))
        return
    out.problems += [p for p in problems if not p.origin.startswith("as actor.")]
    if values is not None:
        _fill(document, loc, values, dict(document.origins))


def _fill(document: Document, loc: Loc, values: dict[str, Any], origins: dict[Loc, Origin]) -> None:
    """Write the whole section down, defaults included, so that the resolved configuration says all of it."""
    for key, item in values.items():
        place = (*loc, key)
        if isinstance(item, dict) and item:
            _fill(document, place, item, origins)
        else:
            document.set(place, item, origins.get(place, Origin("default", "default")))


def _device(document: Document) -> str | None:
    """The device, where the configuration or RLCTL_DEVICE names it; asking the machine would import torch."""
    given = document.get(("trainer", "device"))
    if isinstance(given, str) and given != "auto":
        return given
    return os.environ.get("RLCTL_DEVICE") or None
