"""Memory of a whole run, pool by pool: which roles share a rank, in which phase of a step most is held, and does it fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlctl.catalogue_memory import MemoryPolicy, rollout_policy, train_policy
from rlctl.config.schema import RunConfig, TrainRole
from rlctl.plan.engine_memory import ModelSize, load_of, train_memory
from rlctl.plan.generation import RolloutMemory, sync_item
from rlctl.plan.layout import RoleLayout
from rlctl.plan.memory import GIB, Item, Moment
from rlctl.plan.request import Request
from rlctl.plan.training import StateMemory, TrainMemory

_TIGHT = 0.9


@dataclass(frozen=True)
class PoolMemory:
    """Phases of a step on one rank of a pool, each with the moment at which it holds most."""

    pool: str
    roles: tuple[str, ...]
    phases: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.phases, key=lambda moment: moment.num_bytes)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory a rank.

    Args:
        pools: empty where nothing is known; ``missing`` then says why. With pools, ``missing`` is what they leave out.
        checkpointing: (activations without, with; peak of the actor's update without, with) in bytes, or None.
        checked: the model of this backend's memory is compared with live bytes in the test suite.
    """

    pools: tuple[PoolMemory, ...] = ()
    missing: str = ""
    checkpointing: tuple[int, int, int, int] | None = None
    checked: bool = False
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max((pool.peak.num_bytes for pool in self.pools), default=0)

    def verdict(self, device_memory_gib: float | None) -> tuple[str, str]:
        """(``fits``, ``tight``, ``too_large`` or ``unknown``, words)."""
        if not self.pools:
            return "unknown", self.missing
        pool = max(self.pools, key=lambda p: p.peak.num_bytes)
        most = f"{pool.peak.num_bytes / GIB:,.2f} GiB a rank in pool {pool.pool}, at {pool.peak.name}"
        if device_memory_gib is None:
            return "unknown", f"at most {most}; --device-memory GIB compares"
        share = self.peak_bytes / GIB / device_memory_gib
        words = f"{most}, of {device_memory_gib:g} GiB"
        if share > 1:
            return "too_large", f"does not fit: {words}"
        known = "" if not self.missing else f"; not counted: {self.missing}"
        if share > _TIGHT:
            return "tight", f"tight: {words}, {share:.0%}; contexts, workspaces and fragmentation come on top{known}"
        return "fits", f"fits: {words}, {share:.0%}{known}"


def plan_memory(request: Request, layouts: Sequence[RoleLayout], size: ModelSize, why_unknown: str) -> MemoryPlan:
    """Every pool's phases.

    Args:
        why_unknown: what is missing of the model; shown where nothing can be said.
    """
    by_role = {layout.role: layout for layout in layouts}
    engines: dict[str, TrainMemory | StateMemory] = {}
    for name, layout in by_role.items():
        if name == "rollout":
            continue
        role, section = _section(request.config, name)
        scores = name == "critic" or (name == "actor" and request.config.trainer.type == "rm")
        sized = _with_value_head(size) if scores else size
        memory = train_memory(name, role, section, layout, sized, request, trained=name != "ref")
        if memory is not None:
            engines[name] = memory
    if "actor" not in engines:
        return MemoryPlan(missing=why_unknown or "the ranks cannot be split as asked")
    rollout = _rollout(request, by_role, size, engines["actor"])
    pools: dict[str, list[str]] = {}
    for layout in layouts:
        pools.setdefault(layout.pool, []).append(layout.role)
    actor = engines["actor"]
    policy = train_policy(by_role["actor"].backend)
    return MemoryPlan(
        pools=tuple(_pool(request, name, roles, engines, rollout, size, by_role) for name, roles in pools.items()),
        missing=why_unknown,
        checkpointing=_with_and_without(actor) if isinstance(actor, TrainMemory) else None,
        checked=policy.checked,
        notes=_notes(request, by_role, policy),
    )


def _section(config: RunConfig, name: str) -> tuple[TrainRole, Mapping[str, Any]]:
    """(bounds, engine section) of a training role; a critic without a section is planned like the actor."""
    if name == "ref":
        return config.ref, config.ref.engine or config.actor.engine
    if name == "critic" and config.critic is not None:
        return config.critic, config.critic.engine or config.actor.engine
    return config.actor, config.actor.engine


def _with_value_head(size: ModelSize) -> ModelSize:
    """The same decoder with one output instead of a vocabulary."""
    if size.shape is None or size.count is None or size.total is None:
        return size
    count = replace(size.count, head=size.shape.hidden_size)
    return ModelSize(replace(size.shape, vocab_size=1, tied=False), count, count.total, size.how)


def _rollout(
    request: Request, layouts: Mapping[str, RoleLayout], size: ModelSize, actor: TrainMemory | StateMemory
) -> RolloutMemory | None:
    layout, config = layouts.get("rollout"), request.config
    if layout is None or layout.topology is None or size.total is None:
        return None
    policy = rollout_policy(layout.backend)
    setting = actor.s if isinstance(actor, TrainMemory) else actor.setting
    precision = actor.p if isinstance(actor, TrainMemory) else actor.precision
    together = layout.pool == layouts["actor"].pool
    alone = together and layouts["actor"].world_size == 1 and not setting.wrapped
    shared = alone and policy.shares_module and setting.policy.lends_module and config.rollout.share_weights
    topology = layout.topology
    return RolloutMemory(
        shape=size.shape,
        total=size.total,
        config=config,
        policy=policy,
        section=config.rollout.engine,
        dp_size=topology.dp_size,
        ranks=topology.tp * topology.pp,
        shared=shared,
        device=request.device,
        precision=precision,
    )


