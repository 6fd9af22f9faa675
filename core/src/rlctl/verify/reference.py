"""The reference: one process, one row at a time, plain Hugging Face code and plain torch.

It shares nothing with the path under test: no packing, no micro-batches, no normaliser, no reader, no loss and no optimizer
of rlctl. Losses are written out here from their definitions, sums are taken in float64, and the update rules are spelt out.

Shapes: T tokens of a row, V vocabulary, E experts, K experts a token, L layers with experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlctl.verify.reference_losses import Objective, Sample, token_losses, token_weights
from rlctl.verify.reference_updates import Rule, adamw_step

Tensors = dict[str, torch.Tensor]
VALUE_MODEL = "value_model"
"""The head of a critic: one number a token. Any other is the head of a language model."""


@dataclass(frozen=True)
class Scores:
    """Of one row: ``numbers`` ``[T]`` float64 by name, zero where the token is not scored: ``log_probs`` and ``entropy``, or of
    a value model ``values``, of the state before the token.

    ``experts`` ``[T, L, K]`` and ``margin`` ``[T, L]``: of the position that predicts the token, the experts chosen and how
    far the last chosen one is ahead of the next (-1 and 0 where nothing is scored); None for dense models and value models.
    """

    numbers: Mapping[str, torch.Tensor]
    experts: torch.Tensor | None = None
    margin: torch.Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One optimizer step. ``scale`` is the sum of the absolute terms of the loss, which a signed loss may be far below."""

    loss: float
    scale: float
    grad_norm: float


@dataclass(frozen=True)
class Run:
    """Several steps from the same start. The tensors are Hugging Face directories.

    Args:
        gradient: of the first step, before clipping.
        weights: after the last step.
        bound: for ``adamw``, how far each weight may be off when its gradients are off by their tolerance.
        scores: of the first batch after the last step.
    """

    steps: list[Step]
    gradient: Path
    weights: Path
    bound: Path | None
    scores: list[Scores]


