"""Constraints between the sizes of parallel axes and a model, as named predicates with words.

A capability names them (several joined by ``&``); config validation, ``plan``, ``doctor`` and the conformance suite read
the same ones. A predicate that needs a fact which is not known (no model was read) does not complain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.topology import Topology

Sizes = Mapping[str, int]
_MAX_CONFIG_BYTES = 4 * 1024 * 1024
_PRODUCT_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "usp", "tp")


@dataclass(frozen=True)
class ModelFacts:
    """What constraints need to know of a model; None where it is not known.

    Args:
        num_heads: attention (query) heads.
        num_kv_heads: key/value heads.
        num_layers: transformer layers.
        num_experts: routed experts of a layer; 0 for a dense model.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    num_layers: int | None = None
    num_experts: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelFacts:
        """Read a Hugging Face ``config.json`` (a text part inside a multimodal one is found)."""
        text = config.get("text_config")
        config = {**config, **text} if isinstance(text, Mapping) else config
        heads = _first(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
        return cls(
            num_heads=heads,
            num_kv_heads=_first(config, "num_key_value_heads", "multi_query_group_num", "n_head_kv") or heads,
            num_layers=_first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
            num_experts=_first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") or 0,
        )


def facts_of(config: object, path: object) -> ModelFacts:
    """Facts of a model section: of its ``config``, or of the ``config.json`` in a local directory ``path``.

    Empty for a hub id, or a file that cannot be read: whoever loads the model complains of it in better words.
    """
    if not isinstance(config, Mapping) and isinstance(path, str):
        config = local_config(path)
    return ModelFacts.from_config(config) if isinstance(config, Mapping) else ModelFacts()


def local_config(path: str) -> object:
    """The ``config.json`` of a local directory; None where it cannot be read."""
    try:
        with (Path(path) / "config.json").open("rb") as stream:
            return json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((int(config[n]) for n in names if isinstance(config.get(n), int)), None)


@dataclass(frozen=True)
class Violation:
    """A constraint that does not hold.

    Args:
        constraint: its name.
        axis: the axis whose size should change.
        words: what is required.
        found: the numbers that break it.
        nearest: the nearest sizes of that axis that fit, as ``tp=4``; empty when none does.
    """

    constraint: str
    axis: str
    words: str
    found: str
    nearest: tuple[str, ...]

    def __str__(self) -> str:
        choices = f"; nearest that fits: {' or '.join(self.nearest)}" if self.nearest else ""
        return f"{self.words} (found {self.found}){choices}"


@dataclass(frozen=True)
class Constraint:
    """One named rule.

    Args:
        axis: the axis that it restricts, whose nearest valid sizes are worked out.
        words: what is required, in words.
        holds: True, False, or None when a fact is missing.
        shown: the sizes and facts that appear in the message.
        note: the rule does not refuse: it says what an axis comes to.
    """

    axis: str
    words: str
    holds: Callable[[Sizes, ModelFacts], bool | None]
    shown: tuple[str, ...]
    note: bool = False


def _divides(size: int, total: int | None) -> bool | None:
    return None if total is None else total % size == 0


def _all(*answers: bool | None) -> bool | None:
    """False when one is False; None when none is, but one is not known."""
    if any(a is False for a in answers):
        return False
    return None if any(a is None for a in answers) else True


def _usp(s: Sizes, f: ModelFacts) -> bool | None:
    kv_fits = None if f.num_kv_heads is None else f.num_kv_heads % s["usp"] == 0 or s["usp"] % f.num_kv_heads == 0
    return _all(_divides(s["tp"] * s["usp"], f.num_heads), kv_fits)


def _vpp(s: Sizes, f: ModelFacts) -> bool | None:
    return s["vpp"] == 1 or _all(s["pp"] > 1, _divides(s["pp"] * s["vpp"], f.num_layers))


def _experts(s: Sizes, f: ModelFacts) -> bool | None:
    ranks_fit = (s["world_size"] // s["pp"]) % (s["ep"] * s["etp"]) == 0
    has_experts = None if f.num_experts is None else f.num_experts > 0
    return s["ep"] == 1 or _all(has_experts, _divides(s["ep"], f.num_experts), ranks_fit)


def _etp(s: Sizes, f: ModelFacts) -> bool | None:
    has_experts = None if f.num_experts is None else f.num_experts > 0
    return s["etp"] == 1 or _all(has_experts, (s["world_size"] // s["pp"]) % (s["ep"] * s["etp"]) == 0)


def _moe_sp(s: Sizes, f: ModelFacts) -> bool | None:
    return True if s["tp"] == 1 or s["sp"] else None if f.num_experts is None else f.num_experts == 0


def _dcp(s: Sizes, f: ModelFacts) -> bool | None:
    most = None if f.num_kv_heads is None else s["dcp"] <= max(1, s["tp"] // f.num_kv_heads)
    return s["dcp"] == 1 or _all(s["tp"] % s["dcp"] == 0, most)


CONSTRAINTS: Mapping[str, Constraint] = {
    "heads_divisible_by_tp": Constraint(
        "tp", "attention heads must divide by tp", lambda s, f: _divides(s["tp"], f.num_heads), ("num_heads", "tp")
    ),
    "heads_and_kv_heads_divisible_by_tp": Constraint(
        "tp",
        "attention heads and key/value heads must divide by tp",
        lambda s, f: _all(_divides(s["tp"], f.num_heads), _divides(s["tp"], f.num_kv_heads)),
        ("num_heads", "num_kv_heads", "tp"),
    ),
    "heads_divisible_by_usp": Constraint(
        "usp",
        "attention heads must divide by tp x usp, and key/value heads by usp or usp by them",
        _usp,
        ("num_heads", "num_kv_heads", "tp", "usp"),
    ),
    "layers_divisible_by_stages": Constraint(
        "pp", "layers must divide by pp", lambda s, f: _divides(s["pp"], f.num_layers), ("num_layers", "pp")
    ),
    "vpp_needs_pp": Constraint(
        "vpp", "vpp needs pp > 1, and layers must divide by pp x vpp", _vpp, ("num_layers", "pp", "vpp")
    ),
    "sp_needs_tp": Constraint(
        "sp",
        "sp is tied to tp: it is off while tp is 1",
        lambda s, _: not s["sp"] or s["tp"] > 1,
        ("sp", "tp"),
        note=True,
    ),
    "moe_with_tp_needs_sp": Constraint(
        "sp", "a mixture of experts with tp > 1 needs sp", _moe_sp, ("num_experts", "tp", "sp")
    ),
    "experts_divisible_by_ep": Constraint(
        "ep",
        "ep needs a model whose experts divide by it, and ep x etp must divide the ranks of a pipeline stage",
        _experts,
        ("num_experts", "ep", "etp", "pp", "world_size"),
    ),
    "ep_within_a_replica": Constraint(
        "ep",
        "ep must divide dp_shard x usp: the experts of each replica are spread over its own ranks",
        lambda s, _: s["dp_shard"] * s["usp"] % s["ep"] == 0,
        ("ep", "dp_shard", "usp"),
    ),
    "etp_needs_experts": Constraint(
        "etp",
        "etp needs a model with experts, and ep x etp must divide the ranks of a pipeline stage",
        _etp,
        ("num_experts", "ep", "etp", "pp", "world_size"),
    ),
    "ep_equals_tp_times_dp": Constraint(
        "ep",
        "ep must equal tp x dp: the expert group is the whole engine",
        lambda s, _: s["ep"] in (1, s["tp"] * s["dp_replicate"] * s["dp_shard"]),
        ("ep", "tp", "dp_replicate", "dp_shard"),
    ),
    "ep_divides_tp": Constraint("ep", "ep must divide tp", lambda s, _: s["tp"] % s["ep"] == 0, ("ep", "tp")),
    "dcp_within_tp": Constraint(
        "dcp", "dcp must divide tp and be at most tp / key/value heads", _dcp, ("dcp", "tp", "num_kv_heads")
    ),
    "cp_excludes_usp": Constraint(
        "cp", "cp and usp exclude each other", lambda s, _: 1 in (s["cp"], s["usp"]), ("cp", "usp")
    ),
    "usp_excludes_cp": Constraint(
        "usp", "usp and cp exclude each other", lambda s, _: 1 in (s["cp"], s["usp"]), ("cp", "usp")
    ),
}


def named(expression: str | None) -> list[tuple[str, Constraint]]:
    """The constraints that a capability names (``a & b``).

    Raises:
        KeyError: a name that does not exist here.
    """
    names = [n.strip() for n in (expression or "").split("&") if n.strip()]
    return [(n, CONSTRAINTS[n]) for n in names]


def check(name: str, topology: Topology, facts: ModelFacts) -> Violation | None:
    """The violation of one constraint, or None when it holds or a fact that it needs is not known."""
    rule = CONSTRAINTS[name]
    sizes = sizes_of(topology)
    if rule.holds(sizes, facts) is not False:
        return None
    values = {**sizes, **vars(facts)}
    found = ", ".join(f"{n}={_shown(n, values[n])}" for n in rule.shown)
    return Violation(name, rule.axis, rule.words, found, tuple(_nearest(rule, sizes, facts)))


def sizes_of(topology: Topology) -> dict[str, int]:
    """Axis sizes and the world size as whole numbers (``sp`` as 0 or 1)."""
    return {k: int(v) for k, v in vars(topology).items()}


def _shown(name: str, value: Any) -> str:
    return str(bool(value)).lower() if name == "sp" else str(value)


def _nearest(rule: Constraint, sizes: Sizes, facts: ModelFacts) -> Iterable[str]:
    """The next smaller and the next larger size of the rule's axis that fits; product axes must divide the world."""
    now, world = sizes[rule.axis], sizes["world_size"]
    if rule.axis == "sp":
        candidates: Iterable[int] = (1 - now,)
    else:
        candidates = [n for n in range(1, max(2 * now, world, 64) + 1) if n != now]
        if rule.axis in _PRODUCT_AXES:
            others = 1
            for axis in _PRODUCT_AXES:
                others *= sizes[axis] if axis not in (rule.axis, "dp_shard") else 1
            candidates = [n for n in candidates if world % (n * others) == 0]
    fits = [n for n in candidates if rule.holds(_with(sizes, rule.axis, n), facts)]
    below = [n for n in fits if n < now][-1:]
    above = [n for n in fits if n > now][:1]
    return [f"{rule.axis}={_shown(rule.axis, n)}" for n in (*below, *above)]


def _with(sizes: Sizes, axis: str, value: int) -> Sizes:
    """The sizes with one axis changed and dp_shard taking the ranks that are left, as ``dp_shard: -1`` does."""
    changed = {**sizes, axis: value}
    if axis in _PRODUCT_AXES and axis != "dp_shard":
        others = 1
        for name in _PRODUCT_AXES:
            others *= changed[name] if name != "dp_shard" else 1
        changed["dp_shard"] = max(1, changed["world_size"] // others)
    return changed
