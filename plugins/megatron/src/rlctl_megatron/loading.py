"""Fill this rank's module chunks from a source of checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlctl.errors import EngineError
from rlctl_megatron import agreement, mapping
from rlctl_megatron.families import Entry, Family, Site, Split
from rlctl_megatron.mapping import Shard
from rlctl_megatron.source import Request, Source

if TYPE_CHECKING:
    from rlctl_megatron.mesh import Place


_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}


@dataclass(frozen=True)
class Chunk:
    """One module of a rank: consecutive layers of the model.

    Args:
        module: its parameters carry megatron's names, layers counted from 0.
        layers: the same layers counted over the whole model, from 0.
        first: it has the embedding.
        last: it has the final norm and the head.
    """

    module: nn.Module
    layers: tuple[int, ...]
    first: bool
    last: bool

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """By the names of the tables. Transformer Engine keeps a norm in the projection that follows it."""
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters():
            for fused, apart in _FUSED_NORMS.items():
                name = name.replace(fused, apart)
            found[name] = parameter
        return found


def shard_of(entry: Entry, place: Place) -> Shard:
    """This rank's share of an entry's parameters."""
    if entry.split is Split.ETP:
        return Shard(place.etp_rank, place.topology.etp)
    return Shard(place.tp_rank, place.topology.tp)


def chunk_sites(chunk: Chunk, family: Family, place: Place) -> Iterator[tuple[str, Site]]:
    """Iterate over (parameter name, what it is in the whole model) for every parameter that the chunk must have."""
    if chunk.first:
        yield from ((e.megatron, Site(e)) for e in family.first)
    experts = mapping.local_experts(family, place.ep_rank, place.topology.ep)
    for index, layer in enumerate(chunk.layers):
        for site in family.layer_sites(layer):
            if site.expert is None or site.expert in experts:
                expert = None if site.expert is None else site.expert - experts.start
                yield site.entry.megatron.format(layer=index, expert=expert), site
    if chunk.last:
        # A chunk with both ends of a tied model has no copy of the embedding.
        yield from ((e.megatron, Site(e)) for e in family.last if e.exported or not chunk.first)


def parameters(chunks: Sequence[Chunk], family: Family, place: Place) -> dict[Site, nn.Parameter]:
    """This rank's parameters by what they are in the whole model; asserts that names and shapes are those of the table."""
    found: dict[Site, nn.Parameter] = {}
    for number, chunk in enumerate(chunks):
        expected = mapping.layers_of(place.topology, family.num_layers, place.pp_rank, number)
        assert chunk.layers == expected, f"chunk {number} has layers {chunk.layers}, not {expected}"
        have = chunk.named_parameters()
        sites = dict(chunk_sites(chunk, family, place))
        assert have.keys() == sites.keys(), f"only in module or table: {sorted(have.keys() ^ sites.keys())[:6]}"
        for name, site in sites.items():
            wanted = mapping.parameter_shape(site.entry, family, shard_of(site.entry, place))
            assert tuple(have[name].shape) == wanted, (name, tuple(have[name].shape), wanted)
            assert site not in found, f"{name} twice"
            found[site] = have[name]
    return found


@torch.no_grad()
def load_weights(
    chunks: Sequence[Chunk],
    family: Family,
    place: Place,
    source: Source,
    store: Callable[[nn.Parameter, torch.Tensor], None] | None = None,
) -> None:
    """Fill every parameter of ``chunks`` once, in the parameter's dtype. Every rank must call it.

    Args:
        store: puts the whole local tensor, in the source's dtype, where it belongs; None: into the parameter.

    Raises:
        EngineError: on every rank, when one of them does not get what it needs; each with what it saw itself.
    """
    agreement.together(place, "load its weights", lambda: _fill_or_say(chunks, family, place, source, store or _copy))


def _fill_or_say(
    chunks: Sequence[Chunk],
    family: Family,
    place: Place,
    source: Source,
    store: Callable[[nn.Parameter, torch.Tensor], None],
) -> None:
    try:
        _fill(chunks, family, place, source, store)
    except (OSError, RuntimeError, MemoryError) as error:
        # What a disk, a device or a full memory says.
        raise EngineError(
            "the weights could not be loaded on this rank",
            found=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no words'}",
            wanted="files that can be read to the end, and memory for this rank's part of the model",
            next="look at disk and memory (rlctl plan says how much a rank needs)",
        ) from error


def _copy(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    parameter.copy_(whole)


def _fill(
    chunks: Sequence[Chunk],
    family: Family,
    place: Place,
    source: Source,
    store: Callable[[nn.Parameter, torch.Tensor], None],
) -> None:
    targets = list(parameters(chunks, family, place).items())
    requests: list[Request] = []
    owners: list[tuple[int, int]] = []
    for number, (site, _) in enumerate(targets):
        shapes, cuts = family.shapes(site.entry), mapping.slices(site.entry, family, shard_of(site.entry, place))
        for part, (name, shape, cut) in enumerate(zip(site.names(), shapes, cuts, strict=True)):
            requests.append(Request(name, shape, cut))
            owners.append((number, part))
    waiting: dict[int, dict[int, torch.Tensor]] = {}
    filled: set[int] = set()

    def take(index: int, tensor: torch.Tensor) -> None:
        number, part = owners[index]
        site, parameter = targets[number]
        assert number not in filled, f"{requests[index].name} came after its parameter was filled"
        parts = waiting.setdefault(number, {})
        assert part not in parts, f"{requests[index].name} came twice"
        assert tensor.shape[requests[index].cut.axis] == requests[index].cut.stop - requests[index].cut.start
        parts[part] = tensor
        if len(parts) == len(site.entry.stored):
            del waiting[number]
            whole = mapping.combine(
                site.entry, [parts[i] for i in range(len(parts))], family, shard_of(site.entry, place)
            )
            assert whole.shape == parameter.shape, (site, whole.shape, parameter.shape)
            store(parameter, whole)
            filled.add(number)

    problem: Exception | None = None
    for index, tensor in source.stream(family, requests):
        if problem is None:
            try:
                take(index, tensor)
            except Exception as error:
                # Whatever it is: the stream goes on to its end, for other ranks may get theirs in the same round.
                problem = error
    if problem is not None:
        raise problem
    assert len(filled) == len(targets), f"{len(targets) - len(filled)} parameters were not filled"
