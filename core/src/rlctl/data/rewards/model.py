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
from rlctl.errors import ConfigError, DataError

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
        batch_size: rows that are scored together, at least 1.
        device: where it computes, as torch names it.
        system_prompt, prompt_template, chat_template: as in the ``data`` and ``model`` sections it was trained with.

    Raises:
        ConfigError: there is no reward model in ``path``, or it does not load; the device or the size of a batch is none.
    """
    if batch_size < 1:
        raise ConfigError(
            "the reward model scores at least one row at a time",
            found=f"batch_size {batch_size}",
            wanted="a whole number of at least 1",
            next="args.batch_size=32",
        )
    folder = _folder(path, context.base_dir)
    _check_device(device)

    from rlctl.config.schema import DataConfig, ModelConfig
    from rlctl.data.prompts import PromptEncoder
    from rlctl.data.tokenizer import load_tokenizer

    loaded = _load(path, folder)
    try:
        tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=chat_template))
    except DataError as error:
        raise ConfigError(
            f"the reward model {path} has no tokenizer that loads",
            found=f"{folder}: {error.found or error.what}",
            wanted="the tokenizer it was trained with, beside its weights",
            next=f"copy the files of the tokenizer to {folder}",
        ) from error
    try:
        placed = loaded.eval().to(device)
    except Exception as error:  # out of memory, or whatever a device's runtime raises
        raise ConfigError(
            f"the reward model {path} does not go to its device",
            found=f"{device}: {_first_line(error)}",
            wanted="a device with room for its weights",
            next="args.device=cpu",
        ) from error
    rows = DataConfig(train_files=(str(folder),), system_prompt=system_prompt, prompt_template=prompt_template)
    return ModelReward(placed, PromptEncoder(tokenizer, rows), batch_size, device)


def _folder(path: str, base_dir: Path) -> Path:
    """The directory that ``path`` means, whole."""
    wanted = "the directory that a run of trainer.type rm exports"
    try:
        folder = base_dir.absolute() / Path(path).expanduser()
        there = bool(path.strip()) and folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null byte
        raise ConfigError(
            f"the reward model {path!r} is no path", found=str(error), wanted=wanted, next="args.path=DIRECTORY"
        ) from error
    if not there:
        raise ConfigError(
            f"there is no reward model {path}" if path.strip() else "the reward model has no path",
            found=f"no directory {folder}" if path.strip() else repr(path),
            wanted=f"{wanted}; a relative path starts at {base_dir.absolute()}",
            next="args.path=DIRECTORY",
        )
    return folder


def _check_device(device: str) -> None:
    """Something is computed there: a name alone says neither that torch was built for it nor that there is one."""
    import torch

    try:
        torch.ones(1, device=device).item()
    except (
        Exception
    ) as error:  # torch raises RuntimeError, AssertionError, NotImplementedError and those of its extensions
        raise ConfigError(
            "the reward model's device is none that this torch computes on",
            found=f"{device!r}: {_first_line(error)}",
            wanted="cpu, or an accelerator of this machine as torch names it (cuda, cuda:1, npu)",
            next="args.device=cpu",
        ) from error


def _load(path: str, folder: Path) -> Any:
    """The model of ``folder`` with one label and a head called ``score``, all of whose weights are in its files."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

    from rlctl.hf_quiet import quiet_transformers
    from rlctl.models import VALUE_BIAS

    try:
        config = AutoConfig.from_pretrained(str(folder))
    except Exception as error:  # the library raises OSError, ValueError, KeyError, and its own
        raise ConfigError(
            f"the reward model {path} cannot be read",
            found=f"{folder}: {_first_line(error)}",
            wanted="the directory that a run of trainer.type rm exports",
            next="args.path=DIRECTORY",
        ) from error
    names = list(config.architectures or [])
    kind = next((head for head in HEADS for name in names if name.endswith(head)), None)
    if kind is None:
        raise ConfigError(
            f"{path} is no reward model",
            found=", ".join(names) or "a config that names no architecture",
            wanted="a classifier with one label: what a run of trainer.type rm exports",
            next="rlctl train rm",
        )
    auto = AutoModelForTokenClassification if kind == HEADS[0] else AutoModelForSequenceClassification
    try:
        with quiet_transformers():
            loaded, info = auto.from_pretrained(str(folder), output_loading_info=True)
    except Exception as error:  # as above, and SafetensorError of a file that is cut
        raise ConfigError(
            f"the weights of the reward model {path} do not load",
            found=f"{folder}: {_first_line(error)}",
            wanted="whole files of weights that fit its config.json",
            next=f"copy {folder} again, or args.path=DIRECTORY of another one",
        ) from error
    if loaded.config.num_labels != 1 or not hasattr(loaded, "score"):
        raise ConfigError(
            f"{path} is no reward model",
            found=f"{type(loaded).__name__} with {loaded.config.num_labels} labels",
            wanted="one label, from a linear head called score",
            next="rlctl train rm",
        )
    # A bias that is not there is 0; any other weight would be random.
    missing = sorted(set(info["missing_keys"]) - {VALUE_BIAS})
    if missing:
        raise ConfigError(
            f"the reward model {path} lacks weights, which would be random numbers",
            found=f"{folder}: {len(missing)} missing, first {missing[0]}",
            wanted="all of its weights, the head called score among them",
            next=f"copy {folder} again, or args.path=DIRECTORY of another one",
        )
    return loaded


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
