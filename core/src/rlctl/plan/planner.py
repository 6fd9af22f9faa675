"""From a request to a plan: ranks, batches, refusals, memory and backends."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlctl.config.problems import Problem
from rlctl.config.schema import ParallelConfig, RunConfig
from rlctl.config.schema_lora import reference_is_base
from rlctl.constraints import ModelFacts
from rlctl.data.lengths import positions_in, surely_beyond
from rlctl.data.readers import count_rows, split_files
from rlctl.errors import DataError
from rlctl.evidence import EvidenceBook
from rlctl.plan.adapters import unmatched_targets
from rlctl.plan.arithmetic import Line, pair_lines, rl_lines, sft_lines, warm_start_lines
from rlctl.plan.backends import Choice, Needs, rank_backends
from rlctl.plan.budget import MemoryPlan, plan_memory
from rlctl.plan.engine_memory import ModelSize
from rlctl.plan.layout import RoleLayout, lay_out
from rlctl.plan.parameters import count_in_files, count_parameters
from rlctl.plan.request import Request, find_spec, plugins_of, python_of, ranks_of
from rlctl.plan.shapes import FAMILIES, model_shape
from rlctl.plan.source import ModelSource, find_model
from rlctl.plugins import PluginSet
from rlctl.records import ModelType
from rlctl.trainer_kinds import PAIR_TRAINERS


@dataclass(frozen=True)
class Refusal:
    """Something that would be refused before launch.

    Args:
        where: role or dotted path.
        what: in plain words.
        nearest: choices that would be taken, nearest first.
    """

    where: str
    what: str
    nearest: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that :mod:`rlctl.plan` says of one configuration."""

    request: Request
    source: ModelSource
    size: ModelSize
    layouts: tuple[RoleLayout, ...]
    batch: tuple[Line, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]
    memory: MemoryPlan
    train_backends: tuple[Choice, ...]
    rollout_backends: tuple[Choice, ...]


def make_plan(request: Request, plugins: PluginSet, book: EvidenceBook) -> Plan:
    """Plan a run. Nothing is launched, downloaded or converted."""
    config = request.config
    source = find_model(config.model)
    size, why = model_size(source)
    facts = ModelFacts() if source.config is None else ModelFacts.from_config(source.config)
    layouts, refusals = _layouts(request, plugins, facts)
    beyond = None if source.config is None else surely_beyond(config.data, positions_in(source.config))
    if config.trainer.type == "rl" and beyond is not None:
        refusals.append(Refusal("data.max_response_length", f"{beyond.what} (at least {beyond.found})", (beyond.next,)))
    refusals += _adapter_refusals(request, size)
    actor = next((lay for lay in layouts if lay.role == "actor"), None)
    topology = None if actor is None else actor.topology
    dp_size = 1 if topology is None else topology.dp_size
    token_ranks = 1 if topology is None else topology.usp * topology.cp
    rows = training_rows(config)
    if config.trainer.type in PAIR_TRAINERS:
        batch = pair_lines(config, dp_size, token_ranks, rows)
    elif config.trainer.type == "sft":
        batch = sft_lines(config, dp_size, token_ranks, rows)
    else:
        batch = [*warm_start_lines(config, dp_size, token_ranks), *rl_lines(config, dp_size, token_ranks, rows)]
    family = None if source.config is None else str(source.config.get("model_type"))
    notes = list(request.notices)
    if topology is None:
        notes.append("the batch lines take dp as 1, because the actor's ranks cannot be split as asked")
    notes += [*(f"{lay.role}: {note}" for lay in layouts for note in lay.notes)]
    return Plan(
        request=request,
        source=source,
        size=size,
        layouts=tuple(layouts),
        batch=tuple(batch),
        refusals=tuple(refusals),
        notes=tuple(dict.fromkeys(notes)),
        memory=plan_memory(request, layouts, size, why),
        train_backends=_ranked(request, "actor", plugins, book, facts, family),
        rollout_backends=_ranked(request, "rollout", plugins, book, facts, family)
        if config.trainer.type == "rl"
        else (),
    )


def _adapter_refusals(request: Request, size: ModelSize) -> list[Refusal]:
    lora = request.config.model.lora
    unmatched = None if lora is None or size.shape is None else unmatched_targets(size.shape, lora)
    if unmatched is None:
        return []
    what, hint = unmatched
    return [Refusal("model.lora.target_modules", what, (f"model.lora.{hint}",))]


def _ranked(
    request: Request, role: str, plugins: PluginSet, book: EvidenceBook, facts: ModelFacts, family: str | None
) -> tuple[Choice, ...]:
    """The backends that could do what a role does, of the environment where it lives."""
    there = plugins_of(request.config, role, plugins)
    # What was proved here was proved with the versions of this environment.
    return tuple(
        rank_backends(_needs(request, role, facts, family), there, book if there is plugins else EvidenceBook())
    )


