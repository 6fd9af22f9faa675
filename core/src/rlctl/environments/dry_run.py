"""An environment on a few rows, without a model: it is told each row's own answer, turn after turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlctl.data.columns import Row
from rlctl.data.prompts import PromptEncoder
from rlctl.environments.episodes import Episodes
from rlctl.environments.glue import ChatGlue
from rlctl.environments.registry import open_environment
from rlctl.generation import Completion, Conversation, FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from rlctl.config.load import ResolvedConfig
    from rlctl.plugins import PluginSet

ROWS = 3
"""Rows that are tried."""

TURNS = 3
"""Turns of each, where the environment asks for as many."""


def try_environment(
    resolved: ResolvedConfig,
    plugins: PluginSet | None,
    encoder: PromptEncoder,
    rows: Sequence[Row],
    positions: int | None = None,
) -> list[Conversation]:
    """Two conversations with each of the first rows, as a run has them; empty where the run has no environment.

    Args:
        positions: how many the model has, where that is known.

    Raises:
        RlctlError: it does not load or fails, begins a row differently for two samples of it or with too long a prompt, or the chat
            template cannot carry its words.
    """
    config = resolved.config
    section = config.rollout.environment
    if section is None:
        return []
    tried = section.model_copy(update={"on_error": "raise", "max_turns": min(TURNS, section.max_turns)})
    held: list[Conversation] = []
    with open_environment(section, plugins, resolved.base_dir) as client:
        glue = ChatGlue(encoder, client.tools, section.earlier_thinking == "keep", config.rollout.stop)
        episodes = Episodes(client, tried, glue, config.data.max_prompt_length, positions=positions)
        params = SamplingParams(n=2, max_tokens=config.data.max_response_length, seed=0)
        for row in rows[:ROWS]:
            said = [*encoder.encode(row.answer or row.response or ""), *encoder.stop_token_ids[-1:]] or encoder.encode(
                "?"
            )

            def generate(request: GenerateRequest, said: list[int] = said) -> list[Completion]:
                ids = said[: request.params.max_tokens]
                why = FinishReason.STOP if len(ids) == len(said) else FinishReason.LENGTH
                n = request.params.n
                return [Completion(i // n, i % n, ids, [0.0] * len(ids), why) for i in range(len(request.prompts) * n)]

            held += [c for c in episodes.run([row], params, generate)[1] if isinstance(c, Conversation)]
    return held
