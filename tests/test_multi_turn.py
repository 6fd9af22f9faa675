"""Conversations in whole runs: the tokens trained on are those sampled, whatever the template, the environment and the ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_styles import STYLES, characters, tiny_model
from kept_ranks import kept_ranks
from safetensors.torch import load_file

from rlctl.batch import PackedBatch
from rlctl.config.load import load_config
from rlctl.config.schema import DataConfig, TaskConfig
from rlctl.config.schema_environment import EnvironmentConfig
from rlctl.data.columns import Row
from rlctl.data.procedural import make_rows
from rlctl.data.prompts import PromptEncoder
from rlctl.data.tokenizer import load_tokenizer
from rlctl.environments.episodes import Episodes
from rlctl.environments.glue import ChatGlue
from rlctl.environments.registry import open_environment
from rlctl.errors import ConfigError, DataError
from rlctl.generation import Completion, Conversation, Ending, FinishReason, GenerateRequest, SamplingParams
from rlctl.models import resolve_model_source
from rlctl.plugins import load_plugins
from rlctl.runtime.remote import RemoteEngine
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.environments import turn_token_rewards
from rlctl.trainers.evaluation import ScoredRollout
from rlctl.trainers.rl import RLTrainer
from rlctl.trainers.run import Runner, RunResult

HERE = Path(__file__).parent
WORLDS = HERE / "talking_environments.py"
BASE = [
    "warm_start=null",
    "data.train_batch_size=2",
    "data.val_batch_size=4",
    "data.task.val_size=4",
    "data.task.train_size=16",
    "data.task.args={length: 3}",
    "data.max_prompt_length=80",
    "data.max_response_length=220",
    "rollout.n=3",
    "reward.components=[{name: environment}]",
    "rollout.environment.max_turn_tokens=12",
    "actor.optim.lr=1e-2",
    "trainer.num_threads=1",
    "trainer.total_training_steps=2",
    "trainer.logger=[jsonl]",
    "trainer.save_best=false",
]
CLOCK = ("timing_s/", "perf/", "sync/seconds", "training/unix_time")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for style in STYLES:
        (root / style).mkdir()
    return {style: tiny_model(root / style, template) for style, template in STYLES.items()}


class Seen:
    """What the engine was asked and has returned, and what was packed of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[GenerateRequest, list[Completion]]] = []
        self.packed: list[tuple[ScoredRollout, PackedBatch, list[tuple[GenerateRequest, list[Completion]]]]] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    notes = Seen()
    generate, pack = RemoteEngine.generate, RLTrainer.pack

    def generated(self: RemoteEngine, request: GenerateRequest, on_progress: Any = None) -> list[Completion]:
        out = generate(self, request, on_progress)
        notes.calls.append((request, out))
        return out

    def packed(self: RLTrainer, rollout: ScoredRollout) -> PackedBatch:
        batch = pack(self, rollout)
        notes.packed.append((rollout, batch, notes.calls[:]))
        notes.calls.clear()
        return batch

    monkeypatch.setattr(RemoteEngine, "generate", generated)
    monkeypatch.setattr(RLTrainer, "pack", packed)
    return notes


def train(run: Path, model: Path, world: str, *overrides: str, resume: bool = False) -> RunResult:
    plugins = load_plugins()
    name = f"rollout.environment.name={WORLDS}:{world}"
    resolved = load_config("quickstart", [*BASE, f"model.path={model}", name, *overrides], plugins=plugins)
    where = {"resume": run} if resume else {"run_dir": run}
    return Runner(resolved, plugins, NullReporter(), **where).execute()


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def numbers(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in lines(run)]


