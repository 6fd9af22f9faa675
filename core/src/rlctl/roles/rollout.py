"""The rollout: samples completions from the actor's current weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.config.schema import RolloutConfig
from rlctl.data.prompts import PromptEncoder
from rlctl.data.rows import Row
from rlctl.environments.episodes import Episodes
from rlctl.generation import Completion, GenerateRequest, SamplingParams
from rlctl.runtime.carriage import Transfer
from rlctl.runtime.remote import RemoteEngine
from rlctl.sync import SyncReport

Mode = Literal["sample", "greedy", "validate"]

PARTS = ("weights", "kv")
"""What a rollout engine may give back while it rests."""


@dataclass
class RolloutRole:
    """A rollout engine and how to sample from it.

    Args:
        stop_token_ids: tokens that end a turn of the chat template, beside the model's own end tokens.
        verify_sync: compare fingerprints after each copy of weights.
        dtype: dtype of a copy, None for the master weights'.
        transfer: how weights travel to another pool.
        episodes: conversations with an environment, instead of single completions.
    """

    engine: RemoteEngine
    config: RolloutConfig
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    verify_sync: bool = True
    dtype: str | None = None
    version: int = 0
    transfer: Transfer = field(default_factory=Transfer)
    episodes: Episodes | None = None
    resting: frozenset[str] = frozenset()
    """What the engine has given back."""
    _told: bool = False

    def rest(self) -> str | None:
        """Give back what the engine holds on its device, until it samples or syncs again (``rollout.free_cache_engine``).

        Returns:
            Words for the user, the first time that nothing was freed.
        """
        if self.config.free_cache_engine and not self.resting:
            if self.engine.release(*PARTS):
                self.resting = frozenset(PARTS)
            elif not self._told:
                self._told = True
                return "rollout.free_cache_engine: the rollout engine has nothing that it can give back here"
        return None

    def wake(self, *parts: str) -> None:
        """Bring back those of ``parts`` that were given back; by default all."""
        asked = [part for part in PARTS if part in self.resting and part in (parts or PARTS)]
        if asked:
            self.engine.resume(*asked)
            self.resting -= set(asked)

    def sync(self, actor: RemoteEngine) -> SyncReport:
        """Serve the actor's weights from here on. Keys and values of a resting engine come back when the weights are there, so that
        the buckets in between do not need their room."""
        self.wake("weights")
        report = self._sync(actor)
        self.wake()
        return report

    def _sync(self, actor: RemoteEngine) -> SyncReport:
        self.version += 1
        return actor.sync_to(
            self.engine,
            self.version,
            share=self.config.share_weights,
            verify=self.verify_sync,
            dtype=self.dtype,
            transfer=self.transfer,
        )

    def params(self, mode: Mode, seed: int) -> SamplingParams:
        """How to sample: ``sample`` is the training distribution, ``greedy`` the most probable token each time, ``validate`` as
        ``rollout.val_kwargs`` say (greedy unless set otherwise)."""
        cfg, val = self.config, self.config.val_kwargs
        how: dict[Mode, dict[str, Any]] = {
            "sample": {"n": cfg.n, "temperature": cfg.temperature, "top_p": cfg.top_p, "top_k": cfg.top_k},
            "greedy": {"n": 1, "temperature": 0.0},
            "validate": {"n": val.n, "temperature": val.temperature, "top_p": val.top_p, "top_k": val.top_k},
        }
        return SamplingParams(
            **how[mode], max_tokens=self.max_tokens, stop=cfg.stop, stop_token_ids=self.stop_token_ids, seed=seed
        )

    def sample(
        self, prompts: Sequence[Sequence[int]], seed: int, on_progress: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """``n`` completions a prompt under the training distribution; ``on_progress`` is told how many more are done."""
        return self._generate(GenerateRequest(prompts, self.params("sample", seed)), on_progress)

    def greedy(
        self, prompts: Sequence[Sequence[int]], seed: int, on_progress: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """The most probable completion of each prompt, token by token."""
        return self._generate(GenerateRequest(prompts, self.params("greedy", seed)), on_progress)

    def validate(
        self, prompts: Sequence[Sequence[int]], seed: int, on_progress: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Completions under ``rollout.val_kwargs`` (greedy unless set otherwise)."""
        return self._generate(GenerateRequest(prompts, self.params("validate", seed)), on_progress)

    def _generate(self, request: GenerateRequest, on_progress: Callable[[int], None] | None = None) -> list[Completion]:
        self.wake()
        return self.engine.generate(request, on_progress)

    def converse(
        self,
        rows: Sequence[Row],
        encoder: PromptEncoder,
        mode: Mode,
        seed: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> tuple[list[list[int]], list[Completion]]:
        """The prompt of each row, and what follows: with an environment conversations, else completions.

        Raises:
            DataError: the environment fails, or the chat template cannot carry a conversation.
        """
        if self.episodes is not None:
            return self.episodes.run(rows, self.params(mode, seed), self._generate, on_progress)
        prompts = [encoder.prompt_ids(row) for row in rows]
        return prompts, getattr(self, mode)(prompts, seed, on_progress)
