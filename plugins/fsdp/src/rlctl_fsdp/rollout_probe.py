"""Which runner serves a model: found by comparing logits, never by a list of names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rlctl.errors import EngineError
from rlctl_fsdp.generation_mode import generation_mode
from rlctl_fsdp.runners import DynamicRunner, RecomputeRunner, Runner, StaticRunner, natural_attention

RUNNERS: dict[str, type[Runner]] = {"static": StaticRunner, "dynamic": DynamicRunner, "recompute": RecomputeRunner}
_STEPS = 3
_LENGTHS = (3, 7)


def _rows(lengths: Sequence[int], vocab: int) -> list[list[int]]:
    """Rows of different tokens; ``_STEPS`` of each are fed one by one."""
    rows, value = [], 17
    for length in lengths:
        row = []
        for _ in range(length + _STEPS):
            value = (value * 7919 + 13) % vocab
            row.append(value)
        rows.append(row)
    return rows


def _stepwise(runner: Runner, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits after each row's prompt and after each fed token, two copies a row, one of them dropped on the way."""
    prompts = [row[: len(row) - _STEPS] for row in rows]
    device = runner.device
    first = runner.prefill(prompts, copies=2, max_new=_STEPS + 1)
    per_row = [[logits] for logits in first.float()]
    for step in range(_STEPS):
        if step == 1:
            runner.keep(torch.arange(0, 2 * len(rows), 2, device=device))
        copies = 2 if step == 0 else 1
        tokens = torch.tensor([row[len(row) - _STEPS + step] for row in rows for _ in range(copies)], device=device)
        logits = runner.step(tokens).float()
        for i in range(len(rows)):
            per_row[i].append(logits[i * copies])
    return [torch.stack(steps) for steps in per_row]


def _plain(module: PreTrainedModel, rows: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    runner = RecomputeRunner(module, device)
    return [runner.logits([row])[0, -_STEPS - 1 :].float() for row in rows]


def _distance(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> torch.Tensor:
    """Mean difference at each position in units of the logits' standard deviation there."""
    return torch.cat([(a - b).abs().mean(-1) / b.std(-1).clamp(min=1e-9) for a, b in zip(ours, plain, strict=True)])


def _limit(distance: torch.Tensor, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """(the distance that counts, the largest allowed). In half precision a router may flip at single positions."""
    if dtype is torch.float32:
        return float(distance.max()), 1e-4 if device.type == "cpu" else 2e-2
    return float(distance.quantile(0.75)), 0.1


def choose_runner(module: PreTrainedModel, device: torch.device, path: str) -> tuple[type[Runner], str]:
    """The first of static, dynamic, recompute whose logits equal a plain forward pass; and why.

    Args:
        path: ``auto``, or the one runner to take.

    Raises:
        EngineError: ``path`` names a runner that this model cannot use.
    """
    with generation_mode(module, natural_attention(module)):
        vocab = int(module.config.get_text_config(decoder=True).vocab_size)
        rows = {kind: _rows(_LENGTHS if kind.any_length else _LENGTHS[:1], vocab) for kind in RUNNERS.values()}
        plain = _plain(module, rows[StaticRunner], device)
    reasons: list[str] = []
    for name in RUNNERS if path == "auto" else [path]:
        kind = RUNNERS[name]
        if kind is RecomputeRunner:
            return kind, "; ".join(reasons) or "asked for"
        problem = _problem(kind, module, rows[kind], plain[: len(rows[kind])], device)
        if problem is None:
            return kind, "; ".join([*reasons, "equal to a plain forward pass"])
        reasons.append(f"not {name}: {problem}")
    raise EngineError(
        f"this model cannot be decoded with rollout.engine.path={path}",
        found=reasons[0].partition(": ")[2],
        wanted="logits equal to a plain forward pass",
        next="set rollout.engine.path=auto",
    )


def _problem(
    kind: type[Runner], module: PreTrainedModel, rows: list[list[int]], plain: list[torch.Tensor], device: torch.device
) -> str | None:
    if kind is StaticRunner and (reason := StaticRunner.problem(module)) is not None:
        return reason
    try:
        with generation_mode(module, kind.attention_of(module)):
            runner = kind(module, device)
            distance = _distance(_stepwise(runner, rows), plain)
            if isinstance(runner, StaticRunner):
                runner.check_windows()
    except Exception as error:  # The model's own code, any model's: whatever it raises on this path, another is tried.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    dtype = plain[0].dtype if not torch.is_autocast_enabled(device.type) else torch.get_autocast_dtype(device.type)
    held = next(p for p in module.parameters() if p.is_floating_point()).dtype
    counts, allowed = _limit(distance, held if dtype is torch.float32 else dtype, device)
    return None if counts <= allowed else f"logits differ by {counts:.2g} of their standard deviation"
