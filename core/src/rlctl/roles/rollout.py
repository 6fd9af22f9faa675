"""The rollout: samples completions from the actor's current weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlctl.config.schema import RolloutConfig
from rlctl.generation import Completion, GenerateRequest, SamplingParams
from rlctl.runtime.carriage import Transfer
from rlctl.runtime.remote import RemoteEngine
from rlctl.sync import SyncReport


@dataclass
class RolloutRole:
    """A rollout engine and how to sample from it.

    Args:
        stop_token_ids: tokens that end a turn of the chat template, beside the model's own end tokens.
        verify_sync: compare fingerprints after each copy of weights.
        dtype: dtype of a copy, None for the master weights'.
        transfer: how weights travel to another pool.
    """

    engine: RemoteEngine
    config: RolloutConfig
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    verify_sync: bool = True
    dtype: str | None = None
    version: int = 0
    transfer: Transfer = field(default_factory=Transfer)

    def sync(self, actor: RemoteEngine) -> SyncReport:
        """Serve the actor's weights from here on."""
        self.version += 1
        return actor.sync_to(
            self.engine,
            self.version,
            share=self.config.share_weights,
            verify=self.verify_sync,
            dtype=self.dtype,
            transfer=self.transfer,
        )

    def sample(
        self, prompts: Sequence[Sequence[int]], seed: int, on_progress: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """``n`` completions a prompt under the training distribution; ``on_progress`` is told how many more are done."""
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
        return self.engine.generate(GenerateRequest(prompts, params), on_progress)

    def greedy(
        self, prompts: Sequence[Sequence[int]], seed: int, on_progress: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """The most probable completion of each prompt, token by token."""
        params = SamplingParams(
            n=1,
            temperature=0.0,
            max_tokens=self.max_tokens,
            stop=self.config.stop,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
        )
        return self.engine.generate(GenerateRequest(prompts, params), on_progress)

    def validate(
        self, prompts: Sequence[Sequence[int]], seed: int, on_progress: Callable[[int], None] | None = None
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
        return self.engine.generate(GenerateRequest(prompts, params), on_progress)
