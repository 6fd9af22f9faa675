"""What the engine finds out about a model before the first batch: its head, and whether rows may be packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from rlctl.batch import pack
from rlctl.errors import EngineError
from rlctl.parts import attention
from rlctl.parts.head import HeadSpec, decoder_of, head_of, probe_head
from rlctl.parts.layout import lay_out
from rlctl.parts.ulysses import Ulysses, assemble
from rlctl_fsdp.config import FSDPConfig
from rlctl_fsdp.locality import leak_between_rows, mixing_outside_attention
from rlctl_fsdp.probe import Verdict, probe_packing


@dataclass(frozen=True)
class Inspection:
    """Results of the probes.

    Args:
        head: None: the model's own forward makes the logits, or it is a value model.
        longest_row: see :func:`row_limit`; None for rows of any length.
    """

    vocab_size: int = 0
    head: HeadSpec | None = None
    head_note: str = ""
    packed: bool = True
    attention_note: str = ""
    share: bool = False
    share_note: str = "off: rows are not packed"
    longest_row: int | None = None


@dataclass(frozen=True)
class Surroundings:
    """Where a model is tried.

    Args:
        compute: dtype of the computation.
        sharded: under ``fully_shard``, which makes the computation's dtype part of the module.
        ulysses: rows will be split between the ranks of this group.
        value: the model has a value head.
        agree: whether all ranks say yes; they must not go different ways.
    """

    device: torch.device
    compute: torch.dtype
    sharded: bool
    ulysses: Ulysses | None = None
    agree: Callable[[bool], bool] = bool
    value: bool = False


def inspect_model(model: PreTrainedModel, config: FSDPConfig, where: Surroundings) -> Inspection:
    """Run the probes of :mod:`rlctl.parts.head`, :mod:`rlctl_fsdp.probe` and :mod:`rlctl_fsdp.locality` on whole weights.

    Raises:
        EngineError: ``attention: packed`` was asked for and the model does not keep packed rows apart; or rows are to be
            split between ranks and a layer other than attention looks at neighbours. On every rank.
    """
    device, compute = where.device, where.compute
    if where.value:
        spec, head_note, embedding = None, "none: a value head", model.get_input_embeddings()
    else:
        spec, why = probe_head(model, device)
        head_note = f"chunked, {spec.describe()}" if spec is not None else f"the model's own forward: {why}"
        embedding = model.get_output_embeddings()
    rows = getattr(embedding, "weight", None)
    vocab_size = int(model.config.get_text_config().vocab_size if rows is None else rows.shape[0])
    if config.attention == "per_row":
        return Inspection(vocab_size, spec, head_note, False, "per_row: asked for")
    verdict = _try_packing(model, spec, vocab_size, where, share=False)
    if verdict.packed:
        verdict = _look_closer(model, verdict, vocab_size, where)
    if where.ulysses is not None and not verdict.packed:
        raise EngineError(
            f"the rows of {type(model).__name__} cannot be split between ranks",
            found=verdict.why,
            wanted="attention that keeps packed rows apart, and other layers that look at one token at a time",
            next="set parallel.usp=1: dp_shard and dp_replicate give each rank whole rows",
        )
    if verdict.packed:
        kernel = attention.kernel_for(device, compute, *_head_sizes(model), None)
        note = f"packed ({kernel}): {verdict.why}"
        limit = row_limit(model)
        if not config.share_prompts:
            return Inspection(vocab_size, spec, head_note, True, note, False, "off: asked for", limit)
        sharing = _try_packing(model, spec, vocab_size, where, share=True)
        return Inspection(vocab_size, spec, head_note, True, note, sharing.packed, sharing.why, limit)
    if config.attention == "packed":
        raise EngineError(
            f"{type(model).__name__} cannot run packed rows",
            found=verdict.why,
            wanted="layers that keep packed rows apart",
            next="set actor.engine.attention=auto: rows of equal length then run as a batch",
        )
    return Inspection(vocab_size, spec, head_note, False, f"per_row: {verdict.why}")


def _look_closer(model: PreTrainedModel, verdict: Verdict, vocab_size: int, where: Surroundings) -> Verdict:
    """``verdict``, unless a module looks across rows, or past a token where ranks hold slices."""
    dtype = where.compute if where.sharded else next(model.parameters()).dtype
    if where.value:
        model = cast(PreTrainedModel, model.base_model)
    found = leak_between_rows(model, vocab_size, where.device, dtype)
    if where.ulysses is not None:
        found = found or mixing_outside_attention(model, vocab_size, where.device, dtype)
    if where.agree(found is None):
        return verdict
    return Verdict(False, found or "another rank saw a layer look where it must not")


def row_limit(model: PreTrainedModel) -> int | None:
    """The longest row that may be packed, or None.

    Some rotary embeddings (``dynamic``, ``longrope``) take other frequencies for *all* rows once a position beyond a
    limit is in sight: a short row's numbers would then depend on its neighbours, on its slice and on its history.
    """
    limits: list[int] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        config = getattr(module, "config", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                values = getattr(config, "rope_parameters", None) or {}
                values = values if layer is None else values[layer]
                limits.append(int(values["original_max_position_embeddings"]))
            elif isinstance(kind, str) and "dynamic" in kind:
                limits.append(int(module.original_max_seq_len))  # pyright: ignore[reportArgumentType]
    return min(limits, default=None)


def _head_sizes(model: PreTrainedModel) -> tuple[int, int]:
    text = model.config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(size), int(size)


def _try_packing(
    model: PreTrainedModel, spec: HeadSpec | None, vocab_size: int, where: Surroundings, share: bool
) -> Verdict:
    """Probe rows end to end (``share`` False), or with a prompt that two of them share; in slices, if so they will run."""
    master = next(model.parameters()).dtype
    device, compute, ulysses = where.device, where.compute, where.ulysses

    def packed_logits(rows: Sequence[torch.Tensor], scored_from: int) -> torch.Tensor:
        mask = [torch.arange(len(r)) >= scored_from for r in rows]
        batch = pack({"input_ids": rows, "loss_mask": mask})
        layout = lay_out(batch, device, packed=True, share=share, ulysses=ulysses)
        decoder, head = decoder_of(model), head_of(model)
        with attention.attention_set(model, attention.NAME):
            if where.value:
                logits = model.base_model(**layout.inputs).last_hidden_state[0].float()[layout.sources]
            elif spec is None or decoder is None or head is None:
                logits = model(**layout.inputs).logits[0].float()[layout.sources]
            else:
                hidden = decoder(**layout.inputs).last_hidden_state[0]
                logits = spec.apply(F.linear(hidden, *head).float())[layout.sources]
        if ulysses is None or layout.mine is None:
            return logits
        return assemble(logits, layout.mine, layout.positions.numel(), ulysses)

    def alone_logits(ids: torch.Tensor) -> torch.Tensor:
        out = (model.base_model if where.value else model)(input_ids=ids, use_cache=False)
        return out.last_hidden_state if where.value else out.logits

    def probe(dtype: torch.dtype) -> Verdict:
        verdict = probe_packing(alone_logits, packed_logits, vocab_size, device, dtype, share)
        agreed = where.agree(verdict.packed)
        return verdict if agreed or not verdict.packed else Verdict(False, "another rank saw packed rows differ")

    if where.sharded or compute == master:
        return probe(compute if where.sharded else master)
    # First in the precision of the weights, where a small difference shows; then with the kernel that training uses.
    exact = probe(master)
    if not exact.packed:
        return exact
    with torch.autocast(device.type, compute) if compute != master else nullcontext():
        coarse = probe(compute)
    return exact if coarse.packed else coarse
