"""A trained reward model as a reward: the score that it gives a prompt with a completion.

Takes what ``trainer.type: rm`` exports, or any sequence classifier of transformers with one label whose head is called ``score``. It
runs in the process that scores rewards, with its own tokenizer and chat template.

Shapes: B rows, T tokens of the longest, padded behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.data.columns import Row
from rlctl.data.rewards.base import RewardContext, RewardInput
from rlctl.errors import ConfigError

if TYPE_CHECKING:
    from rlctl.data.prompts import PromptEncoder

HEADS = ("ForTokenClassification", "ForSequenceClassification")


@dataclass
class ModelReward:
    """A built reward model; :meth:`prepare` scores a batch, and a call hands out what it found."""

    model: Any
    encoder: PromptEncoder
    batch_size: int
    device: str
    compares: bool = False
    _found: dict[int, float] = field(default_factory=dict)

    def prepare(self, items: Sequence[RewardInput]) -> None:
        """Score ``items`` together; each is called for afterwards."""
        self._found = dict(zip(map(id, items), self.scores([(i.row, i.text) for i in items]), strict=True))

    def __call__(self, item: RewardInput) -> float:
        found = self._found.pop(id(item), None)
        return self.scores([(item.row, item.text)])[0] if found is None else found

    def scores(self, answered: Sequence[tuple[Row, str]]) -> list[float]:
        """The score of each row with its completion, read at the last token, the one that ends the completion."""
        rows = [replace(row, response=text, messages=None) for row, text in answered]
        ids = [ids for ids, _ in self.encoder.sft_batch(rows)]
        # Rows of like length together, so that little is padded.
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        out = [0.0] * len(ids)
        for at in range(0, len(order), self.batch_size):
            chunk = order[at : at + self.batch_size]
            for i, score in zip(chunk, self._score([ids[i] for i in chunk]), strict=True):
                out[i] = score
        return out

    def _score(self, rows: list[list[int]]) -> list[float]:
        import torch

        longest = max(map(len, rows))
        tokens = torch.tensor([[*ids, *([ids[-1]] * (longest - len(ids)))] for ids in rows], device=self.device)
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in rows], device=self.device)
        with torch.no_grad():
            hidden = self.model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
            last = torch.tensor([len(ids) - 1 for ids in rows], device=self.device)
            # The whole row behind the last token: padding comes after it, and nothing sees what comes after.
            return self.model.score(hidden[torch.arange(len(rows), device=self.device), last]).float()[:, 0].tolist()


def model(
    context: RewardContext,
    path: str,
    *,
    batch_size: int = 32,
    device: str = "cpu",
    system_prompt: str | None = None,
    prompt_template: str | None = None,
    chat_template: str | None = None,
) -> ModelReward:
    """Build the reward ``model``.

    Args:
        path: directory of the reward model; a relative one starts where the configuration lies.
        device: where it computes, as torch names it.
        system_prompt, prompt_template, chat_template: as in the ``data`` and ``model`` sections it was trained with.

    Raises:
        ConfigError: there is no reward model in ``path``.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

    from rlctl.config.schema import DataConfig, ModelConfig
    from rlctl.data.prompts import PromptEncoder
    from rlctl.data.tokenizer import load_tokenizer

    folder = context.base_dir / Path(path).expanduser()
    try:
        names = list(AutoConfig.from_pretrained(str(folder)).architectures or [])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the reward model {path} cannot be read",
            found=str(error).strip().split("\n")[0],
            wanted="the directory that a run of trainer.type rm exports",
        ) from error
    kind = next((head for head in HEADS for name in names if name.endswith(head)), None)
    if kind is None:
        raise ConfigError(
            f"{path} is no reward model",
            found=", ".join(names) or "a config that names no architecture",
            wanted="a classifier with one label: what a run of trainer.type rm exports",
            next="rlctl train rm",
        )
    auto = AutoModelForTokenClassification if kind == HEADS[0] else AutoModelForSequenceClassification
    loaded: Any = auto.from_pretrained(str(folder))
    if loaded.config.num_labels != 1 or not hasattr(loaded, "score"):
        raise ConfigError(
            f"{path} is no reward model",
            found=f"{type(loaded).__name__} with {loaded.config.num_labels} labels",
            wanted="one label, from a linear head called score",
        )
    tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=chat_template))
    rows = DataConfig(train_files=(str(folder),), system_prompt=system_prompt, prompt_template=prompt_template)
    return ModelReward(loaded.eval().to(device), PromptEncoder(tokenizer, rows), batch_size, device)
