"""A model small enough for any test, made from nothing but a seed, yet complete: weights, config, tokenizer, template."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2, as in SmolLM2: unknown, begin, end (and pad)."""

WORDS = (
    "system user assistant You are a helpful the answer is State final : What sum of and plus minus times equals "
    "boxed problem number numbers question reply because so that therefore first then model"
)
"""The merges of the tokenizer build these words from left to right, with and without a leading blank."""

TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with a default system text, like SmolLM2's."""

VOCABULARY = 640
"""Rows of the embedding; the tokenizer uses fewer of them, as many real models do."""


def write_tiny_model(folder: Path, *, seed: int = 0, layers: int = 2, tied: bool = True) -> None:
    """Write a Llama with random fp32 weights into `folder`: hidden 64, 4 heads, 2 key-value heads, 4096 positions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.1,  # unlike 0.02, this gives distributions that are far from uniform
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)


def write_tiny_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer, each digit a token, and its ChatML template into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in WORDS.split():
        for text in (word, "Ġ" + word):
            for end in range(1, len(text)):
                if (pair := (text[:end], text[end])) not in merges:
                    merges.append(pair)
                    tokens.append(text[: end + 1])
    assert len(tokens) <= VOCABULARY, len(tokens)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    unknown, begin, end_of_turn = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "bos_token": begin,
        "eos_token": end_of_turn,
        "pad_token": end_of_turn,
        "unk_token": unknown,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