def assert_trained_on_what_was_sampled(
    rollout: ScoredRollout, batch: PackedBatch, calls: list[tuple[GenerateRequest, list[Completion]]]
) -> int:
    """Every completion of the engine is in the batch, in its place and with its log-probs, and nothing else is trained on.

    The calls of a step come first, those of a greedy baseline or a validation would be left over. Returns the number of rows.
    """
    sampled: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = Counter()
    for request, out in calls:
        for c in out:
            context = tuple(request.prompts[c.prompt_index])
            sampled[context, tuple(c.token_ids), tuple(torch.tensor(c.log_probs).tolist())] += 1
    fields = [batch.split_items(batch.items[name]) for name in ("input_ids", "loss_mask", "rollout_log_probs")]
    assert len(fields[0]) == len(rollout.completions)
    for row, (ids, mask, log_probs) in enumerate(zip(*(map(torch.Tensor.tolist, f) for f in fields), strict=True)):
        at = len(rollout.prompts[rollout.completions[row].prompt_index])
        assert not any(mask[:at])
        while at < len(ids):
            if not mask[at]:
                assert log_probs[at] == 0.0
                at += 1
                continue
            found = [
                (context, tokens, probs)
                for context, tokens, probs in sampled
                if context == tuple(ids[:at])
                if tokens == tuple(ids[at : at + len(tokens)]) and probs == tuple(log_probs[at : at + len(tokens)])
            ]
            assert found, f"row {row} trains on tokens at {at} that nobody sampled there"
            one = max(found, key=lambda f: len(f[1]))
            assert all(mask[at : at + len(one[1])])
            sampled[one] -= 1
            if not sampled[one]:
                del sampled[one]
            at += len(one[1])
    assert not sampled, "the engine sampled tokens that are in no row"
    return len(rollout.completions)


@pytest.mark.parametrize("style", STYLES)
def test_the_tokens_trained_on_are_those_sampled(
    style: str, models: dict[str, Path], seen: Seen, tmp_path: Path
) -> None:
    """n > 1, turns that end and turns that are cut, budgets that end in a turn; on every row of the run."""
    role = "user" if style == "gemma" else "tool"
    run = train(
        tmp_path / "run",
        models[style],
        "Echo",
        f"rollout.environment.args={{role: {role}}}",
        "trainer.val_before_train=false",
    )
    training = [step for step in seen.packed if step[0].rows[0].source.startswith("sort_digits train")]
    assert [assert_trained_on_what_was_sampled(*step) for step in training] == [6, 6]
    endings = Counter(
        c.ending for rollout, _, _ in training for c in rollout.completions if isinstance(c, Conversation)
    )
    assert endings[Ending.DONE] + endings[Ending.LENGTH] == 12
    for rollout, batch, _ in training:
        for c, result in zip(rollout.completions, rollout.rewards, strict=True):
            assert isinstance(c, Conversation)
            assert len(c.token_ids) <= 220
            assert result.score == pytest.approx(
                sum(sum(map(ord, t.text)) % 7 + (i + 1) / 8 for i, t in enumerate(c.turns))
            )
        assert int(batch.items["loss_mask"].sum()) == sum(c.num_sampled for c in rollout.completions)
    for line in lines(run.path)[0:2]:
        assert line["training/rollout_probs_diff_max"] < 1e-4
        assert line["actor/grad_norm"] > 0
        assert line["num_turns/max"] == 3
        both = line["environment/sampled_tokens/mean"] + line["environment/observed_tokens/mean"]
        assert both == pytest.approx(line["response_length/mean"])


def test_one_turn_is_a_completion(models: dict[str, Path], seen: Seen, tmp_path: Path) -> None:
    """An environment of a single turn samples, token by token, what the run samples without one."""
    one = ["data.max_response_length=12", "trainer.total_training_steps=1", "trainer.val_before_train=false"]
    train(tmp_path / "turns", models["qwen"], "Echo", "rollout.environment.args={turns: 1}", *one)
    with_turns = seen.packed[0][1]
    seen.packed.clear()
    train(
        tmp_path / "plain",
        models["qwen"],
        "Echo",
        "rollout.environment=null",
        "reward.components=[{name: exact_match}]",
        *one,
    )
    for name in ("input_ids", "loss_mask", "rollout_log_probs"):
        assert torch.equal(with_turns.items[name], seen.packed[0][1].items[name]), name


def test_turns_end_at_max_turns_and_async_environments_wait_together(
    models: dict[str, Path], seen: Seen, tmp_path: Path
) -> None:
    """Six conversations, four calls at a time; and a greedy validation talks to the same environment."""
    settings = [
        "rollout.environment.max_turns=2",
        "rollout.environment.max_concurrency=4",
        "trainer.total_training_steps=1",
    ]
    run = train(tmp_path / "run", models["smollm2"], "Waiting", "rollout.environment.args={turns: 9}", *settings)
    (line,) = [line for line in lines(run.path) if line["training/global_step"] == 1]
    assert line["num_turns/min"] == line["num_turns/max"] == 2
    assert line["num_turns/clip_ratio"] == 1.0
    assert line["response_length/clip_ratio"] == 0.0
    assert line["reward/environment/most"] == 4
    assert line["val/num_turns/mean"] == 2
    samples = lines(run.path, "samples.jsonl")
    assert {sample["split"] for sample in samples} == {"train", "val"}
    for sample in samples:
        assert len(sample["turns"]) == 2
        assert sample["ending"] == "max_turns"
        assert "no. 1" in sample["turns"][0]["observation"]
        assert "no. 1" in sample["completion"]
        assert sample["score"] == pytest.approx(sum(turn["reward"] for turn in sample["turns"]))


