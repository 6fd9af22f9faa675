"""What chat templates write between turns, in four styles: clean suffixes, ends of turns, roles, and templates that are refused."""

from __future__ import annotations

import pytest
from chat_styles import END, FORGETFUL, SMOLLM2, STYLES, characters

from rlctl.config.schema import DataConfig, TaskConfig
from rlctl.data.columns import Row
from rlctl.data.prompts import PromptEncoder
from rlctl.environments.glue import TURN, ChatGlue
from rlctl.environments.tools import as_user, in_words
from rlctl.errors import DataError
from rlctl.generation import FinishReason

ROW = Row(7, "train row 7", "How much?", "3", None, "toy")
TOOLS = [{"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}}]


def glue(template: str | None, system: str | None = None, **settings) -> ChatGlue:
    tokenizer = characters(template or "")
    if template is None:
        tokenizer.chat_template = None
    return ChatGlue(PromptEncoder(tokenizer, DataConfig(task=TaskConfig(name="x"), system_prompt=system)), **settings)


@pytest.mark.parametrize("style", STYLES)
def test_the_tokens_of_a_conversation_are_those_of_its_rendering(style: str) -> None:
    """The suffixes, put behind what was sampled, give what the template writes of the true messages."""
    chat = glue(STYLES[style])
    encoder, transcript = chat.encoder, chat.open(ROW)
    ids, messages = list(transcript.prompt_ids), encoder.messages(ROW)
    end = encoder.encode(END[style])
    for text, words in (("Seven", " no\n\nmore "), ("is it 3?", "yes"), ("ok", '<b> "quoted"')):
        sampled = encoder.encode(text) + end
        ids += sampled + chat.ids(transcript.follow([{"role": "user", "content": words}]), sampled, FinishReason.STOP)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": words}]
    assert ids == encoder.encode(encoder.render(ROW, messages, generation=True))
    assert TURN not in encoder.tokenizer.decode(ids)


@pytest.mark.parametrize("style", STYLES)
def test_a_turn_that_was_cut_gets_its_end_from_the_template(style: str) -> None:
    chat = glue(STYLES[style])
    follows = chat.open(ROW).follow([{"role": "user", "content": "on"}])
    end, eos = chat.encoder.encode(END[style]), chat.encoder.encode("<eos>")
    words = chat.encoder.encode("3 +")
    whole = chat.ids(follows, words, FinishReason.LENGTH)
    assert whole == chat.encoder.encode(follows)
    assert whole[:1] == end
    assert chat.ids(follows, words + end, FinishReason.STOP) == whole[1:]
    # Another stop token than the template's: what was sampled stays, and the turn is ended as the template does.
    assert chat.ids(follows, words + eos, FinishReason.STOP) == whole


def test_a_stop_text_that_begins_the_glue_is_not_written_twice() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    chat = glue(plain, stop=("\nuser:",))
    follows = chat.open(ROW).follow([{"role": "user", "content": "on"}])
    assert follows == "\nuser: on\nassistant: "
    sampled = chat.encoder.encode("three\nuser:")
    assert chat.encoder.tokenizer.decode(chat.ids(follows, sampled, FinishReason.STOP)) == " on\nassistant: "
    past = chat.encoder.encode("three\nuser:x")  # a token that has letters behind the stop text
    assert chat.ids(follows, past, FinishReason.STOP) == chat.encoder.encode(follows)


@pytest.mark.parametrize(
    ("style", "tool", "tools"),
    [("smollm2", True, False), ("qwen", True, True), ("llama3", True, False), ("gemma", False, False)],
)
def test_roles_and_tools_that_a_template_has_no_place_for(style: str, tool: bool, tools: bool) -> None:
    chat = glue(STYLES[style], tools=TOOLS)
    assert chat.takes_role("tool") is tool
    assert chat.takes_tools() is tools
    said = {"role": "tool", "content": 'a "b"\nc'}
    follows = chat.open(ROW).follow([said] if tool else as_user([said]))
    assert "a " in follows
    assert "calc" in chat.open(ROW, in_words(TOOLS, chat.encoder.messages(ROW))).text


def test_a_demonstration_is_no_part_of_the_prompt() -> None:
    """A row that is a whole conversation begins before its first answer, with the system message of the configuration."""
    chat = glue(SMOLLM2, system="Answer.")
    said = [{"role": role, "content": words} for role, words in (("user", "1"), ("assistant", "2"), ("tool", "3"))]
    last = {"role": "assistant", "content": "4"}
    demonstration = Row(0, "row 0", tuple(said), "4", "4", "toy", {}, "4", (*said, last))
    assert [m["content"] for m in chat.encoder.beginning(demonstration)] == ["Answer.", "1"]
    history = Row(0, "row 0", (*tuple(said[:2]), {"role": "user", "content": "3"}), "4", None, "toy")
    assert [m["content"] for m in chat.encoder.beginning(history)] == ["Answer.", "1", "2", "3"]


def test_a_role_that_is_left_out_in_silence_is_refused() -> None:
    chat = glue(SMOLLM2.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"))
    assert not chat.takes_role("tool")
    with pytest.raises(DataError, match="does not show a message of the role 'tool'"):
        chat.open(ROW).follow([{"role": "tool", "content": "seen"}])


def test_a_template_that_forgets_thoughts_is_refused_or_overruled() -> None:
    with pytest.raises(DataError, match="leaves the thinking of an earlier turn out") as caught:
        glue(FORGETFUL).open(ROW).follow([{"role": "user", "content": "on"}])
    assert "earlier_thinking=keep" in str(caught.value)
    assert "on<|im_end|>" in glue(FORGETFUL, keep_thinking=True).open(ROW).follow([{"role": "user", "content": "on"}])


@pytest.mark.parametrize(
    "template",
    [
        SMOLLM2.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}"),
        SMOLLM2.replace("{{ m.role }}\n", "{{ m.role }} {{ loop.revindex }}\n"),
    ],
    ids=["thinks in the prompt only", "counts from the end"],
)
def test_a_template_that_rewrites_what_came_before_is_refused(template: str) -> None:
    with pytest.raises(DataError, match="differently once an observation follows"):
        glue(template).open(ROW).follow([{"role": "user", "content": "on"}])


def test_a_conversation_may_go_on_past_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates write the day. The tokens that the policy has seen stay as they are."""
    days = iter("112233")
    render = PromptEncoder.render
    monkeypatch.setattr(
        PromptEncoder,
        "render",
        lambda self, *args, **settings: render(self, *args, **settings).replace("Be good", f"Day {next(days)}"),
    )
    transcript = glue(SMOLLM2, keep_thinking=True).open(ROW)
    assert "Day 1" in transcript.text
    first, second = (transcript.follow([{"role": "user", "content": words}]) for words in ("on", "and on"))
    assert first == "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    assert second == "<|im_end|>\n<|im_start|>user\nand on<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_observations_follow_as_they_are() -> None:
    chat = glue(None)
    transcript = chat.open(ROW)
    assert transcript.text == "How much?"
    assert transcript.follow([{"role": "user", "content": "\nmore: "}]) == "\nmore: "