def roles(request: Request) -> list[str]:
    """The roles that take part."""
    config = request.config
    ref = ["ref"] if config.needs_reference and not reference_is_base(config) else []
    if config.trainer.type != "rl":
        return ["actor", *ref]
    critic = ["critic"] if request.critic or config.critic is not None else []
    return ["actor", *ref, *critic, "rollout"]


def role_axes(config: RunConfig, role: str) -> dict[str, int]:
    """The sizes that a role's ``parallel`` section asks for."""
    sections: dict[str, ParallelConfig] = {"rollout": config.rollout.parallel, "ref": config.ref.parallel}
    if config.critic is not None:
        sections["critic"] = config.critic.parallel
    return {axis: int(size) for axis, size in sections.get(role, config.actor.parallel).model_dump().items()}


def _layouts(request: Request, plugins: PluginSet, facts: ModelFacts) -> tuple[list[RoleLayout], list[Refusal]]:
    config = request.config
    layouts: list[RoleLayout] = []
    refusals = [_refusal(fault) for fault in request.faults if not _about_axes(fault)]
    for role in roles(request):
        name, kind = config.backend_of(role)
        spec = find_spec(plugins_of(config, role, plugins), name, kind, request.device)
        if spec is None:
            continue  # the configuration has said so
        if request.device not in {device for device, _ in spec.devices}:
            runs_on = ", ".join(dict.fromkeys(device for device, _ in spec.devices))
            refusals.append(Refusal(role, f"{spec.name} does not run on {request.device}", (f"one of {runs_on}",)))
            continue
        scores = role == "critic" or (role == "actor" and config.trainer.type == "rm")
        head = ModelType.VALUE_MODEL if scores else ModelType.LANGUAGE_MODEL
        if head not in spec.model_types:
            refusals.append(
                Refusal(
                    role, f"{spec.name} has no {head}: it cannot train a {'reward model' if role == 'actor' else role}"
                )
            )
            head = spec.model_types[0]
        layout = lay_out(
            role, spec, config.pool_of(role), ranks_of(config, role), role_axes(config, role),
            request.device, request.vendor, facts, head,
        )  # fmt: skip
        layout = replace(layout, python=python_of(config, role))
        layouts.append(layout)
        # The reference and a critic follow the actor: one complaint is enough.
        said = {refusal.what.removeprefix(f"{refusal.where}.") for refusal in refusals}
        for problem in layout.problems:
            if problem.removeprefix(f"{role}.") not in said:
                refusals.append(Refusal(role, problem, layout.nearest))
    return layouts, refusals


def _about_axes(fault: Problem) -> bool:
    """Faults of the parallel sections, which the layout finds again, with the nearest sizes that fit."""
    parts = fault.path.split(".")
    return (len(parts) > 1 and parts[1] == "parallel") or fault.what.find(" does not run as ") > 0


def _refusal(fault: Problem) -> Refusal:
    return Refusal(fault.path or fault.origin, str(fault))


def _needs(request: Request, role: str, facts: ModelFacts, family: str | None) -> Needs:
    config = request.config
    heads = (ModelType.VALUE_MODEL if config.trainer.type == "rm" else ModelType.LANGUAGE_MODEL,)
    if role == "actor" and "critic" in roles(request) and config.backend_of("critic") == config.backend_of("actor"):
        heads = (ModelType.LANGUAGE_MODEL, ModelType.VALUE_MODEL)
    _, kind = config.backend_of(role)
    axes, size = role_axes(config, role), ranks_of(config, role)
    lora = role == "actor" and config.model.lora is not None
    return Needs(kind, size, axes, request.device, request.vendor, heads, facts, family, lora)


def model_size(source: ModelSource) -> tuple[ModelSize, str]:
    """What is known of the model's size, and what is missing of it."""
    if source.config is None:
        return ModelSize(None, None, None, ""), source.missing
    kind = str(source.config.get("model_type"))
    try:
        shape = model_shape(source.config)
    except (ValueError, TypeError, AttributeError) as error:
        return ModelSize(None, None, None, ""), f"the sizes in {source.words} cannot be read: {error}"
    if shape is not None:
        count = count_parameters(shape)
        return ModelSize(shape, count, count.total, f"counted from {source.words}"), ""
    known = ", ".join(FAMILIES)
    missing = f"activations, logits and the KV cache of model_type {kind} (known: {known})"
    in_files = None if source.directory is None else count_in_files(source.directory)
    if in_files is None:
        return ModelSize(
            None, None, None, ""
        ), f"the number of weights of model_type {kind}: it is none of {known}, and there are no safetensors files"
    return ModelSize(None, None, in_files, "read from the headers of its safetensors files"), missing


def training_rows(config: RunConfig) -> int | None:
    """Training rows, where that is cheap to know: a task's size, or the lines of local jsonl files."""
    data = config.data
    if data.task is not None:
        rows: int | None = data.task.train_size
    else:
        try:
            counts = [count_rows(file) for file in split_files(data.train_files, "train")]
        except (DataError, OSError):
            return None
        rows = None if any(n is None for n in counts) else sum(n for n in counts if n is not None)
    if rows is None or data.train_max_samples is None:
        return rows
    return min(rows, data.train_max_samples)