def test_a_pause_changes_no_number_and_no_weight(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["trainer.save_freq=1", "actor.ppo_mini_batch_size=1"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(whole, models["llama3"], "Echo", *settings)
    honest = Runner._step

    def unplugged(self: Runner, trainer: Any, number: int) -> dict[str, float]:
        if number == 2:
            raise KeyboardInterrupt
        return honest(self, trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_step", unplugged)
        with pytest.raises(KeyboardInterrupt):
            train(broken, models["llama3"], "Echo", *settings)
    train(broken, models["llama3"], "Echo", *settings, resume=True)
    assert numbers(broken) == numbers(whole)
    one, other = (load_file(run / "export" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def ranks() -> Iterator[None]:
    with kept_ranks():
        yield


def test_two_ranks_converse_as_one(ranks: None, models: dict[str, Path], seen: Seen, tmp_path: Path) -> None:
    once = ["trainer.total_training_steps=1", "trainer.val_before_train=false"]
    train(tmp_path / "one", models["qwen"], "Echo", *once)
    seen.calls.clear()  # of the validation at the end
    train(tmp_path / "two", models["qwen"], "Echo", *once, "runtime.nproc=2")
    (one, a, _), (two, b, calls) = [step for step in seen.packed if "train" in step[0].rows[0].source]
    assert assert_trained_on_what_was_sampled(two, b, calls) == 6
    assert [c.token_ids for c in one.completions] == [c.token_ids for c in two.completions]
    assert torch.equal(a.items["loss_mask"], b.items["loss_mask"])
    first, second = (
        next(line for line in lines(tmp_path / run) if line["training/global_step"] == 1) for run in ("one", "two")
    )
    assert second["training/rollout_probs_diff_max"] < 1e-4
    for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "num_turns/mean"):
        assert second[name] == pytest.approx(first[name], abs=1e-5), name


def test_the_recipe_s_conversations_are_those_it_was_shown() -> None:
    """The calculator recipe's tokenizer, template and tool: a policy that calls and repeats makes the very tokens, trained in the same
    places, that the demonstrations of the warm start have."""
    config = load_config("calculator", plugins=load_plugins()).config
    encoder = PromptEncoder(load_tokenizer(resolve_model_source(config.model)), config.data)
    rows = [
        row
        for row in make_rows(config.data.task.model_copy(update={"train_size": 12}), "train")
        if len(row.prompt) == 3
    ]
    assert len(rows) == 3

    def policy(request: GenerateRequest) -> list[Completion]:
        out: list[Completion] = []
        for p, prompt in enumerate(request.prompts):
            asked, _, said = str(encoder.tokenizer.decode(prompt)).partition("$:")
            ids = encoder.encode((said.rstrip("=") if said else f"calc[{asked.rstrip('=')}]") + "$")
            out.append(Completion(p, 0, ids, [-1.0] * len(ids), FinishReason.STOP))
        return out

    section = config.rollout.environment
    with open_environment(section, None, HERE) as client:
        talk = Episodes(client, section, ChatGlue(encoder), config.data.max_prompt_length)
        prompts, out = talk.run(rows, SamplingParams(max_tokens=config.data.max_response_length), policy)
    for row, c in zip(rows, out, strict=True):
        ids, mask = encoder.sft(row)
        prompt = prompts[c.prompt_index]
        assert [*prompt, *c.token_ids] == ids
        assert [*([False] * len(prompt)), *c.sampled] == mask
        assert c.reward == 1.0
        assert c.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_the_page_s_examples_are_environments() -> None:
    page = (HERE.parent / "docs" / "multi-turn.md").read_text()
    space: dict[str, Any] = {"__name__": "page"}
    for block in page.split("```python\n")[1:]:
        exec(block.split("```")[0], space)
    weather = space["Weather"]()
    weather.reset({"answer": "snow"})
    asked = '<tool_call>{"name": "lookup", "arguments": {"city": "Oslo"}}</tool_call>'
    assert weather.step(asked)[0] == [{"role": "tool", "content": "snow"}]
    assert weather.step("There is snow.")[1:3] == (1.0, True)
    guess = space["Guess"](tries=3)
    assert guess.reset({"answer": "5"}) is None
    assert [guess.step(text) for text in ("x", "3", "9")] == [
        ("A number, please.", 0.0, False),
        ("too small", 0.0, False),
        ("too large", 0.0, True),
    ]
    assert guess.step("5") == (None, 1.0, True)


# ---- environments that fail ---------------------------------------------------------------------------------------
ZERO = ["rollout.environment.on_error=zero", "trainer.total_training_steps=1", "trainer.val_before_train=false"]


@pytest.mark.parametrize(
    ("world", "how", "words"),
    [
        ("Failing", "raise", r"failed in step on sort_digits (train|val) row \d+ \(row \d+\)"),
        ("Sleepy", "raise", "the world is broken"),
        ("Failing", "slow", "took longer than rollout.environment.timeout_s in step"),
        ("Sleepy", "slow", "took longer than rollout.environment.timeout_s in step"),
        ("Failing", "die", "brought its process down in step"),
        ("Failing", "value", "returned something else in step"),
        ("Failing", "reward", "the reward of step is not what it has to be"),
        ("Failing", "nothing", "something for the policy to answer, or done"),
        ("Failing", "reset", "failed in reset"),
        ("Failing", "reset value", "returned something else in reset"),
        ("Random", "", "differently for two samples"),
        ("Long", "", r"the prompt of sort_digits train row 4 \(row 4\) is too long as the environment"),
        ("Nobody", "", "has no class 'Nobody'"),
        ("Echo", "", "refuses rollout.environment.args"),
    ],
)
def test_a_failing_environment_stops_the_run_with_words(
    world: str, how: str, words: str, models: dict[str, Path], episodes: Any
) -> None:
    args = {"how": how, "always": True} if how else {"nobody": 1} if world == "Echo" else {}
    with pytest.raises(DataError, match=words):
        episodes(world, args, timeout_s=0.3)


@pytest.fixture(scope="module")
def episodes(models: dict[str, Path]) -> Any:
    """Conversations of two rows with two samples each, with an engine that writes ``b`` and ends each turn (a reward of its number / 8)."""

    encoder = PromptEncoder(characters(STYLES["smollm2"]), DataConfig(task=TaskConfig(name="x")))
    rows = [
        Row(4, "sort_digits train row 4", "first", "345", None, "toy"),
        Row(5, "sort_digits train row 5", "other", "7", None, "toy"),
    ]
    turn = encoder.encode("b<|im_end|>")

    def engine(request: GenerateRequest) -> list[Completion]:
        kept = turn[: request.params.max_tokens]
        why = FinishReason.STOP if kept == turn else FinishReason.LENGTH
        return [
            Completion(p, s, kept, [-1.0] * len(kept), why)
            for p in range(len(request.prompts))
            for s in range(request.params.n)
        ]

    def run(
        world: str,
        args: dict[str, Any],
        budgets: Sequence[int] = (400,),
        notices: list[str] | None = None,
        **settings: Any,
    ) -> list[list[Conversation]]:
        """What comes of it under each budget."""
        config = EnvironmentConfig(name=f"{WORLDS}:{world}", args=args, **settings)
        with open_environment(config, None, HERE) as client:
            talk = Episodes(client, config, ChatGlue(encoder), 200, (notices if notices is not None else []).append)
            asked = [SamplingParams(n=2, seed=3, max_tokens=budget) for budget in budgets]
            return [[c for c in talk.run(rows, p, engine)[1] if isinstance(c, Conversation)] for p in asked]

    return run


@pytest.mark.parametrize("how", ["raise", "slow", "reset"])
def test_a_failing_environment_can_cost_its_row_alone(how: str, episodes: Any) -> None:
    notices: list[str] = []
    (out,) = episodes("Failing", {"how": how}, notices=notices, on_error="zero", timeout_s=0.3)
    assert [c.ending for c in out] == [Ending.ERROR, Ending.ERROR, Ending.DONE, Ending.DONE]
    assert [c.reward for c in out] == pytest.approx([0.0, 0.0, 0.75, 0.75])
    assert [len(c.turns) for c in out] == ([0, 0, 3, 3] if how == "reset" else [2, 2, 3, 3])
    assert len(notices) == 1
    assert "row 4" in notices[0]


def test_rows_whose_environment_failed_are_trained_as_zeros(
    models: dict[str, Path], seen: Seen, tmp_path: Path
) -> None:
    """A row without a token stays in its group."""
    run = train(
        tmp_path / "run",
        models["qwen"],
        "Failing",
        "rollout.environment.args={how: reset}",
        *ZERO,
        "data.train_batch_size=8",
    )
    line = lines(run.path)[0]
    failed = [c for c in seen.packed[0][0].completions if isinstance(c, Conversation) and c.ending is Ending.ERROR]
    assert line["environment/errors"] == len(failed) > 0
    assert all(not c.token_ids for c in failed)
    assert line["critic/score/min"] == 0.0 < line["critic/score/max"]
    assert_trained_on_what_was_sampled(*seen.packed[0])


def test_a_budget_ends_a_conversation_where_no_answer_fits(episodes: Any) -> None:
    """In the middle of a turn, or where the observation would leave no token for an answer; no row gets past it."""
    (whole,) = episodes("Echo", {})
    longest = len(whole[0].token_ids)
    found = episodes("Echo", {}, budgets=range(1, longest + 2))
    for budget, out in enumerate(found, start=1):
        for c, full in zip(out, whole, strict=True):
            assert len(c.token_ids) <= budget
            assert c.token_ids == full.token_ids[: len(c.token_ids)]
            assert c.sampled[-1]
    endings = [out[0].ending for out in found]
    assert set(endings[: longest - 1]) == {Ending.LENGTH}
    assert endings[longest - 1 :] == [Ending.DONE, Ending.DONE]
    assert found[-1][0].finish_reason is FinishReason.STOP


# ---- rewards of turns ----------------------------------------------------------------------------------------------
def test_rewards_of_turns_stand_at_their_ends(
    models: dict[str, Path], seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under reinforce_plus_plus the return of a token is what its turn and later ones bring."""
    from rlctl.trainers import advantages

    offered: list[dict[str, Any]] = []
    call = advantages.call_advantages
    monkeypatch.setattr(advantages, "call_advantages", lambda a, c, o, *rest: offered.append(o) or call(a, c, o, *rest))
    settings = [
        "algorithm.adv_estimator=reinforce_plus_plus",
        "rollout.environment.turn_rewards=true",
        "trainer.total_training_steps=1",
    ]
    settings += ["reward.components=[{name: environment, weight: 2.0}, {name: length, weight: 0.5, args: {limit: 1}}]"]
    train(tmp_path / "run", models["smollm2"], "Echo", *settings, "trainer.val_before_train=false")
    rollout, batch, _ = seen.packed[0]
    tokens = batch.split_items(offered[0]["token_rewards"])
    for c, row, result in zip(rollout.completions, tokens, rollout.rewards, strict=True):
        assert isinstance(c, Conversation)
        start = len(rollout.prompts[c.prompt_index])
        expected = torch.zeros(len(row), dtype=torch.float64)
        for turn in c.turns:
            expected[start + turn.end - 1] += 2.0 * turn.reward
        expected[start + c.turns[-1].end - 1] += result.score - 2.0 * c.reward
        assert torch.allclose(row, expected, atol=1e-12)
        assert float(row.sum()) == pytest.approx(result.score)


def test_a_row_that_trains_nothing_has_no_place_for_rewards() -> None:
    found = turn_token_rewards(
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        [Completion(0, 0, [5], [0.0], FinishReason.STOP), Conversation(0, 1, [5, 6], [0.0, 0.0], FinishReason.STOP)],
        torch.tensor([False, False, False, True, False]),
        torch.tensor([0, 2, 5]),
        1.0,
    )
    assert found.tolist() == [0.0, 0.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.environment.turn_rewards=true", "reads the reward of a whole row"),
        ("reward.components=[{name: exact_match}]", "leaves out what rollout.environment gives"),
        ("rollout.environment=null", "needs rollout.environment"),
        ("rollout.environment={name: calculater}", "there is no environment 'calculater'"),
        ("rollout.environment={name: nothere.py:Echo}", "there is no such file"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    override: str, words: str, models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(tmp_path / "run", models["qwen"], "Echo", override)
