"""What `rlctl verify` runs: topologies, heads and models. Of ``--all`` a part, with the reason of each rule.

Not every combination: an axis that says nothing about a model is not run with it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl.constraints import facts_of
from rlctl.device import Device
from rlctl.records import Axis, BackendSpec, ModelType
from rlctl.topology import Topology
from rlctl.verify.models import head_of
from rlctl.verify.tiny import MOE
from rlctl.verify.topologies import EXPERT_AXES, all_topologies, declared_axes

TINY = "tiny:"
DEFAULT_MODELS = ("tiny:qwen3",)
DEFAULT_OF_ALL = ("tiny:qwen3", "tiny:qwen3_moe")
"""A dense model, whose head is tied to its embedding, and a mixture of experts."""
UNTIED = "tiny:qwen2"
"""A dense model with a head of its own, and biases of queries, keys and values."""
_WHERE_HEADS_LIE = (Axis.TP, Axis.PP)
_UNTIED_AXES = ({}, *({a.value: 2} for a in _WHERE_HEADS_LIE))


@dataclass(frozen=True)
class Choice:
    """One case to run. ``model``: ``tiny:FAMILY`` or a directory."""

    topology: Topology
    model_type: ModelType
    model: str


@dataclass(frozen=True)
class LeftOut:
    """Combinations that are not run, and why. ``topology`` may be the words for several."""

    topology: str
    model: str
    reason: str
    model_type: str = str(ModelType.LANGUAGE_MODEL)

    def to_json(self) -> dict[str, str]:
        """As ``rlctl verify --json`` shows it."""
        return {
            "topology": self.topology,
            "model": self.model,
            "model_type": self.model_type,
            "reason": self.reason,
        }


def is_mixture(model: str) -> bool:
    """Whether a model has experts."""
    if model.startswith(TINY):
        return model.removeprefix(TINY) in MOE
    return bool(facts_of(None, model).num_experts)


def heads_of(spec: BackendSpec, model: str) -> tuple[ModelType, ...]:
    """The heads that a model can be verified with: tiny ones with each that the backend has, others with their own."""
    return spec.model_types if model.startswith(TINY) else (head_of(Path(model)),)


def choose_one(spec: BackendSpec, topology: Topology, models: Sequence[str]) -> list[Choice]:
    """One topology, with every model and head."""
    return [Choice(topology, head, m) for m in models for head in heads_of(spec, m)]


def choose_all(
    spec: BackendSpec, device: Device, models: Sequence[str], most_ranks: int
) -> tuple[list[Choice], list[LeftOut]]:
    """The choices of ``--all``, sorted by the number of ranks, and the rules that left others out.

    Experts are spread (ep, etp) in mixtures of experts alone, and where a backend has these axes, a dense model, if there is
    one, runs on all the others of more than two ranks in their stead. A head that is not tied runs where embedding and head
    are split or apart. A value head takes the place of another at the end of the same layers, so it runs in one process and
    along each axis that takes part in it.

    Args:
        models: none for the default ones.
    """
    place = (device.type, device.vendor)
    axes = declared_axes(spec, ModelType.LANGUAGE_MODEL, *place)
    given = tuple(models) or DEFAULT_OF_ALL
    dense = [m for m in given if not is_mixture(m)]
    left_out: list[LeftOut] = []
    found: list[Choice] = []
    language = all_topologies(spec, ModelType.LANGUAGE_MODEL, *place, most_ranks)
    for model in given:
        heads = heads_of(spec, model)
        if not set(heads) & set(spec.model_types):
            left_out.append(LeftOut("every topology", model, f"{spec.name} has no {heads[0]}", str(heads[0])))
        elif ModelType.LANGUAGE_MODEL in heads:
            kept, dropped = _of_language(language, model, dense, axes)
            found += [Choice(t, ModelType.LANGUAGE_MODEL, model) for t in kept]
            left_out += dropped
    if not models and axes & set(_WHERE_HEADS_LIE) and ModelType.LANGUAGE_MODEL in spec.model_types:
        few = [t for t in language if t.axes() in _UNTIED_AXES]
        found += [Choice(t, ModelType.LANGUAGE_MODEL, UNTIED) for t in few]
        why = "what is its own, a head apart from the embedding, is split by tp and moved by pp alone"
        left_out.append(LeftOut("all but one process, tp=2 and pp=2", UNTIED, why))
    if ModelType.VALUE_MODEL in spec.model_types:
        values = all_topologies(spec, ModelType.VALUE_MODEL, *place, most_ranks)
        for model in given:
            if ModelType.VALUE_MODEL in heads_of(spec, model):
                kept, dropped = _of_values(values, model, dense)
                found += [Choice(t, ModelType.VALUE_MODEL, model) for t in kept]
                left_out += dropped
    head_order, models_order = list(ModelType), list(dict.fromkeys(c.model for c in found))
    found.sort(
        key=lambda c: (
            *_place_of(c.topology, language),
            head_order.index(c.model_type),
            models_order.index(c.model),
        )
    )
    return found, left_out


def _place_of(topology: Topology, known: Sequence[Topology]) -> tuple[int, int]:
    """By ranks, so that topologies share worker groups, then as they were listed."""
    return topology.world_size, known.index(topology) if topology in known else len(known)


def _of_language(
    topologies: Sequence[Topology], model: str, dense: Sequence[str], axes: set[Axis]
) -> tuple[list[Topology], list[LeftOut]]:
    spread = [t for t in topologies if spreads_experts(t)]
    if model in dense:
        note = LeftOut("topologies with ep or etp", model, "it has no experts to spread")
        return [t for t in topologies if t not in spread], [note] if spread else []
    if dense and axes & set(EXPERT_AXES):
        # Two ranks in any case: whole experts on ranks with different tokens are a case of their own.
        note = LeftOut("more than two ranks without ep and etp", model, f"{dense[0]} runs on them")
        few = [t for t in topologies if t in spread or (t.world_size <= 2 and (t.sp or t.tp == 1))]
        return few, [note]
    return list(topologies), []


def _of_values(
    topologies: Sequence[Topology], model: str, dense: Sequence[str]
) -> tuple[list[Topology], list[LeftOut]]:
    if dense and model not in dense:
        why = f"the value head is verified on {dense[0]}"
        return [], [LeftOut("every topology", model, why, str(ModelType.VALUE_MODEL))]
    kept = [t for t in topologies if t.world_size <= 2 and len(t.axes()) <= 1]
    why = "the head differs, and the layers below it do not: they are verified as a language model"
    note = LeftOut("all but one process and one axis of size 2", model, why, str(ModelType.VALUE_MODEL))
    return kept, [note] if len(kept) < len(topologies) else []


def spreads_experts(topology: Topology) -> bool:
    """Whether an axis of experts is larger than one."""
    return topology.ep * topology.etp > 1
