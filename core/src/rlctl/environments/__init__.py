"""Conversations of several turns: whom the policy talks to, and how its words and theirs become one row of tokens.

An environment is a class. One object of it is made for each conversation, in a process of its own (as a user's reward function
has), and its methods may be sync or async::

    class Guess:
        def __init__(self, tries=3):            # rollout.environment.args
            self.tries = tries

        def reset(self, row):                   # a dict, see Observed
            self.wanted = row["answer"]
            return None                         # begin with the row's own prompt

        def step(self, text):                   # what the policy has said, without special tokens
            self.tries -= 1
            if text.strip() == self.wanted:
                return None, 1.0, True          # observation, reward, done
            return "Wrong, try again.", 0.0, self.tries == 0

``reset`` returns None, or the messages with which the conversation begins; what is random in it should follow from the row.
``step`` returns (observation, reward, done), and may add a dict of numbers to log. An observation is text (a message of the user), a
message or a list of messages. A class may have ``tools``, JSON schemas that the chat template is given, and ``close()``.
"""

from __future__ import annotations

from typing import Any, Protocol

Observed = dict[str, Any]
"""What ``reset`` gets of a row: index, source, prompt (text or messages), answer, ground_truth, data_source, extra_info."""


class Environment(Protocol):
    """What the class of an environment has; either method may be async."""

    def reset(self, row: Observed) -> Any:
        """Begin the conversation; see the module."""
        ...

    def step(self, text: str) -> Any:
        """Answer a turn of the policy; (observation, reward, done), or with a dict of numbers behind them."""
        ...
