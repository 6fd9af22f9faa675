"""How far apart two results are, in the unit of each quantity, and how far they may be.

The largest delta of each quantity is kept, with the place where it was. Nothing here knows which side is which beyond
``wanted`` (the reference) and ``found``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

FLOAT32_EPS = 2.0**-24
"""Half a unit in the last place of a float32 number, relative to it: what rounding once can do."""

QUANTITIES: Mapping[str, str] = {
    "export_names": "names, shapes and dtypes of the export that differ from the model's file",
    "export": "largest difference of an exported weight from the model's file",
    "log_probs": "nats, any scored token, before and after training",
    "entropy": "nats, any scored token, before and after training",
    "values": "of a value model, any scored token, before and after training",
    "experts": "share of expert choices that differ",
    "expert_tokens": "tokens of one expert, largest difference",
    "loss": "relative to the sum of its absolute terms, any weighting, any step but AdamW's later ones",
    "grad_norm": "relative, any step but AdamW's later ones",
    "loss_adamw": "relative to the sum of its absolute terms, steps that follow an AdamW step",
    "grad_norm_adamw": "relative, steps that follow an AdamW step",
    "gradients": "relative to the largest element of that weight's gradient",
    "weights": "after the SGD steps, relative to the largest movement of that weight",
    "weights_adamw": "after the AdamW steps, in units of what the gradients' tolerance justifies",
    "checkpoint": "relative, the step after loading against the same step after saving",
}
"""Every quantity in the order of reports, with its unit."""

# An element of a weight whose gradient (or movement) is all but zero is compared on the scale of the whole model's.
OVERALL = 1e-3

FLOAT32_TOLERANCES: Mapping[str, float] = {
    "export_names": 0.0,
    "export": 0.0,
    "log_probs": 2e-5,
    "entropy": 2e-5,
    "values": 2e-5,
    "experts": 0.0,
    "expert_tokens": 0.0,
    "loss": 1e-5,
    "grad_norm": 1e-5,
    "loss_adamw": 1e-5,
    "grad_norm_adamw": 1e-5,
    "gradients": 2e-5,
    "weights": 5e-5,
    "weights_adamw": 1.0,
    "checkpoint": 1e-6,
}
"""Tolerances of a computation in float32. Those of ``*_adamw`` are worked out for each model, and this is their least."""


@dataclass(frozen=True)
class Delta:
    """The largest difference of one quantity and where it was."""

    value: float
    where: str = ""


class Deltas:
    """Collects the largest delta of each quantity. NaN counts as larger than everything."""

    def __init__(self) -> None:
        self.found: dict[str, Delta] = {}

    def note(self, quantity: str, value: float, where: str = "") -> None:
        """Keep ``value`` if it is the largest so far."""
        assert quantity in QUANTITIES, quantity
        value = math.inf if math.isnan(value) else float(value)
        if quantity not in self.found or value > self.found[quantity].value:
            self.found[quantity] = Delta(value, where)

    def failures(self, tolerances: Mapping[str, float]) -> list[str]:
        """Quantities beyond their tolerance."""
        return [q for q in QUANTITIES if q in self.found and not self.found[q].value <= tolerances[q]]


class Tensors:
    """The tensors of a Hugging Face directory, read one at a time."""

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._files |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> list[str]:
        """In no particular order."""
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def relative(found: float, wanted: float) -> float:
    """|found - wanted| / |wanted|."""
    if found == wanted:
        return 0.0
    return abs(found - wanted) / max(abs(wanted), 1e-300)


def largest(tensor: torch.Tensor) -> float:
    """Largest absolute element; 0 for an empty tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def compare_scores(
    deltas: Deltas, quantity: str, found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], when: str
) -> None:
    """Per-token numbers, a tensor a row; also where nothing is scored, which must be zero."""
    for row, (a, b) in enumerate(zip(found, wanted, strict=True)):
        off = (a.double().cpu() - b.double()).abs()
        if off.numel():
            at = int(off.nan_to_num(math.inf).argmax())
            deltas.note(quantity, float(off[at]), f"row {row}, token {at}, {when}")


def compare_export(
    deltas: Deltas,
    export: Iterable[tuple[str, torch.Tensor]],
    file: Tensors,
    dtype: torch.dtype,
    tied: frozenset[str],
) -> None:
    """A fresh engine's export against the file it was built from.

    Args:
        dtype: of the master weights, which the export keeps.
        tied: names that may be in one and not in the other, being copies of another weight.
    """
    wrong: list[str] = []
    seen: set[str] = set()
    deltas.note("export", 0.0)
    for name, tensor in export:
        if name in seen:
            wrong.append(f"{name} twice")
        seen.add(name)
        if name not in file:
            if name not in tied:
                wrong.append(f"{name} is not in the file")
            continue
        wanted = file[name]
        if tensor.shape != wanted.shape:
            wrong.append(f"{name} {tuple(tensor.shape)} instead of {tuple(wanted.shape)}")
        elif wanted.is_floating_point() and tensor.dtype != dtype:
            wrong.append(f"{name} {tensor.dtype} instead of {dtype}")
        else:
            deltas.note("export", largest(tensor.double() - wanted.to(dtype).double()), name)
    wrong += [f"{name} is missing" for name in file.names if name not in seen and name not in tied]
    deltas.note("export_names", float(len(wrong)), ", ".join(wrong[:3]))


