"""Does this model keep packed rows apart? Found by running it, never by its name.

Two random rows run packed and alone. The model may not be packed when its packed logits differ from those of each row
alone (attention of its own, sinks, missing position resets), when changing one row changes the other (linear attention,
convolution or recurrent state running across the boundary), or when a window that its masks ask for never reaches the
attention function.

Shapes: T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rlctl_fsdp import attention

_LENGTHS = (7, 12)
_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
_TOLERANCE_LOW = 4e-2


@dataclass(frozen=True)
class Verdict:
    """``packed`` is True when rows may be packed; ``why`` says what was seen."""

    packed: bool
    why: str


PackedLogits = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@torch.no_grad()
def probe_packing(
    model: PreTrainedModel, packed_logits: PackedLogits, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> Verdict:
    """Compare the engine's packed path with rows alone.

    Args:
        model: whole weights, in eval mode; run it inside the root's forward when sharded.
        packed_logits: rows of token ids -> logits ``[sum T, V]`` along the engine's packed path.
        dtype: dtype of the computation, which sets the tolerance.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocab_size, (n,), generator=generator) for n in _LENGTHS]
    other = torch.randint(0, vocab_size, (_LENGTHS[0],), generator=generator)
    alone = torch.cat([_alone(model, row, device) for row in rows])
    try:
        with attention.tracing() as trace:
            packed = packed_logits(rows)
    except attention.PackedAttentionError as error:
        return Verdict(False, error.what + (f" ({error.found})" if error.found else ""))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        # Models refuse row boundaries in their own words: unknown arguments, a missing kernel, a shape.
        return Verdict(False, f"the model refuses row boundaries: {str(error).strip().splitlines()[0]}")
    if trace.mask_windows - trace.windows:
        missing = ", ".join(map(str, sorted(trace.mask_windows - trace.windows)))
        return Verdict(False, f"a local window ({missing}) is in the masks only, which packing does not build")
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_LOW)
    scale = float(alone.abs().max()) or 1.0
    difference = float((packed - alone).abs().max()) / scale
    if not difference <= tolerance:
        return Verdict(False, f"packed rows differ from rows alone by {difference:.1e} of the largest logit")
    leak = float((packed_logits([other, rows[1]])[_LENGTHS[0] :] - packed[_LENGTHS[0] :]).abs().max()) / scale
    if not leak <= tolerance / 4:
        return Verdict(False, f"changing one row changes its neighbour by {leak:.1e} of the largest logit")
    return Verdict(True, f"packed equals alone to {difference:.1e}")


def _alone(model: PreTrainedModel, row: torch.Tensor, device: torch.device) -> torch.Tensor:
    return model(input_ids=row[None].to(device), use_cache=False).logits[0].float()
