"""Chat templates in the styles of four families, written for these tests, and a character tokenizer with their marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# ChatML with a system message of its own where there is none (as SmolLM2's); it writes any role.
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# ChatML with tools; what they say stands in a user's turn, several in one.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Begins with a bos, trims every message, writes what tools say as JSON under a role of its own.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The model is called model, there is no system message and no tool, and turns alternate.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Leaves the thinking of turns before the last message out.
FORGETFUL = SMOLLM2.replace(
    "{{ m.content }}", "{{ m.content if loop.last or '</think>' not in m.content else m.content.split('</think>')[1] }}"
)
STYLES = {"smollm2": SMOLLM2, "qwen": QWEN, "llama3": LLAMA3, "gemma": GEMMA}
END = {"smollm2": "<|im_end|>", "qwen": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
_MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_MARKS += ["<start_of_turn>", "<end_of_turn>"]
_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", *_MARKS]


def characters(template: str) -> Any:
    """A tokenizer of one id a character."""
    import tokenizers
    import transformers

    vocab = {token: i for i, token in enumerate([*_SPECIAL, "\n", *(chr(code) for code in range(32, 127))])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=_MARKS,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def tiny_model(folder: Path, template: str) -> Path:
    """A model directory: the tokenizer, and the configuration of one small layer, to be started at random."""
    tokenizer = characters(template)
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
