"""A stream of weights into the live model, as whole layers, in whatever order and buckets they come.

vLLM writes a layer when all of its tensors have come; it takes a missing one for padding and leaves memory as it is there, in
silence. So tensors of one layer (q, k and v; gate and up; all experts) are kept until the last of them is here, and go in
together. Of a layer that is never completed, what is served stays, with the tensors that did come put in their places.

Nothing raises while vLLM takes weights, since its layers have no memory meanwhile: what went wrong is kept and raised when the
model is whole again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rlctl.errors import EngineError, GuardError, RlctlError
from rlctl_vllm import compat
from rlctl_vllm.live import LiveReader
from rlctl_vllm.names import WeightNames

_EXAMPLES = 4096
"""Elements of one expert that tell whether a reload left experts as a kernel wants them."""


@dataclass
class Arrivals:
    """What one sync brought."""

    loaded: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    negative_zeros: dict[str, torch.Tensor] = field(default_factory=dict)
    failure: BaseException | None = None
    held: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Live module -> the tensors of it that have come, until all have."""
    experts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Live module of experts -> its first gate matrix, as it came."""


class Loader:
    """Loads into one live model.

    Args:
        llm: vLLM's front object.
        names: of its model.
    """

    def __init__(self, llm: compat.LLM, names: WeightNames) -> None:
        self._llm = llm
        self._names = names

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> tuple[dict[str, list[str]], dict[str, torch.Tensor]]:
        """Take all of ``weights``, and forget keys and values of the old ones.

        Returns:
            (the answer of ``rlctl_load_weights``, where the tensors had -0.0).

        Raises:
            EngineError: a name that the model does not have, or another shape.
            GuardError: a name that came twice.
            BaseException: what ``weights`` raised. The model is a mixture of old and new weights then.
        """
        arrivals = Arrivals()
        compat.reload(self._llm, self._whole_layers(weights, arrivals))
        if arrivals.held and arrivals.failure is None:
            compat.reload(self._llm, self._completed(arrivals))
        self._repack(arrivals)
        if not compat.reset_prefix_cache(self._llm):
            arrivals.failure = arrivals.failure or EngineError(
                "vLLM did not empty its prefix cache",
                found="rows that are still being generated",
                wanted="weights loaded between requests",
            )
        if arrivals.failure is not None:
            raise arrivals.failure
        missing = sorted(set(self._names.parts) - arrivals.names)
        return {"loaded": arrivals.loaded, "missing": self._as_sent(missing)}, arrivals.negative_zeros

    def _as_sent(self, missing: list[str]) -> list[str]:
        """Names that are missing; where a whole tensor of a module in memory is, that one instead of its experts."""
        left, out = set(missing), []
        for name, (_, published) in self._names.fused.items():
            if left.issuperset(published):
                out.append(name)
                left -= set(published)
        return sorted([*out, *left])

    # ---- taking -----------------------------------------------------------------------------------------------
    def _whole_layers(
        self, weights: Iterator[tuple[str, torch.Tensor]], arrivals: Arrivals
    ) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for name, tensor in weights:
                # Once something is wrong the rest is still read: a sender waits for every tensor to be taken.
                if arrivals.failure is None:
                    try:
                        published = self._accept(name, tensor, arrivals)
                    except RlctlError as error:
                        arrivals.failure = error
                        continue
                    arrivals.loaded.append(name)
                    for own, part in published.items():
                        yield from self._hold(own, part, arrivals)
        except BaseException as error:  # raised again by load(), when the model has its memory back
            arrivals.failure = error

    def _accept(self, name: str, tensor: torch.Tensor, arrivals: Arrivals) -> dict[str, torch.Tensor]:
        """The published tensors of one that came; none for a tied copy."""
        names = self._names
        known = names.parts.get(name) or names.tied.get(name)
        shape = known.shape if known is not None else names.fused[name][0] if name in names.fused else None
        if shape is None:
            raise EngineError(
                f"vLLM's model has no weight {name!r}",
                found=f"a tensor of shape {tuple(tensor.shape)}",
                wanted=f"names of {type(names.skeleton).__name__}, for example {next(iter(names.parts))}",
                next="the training and the rollout model must be one architecture: check model.path and model.config",
            )
        if tuple(tensor.shape) != shape:
            raise EngineError(
                f"weight {name!r} has another shape in the rollout engine",
                found=tuple(tensor.shape),
                wanted=shape,
                next="the training and the rollout model must be one architecture: check model.path and model.config",
            )
        if name in names.tied:
            return {}
        published = names.publish(name, tensor.detach())
        if twice := sorted(arrivals.names.intersection(published)):
            raise GuardError(
                f"weight {twice[0]!r} came twice in one sync",
                found=f"{name} after {len(arrivals.loaded)} tensors",
                wanted="every tensor of the model exactly once",
            )
        arrivals.names.update(published)
        return published

    def _hold(self, name: str, tensor: torch.Tensor, arrivals: Arrivals) -> Iterator[tuple[str, torch.Tensor]]:
        """Keep ``tensor`` until its layer is whole; then give out all of it."""
        part = self._names.parts[name]
        places = ((tensor == 0) & tensor.signbit()).reshape(-1).nonzero()[:, 0].cpu()
        if places.numel():
            arrivals.negative_zeros[name] = places
        wanted = self._names.groups[part.module]
        held = arrivals.held.setdefault(part.module, {})
        # What comes next may be written where this one lies. vLLM keeps an embedding until the end, for its padding.
        alone = len(wanted) == 1 and compat.split_of(self._module(part.module)) != "vocab"
        held[name] = tensor if alone else tensor.clone()
        if part.expert == 0 and part.parameter == "w13_weight" and part.shard == 0:
            arrivals.experts[part.module] = tensor.reshape(-1)[:_EXAMPLES].clone()
        if len(held) == len(wanted):
            del arrivals.held[part.module]
            for member in wanted:
                yield member, held.pop(member)

    def _completed(self, arrivals: Arrivals) -> Iterator[tuple[str, torch.Tensor]]:
        """Layers of which only a part has come, the rest read from what is served."""
        reader = LiveReader(self._model())
        layers = {m: [(n, held.get(n)) for n in self._names.groups[m]] for m, held in arrivals.held.items()}
        # Read before the first is given out: then vLLM takes the memory of all layers away.
        whole = {
            module: [(n, reader.read(self._names.parts[n]).clone() if t is None else t) for n, t in members]
            for module, members in layers.items()
        }
        arrivals.held.clear()
        return iter([pair for members in whole.values() for pair in members])

    # ---- after ------------------------------------------------------------------------------------------------
    def _repack(self, arrivals: Arrivals) -> None:
        """What a reload of vLLM leaves undone on a CPU: experts as its kernels want them, and the copy of a tied head."""
        for module in self._names.heads:
            compat.repack_head(self._module(module))
        for module, first in arrivals.experts.items():
            repack_experts(self._module(module), first)

    def _model(self) -> torch.nn.Module:
        return compat.model_of(self._llm)

    def _module(self, name: str) -> torch.nn.Module:
        return self._model().get_submodule(name)


def repack_experts(module: torch.nn.Module, first: torch.Tensor) -> None:
    """Pack experts that a reload has left as they came.

    Args:
        first: the beginning of the first expert's gate matrix, as it came; it tells whether they were packed already.
    """
    isa = compat.experts_isa(module)
    if isa is None:
        return
    live = module.get_parameter("w13_weight")
    if not torch.equal(live[0].reshape(-1)[: first.numel()], first.to(live.dtype)):
        return
    for name in ("w13_weight", "w2_weight"):
        weight = module.get_parameter(name)
        weight.data.copy_(compat.pack_experts(weight.data.clone(), isa))
