"""Tiny models as Hugging Face directories, engines on them, and what plain transformers says of the same rows."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from rlctl_megatron import standins

standins.prepare(os.environ.get("MEGATRON_TINY_DEVICE", "cpu"))
from rlctl_megatron.engine import MegatronEngine  # noqa: E402  (the stand-ins come before megatron-core)

VOCAB = 61
"""No multiple of two: two ranks share it with a row that only fills."""
LR = 32.0
"""So far a weight moves that its gradient can be read off in float32."""
LENGTHS = (9, 4, 13, 8, 2, 7)
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **BASE},
    "llama-tied": {"model_type": "llama", **BASE, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **BASE},
    "qwen3": {"model_type": "qwen3", **BASE, "head_dim": 16},
    "mistral": {"model_type": "mistral", **BASE, "head_dim": 8, "sliding_window": 5},
    "qwen3-moe": {
        "model_type": "qwen3_moe", **BASE, **_EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"model_type": "mixtral", **BASE, **_EXPERTS, "num_local_experts": 4},
}  # fmt: skip


def save_model(directory: Path, config: Mapping[str, Any], value: bool = False, seed: int = 11) -> Path:
    """A directory whose norms are not all ones, nor its biases zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        filled = AutoConfig.for_model(**config)
        if value:
            filled.num_labels = 1
            filled.token_classification_bias = False
        model = (AutoModelForTokenClassification if value else AutoModelForCausalLM).from_config(filled)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    weight.add_(0.3 * torch.randn(weight.shape))
        model.save_pretrained(directory)
    return directory


def rows(lengths: Sequence[int] = LENGTHS, seed: int = 0, vocab: int = VOCAB) -> PackedBatch:
    """Random rows, all but their first tokens scored and weighted alike."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, vocab, (n,), generator=generator) for n in lengths]
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
    device: str = "cpu",
    **settings: Any,
) -> Iterator[Engine]:
    """A built engine, shut down afterwards. Plain descent without clipping unless ``optim`` says otherwise."""
    section: dict[str, Any] = {"path": str(model)} if isinstance(model, Path) else {"config": dict(model), "seed": 3}
    section |= {"dtype": "float32"}
    if value:
        section["model_type"] = ModelType.VALUE_MODEL
    engine = Engine(MegatronEngine(), BackendKind.TRAIN, "megatron")
    optimizer = (
        None if forward_only else {"name": "sgd", "lr": LR, "weight_decay": 0.0, "clip_grad": 0.0, **(optim or {})}
    )
    try:
        engine.build(resolve(world, axes or {}), {"device": device, **settings}, section, optimizer, forward_only)
        yield engine
    finally:
        engine.shutdown()


def provider(engine: Engine) -> Any:
    """The backend's own object behind the facade."""
    return engine._pm.get_plugin("provider")


def exported(engine: Engine) -> dict[str, torch.Tensor]:
    """A copy of every weight under its Hugging Face name."""
    return {n: t.detach().cpu().clone() for n, t in engine.export_weights()}


@dataclass
class Seen:
    """One step of plain descent.

    Args:
        numbers: log-probs, or values, of every token of the rows.
        gradients: by Hugging Face name.
    """

    loss: float
    grad_norm: float
    numbers: torch.Tensor
    gradients: dict[str, torch.Tensor]


def one_step(engine: Engine, batch: PackedBatch, *, micro_rows: int = 2, loss: Any = nll) -> Seen:
    """Micro-batches of ``micro_rows`` rows and one step; the gradient is read off the movement of the weights."""
    before = exported(engine)
    engine.set_mode(True)
    outputs = engine.forward_backward(list(batch.chunks(micro_rows)), loss, forward_only=False)
    step = engine.optimizer_step()
    after = exported(engine)
    return Seen(
        sum(o.loss for o in outputs),
        step.grad_norm,
        torch.cat([o.items["numbers"] for o in outputs]),
        {n: (before[n].double() - after[n].double()) / LR for n in before},
    )


def by_transformers(directory: Path, batch: PackedBatch, *, value: bool = False) -> Seen:
    """The same step by plain transformers, row by row."""
    kind = AutoModelForTokenClassification if value else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    loss, numbers = torch.zeros(()), []
    for ids, weight in zip(
        batch.split_items(batch.items["input_ids"]), batch.split_items(batch.items["item_weight"]), strict=True
    ):
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
    gradients = _stored_names(model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    norm = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
    return Seen(float(loss.detach()), float(norm), torch.cat(numbers), gradients)


def _stored_names(model: Any, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names that ``save_pretrained`` writes: transformers keeps the experts of a layer in one tensor."""
    return {n: t.double().clone() for n, t in revert_weight_conversion(model, dict(gradients)).items()}


@dataclass(frozen=True)
class Apart:
    """How far two steps are apart: loss and norm relative, numbers in nats, gradients relative to the largest element."""

    loss: float
    grad_norm: float
    numbers: float
    gradients: float
    worst: str

    def largest(self) -> float:
        """Of all four; NaN counts as infinite."""
        values = (self.loss, self.grad_norm, self.numbers, self.gradients)
        return max(v if v == v else float("inf") for v in values)


def compare(found: Seen, wanted: Seen) -> Apart:
    """``found`` against ``wanted``; both must name the same gradients."""
    assert found.gradients.keys() == wanted.gradients.keys(), found.gradients.keys() ^ wanted.gradients.keys()
    off = {
        n: float((g - wanted.gradients[n]).abs().max() / wanted.gradients[n].abs().max().clamp(min=1e-3))
        for n, g in found.gradients.items()
    }
    worst = max(off, key=lambda n: off[n])
    return Apart(
        abs(found.loss - wanted.loss) / abs(wanted.loss),
        abs(found.grad_norm - wanted.grad_norm) / wanted.grad_norm,
        float((found.numbers - wanted.numbers).abs().max()),
        off[worst],
        worst,
    )


@contextlib.contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """``where.name`` is ``value`` within."""
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def run_ranks(script: str, *arguments: object, world: int = 2, device: str = "cpu", timeout_s: float = 600.0) -> None:
    """Run a script beside this file as ``world`` ranks, and fail with their output when one of them does.

    Args:
        device: what their process is prepared for: the CPU's stand-ins are not for a process that computes elsewhere.
    """
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
        "MEGATRON_TINY_DEVICE": device,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
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
