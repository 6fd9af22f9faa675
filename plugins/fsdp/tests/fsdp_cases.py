"""Random training cases, run alike on one process and on many ranks.

A case draws its rows, lengths, loss mask, shared prompts, micro-batches, calls before the step, aggregation, loss, model
family and engine settings. Its optimizer is AdamW with a rate and an epsilon of 100, whose first step is the gradient
itself to within |g| / 100: a step that is linear in the gradient, so that updated weights compare as tightly as gradients.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fsdp_helpers import CONFIGS, VOCAB, build_engine, nll, ppo_like
from torch.distributed.tensor import DTensor

from rlctl.algorithms.losses import PolicyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.config.schema import ActorConfig, PolicyLossConfig
from rlctl.logits import LogitsReader, LossOutput
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer import item_weights
from rlctl.normalizer_modes import LossAggMode
from rlctl.parts.outputs import ALIGNMENT
from rlctl.topology import Topology

# Large random weights, so that attention matters: at the usual 0.02 a token hardly looks at the others.
FAMILIES: dict[str, dict[str, Any]] = {
    name: {**CONFIGS[name], "initializer_range": 0.2}
    for name in ("llama", "llama-tied", "qwen2-window", "qwen3", "gemma3", "gpt-neox", "qwen3-moe", "mistral", "gemma2")
} | {
    "mixtral": {
        **CONFIGS["llama"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "initializer_range": 0.2,
    },
    "multi-query": {**CONFIGS["llama"], "num_key_value_heads": 1, "initializer_range": 0.2},
}  # fmt: skip

SIZES: dict[int, list[tuple[int, int, int]]] = {
    world: [(r, s, world // r // s) for r in (1, 2, 4) for s in (1, 2, 4) if r * s <= world and world % (r * s) == 0]
    for world in (1, 2, 4)
}
"""World size -> every (dp_replicate, dp_shard, usp)."""

LINEAR = {"lr": 100.0, "eps": 100.0, "weight_decay": 0.0, "clip_grad": 0.0}


def sequence_ratio(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """A loss of whole rows: the clipped exponential of each row's mean log-prob (as GSPO has it)."""
    log_probs = reader.log_prob()
    device = log_probs.device
    row, mask = batch.row_ids().to(device), batch.items["loss_mask"].to(device).float()
    zeros = log_probs.new_zeros(batch.num_rows)
    mean = zeros.index_add(0, row, log_probs * mask) / zeros.index_add(0, row, mask).clamp(min=1)
    ratio = torch.exp((mean + 3.0).clamp(-2, 2))[row]
    weight = batch.items["item_weight"].to(device)
    return LossOutput((weight * ratio).sum(), {"ratio": (weight * ratio).detach().sum()}, {"top": ratio.detach().max()})