def _pool(
    request: Request,
    name: str,
    roles: Sequence[str],
    engines: Mapping[str, TrainMemory | StateMemory],
    rollout: RolloutMemory | None,
    size: ModelSize,
    layouts: Mapping[str, RoleLayout],
) -> PoolMemory:
    here = {role: engines[role] for role in roles if role in engines}
    generates = rollout if "rollout" in roles else None
    copies = [generates.weights()] if generates is not None else []
    rl = request.config.trainer.type == "rl"
    phases: list[Moment] = []
    shared = generates is not None and generates.shared

    def resting(but: str = "") -> list[Item]:
        out: list[Item] = []
        for role, memory in here.items():
            if role != but:
                out += _at_rest(memory, request, keep_weights=shared and role == "actor")
        return out

    phases += _warm_start(request, layouts, engines, copies, name)
    if generates is not None:
        most = max(
            (generates.prefill(), generates.logits()), key=lambda item: item.num_bytes if item is not None else 0
        )
        decoding = [item for item in (generates.cache(), most) if item is not None]
        phases.append(Moment("generation", (*resting(), *copies, *decoding)))
    if "ref" in here:
        phases += [_phase("scoring by the reference", m, (*resting("ref"), *copies)) for m in _fullest(here["ref"])]
    for role in ("critic", "actor"):
        if role in here:
            words = f"update of the {role}" if rl else "training step"
            phases += [_phase(words, m, (*resting(role), *copies)) for m in _fullest(here[role])]
    if rl and size.total is not None:
        source = engines["actor"]
        whole = sync_item(size.count, size.shape, size.total, _master_bytes(source), shared)
        sends = "actor" in here or generates is not None
        if sends:
            phases.append(Moment("weight sync", (*resting(), *copies, whole)))
    return PoolMemory(name, tuple(roles), tuple(phases))


def _warm_start(
    request: Request,
    layouts: Mapping[str, RoleLayout],
    engines: Mapping[str, TrainMemory | StateMemory],
    copies: Sequence[Item],
    pool: str,
) -> list[Moment]:
    """The supervised steps before RL: an engine like the actor's, alone on its ranks but for the rollout's copy."""
    settings, actor, layout = request.config.warm_start, engines["actor"], layouts["actor"]
    if settings is None or layout.pool != pool or layout.topology is None or not isinstance(actor, TrainMemory):
        return []
    load = load_of(request.config.actor, layout.topology, request.config, settings.batch_size)
    full = TrainMemory("actor", actor.shape, actor.count, actor.p, actor.s, load)
    engine = actor.under(actor.s, load) if settings.lora else full
    beside = copies if settings.stop_at_score is not None else ()
    return [_phase("warm start", m, beside) for m in _fullest(engine)]


def _fullest(memory: TrainMemory | StateMemory) -> list[Moment]:
    """The moment at which a training engine holds most."""
    if isinstance(memory, TrainMemory):
        return [max(memory.moments(), key=lambda moment: moment.num_bytes)]
    held = [memory.weights(), memory.gradients(), memory.optimizer()] if memory.role != "ref" else [memory.weights()]
    return [Moment("what is known", tuple(held))]


def _phase(words: str, moment: Moment, others: Sequence[Item]) -> Moment:
    return Moment(f"{words}: {moment.name}", (*moment.items, *others))


def _at_rest(memory: TrainMemory | StateMemory, request: Request, *, keep_weights: bool) -> list[Item]:
    """What an engine leaves on the device while another one works."""
    state = memory.state if isinstance(memory, TrainMemory) else memory
    _, section = _section(request.config, state.role)
    policy, offloads = state.setting.policy, request.device != "cpu"
    out = []
    stays = not (offloads and section.get(policy.param_offload))
    if keep_weights or stays:
        out.append(state.weights())
    if state.role != "ref" and policy.buffered_gradients and stays:
        out.append(state.gradients())
    if state.role != "ref" and state.setting.moments and not state.setting.moments_away:
        out.append(state.optimizer())
    return out


def _master_bytes(memory: TrainMemory | StateMemory) -> int:
    precision = memory.p if isinstance(memory, TrainMemory) else memory.precision
    return precision.master_bytes


def _with_and_without(actor: TrainMemory) -> tuple[int, int, int, int]:
    """(activations without, with checkpointing; peak of the step without, with)."""
    out: list[int] = []
    peaks: list[int] = []
    for on in (False, True):
        other = actor.under(replace(actor.s, checkpointing=on))
        out.append(actor.activations(checkpointing=on).num_bytes)
        peaks.append(max(moment.num_bytes for moment in other.moments()))
    return out[0], out[1], peaks[0], peaks[1]


def _notes(request: Request, layouts: Mapping[str, RoleLayout], policy: MemoryPolicy) -> tuple[str, ...]:
    notes: list[str] = []
    actor, critic = layouts["actor"], request.config.critic
    if "critic" in layouts and critic is not None and critic.model is not None:
        notes.append("the critic is counted with the layers of the actor's model: critic.model is not read here")
    if not policy.checked:
        notes.append(
            f"what {actor.backend} keeps follows its documentation; only the figures of checked backends are compared with live bytes"
        )
    if request.device == "cpu":
        ranks = sum({layout.pool: layout.world_size for layout in layouts.values()}.values())
        notes.append(
            f"the host's memory is shared: {ranks} ranks, and the libraries themselves (about 0.5 GiB each) on top"
            if ranks > 1
            else "the libraries themselves (about 0.5 GiB) come on top"
        )
    return tuple(notes)
