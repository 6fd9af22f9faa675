"""What the engine finds out about a model before the first batch: its head, and whether rows may be packed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from rlctl.batch import pack
from rlctl.errors import EngineError
from rlctl_fsdp import attention
from rlctl_fsdp.config import FSDPConfig
from rlctl_fsdp.head import HeadSpec, decoder_of, head_of, probe_head
from rlctl_fsdp.layout import lay_out
from rlctl_fsdp.probe import Verdict, probe_packing


@dataclass(frozen=True)
class Inspection:
    """Results of the probes. ``head`` None: the model's own forward makes the logits."""

    vocab_size: int = 0
    head: HeadSpec | None = None
    head_note: str = ""
    packed: bool = True
    attention_note: str = ""
    share: bool = False
    share_note: str = "off: rows are not packed"


def inspect_model(
    model: PreTrainedModel, config: FSDPConfig, device: torch.device, compute: torch.dtype, sharded: bool
) -> Inspection:
    """Run the probes of :mod:`rlctl_fsdp.head` and :mod:`rlctl_fsdp.probe` on whole weights.

    Raises:
        EngineError: ``attention: packed`` was asked for and the model does not keep packed rows apart.
    """
    spec, why = probe_head(model, device)
    head_note = f"chunked, {spec.describe()}" if spec is not None else f"the model's own forward: {why}"
    vocab = model.get_output_embeddings()
    vocab_size = int(vocab.weight.shape[0]) if vocab is not None else int(model.config.get_text_config().vocab_size)
    if config.attention == "per_row":
        return Inspection(vocab_size, spec, head_note, False, "per_row: asked for")
    verdict = _try_packing(model, spec, vocab_size, device, compute, sharded, share=False)
    if verdict.packed:
        kernel = attention.kernel_for(device, compute, *_head_sizes(model), None)
        note = f"packed ({kernel}): {verdict.why}"
        if not config.share_prompts:
            return Inspection(vocab_size, spec, head_note, True, note, False, "off: asked for")
        sharing = _try_packing(model, spec, vocab_size, device, compute, sharded, share=True)
        return Inspection(vocab_size, spec, head_note, True, note, sharing.packed, sharing.why)
    if config.attention == "packed":
        raise EngineError(
            f"{type(model).__name__} cannot run packed rows",
            found=verdict.why,
            wanted="layers that keep packed rows apart",
            next="set actor.engine.attention=auto: rows of equal length then run as a batch",
        )
    return Inspection(vocab_size, spec, head_note, False, f"per_row: {verdict.why}")


def _head_sizes(model: PreTrainedModel) -> tuple[int, int]:
    text = model.config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(size), int(size)


def _try_packing(
    model: PreTrainedModel,
    spec: HeadSpec | None,
    vocab_size: int,
    device: torch.device,
    compute: torch.dtype,
    sharded: bool,
    share: bool,
) -> Verdict:
    """Probe rows end to end (``share`` False), or with a prompt that two of them share."""
    master = next(model.parameters()).dtype

    def packed_logits(rows: Sequence[torch.Tensor], scored_from: int) -> torch.Tensor:
        mask = [torch.arange(len(r)) >= scored_from for r in rows]
        layout = lay_out(pack({"input_ids": rows, "loss_mask": mask}), device, packed=True, share=share)
        decoder, head = decoder_of(model), head_of(model)
        with attention.attention_set(model, attention.NAME):
            if spec is None or decoder is None or head is None:
                return model(**layout.inputs).logits[0].float()[layout.sources]
            hidden = decoder(**layout.inputs).last_hidden_state[0]
            return spec.apply(F.linear(hidden, *head).float())[layout.sources]

    if sharded or compute == master:
        return probe_packing(model, packed_logits, vocab_size, device, compute if sharded else master, share)
    # First in the precision of the weights, where a small difference shows; then with the kernel that training uses.
    exact = probe_packing(model, packed_logits, vocab_size, device, master, share)
    if not exact.packed:
        return exact
    with torch.autocast(device.type, compute) if compute != master else nullcontext():
        coarse = probe_packing(model, packed_logits, vocab_size, device, compute, share)
    return exact if coarse.packed else coarse