def movement_scales(before: Tensors, after: Tensors) -> dict[str, float]:
    """Largest movement of each weight between two sets of weights."""
    return {n: largest(after[n].double() - before[n].double()) for n in after.names if n in before}


def gradient_scales(gradient: Tensors) -> dict[str, float]:
    """Largest element of each gradient."""
    return {n: largest(gradient[n]) for n in gradient.names}


def compare_gradients(
    deltas: Deltas,
    export: Iterable[tuple[str, torch.Tensor]],
    start: Tensors,
    gradient: Tensors,
    lr: float,
    when: str,
    eps: float | None = None,
    tied: frozenset[str] = frozenset(),
) -> None:
    """Gradients read off one step, less what float32 weights cannot resolve.

    Args:
        lr: an SGD step moves a weight by ``lr * g``.
        eps: of AdamW, whose first step moves it by ``lr * g / (|g| + eps)``; None for SGD.
        tied: names that an export may leave out, being copies of another weight; any other that is left out counts as
            infinitely far off, here and in the comparisons below.
    """
    scales = gradient_scales(gradient)
    overall = OVERALL * max(scales.values())
    seen: set[str] = set()
    for name, after in export:
        seen.add(name)
        if name not in gradient:
            continue
        before, wanted = start[name].double(), gradient[name].double()
        found = (before - after.double().cpu()) / lr
        blur = 2 * FLOAT32_EPS * torch.maximum(before.abs(), after.double().cpu().abs()) / lr
        if eps is not None:
            left = (1.0 - found.abs()).clamp(min=1e-12)
            found, blur = found * eps / left, blur * eps / left**2
        off = ((found - wanted).abs() - blur).clamp(min=0.0)
        deltas.note("gradients", largest(off) / max(scales[name], overall), f"{name}, {when}")
    _left_out(deltas, "gradients", scales, seen | tied, when)


def _left_out(deltas: Deltas, quantity: str, names: Iterable[str], excused: set[str], when: str) -> None:
    for name in names:
        if name not in excused:
            deltas.note(quantity, math.inf, f"{name} is missing, {when}")


def compare_two_gradients(deltas: Deltas, found: Tensors, wanted: Tensors) -> None:
    """Two gradients that are both at hand."""
    scales = gradient_scales(wanted)
    overall = OVERALL * max(scales.values())
    for name, scale in scales.items():
        deltas.note("gradients", largest(found[name].double() - wanted[name].double()) / max(scale, overall), name)


def compare_weights(
    deltas: Deltas,
    export: Iterable[tuple[str, torch.Tensor]],
    start: Tensors,
    wanted: Tensors,
    when: str,
    tied: frozenset[str] = frozenset(),
) -> None:
    """Weights after some SGD steps, relative to how far each weight moved."""
    scales = movement_scales(start, wanted)
    overall = OVERALL * max(scales.values())
    seen: set[str] = set()
    for name, after in export:
        seen.add(name)
        if name not in scales:
            continue
        goal = wanted[name].double()
        blur = 4 * FLOAT32_EPS * goal.abs()
        off = ((after.double().cpu() - goal).abs() - blur).clamp(min=0.0)
        deltas.note("weights", largest(off) / max(scales[name], overall), f"{name}, {when}")
    _left_out(deltas, "weights", scales, seen | tied, when)


def compare_bounded(
    deltas: Deltas,
    export: Iterable[tuple[str, torch.Tensor]],
    wanted: Tensors,
    bound: Tensors,
    when: str,
    tied: frozenset[str] = frozenset(),
) -> None:
    """Weights after AdamW: each element's difference in units of its own bound."""
    seen: set[str] = set()
    for name, after in export:
        seen.add(name)
        if name not in wanted:
            continue
        goal = wanted[name].double()
        allowed = bound[name].double() + 4 * FLOAT32_EPS * goal.abs() + 1e-12
        ratio = (after.double().cpu() - goal).abs() / allowed
        deltas.note("weights_adamw", largest(ratio.nan_to_num(math.inf)), f"{name}, {when}")
    _left_out(deltas, "weights_adamw", wanted.names, seen | tied, when)


def compare_experts(
    deltas: Deltas,
    found: Iterable[torch.Tensor],
    wanted: Iterable[tuple[torch.Tensor, torch.Tensor]],
    num_experts: int,
    sure: float,
    when: str,
) -> None:
    """Choices ``[T, L, K]`` a row, as sets, where the reference's margin is above ``sure``; and the tokens of each expert."""
    different, total = 0, 0
    counts: list[torch.Tensor] = []
    for a, (b, margin) in zip(found, wanted, strict=True):
        mine, theirs = a.long().cpu().sort(-1).values, b.sort(-1).values
        clear = (b[..., 0] >= 0) & (margin > sure)
        different += int((mine != theirs).any(-1)[clear].sum())
        total += int(clear.sum())
        pair = [_tokens_of(t, clear, num_experts) for t in (mine, theirs)]
        counts.append(pair[0] - pair[1])
    deltas.note("experts", different / max(total, 1), f"{different} of {total} choices, {when}")
    off = torch.stack(counts).sum(0).abs()
    deltas.note("expert_tokens", float(off.max()) if total else 0.0, when)


def _tokens_of(experts: torch.Tensor, clear: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``[L, E]`` number of tokens that chose each expert of each layer."""
    one_hot = torch.nn.functional.one_hot(experts.clamp(min=0), num_experts).sum(-2)
    return (one_hot * clear[..., None]).sum(0)
