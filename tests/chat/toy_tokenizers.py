"""Small real tokenizers: byte-level BPE trained on a few lines, with the chat templates of several model families."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "State the final answer: 4 + 3 =",
    "The answer is \\boxed{7}.",
    "You are a helpful assistant.",
    "system user assistant",
    "0 1 2 3 4 5 6 7 8 9 10 11 12",
]

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's template: its first token is also its bos_token."""

CHATML_GENERATION = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""Holds the BOS itself, before every question; its tokenizer would add another one to plain text."""

REWRITING = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' and not loop.last %}"
    "{{ message['content'].split('think:')[0] }}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Drops the thoughts of all turns but the last, as reasoning models' templates do."""


@cache
def _bpe(special: tuple[str, ...], bos: str | None) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return str(tokenizer.to_str())


def chatml(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Like SmolLM2's: bos <|im_start|> (1), eos and pad <|im_end|> (2), nothing added to plain text."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe(special, None)),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=template,
    )


def llama2(template: str = LLAMA2) -> PreTrainedTokenizerFast:
    """Like Llama 2's: plain text gets <s> (0) in front; eos </s> (1)."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe(("<s>", "</s>"), "<s>")),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def qwen_base() -> PreTrainedTokenizerFast:
    """Like Qwen's base models: a ChatML template whose <|im_end|> (2) is not the eos token <|endoftext|> (0)."""
    tokenizer = chatml()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.bos_token = None
    return tokenizer
