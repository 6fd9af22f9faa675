"""Tiny models as Hugging Face directories, engines on them, and what plain transformers says of the same rows."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.core_model_loading import revert_weight_conversion

from rlctl.batch import PackedBatch, pack
from rlctl.engine import Engine
from rlctl.logits import LogitsReader, LossOutput
from rlctl.normalizer import item_weights
from rlctl.records import BackendKind, ModelType
from rlctl.topology import resolve
from rlctl_veomni import notices, standins

notices.silence()
standins.prepare("cpu")
from rlctl_veomni.engine import VeOmniEngine  # noqa: E402  (the stand-ins come before veomni)

VOCAB = 61
LR = 32.0
"""So far a weight moves that its gradient can be read off in float32."""
LENGTHS = (9, 4, 13, 8, 2, 7, 11, 5)
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MOE: dict[str, Any] = {
    **BASE,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **BASE},
    "qwen2": {"model_type": "qwen2", **BASE},
    "qwen3": {"model_type": "qwen3", **BASE, "head_dim": 16, "tie_word_embeddings": True},
    "moe": MOE,
    "moe-tied": {**MOE, "tie_word_embeddings": True, "num_key_value_heads": 1},
}


def save_model(directory: Path, config: Mapping[str, Any], value: bool = False, seed: int = 11) -> Path:
    """A directory whose norms are not all ones, nor its biases zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        filled = AutoConfig.for_model(**config)
        if value:
            filled.num_labels = 1
        model: Any = (AutoModelForTokenClassification if value else AutoModelForCausalLM).from_config(filled)
        if value:
            model.score.bias = None
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    weight.add_(0.3 * torch.randn(weight.shape))
                elif name.endswith("gate.weight"):
                    weight.mul_(4.0)  # so that which experts win does not hang on the last digit
        model.save_pretrained(directory)
    return directory


