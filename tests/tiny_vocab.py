"""Vocabularies small enough to read and complete enough to be real: every text has tokens, and some words have one."""

from __future__ import annotations

from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Token types of `tokenizer.ggml.token_type`."""

CHATML_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    "{% endfor %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n'"
    " + message['content'] + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

# Each pair joins two tokens that exist by then; the order is the rank.
_MERGES = (
    "h e|Ġ t|Ġt he|i n|r e|o n|Ġ a|e r|Ġ s|Ġ w|a t|n d|e n|Ġ o|o r|Ġ h|Ġ he|l l|Ġhe ll|Ġhell o|i s|Ġ is|e s|in g|"
    "Ġa nd|Ġw or|Ġwor l|Ġworl d|he ll|hell o|Ã ©|Ġ Ġ|ĠĠ ĠĠ|Ċ Ċ|. Ċ|u s|us er|s t|a s|i st|s ist|as sist|a n|an t|"
    "assist ant|s y|sy st|e m|syst em"
)

# Best first; each is two pieces that the vocabulary has, put together.
_WORDS = "▁t he ▁the in ▁a er re ▁h ▁he ll ▁hell ▁hello ▁w or ▁wor ▁worl ▁world is ▁is ▁▁"


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE: printable Latin-1 as it is, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def bpe_metadata(pre: str) -> dict[str, Any]:
    """A byte-level BPE vocabulary: 256 bytes, the merges, and ChatML's control tokens as the last three ids."""
    tokens = _byte_characters()
    merges = _MERGES.split("|")
    for merge in merges:
        left, right = merge.split(" ")
        assert {left, right} <= set(tokens), merge
        assert left + right not in tokens, merge
        tokens.append(left + right)
    first_control = len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *CHATML_CONTROLS],
        "tokenizer.ggml.token_type": [NORMAL] * first_control + [CONTROL] * len(CHATML_CONTROLS),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first_control,
        "tokenizer.ggml.eos_token_id": first_control + 2,
        "tokenizer.ggml.padding_token_id": first_control,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML_TEMPLATE,
    }


def spm_metadata(*, gemma: bool) -> dict[str, Any]:
    """A SentencePiece vocabulary with byte fallback, with the special tokens of Gemma 3 or of Llama 2."""
    if gemma:
        special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
        special += [("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL), ("\n\n", USER_DEFINED)]
    else:
        special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens = [text for text, _ in special] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [kind for _, kind in special] + [BYTE] * 256
    scores = [0.0] * len(tokens)
    pieces = [*_WORDS.split(), "▁", *map(chr, range(0x21, 0x7F)), "\n", "é", "日"]
    tokens += pieces
    types += [NORMAL] * len(pieces)
    scores += [-float(rank) for rank in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 2 if gemma else 1,
        "tokenizer.ggml.eos_token_id": 1 if gemma else 2,
        "tokenizer.ggml.unknown_token_id": 3 if gemma else 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": not gemma,
        "tokenizer.chat_template": GEMMA_TEMPLATE if gemma else LLAMA2_TEMPLATE,
    }


def gemma4_metadata() -> dict[str, Any]:
    """SentencePiece's pieces with ranked merges and byte fallback, and the tokens that Gemma 4 marks turns and calls
    with; the converter makes those that a reader wants to see user-defined."""
    special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    special += [("<|turn>", CONTROL), ("<turn|>", CONTROL), ("<|think|>", CONTROL), ("<|tool>", CONTROL)]
    special += [("<tool|>", CONTROL)]
    visible = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>")
    special += [(text, USER_DEFINED) for text in (*visible, '<|"|>')]
    pieces = [*dict.fromkeys(["▁", *map(chr, range(0x21, 0x7F)), "\n", "é", "日", *_WORDS.split(), "\n\n", "\n\n\n"])]
    known = set(pieces)
    merged = [piece for piece in pieces if piece != "\n\n\n"]  # a piece that no merges make, only a run of line ends
    splits = ((piece[:cut], piece[cut:]) for piece in merged for cut in range(1, len(piece)))
    tokens = [*(text for text, _ in special), *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [kind for _, kind in special] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in splits if {left, right} <= known],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
