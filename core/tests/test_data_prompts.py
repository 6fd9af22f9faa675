"""Rows to ids: templates, loss masks, the prefix rule. Tokenizers are made here, with templates of several kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import DataConfig, ModelConfig
from rlctl.data.columns import Row
from rlctl.data.lengths import fit_rows
from rlctl.data.prompts import PromptEncoder
from rlctl.data.tokenizer import load_tokenizer
from rlctl.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Ends no turn: the next role's mark does.
OPEN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
# Writes an empty thought into the prompt once a response follows.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}T{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n?{% endif %}"
)
# Keeps a thought in the last assistant turn only.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}T{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('a user message comes first') }}{% endif %}" + CHATML


def characters(template: str | None = None, bos: bool = False, eos: str | None = "<eos>") -> Any:
    """A tokenizer of one id a character, with ChatML's and roles' marks as special tokens."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocab = {token: place for place, token in enumerate(special + letters)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    if bos:
        model.post_processor = tokenizers.processors.TemplateProcessing(
            "<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
        )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>" if bos else None,
        eos_token=eos,
        additional_special_tokens=special[4:],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def merging() -> Any:
    """A tokenizer that writes ``=1`` as one token: prompt and response merge over their border."""
    letters = [chr(code) for code in range(32, 127)]
    vocab = {token: place for place, token in enumerate(["<eos>", *letters, "=1"])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("=", "1")]))
    model.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def row(prompt: Any, answer: str | None = None, response: str | None = None, **more: Any) -> Row:
    return Row(5, "set.jsonl:6", prompt, answer, response, "set", **more)


def encoder(tokenizer: Any, **settings: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, DataConfig.model_validate({"train_files": ["x.jsonl"], **settings}))


def spelled(made: PromptEncoder, ids: list[int]) -> str:
    return "".join(made.tokenizer.convert_ids_to_tokens(ids))


def learned(made: PromptEncoder, pair: tuple[list[int], list[bool]]) -> list[str]:
    """The stretches of a row that carry loss, as text."""
    ids, mask = pair
    assert len(ids) == len(mask)
    out: list[str] = []
    before = False
    for token_id, learn in zip(ids, mask, strict=True):
        if learn:
            out = [*out, ""] if not before else out
            out[-1] += spelled(made, [token_id])
        before = learn
    return out