def rows(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> PackedBatch:
    """Random rows, all but their first tokens scored and weighted alike."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, VOCAB, (n,), generator=generator) for n in lengths]
    batch = pack({"input_ids": ids, "loss_mask": [torch.arange(n) > 0 for n in lengths]})
    return batch.with_items(item_weight=item_weights(batch, "token-mean"))


def nll(reader: LogitsReader, batch: PackedBatch) -> LossOutput:
    """Weighted negative log-likelihood."""
    log_probs = reader.log_prob()
    return LossOutput(-(batch.items["item_weight"] * log_probs).sum(), items={"numbers": log_probs.detach()})


def squares(reader: Any, batch: PackedBatch) -> LossOutput:
    """Weighted squares of a value model's numbers, moved by one."""
    values = reader.values()
    return LossOutput((batch.items["item_weight"] * (values - 1.0).square()).sum(), items={"numbers": values.detach()})


@contextlib.contextmanager
def engine_on(
    model: Mapping[str, Any] | Path,
    axes: Mapping[str, int] | None = None,
    *,
    world: int = 1,
    optim: Mapping[str, Any] | None = None,
    value: bool = False,
    forward_only: bool = False,
    seed: int = 3,
    **settings: Any,
) -> Iterator[Engine]:
    """A built engine, shut down afterwards. Plain descent without clipping unless ``optim`` says otherwise."""
    section: dict[str, Any] = {"path": str(model)} if isinstance(model, Path) else {"config": dict(model)}
    section |= {"dtype": "float32", "seed": seed}
    if value:
        section["model_type"] = ModelType.VALUE_MODEL
    engine = Engine(VeOmniEngine(), BackendKind.TRAIN, "veomni")
    plain = {"name": "sgd", "lr": LR, "weight_decay": 0.0, "clip_grad": 0.0}
    optimizer = None if forward_only else {**plain, **(optim or {})}
    try:
        engine.build(resolve(world, axes or {}), {"device": "cpu", **settings}, section, optimizer, forward_only)
        yield engine
    finally:
        engine.shutdown()


def provider(engine: Engine) -> Any:
    """The backend's own object behind the facade."""
    return engine._pm.get_plugin("provider")


def exported(engine: Engine) -> dict[str, torch.Tensor]:
    """A copy of every weight under its Hugging Face name."""
    return {n: t.detach().cpu().clone() for n, t in engine.export_weights()}


def mine(engine: Engine, batch: PackedBatch) -> PackedBatch:
    """The rows of this rank's replica; weights stay those of the whole batch."""
    assert engine.mesh is not None
    return batch.select(list(range(engine.mesh.dp_rank, batch.num_rows, engine.mesh.dp_size)))


@dataclass
class Seen:
    """One step of plain descent.

    Args:
        numbers: log-probs, or values, of every token of the rows of this rank.
        gradients: by Hugging Face name.
    """

    loss: float
    grad_norm: float
    numbers: torch.Tensor
    gradients: dict[str, torch.Tensor]


def one_step(engine: Engine, batch: PackedBatch, *, micro_rows: int = 2, loss: Any = nll) -> Seen:
    """Micro-batches of ``micro_rows`` rows and one step; the gradient is read off the movement of the weights."""
    local = mine(engine, batch)
    before = exported(engine)
    engine.set_mode(True)
    outputs = engine.forward_backward(list(local.chunks(micro_rows)), loss, forward_only=False)
    step = engine.optimizer_step()
    after = exported(engine)
    (total,) = engine.reduce([sum(o.loss for o in outputs)])
    return Seen(
        total,
        step.grad_norm,
        torch.cat([o.items["numbers"] for o in outputs]),
        {n: (before[n].double() - after[n].double()) / LR for n in before},
    )


def by_transformers(directory: Path, batch: PackedBatch, *, value: bool = False, clip: float = 0.0) -> Seen:
    """The same step by plain transformers, row by row; numbers are those of all rows."""
    kind = AutoModelForTokenClassification if value else AutoModelForCausalLM
    model: Any = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    if value:
        model.score.bias = None
    loss, numbers = torch.zeros(()), []
    weights = batch.split_items(batch.items["item_weight"])
    for ids, weight in zip(batch.split_items(batch.items["input_ids"]), weights, strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        if value:
            # Position t says what is expected after it; the number at an item is of the position before it.
            found = torch.cat([torch.zeros(1), logits[:-1, 0]])
            loss = loss + (weight * (found - 1.0).square()).sum()
        else:
            log_p = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            found = torch.cat([torch.zeros(1), log_p])
            loss = loss - (weight * found).sum()
        numbers.append(found.detach())
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = float(torch.stack([g.double().norm() for g in gradients.values()]).norm())
    factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
    # transformers keeps the experts of a layer in one tensor too; checkpoints have them one by one.
    named = {n: t.double() * factor for n, t in revert_weight_conversion(model, gradients).items()}
    return Seen(float(loss.detach()), norm, torch.cat(numbers), named)


def rows_of(seen: Seen, engine: Engine, batch: PackedBatch) -> Seen:
    """``seen`` of all rows, with the numbers of this rank's."""
    kept = mine(engine, batch.with_items(numbers=seen.numbers)).items["numbers"]
    return replace(seen, numbers=kept)


def compare(found: Seen, wanted: Seen) -> dict[str, Any]:
    """How far two steps are apart: loss and norm relative, numbers in nats, gradients relative to the largest element."""
    assert found.gradients.keys() == wanted.gradients.keys(), found.gradients.keys() ^ wanted.gradients.keys()
    off = {
        n: float((g - wanted.gradients[n]).abs().max() / wanted.gradients[n].abs().max().clamp(min=1e-3))
        for n, g in found.gradients.items()
    }
    worst = max(off, key=lambda n: off[n])
    return {
        "loss": abs(found.loss - wanted.loss) / abs(wanted.loss),
        "grad_norm": abs(found.grad_norm - wanted.grad_norm) / wanted.grad_norm,
        "numbers": float((found.numbers - wanted.numbers).abs().max()),
        "gradients": off[worst],
        "worst": worst,
    }


@contextlib.contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """``where.name`` is ``value`` within."""
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def run_ranks(script: str, *arguments: object, world: int = 2, timeout_s: float = 500.0) -> None:
    """Run a script beside this file as ``world`` ranks, and fail with their output when one of them does."""
    here = Path(__file__).parent
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(here / script), *map(str, arguments)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [child.communicate(timeout=timeout_s)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [c.returncode for c in children] == [0] * world, "\n".join(o[-3000:] for o in outputs)
