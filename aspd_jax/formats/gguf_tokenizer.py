"""Tokenizers of GGUF files, built from the metadata with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from aspd_jax.errors import CheckpointError
from aspd_jax.formats.gguf_file import Metadata
from aspd_jax.formats.tokenizer_files import building
from aspd_jax.tokens import SPACE

CONTROL, USER_DEFINED = 3, 4  # llama.cpp's types of special tokens and of other tokens that are never split

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Splitting(NamedTuple):
    """Pre-tokenization before BPE merges.

    Attributes:
        pattern: regular expression of a part.
        digits: whether each digit is a part.
        whole_first: whether a part in the vocabulary is a token without applying merges.
        bos: whether a text begins with BOS in a file that does not say so, as in llama.cpp.
    """

    pattern: str
    digits: bool = False
    whole_first: bool = False
    bos: bool = False


# Splittings by `tokenizer.ggml.pre`.
SPLITTINGS = {
    "gpt-2": Splitting(GPT2),
    "smollm": Splitting(GPT2, digits=True),
    "llama-bpe": Splitting(LLAMA3, whole_first=True, bos=True),
    "tekken": Splitting(TEKKEN, whole_first=True, bos=True),
    "qwen2": Splitting(QWEN2),
}
ALIASES = {"deepseek-r1-qwen": "qwen2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}


# Texts of control tokens that end an answer, as in llama.cpp.
END_TOKENS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<end_of_utterance>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<EOT>", "< EOT >", "_<EOT>", "<|EOT|>"),
    *("<｜end▁of▁sentence｜>",),
)


def read_end_ids(metadata: Metadata, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end an answer: end of text, turn and message, and control tokens of `END_TOKENS`.

    Raises:
        CheckpointError: an id is not in the vocabulary.
    """
    keys = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom")]
    ids = {key: metadata.get(key) for key in keys if metadata.get(key) is not None}
    for key, number in ids.items():
        if not 0 <= number < vocab_size:
            raise CheckpointError(f"{metadata.path}: {key}: expected an id below {vocab_size}, got {number}")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    known = [
        n for n, (token, kind) in enumerate(zip(tokens, types, strict=False)) if token in END_TOKENS and kind == CONTROL
    ]
    return tuple(dict.fromkeys([*ids.values(), *known]))


def read_tokenizer(metadata: Metadata) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a GGUF file with its chat template; None if the file has none.

    Raises:
        CheckpointError: the tokenizer is broken or not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    if kind not in BUILDERS:
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.model: expected one of {', '.join(BUILDERS)}, got {kind!r}"
        )
    tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{metadata.path}: token_type: expected one per token, {len(tokens)}, got {len(types)}")
    with building(metadata.path):
        tokenizer = BUILDERS[kind](metadata, tokens)
    for special in (True, False):
        chosen = [t for t, code in zip(tokens, types, strict=True) if code == (CONTROL if special else USER_DEFINED)]
        added = [AddedToken(token, special=special, normalized=False) for token in chosen]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    names = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            if not 0 <= number < len(tokens):
                raise CheckpointError(
                    f"{metadata.path}: tokenizer.ggml.{key}_token_id: expected an id below {len(tokens)}, got {number}"
                )
            names[f"{role}_token"] = tokens[number]
    default = kind == "llama" or _splitting(metadata).bos
    if metadata.get("tokenizer.ggml.add_bos_token", default) and "bos_token" in names:
        bos = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    template = metadata.get("tokenizer.chat_template")
    if names_of_templates := metadata.get("tokenizer.chat_templates"):
        others = {name: metadata[f"tokenizer.chat_template.{name}"] for name in names_of_templates}
        template = others if template is None else {"default": template, **others}
    length = metadata.get(f"{metadata['general.architecture']}.context_length")
    # `transformers` copies the tokenizer as JSON, which is three times faster without the merges.
    model, tokenizer.model = tokenizer.model, models.BPE({token: number for number, token in enumerate(tokens)}, [])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        model_max_length=length,
        clean_up_tokenization_spaces=False,
        **names,
    )
    made.backend_tokenizer.model = model
    return made


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    """Build a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen, SmolLM) from its merges."""
    splitting = _splitting(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.whole_first))
    tokenizer.pre_tokenizer = pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splitting(metadata: Metadata) -> Splitting:
    """Return the splitting of a byte-level BPE tokenizer.

    Raises:
        CheckpointError: the splitting is unknown.
    """
    name = metadata.get("tokenizer.ggml.pre", None)
    if name is None:
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.pre: expected how text is split, got none. Convert the model again."
        )
    name = ALIASES.get(name, name)
    if name not in SPLITTINGS:
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.pre: expected one of {', '.join(SPLITTINGS)}, got {name!r}"
        )
    return SPLITTINGS[name]


def pre_tokenizer(splitting: Splitting) -> Any:
    """Return the pre-tokenizer of a splitting."""
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    cuts += [pre_tokenizers.Split(Regex(splitting.pattern), "isolated")]
    cuts += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return pre_tokenizers.Sequence(cuts)


def _sentence_piece(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer with byte fallback (Llama 2, Mistral, Gemma) from its scores."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _merges(vocabulary, metadata["tokenizer.ggml.scores"])
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a token, in the order in which `transformers` converts SentencePiece models.

    Pairs are ordered by the score of the token, then by the length of their first part, both descending.
    """
    pairs = [
        (-scores[number], left, right)
        for token, number in vocabulary.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in vocabulary and (right := token[cut:]) in vocabulary
    ]
    return [(left, right) for _, left, right in sorted(pairs, key=lambda pair: (pair[0], -len(pair[1])))]


BUILDERS: dict[str, Callable[[Metadata, Sequence[str]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
}
