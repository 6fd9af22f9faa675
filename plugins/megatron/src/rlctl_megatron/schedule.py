"""All micro-batches of one call through megatron-core's schedule: plain, 1F1B or interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlctl.batch import PackedBatch
from rlctl.engine import MicroOutput
from rlctl.logits import LossFn, LossOutput
from rlctl.parts.outputs import detached, on_device, to_micro_output
from rlctl.runtime.phases import beat
from rlctl_megatron import compat
from rlctl_megatron.build import Built
from rlctl_megatron.layout import Laid, lay_out, num_filled
from rlctl_megatron.mesh import Place
from rlctl_megatron.reader import ValueReader, VocabParallelReader, predicting
from rlctl_megatron.specs import ChunkModel
from rlctl_megatron.standins import building
from rlctl_megatron.token_stats import VocabShard


@dataclass(frozen=True)
class Head:
    """How the last stage's hidden states are read.

    Args:
        vocab_size: real rows of the vocabulary, over all tp ranks.
        keep_bytes: budget for raw logits kept for the backward pass.
    """

    vocab_size: int
    keep_bytes: int


def run(
    built: Built,
    place: Place,
    head: Head,
    micro_batches: Sequence[PackedBatch],
    loss_fn: LossFn,
    *,
    forward_only: bool,
) -> list[MicroOutput]:
    """One output for each micro-batch, on every stage the same.

    Gradients are left in each chunk's buffer, of this rank's part alone.
    """
    results: list[tuple[LossOutput, int | None]] = []
    numbers: dict[int, int] = {}  # micro-batches that each chunk has begun
    sp = bool(built.config.sequence_parallel)
    least = _agreed(micro_batches, built, place)
    aligned = place.topology.cp > 1 or sp or any(least)

    def forward(data: Iterator[tuple[PackedBatch, int]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch, num_tokens = next(data)
        laid = lay_out(batch, place.device, place, sp, num_tokens)
        numbers[id(model)] = number = numbers.get(id(model), 0) + 1
        beat(
            micro_batch=number,
            micro_batches=len(micro_batches),
            micro_rows=batch.num_rows,
            micro_tokens=batch.num_items,
        )
        packed = _on_device(laid.packed) if built.models[0].of_engine else laid.packed
        hidden = model(laid.input_ids, laid.position_ids, None, packed_seq_params=packed)

        def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            here = on_device(batch, place.device)
            found = loss_fn(_reader(built.models[-1], output, laid, here, head, place), here)
            results.append((detached(found), laid.filling if aligned else None))
            return found.loss, torch.zeros((), dtype=torch.int, device=place.device), None

        return hidden, loss_of

    schedule = get_forward_backward_func()
    # Each chunk of an interleaved rank reads the micro-batches for itself.
    iterators = [iter(list(zip(micro_batches, least, strict=True))) for _ in built.wrapped]
    many = len(built.wrapped) > 1
    # 0.12.1's pipeline schedule moves a counter to the device by the tensor's own method.
    calls = building(place.device.type) if compat.STAGE_BY_GLOBAL else nullcontext()
    with torch.set_grad_enabled(not forward_only), calls:
        schedule(
            forward_step_func=forward,
            data_iterator=iterators if many else iterators[0],
            model=list(built.wrapped) if many else built.wrapped[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # the shapes are sent along: variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )
    # Read once everything is launched, so that a GPU is not waited for between micro-batches.
    return _share([to_micro_output(out, filling) for out, filling in results], len(micro_batches), place)


def _on_device(packed: PackedSeqParams) -> PackedSeqParams:
    """Bounds as Transformer Engine's kernels read them; ours and the rotary embedding read those on the host."""
    return replace(packed, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None)


def _agreed(micro_batches: Sequence[PackedBatch], built: Built, place: Place) -> list[int]:
    """Tokens that each micro-batch must have at least, where experts gather the tokens of ranks with other rows.

    The all-gather dispatcher takes it for granted that all ranks have as many tokens: with other numbers gloo ends the process
    and NCCL mixes them up. 0 where nothing is asked for.
    """
    t = place.topology
    if built.config.moe_token_dispatcher_type != "allgather" or not built.config.num_moe_experts or t.ep * t.etp == 1:
        return [0] * len(micro_batches)
    sp = bool(built.config.sequence_parallel)
    counts = torch.tensor([num_filled(b, place, sp) for b in micro_batches], device=place.device)
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    return counts.tolist()


def _share(results: list[MicroOutput], count: int, place: Place) -> list[MicroOutput]:
    """What the last stage found, on all stages."""
    if place.pp_group is None:
        assert len(results) == count, "one loss a micro-batch"
        return results
    box: list[Any] = [results]
    last = place.topology.pp - 1
    dist.broadcast_object_list(box, group=place.pp_group, group_src=last, device=torch.device("cpu"))
    assert len(box[0]) == count, "one loss a micro-batch"
    return box[0]


def _reader(
    model: ChunkModel, hidden: torch.Tensor, laid: Laid, batch: PackedBatch, head: Head, place: Place
) -> VocabParallelReader | ValueReader:
    """``hidden`` ``[T, 1, D]`` -> the reader of this micro-batch (on the device)."""
    value = model.value_head
    sp = bool(model.config.sequence_parallel)
    own = predicting(hidden, laid, place.tp_group, sp=sp, vocab_parallel=value is None)
    if value is not None:
        return ValueReader(own, laid, value.weight, place.cp_group)
    weight = model.head_weight()
    shard = VocabShard(
        weight,
        head.vocab_size,
        place.tp_rank * weight.shape[0],
        place.tp_group,
        float(batch.meta.get("temperature", 1.0)),
    )
    return VocabParallelReader(own, laid, batch.items["input_ids"], shard, place.cp_group, head.keep_bytes)
