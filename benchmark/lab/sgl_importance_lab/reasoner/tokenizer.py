"""The reasoner's tokenizer and chat template, with marks around a thought as Qwen3 and DeepSeek-R1 have them.

The marks are no special tokens: a server that leaves out special tokens keeps them in the text, where its
reasoning parser (`--reasoning-parser qwen3`) finds them. Thoughts of earlier turns are left out of a prompt.
"""

from __future__ import annotations

from functools import cache

from sgl_importance_lab.probe.word_tokenizer import ASSISTANT, BEGIN, END, SYSTEM, USER, WordTokenizer
from sgl_importance_lab.reasoner.vocabulary import word_pieces

THINK = "<think>"
END_OF_THOUGHT = "</think>"

CHAT_TEMPLATE = (
    "{{- '<|begin|>' -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{- '<|assistant|>' + message.content.split('</think>')[-1] | trim + ' <|end|>' -}}"
    "{%- elif message.role == 'system' -%}"
    "{{- '<|system|>' + message.content | trim + ' ' -}}"
    "{%- else -%}"
    "{{- '<|user|>' + message.content | trim + ' ' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@cache
def reasoner_tokenizer() -> WordTokenizer:
    return WordTokenizer(words=word_pieces(), chat_template=CHAT_TEMPLATE, marks=(THINK, END_OF_THOUGHT))


def render(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The text that the chat template makes of `messages`, without a template engine."""
    parts = [BEGIN]
    for message in messages:
        content = message["content"]
        match message["role"]:
            case "assistant":
                parts += [ASSISTANT, content.split(END_OF_THOUGHT)[-1].strip(), " ", END]
            case "system":
                parts += [SYSTEM, content.strip(), " "]
            case _:
                parts += [USER, content.strip(), " "]
    if add_generation_prompt:
        parts.append(ASSISTANT)
    return "".join(parts)
