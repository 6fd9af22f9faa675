"""The rollout: samples completions from the actor's current weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlctl.config.schema import RolloutConfig
from rlctl.engine import Engine
from rlctl.generation import Completion, GenerateRequest, SamplingParams
from rlctl.sync import SyncReport, sync_weights


@dataclass
class RolloutRole:
    """A rollout engine and how to sample from it.

    Args:
        stop_token_ids: tokens that end a turn of the chat template, beside the model's own end tokens.
        verify_sync: compare fingerprints after each copy of weights.
        dtype: dtype of a copy, None for the master weights'.
    """

    engine: Engine
    config: RolloutConfig
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    verify_sync: bool = True
    dtype: str | None = None
    version: int = 0

    def sync(self, actor: Engine) -> SyncReport:
        """Serve the actor's weights from here on."""
        self.version += 1
        return sync_weights(
            actor,
            self.engine,
            self.version,
            share=self.config.share_weights,
            verify=self.verify_sync,
            dtype=self.dtype,
        )

    def sample(
        self, prompts: Sequence[Sequence[int]], seed: int, on_done: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """``n`` completions a prompt under the training distribution."""
        cfg = self.config
        params = SamplingParams(
            n=cfg.n,
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            top_k=cfg.top_k,
            max_tokens=self.max_tokens,
            stop=cfg.stop,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
        )
        return self.engine.generate(GenerateRequest(prompts, params), on_done)

    def validate(
        self, prompts: Sequence[Sequence[int]], seed: int, on_done: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Completions under ``rollout.val_kwargs`` (greedy unless set otherwise)."""
        val = self.config.val_kwargs
        params = SamplingParams(
            n=val.n,
            temperature=val.temperature,
            top_p=val.top_p,
            top_k=val.top_k,
            max_tokens=self.max_tokens,
            stop=self.config.stop,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
        )
        return self.engine.generate(GenerateRequest(prompts, params), on_done)
