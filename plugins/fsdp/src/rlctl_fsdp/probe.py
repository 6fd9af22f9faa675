"""Does this model keep packed rows apart? Found by running it, never by its name.

Random rows run packed and alone. The model may not be packed when its packed logits differ from those of each row alone
(attention of its own, sinks, missing position resets), when changing other rows changes this one (linear attention,
convolution or recurrent state running across the boundary), or when a window that its masks ask for never reaches the
attention function. Two of the rows share a prompt, so that the same probe answers for prompts laid out once.

A value model is tried by its hidden states in the place of logits: one number a token would hide too much.

Shapes: P scored tokens, V vocabulary (of a value model its hidden size).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlctl.parts import attention

PROMPT = 5
"""Tokens of the probe's prompts."""
_ANSWERS = (7, 4, 9)
_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
_TOLERANCE_LOW = 4e-2


@dataclass(frozen=True)
class Verdict:
    """``packed`` is True when rows may be packed; ``why`` says what was seen."""

    packed: bool
    why: str


PackedLogits = Callable[[Sequence[torch.Tensor], int], torch.Tensor]
AloneLogits = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def probe_packing(
    alone_logits: AloneLogits,
    packed_logits: PackedLogits,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    share: bool,
) -> Verdict:
    """Compare the engine's packed path with rows alone.

    Args:
        alone_logits: token ids ``[1, T]`` of one row -> the model's own logits ``[1, T, V]``, of whole weights in eval mode;
            run it inside the root's forward when sharded.
        packed_logits: (rows of token ids, offset f of each row's first scored token) -> logits ``[P, V]`` that predict
            the tokens from f on, along the engine's packed path.
        dtype: dtype of the computation, which sets the tolerance.
        share: score what follows the prompts, so that they may be shared; else every token that has a predecessor.
    """
    start = PROMPT if share else 1
    generator = torch.Generator().manual_seed(0)
    prompt, other = (torch.randint(0, vocab_size, (PROMPT,), generator=generator) for _ in range(2))
    answers = [torch.randint(0, vocab_size, (n,), generator=generator) for n in _ANSWERS]
    # Two rows share a prompt, one has another.
    rows = [torch.cat([p, a]) for p, a in zip((prompt, prompt, other), answers, strict=True)]
    changed = [rows[0], torch.cat([prompt, answers[1].flip(0)]), torch.cat([other.flip(0), answers[2]])]
    alone = torch.cat([alone_logits(r[None].to(device))[0, start - 1 : -1] for r in rows])
    alone = alone.float()
    try:
        with attention.tracing() as trace:
            packed = packed_logits(rows, start)
        # Both runs before any verdict: ranks that saw different numbers must not run different collectives.
        neighbours = packed_logits(changed, start)
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
    first = len(rows[0]) - start
    leak = float((neighbours[:first] - packed[:first]).abs().max()) / scale
    if not leak <= tolerance / 4:
        return Verdict(False, f"changing other rows changes this one by {leak:.1e} of the largest logit")
    return Verdict(True, f"equal to rows alone to {difference:.1e}")