def messages(*texts: str, system: str | None = None) -> tuple[dict[str, str], ...]:
    """Texts as alternating turns, the user first."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return tuple(([{"role": "system", "content": system}] if system is not None else []) + turns)


# ---- raw text -----------------------------------------------------------------------------------------------------
def test_raw_prompt_and_answer() -> None:
    made = encoder(characters())
    assert not made.uses_chat_template
    assert spelled(made, made.prompt_ids(row("s:21=", "12"))) == "s:21="
    ids, mask = made.sft(row("s:21=", "12"))
    assert spelled(made, ids) == "s:21=12<eos>"
    assert mask == [False] * 5 + [True] * 3
    assert made.decode(ids) == "s:21=12"
    assert made.stop_token_ids == (made.tokenizer.eos_token_id,)


def test_response_goes_before_answer() -> None:
    made = encoder(characters())
    assert learned(made, made.sft(row("q", "72", "so it is #### 72"))) == ["so it is #### 72<eos>"]


def test_raw_prompt_has_the_tokenizers_leading_token_once() -> None:
    made = encoder(characters(bos=True))
    assert spelled(made, made.prompt_ids(row("ab"))) == "<bos>ab"
    ids, mask = made.sft(row("ab", "c"))
    assert spelled(made, ids) == "<bos>abc<eos>"
    assert mask == [False, False, False, True, True]
    assert made.prompt_ids_batch([row("ab"), row("c")]) == [made.prompt_ids(row("ab")), made.prompt_ids(row("c"))]


def test_a_merge_over_the_border_never_changes_the_prompt() -> None:
    made = encoder(merging())
    together = made.tokenizer("2=12")["input_ids"]
    prompt = made.prompt_ids(row("2="))
    assert together[: len(prompt)] != prompt
    ids, mask = made.sft(row("2=", "12"))
    assert ids[: len(prompt)] == prompt
    assert mask == [False, False, True, True, True]
    assert made.decode(ids) == "2=12"


def test_system_prompt_and_template_in_raw_text() -> None:
    made = encoder(characters(), system_prompt="Be short.", prompt_template="Q: {prompt}\nA: ")
    assert spelled(made, made.prompt_ids(row("1+{x}"))) == "Be short.\n\nQ: 1+{x}\nA: "


def test_one_user_message_without_a_template_is_its_text() -> None:
    made = encoder(characters())
    assert spelled(made, made.prompt_ids(row(messages("hi", system="S")))) == "S\n\nhi"


def test_a_chat_without_a_template_is_refused() -> None:
    made = encoder(characters())
    with pytest.raises(DataError, match=r"set.jsonl:6 \(row 5\) is a chat of 3 messages"):
        made.prompt_ids(row(messages("a", "b", "c")))


def test_never_ignores_the_template() -> None:
    made = encoder(characters(CHATML), apply_chat_template="never")
    assert spelled(made, made.sft(row("p", "a"))[0]) == "pa<eos>"


def test_always_wants_a_template() -> None:
    with pytest.raises(DataError, match="no chat template"):
        encoder(characters(), apply_chat_template="always")


def test_no_end_of_sequence_token() -> None:
    made = encoder(characters(eos=None))
    with pytest.raises(DataError, match="no end-of-sequence token"):
        made.sft(row("p", "a"))


def test_a_row_without_a_response_is_named() -> None:
    with pytest.raises(DataError, match=r"set.jsonl:6 \(row 5\) has no response"):
        encoder(characters()).sft(row("p"))


# ---- chat ---------------------------------------------------------------------------------------------------------
def test_chat_prompt_and_the_token_that_ends_its_response() -> None:
    made = encoder(characters(CHATML))
    prompt = made.prompt_ids(row("1+1?", "2"))
    assert spelled(made, prompt) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    ids, _ = pair = made.sft(row("1+1?", "2"))
    assert ids[: len(prompt)] == prompt
    assert learned(made, pair) == ["2<|im_end|>"]
    # Nothing after the end: a line break there would never be generated.
    assert spelled(made, ids[-1:]) == "<|im_end|>"
    ends = {made.tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", "<|im_end|>")}
    assert set(made.stop_token_ids) == ends


def test_every_assistant_turn_of_a_chat_row_is_learned() -> None:
    made = encoder(characters(CHATML))
    whole = messages("u1", "a1", "u2", "a2", system="s")
    chat = row(whole[:-1], response="a2", messages=whole)
    ids, _ = pair = made.sft(chat)
    assert learned(made, pair) == ["a1<|im_end|>", "a2<|im_end|>"]
    rendered = made.tokenizer.apply_chat_template(list(whole), tokenize=False)
    assert spelled(made, ids) == rendered.rstrip("\n")


def test_earlier_turns_of_a_prompt_are_not_learned() -> None:
    made = encoder(characters(CHATML))
    assert learned(made, made.sft(row(messages("u1", "a1", "u2"), "a2"))) == ["a2<|im_end|>"]


def test_system_prompt_is_put_in_front_unless_the_row_has_one() -> None:
    made = encoder(characters(CHATML), system_prompt="S", prompt_template="<{prompt}>")
    assert spelled(made, made.prompt_ids(row("p"))).startswith(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<p><|im_end|>"
    )
    own = spelled(made, made.prompt_ids(row(messages("p", system="mine"))))
    assert "mine" in own
    assert "\nS<" not in own


def test_a_template_that_ends_no_turn_gets_the_end_of_sequence_token() -> None:
    made = encoder(characters(OPEN))
    assert learned(made, made.sft(row("u", "a"))) == ["a<eos>"]
    whole = messages("u1", "a1", "u2", "a2")
    assert learned(made, made.sft(row(whole[:-1], response="a2", messages=whole))) == ["a1", "a2<eos>"]


def test_an_empty_response_still_ends() -> None:
    for template, end in ((CHATML, "<|im_end|>"), (OPEN, "<eos>"), (None, "<eos>")):
        made = encoder(characters(template))
        assert learned(made, made.sft(row("u", response=""))) == [end]


def test_a_template_that_changes_the_prompt_is_refused_by_row() -> None:
    made = encoder(characters(THINKING))
    with pytest.raises(DataError, match=r"cannot train on set.jsonl:6 \(row 5\): the prompt changes") as caught:
        made.sft(row("u", "a"))
    assert "?" in str(caught.value.wanted)


def test_a_template_that_forgets_thoughts_trains_single_turns_only() -> None:
    made = encoder(characters(FORGETFUL))
    assert learned(made, made.sft(row("u", "a"))) == ["Ta<|im_end|>"]
    whole = messages("u1", "a1", "u2", "a2")
    with pytest.raises(DataError, match="an earlier turn changes"):
        made.sft(row(whole[:-1], response="a2", messages=whole))


def test_a_template_that_refuses_a_row() -> None:
    made = encoder(characters(STRICT))
    with pytest.raises(DataError, match=r"the chat template refuses set.jsonl:6 \(row 5\)") as caught:
        made.prompt_ids(row(messages("u", system="s")))
    assert "a user message comes first" in str(caught.value.found)
    assert caught.value.__cause__ is not None


def test_batches_equal_single_rows() -> None:
    whole = messages("u1", "a1", "u2", "a2")
    rows = [row("p", "a"), row(whole[:-1], response="a2", messages=whole), row("q", response="long")]
    made = encoder(characters(CHATML))
    assert made.sft_batch(rows) == [made.sft(one) for one in rows]
    assert made.prompt_ids_batch(rows) == [made.prompt_ids(one) for one in rows]
    assert made.sft_batch([]) == []
    raw = encoder(merging())
    assert raw.sft_batch([row("2=", "12")]) == [raw.sft(row("2=", "12"))]


def test_escaped_braces_in_a_prompt_template() -> None:
    made = encoder(characters(), prompt_template='{{"q": "{prompt}"}}')
    assert made.prompt_text(row("x")) == '{"q": "x"}'


# ---- limits -------------------------------------------------------------------------------------------------------
def test_rows_over_the_limit_are_named_or_left_out() -> None:
    rows = [Row(i, f"set.jsonl:{i + 1}", "p" * size, "a", None, "set") for i, size in enumerate((3, 9, 4, 8))]
    limits = {"max_prompt_length": 4, "max_response_length": 2}
    strict = encoder(characters(), **limits)
    with pytest.raises(DataError, match="2 rows are too long") as caught:
        fit_rows(rows, strict, strict._data)
    assert caught.value.found == "rows 1, 3; the longest has 9 tokens"
    lenient = DataConfig.model_validate({"train_files": ["x"], "overlong_prompts": "filter", **limits})
    assert [kept.index for kept in fit_rows(rows, strict, lenient)] == [0, 2]
    # For SFT the whole row counts: 4 + 1 + the end.
    assert [kept.index for kept in fit_rows(rows, strict, lenient, sft=True)] == [0, 2]
    with pytest.raises(DataError, match="every row is too long"):
        fit_rows(rows[1:2], strict, lenient)


# ---- loading ------------------------------------------------------------------------------------------------------
def test_load_tokenizer_from_a_directory_with_another_template(tmp_path: Path) -> None:
    characters(OPEN).save_pretrained(tmp_path)
    config = {"model_type": "llama"}
    plain = load_tokenizer(ModelConfig(config=config, tokenizer=str(tmp_path)))
    assert plain.chat_template == OPEN
    replaced = load_tokenizer(ModelConfig(config=config, tokenizer=str(tmp_path), chat_template=CHATML))
    assert encoder(replaced).prompt_text(row("x")).startswith("<|im_start|>user")


def test_directories_without_a_usable_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(DataError, match="holds no tokenizer") as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert caught.value.found == "config.json"
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(DataError, match="does not load"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    with pytest.raises(DataError, match="there is no directory"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "nothing")))


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="transformers library, which is not installed"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