class Reference:
    """A model in one process.

    Args:
        directory: Hugging Face directory that both sides load.
        device: torch device.
        compute: dtype of the computation; weights and their updates stay float32.
        report: told of each piece of work done.
        head: :data:`VALUE_MODEL`, or that of a language model. A value model is transformers' token classifier with one
            label; where the file has no bias for its head, it has none.
    """

    def __init__(
        self,
        directory: Path,
        device: str,
        compute: torch.dtype = torch.float32,
        report: Callable[[], None] = lambda: None,
        head: str = "language_model",
    ) -> None:
        self._report = report
        self._head = head
        self.model: Any = _load(directory, head).to(device)
        self.model.eval()
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")
        self.device = device
        self._grads: Tensors = {}
        self.weights: Tensors = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.start = {n: w.cpu().clone() for n, w in self.weights.items()}
        if compute != torch.float32:
            self.model.to(compute)

    @property
    def num_experts_per_token(self) -> int:
        """K; 0 for a dense model."""
        return int(getattr(self.model.config.get_text_config(), "num_experts_per_tok", 0) or 0)

    @property
    def tied_names(self) -> frozenset[str]:
        """Checkpoint names of weights that are copies of another one."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        return frozenset(tied)

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def num_experts(self) -> int:
        """E; 0 for a dense model."""
        text = self.model.config.get_text_config()
        found = (getattr(text, n, None) for n in ("num_experts", "num_local_experts", "n_routed_experts"))
        return int(next((n for n in found if n), 0))

    # ---- forward ----------------------------------------------------------------------------------------------
    def _forward(self, sample: Sample, temperature: float) -> tuple[Tensors, Any]:
        """What the model says of the scored tokens, ``[P]`` each (see :class:`Scores`), and its output."""
        ids = torch.tensor([sample.ids], device=self.device)
        at = torch.tensor([t for t, s in enumerate(sample.scored) if s], dtype=torch.long, device=self.device)
        if self._head == VALUE_MODEL:
            out = self.model(input_ids=ids, use_cache=False)
            return {"values": out.logits[0, :, 0].double()[at - 1]}, out
        extra = {"output_router_logits": True} if self.num_experts_per_token else {}
        out = self.model(input_ids=ids, use_cache=False, **extra)
        log_p = torch.log_softmax(out.logits[0].double()[at - 1] / temperature, dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return {"log_probs": log_p.gather(-1, ids[0][at][:, None])[:, 0], "entropy": entropy}, out

    @torch.no_grad()
    def scores(self, samples: Sequence[Sample], temperature: float = 1.0) -> list[Scores]:
        """Each row under the present weights."""
        result = []
        for sample in samples:
            at = [t for t, s in enumerate(sample.scored) if s]
            found, out = self._forward(sample, temperature)
            whole = {name: torch.zeros(len(sample.ids), dtype=torch.float64) for name in found}
            for name, values in found.items():
                whole[name][at] = values.cpu()
            experts, margin = self._routing(len(sample.ids), at, out)
            result.append(Scores(whole, experts, margin))
            self._report()
        return result

    def _routing(self, length: int, at: list[int], out: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        k = self.num_experts_per_token
        if not k or getattr(out, "router_logits", None) is None:
            return None, None
        before = [t - 1 for t in at]
        experts = torch.full((length, len(out.router_logits), k), -1, dtype=torch.long)
        margin = torch.zeros(length, len(out.router_logits), dtype=torch.float64)
        for layer, logits in enumerate(out.router_logits):
            values, chosen = logits.double().cpu()[before].topk(k + 1, dim=-1)
            experts[at, layer] = chosen[:, :k]
            margin[at, layer] = values[:, k - 1] - values[:, k]
        return experts, margin

    @torch.no_grad()
    def losses(
        self, samples: Sequence[Sample], objective: Objective, aggregations: Sequence[str]
    ) -> dict[str, tuple[float, float]]:
        """(loss, sum of its absolute terms) under the present weights, for each weighting of the tokens."""
        weightings = {name: replace(objective, aggregation=name) for name in aggregations}
        weights = {name: token_weights(samples, o) for name, o in weightings.items()}
        parts: dict[str, list[tuple[float, float]]] = {name: [] for name in aggregations}
        for row, sample in enumerate(samples):
            if not any(sample.scored):
                continue
            found, _ = self._forward(sample, objective.temperature)
            terms = token_losses(sample, found, objective)
            for name in aggregations:
                weighted = weights[name][row] * terms
                parts[name].append((float(weighted.sum()), float(weighted.abs().sum())))
            self._report()
        return {n: (math.fsum(p for p, _ in ps), math.fsum(a for _, a in ps)) for n, ps in parts.items()}

    def _gradient(self, samples: Sequence[Sample], objective: Objective) -> tuple[float, float]:
        """Fill the gradient sums; (loss, sum of its absolute terms)."""
        self._grads = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in self.weights.items()}
        total, scale = [], []
        for sample, weight in zip(samples, token_weights(samples, objective), strict=True):
            if not any(sample.scored):
                continue
            found, _ = self._forward(sample, objective.temperature)
            terms = weight * token_losses(sample, found, objective)
            terms.sum().backward()
            self._collect()
            total.append(float(terms.detach().sum()))
            scale.append(float(terms.detach().abs().sum()))
            self._report()
        return math.fsum(total), math.fsum(scale)

    # ---- steps ------------------------------------------------------------------------------------------------
    def _collect(self) -> None:
        """Move one row's gradients over into float64 sums."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self._grads[name] += parameter.grad
                parameter.grad = None

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the weights of the file."""
        for name, parameter in self.model.named_parameters():
            self.weights[name].copy_(self.start[name])
            parameter.copy_(self.start[name])

    def first_gradient(self, samples: Sequence[Sample], objective: Objective) -> tuple[float, float, float]:
        """(norm of the gradient, loss, norm of the weights) at the start: what a learning rate is chosen by."""
        self.reset()
        loss, _ = self._gradient(samples, objective)
        return _norm(self._grads), loss, _norm(self.start)

    def run(
        self,
        batches: Sequence[Sequence[Sample]],
        objective: Objective,
        rule: Rule,
        gradient_tolerance: tuple[float, float],
        into: Path,
    ) -> Run:
        """One step on each batch, from the start.

        Args:
            gradient_tolerance: what an element of a gradient may be off by, relative to the largest element of that weight's
                gradient, and to the largest of all; the larger counts. It becomes ``Run.bound``.
            into: directory for the tensors.
        """
        bound: Tensors = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        steps: list[Step] = []
        for step in self._steps(batches, objective, rule, gradient_tolerance, bound, None):
            if not steps:
                self.save_gradient(into / "gradient")
            steps.append(step)
        self._save(self.weights, into / "weights")
        if rule.name == "adamw":
            self._save(bound, into / "bound")
        scores = self.scores(batches[0], objective.temperature)
        has_bound = into / "bound" if rule.name == "adamw" else None
        return Run(steps, into / "gradient", into / "weights", has_bound, scores)

    def shaken(
        self,
        batches: Sequence[Sequence[Sample]],
        objective: Objective,
        rule: Rule,
        gradient_tolerance: tuple[float, float],
        seed: int = 0,
    ) -> list[Step]:
        """The steps of :meth:`run` when every gradient is off by as much as it may be: how far that alone goes."""
        bound: Tensors = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        noise = torch.Generator().manual_seed(seed)
        return list(self._steps(batches, objective, rule, gradient_tolerance, bound, noise))

    def _steps(
        self,
        batches: Sequence[Sequence[Sample]],
        objective: Objective,
        rule: Rule,
        gradient_tolerance: tuple[float, float],
        bound: Tensors,
        noise: torch.Generator | None,
    ) -> Iterator[Step]:
        """Yields each step before its update is made, when the gradients are those of the step."""
        self.reset()
        moments = {n: (torch.zeros_like(w), torch.zeros_like(w)) for n, w in self.weights.items()}
        own, overall = gradient_tolerance
        for number, samples in enumerate(batches, 1):
            loss, scale = self._gradient(samples, objective)
            norm = _norm(self._grads)
            yield Step(loss, scale, norm)
            factor = rule.clip / (norm + 1e-6) if 0 < rule.clip < norm else 1.0
            largest = max(float(g.abs().max()) for g in self._grads.values())
            for name, parameter in self.model.named_parameters():
                grad = self._grads[name] * factor
                off = max(own * float(grad.abs().max()), overall * largest * factor)
                if noise is not None:
                    # What no token reaches has a gradient of exactly zero, wherever it is computed.
                    shake = (2 * torch.rand(grad.shape, generator=noise, dtype=grad.dtype) - 1).to(grad.device)
                    grad += off * shake * (grad != 0)
                if rule.name == "sgd":
                    self.weights[name] -= (rule.lr * grad).float()
                else:
                    adamw_step(self.weights[name], grad, moments[name], rule, number, bound[name], off)
                with torch.no_grad():
                    parameter.copy_(self.weights[name])

    def save_gradient(self, directory: Path) -> None:
        """Write the gradient that was computed last."""
        self._save(self._grads, directory)

    def _save(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write tensors named as the model's parameters in the form of its own checkpoints."""
        state = {n: t.detach().float().cpu().contiguous() for n, t in tensors.items()}
        self.model.save_pretrained(directory, state_dict=state)


def _load(directory: Path, head: str) -> Any:
    # Any: transformers' own annotations wrap the methods that nn.Module has.
    options: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
    if head != VALUE_MODEL:
        return AutoModelForCausalLM.from_pretrained(directory, **options)
    found: Any = AutoModelForTokenClassification.from_pretrained(directory, output_loading_info=True, **options)
    model, info = found
    missing = set(info["missing_keys"])
    if missing == {"score.bias"}:
        model.score.bias = None
    elif missing:
        raise ValueError(f"{directory} lacks {', '.join(sorted(missing))}")
    if model.config.num_labels != 1:
        raise ValueError(f"{directory} has {model.config.num_labels} labels, and a value model has one")
    return model


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(math.fsum(float(t.double().square().sum()) for t in tensors.values()))