def towards_alternatives(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """Log-probs of several tokens at each position, weighted by what the model itself finds likely."""
    weight = batch.items["item_weight"]
    ids = batch.items["input_ids"]
    log_probs = reader.log_prob_at(torch.stack([ids, (ids * 7 + 3) % VOCAB, (ids + 11) % VOCAB], 1))
    best, which = reader.topk(2)
    share = torch.tensor([0.6, 0.3, 0.1], device=log_probs.device)
    loss = -(weight[:, None] * share * log_probs).sum() - (weight * reader.entropy()).sum()
    sums = {"mass": (weight[:, None] * best.exp()).sum(), "ids": (weight[:, None] * which).sum()}
    return LossOutput(loss, sums)


def policy_loss(loss_mode: str) -> PolicyLoss:
    """rlctl's own loss of whole rows, with bounds that some rows are within."""
    section = PolicyLossConfig(loss_mode=loss_mode, clip_ratio_low=0.3, clip_ratio_high=0.4)
    return PolicyLoss(ActorConfig(policy_loss=section))


Loss = Callable[[LogitsReader, PackedBatch], LossOutput]
LOSSES: dict[str, Loss] = {
    "nll": nll, "ppo": ppo_like, "sequence": sequence_ratio, "alternatives": towards_alternatives,
    "gspo": policy_loss("gspo"), "geo_mean": policy_loss("geo_mean"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One drawn case. ``owner`` gives each row its dp rank."""

    seed: int
    model_seed: int
    sizes: tuple[int, int, int]
    family: str
    loss: str
    mode: str
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    owner: tuple[int, ...]
    max_rows: int | None
    max_tokens: int | None
    calls: int
    clip: float
    settings: tuple[tuple[str, Any], ...]

    @property
    def topology(self) -> Topology:
        replicate, shard, usp = self.sizes
        return Topology(world_size=replicate * shard * usp, dp_replicate=replicate, dp_shard=shard, usp=usp)

    @property
    def plan(self) -> MicroBatchPlan:
        return MicroBatchPlan(max_rows=self.max_rows, max_tokens=self.max_tokens)

    def __str__(self) -> str:
        names = ("dp_replicate", "dp_shard", "usp")
        sizes = ",".join(f"{n}={v}" for n, v in zip(names, self.sizes, strict=True) if v > 1) or "wrapped alone"
        return f"{self.seed}: {sizes}; {self.family}, {self.loss}, {self.mode}"

    def batch(self) -> PackedBatch:
        """All rows: some share a prompt, masks have gaps, some rows score nothing."""
        generator = torch.Generator().manual_seed(self.seed)
        prompts = [torch.randint(2, VOCAB, (n,), generator=generator) for n in (2, 4, 7)]
        tokens, masks = [], []
        for length, prompt in zip(self.lengths, self.prompts, strict=True):
            row = torch.randint(2, VOCAB, (length,), generator=generator)
            mask = torch.rand(length, generator=generator) < 0.6
            mask[0] = False
            if prompt >= 0:
                row = torch.cat([prompts[prompt], row])
                mask = torch.cat([torch.zeros(len(prompts[prompt]), dtype=torch.bool), mask])
            tokens.append(row)
            masks.append(mask)
        # The normaliser needs one token at least.
        masks[0][-1] = True
        batch = pack({"input_ids": tokens, "loss_mask": masks})
        # Near what the model says, on both sides of the bounds.
        old = -math.log(VOCAB) + 0.8 * torch.randn(batch.num_items, generator=generator)
        advantages = batch.spread(torch.randn(batch.num_rows, generator=generator))
        return batch.with_items(old_log_probs=old, advantages=advantages)


PER_ENGINE = 3
"""Cases that share an engine, because building one takes longer than a step."""


def draw(number: int, world: int) -> Case:
    """One of the cases of ``world`` ranks. Neighbours share mesh, family and settings, and nothing else.

    Meshes and families take turns, so that every family is cut into slices somewhere.
    """
    engine = number // PER_ENGINE
    families = sorted(FAMILIES)
    family = families[(engine + _SHIFT[world]) % len(families)]
    return draw_on(SIZES[world][engine % len(SIZES[world])], 300 * world + number, family)


_SHIFT = {4: 0, 2: 2, 1: 5}


def draw_on(sizes: tuple[int, int, int], seed: int, family: str) -> Case:
    """The case of a seed for given axes and family."""
    rng, shared = random.Random(seed), random.Random(-1 - seed // PER_ENGINE)
    replicate, shard, usp = sizes
    num_rows = rng.randint(1, 9)
    lengths = tuple(rng.randint(2, rng.choice((4, 14))) for _ in range(num_rows))
    by_tokens = rng.random() < 0.5
    # No row with its prompt is longer than 21; the bound is that of one device, so usp ranks take usp times as much.
    budget = rng.choice((-(-21 // usp), 30))
    settings: dict[str, Any] = {}
    if shared.random() < 0.25:
        settings["activation_checkpointing"] = True
    if shared.random() < 0.25:
        settings["reshard_after_forward"] = False
    if shared.random() < 0.25:
        settings["share_prompts"] = False
    return Case(
        seed=seed,
        model_seed=seed // PER_ENGINE,
        sizes=sizes,
        family=family,
        loss=rng.choice(sorted(LOSSES)),
        mode=rng.choice([str(m) for m in LossAggMode]),
        lengths=lengths,
        prompts=tuple(rng.choice((-1, 0, 1, 2)) for _ in range(num_rows)),
        owner=tuple(rng.randrange(replicate * shard) for _ in range(num_rows)),
        max_rows=None if by_tokens else rng.randint(1, 4),
        max_tokens=budget if by_tokens else None,
        calls=rng.choice((1, 1, 2)),
        clip=rng.choice((0.0, 0.0, 0.05)),
        settings=tuple(sorted(settings.items())),
    )


class Bench:
    """An engine for the cases of one mesh, family and settings; each of them starts from the same weights.

    Args:
        alone: one process whatever the case's mesh, with the backend's default settings.
    """

    def __init__(self, case: Case, device: str = "cpu", alone: bool = False) -> None:
        settings = {"device": device, "param_dtype": "float32", **({} if alone else dict(case.settings))}
        topology = Topology() if alone else case.topology
        if not alone and topology.world_size == 1:
            settings["wrap"] = "always"
        model = {"config": dict(FAMILIES[case.family]), "tokenizer": "unused", "seed": case.model_seed}
        self.alone = alone
        self.key = self.key_of(case)
        self.engine = build_engine(model, LINEAR, topology=topology, **settings)
        self._provider = self.engine._pm.get_plugin("provider")
        self._start = [_local(p).detach().clone() for p in self._provider._root.parameters()]
        self._before = self._weights() if alone else {}

    @staticmethod
    def key_of(case: Case) -> tuple[Any, ...]:
        """What cases on one bench have in common."""
        return case.sizes, case.family, case.model_seed, case.settings

    def run(self, case: Case) -> dict[str, Any]:
        """Loss, metrics, gradient norm and updated weights of one step; alone as one micro-batch in one call."""
        assert self.key_of(case) == self.key, "another bench's case"
        self._reset(case)
        engine, batch = self.engine, case.batch()
        assert engine.mesh is not None
        if not self.alone:
            batch = batch.select([i for i, owner in enumerate(case.owner) if owner == engine.mesh.dp_rank])
        plan = MicroBatchPlan(max_rows=99) if self.alone else case.plan
        weights = item_weights(batch, case.mode, reduce=engine.reduce, norm_length=9)
        batch = batch.with_items(item_weight=weights)
        found: dict[str, Any] = {}
        if self.alone or case.calls == 1:
            out = engine.train_batch(batch, LOSSES[case.loss], plan)
            found |= {"loss": out.loss, "grad_norm": out.step.grad_norm, "alignment": out.sums.get(ALIGNMENT)}
            found["metrics"] = {k: v for k, v in (out.sums | out.maxes).items() if k != ALIGNMENT}
        else:
            middle, loss = (batch.num_rows + 1) // 2, 0.0
            engine.set_mode(True)
            for part in (range(middle), range(middle, batch.num_rows)):
                micro_batches, _ = engine.micro_batches(batch.select(part), plan)
                outputs = engine.forward_backward(micro_batches, LOSSES[case.loss], forward_only=False)
                loss += sum(o.loss for o in outputs)
            found |= {"loss": engine.reduce([loss])[0], "grad_norm": engine.optimizer_step().grad_norm}
        exported = self._weights()
        total = 0
        for tensor in exported.values():
            total = zlib.crc32(tensor.contiguous().numpy().tobytes(), total)
        if self.alone:
            found["largest_step"] = max(float((exported[n] - t).abs().max()) for n, t in self._before.items())
        return found | {"weights": exported, "checksum": total}

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu().clone() for name, tensor in self.engine.export_weights()}

    @torch.no_grad()
    def _reset(self, case: Case) -> None:
        provider = self._provider
        provider._reshard()
        for parameter, start in zip(provider._root.parameters(), self._start, strict=True):
            _local(parameter).copy_(start)
        provider._stepper.optimizer.state.clear()
        provider._stepper._settings["clip_grad"] = case.clip


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differences(got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Loss and gradient norm relative to the one-process value (absolutely below 1), weights relative to the largest step.

    A step is at least 0.05 there: below that the rounding of norm weights, which are near 1, shows.
    """
    weights = max(float((got["weights"][n] - w).abs().max()) for n, w in wanted["weights"].items())
    metrics = [abs(got["metrics"][k] - v) / max(1.0, abs(v)) for k, v in wanted["metrics"].items() if "metrics" in got]
    return {
        "loss": abs(got["loss"] - wanted["loss"]) / max(1.0, abs(wanted["loss"])),
        "grad_norm": abs(got["grad_norm"] - wanted["grad_norm"]) / max(1.0, wanted["grad_norm"]),
        "updated_weights": weights / max(0.05, wanted["largest_step"]),
        "metrics": max(metrics, default=0.0),
    }
