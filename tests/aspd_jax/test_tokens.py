from __future__ import annotations

import io
import json
import re
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from aspd_jax.errors import StructureError, TokenizerError
from aspd_jax.structure import Branch, Parallel, Serial, canonical
from aspd_jax.tokens import SEPARATOR, TAGS, BlockIds, Codec, SpecialTokens, add_special_tokens, copy_backend, split
from tests.conftest import SHARED

TEXTS = [f"Some words, in a list: {n}. One two three.\n- four\n" for n in range(50)]


def sentencepiece_like(scheme: str) -> PreTrainedTokenizerFast:
    """A tokenizer built as those of Llama (`prepend`), Mistral (`first`) or Gemma (`none`): byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(back if scheme == "none" else [*back, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=["▁"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    made = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def byte_level(nfc: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    if nfc:  # as all Qwen tokenizers
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def vicuna_like(folder: Path) -> PreTrainedTokenizerBase:
    """A folder with tokenizer.model only, as Llama 2 and Vicuna have it, read by `transformers`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=320, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **special}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return AutoTokenizer.from_pretrained(folder)


def _vicuna_like() -> Codec:
    with tempfile.TemporaryDirectory() as folder:
        return Codec(vicuna_like(Path(folder)))


MADE = {
    "vicuna_like": _vicuna_like(),
    "byte_level": Codec(byte_level()),
    "llama_like": Codec(sentencepiece_like("prepend")),
    "mistral_like": Codec(sentencepiece_like("first")),
    "gemma_like": Codec(sentencepiece_like("none")),
}
QWEN_LIKE = Codec(byte_level(nfc=True))


def _real() -> dict[str, Codec]:
    folder = SHARED / "data" / "tokenizers"
    if not folder.exists():
        return {}
    files = {"mistral": "mistral_tokenizer.json", "minimind": "minimind_tokenizer.json"}
    return {name: Codec(PreTrainedTokenizerFast(tokenizer_file=str(folder / file))) for name, file in files.items()}


CODECS = MADE | _real()
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())

awkward = st.sampled_from(
    ["▁", "<|title|>", "<|/para|>", "</s>", "<s>", "<unk>", " ", "  ", "\n", "<0x0A>", "é", "🙂", "\x00", ": "]
)
texts = st.one_of(st.text(), st.lists(st.one_of(awkward, st.text(max_size=3))).map("".join))
branch = st.builds(Branch, texts.filter(bool), texts)
structures = st.lists(
    st.one_of(st.builds(Serial, texts), st.lists(branch, min_size=2, max_size=4).map(Parallel)), max_size=4
)


@every_codec
@settings(max_examples=200)
@given(text=texts)
def test_segments_are_exact(codec: Codec, text: str) -> None:
    ids = codec.text.encode(text)
    assert codec.text.decode(ids) == text
    assert not set(ids) & set(codec.special.ids), "text never becomes a tag"


@pytest.mark.parametrize("codec", [*CODECS.values(), QWEN_LIKE], ids=[*CODECS, "qwen_like"])
@settings(max_examples=150)
@given(numbers=st.lists(st.integers(0, 1 << 16), max_size=16))
@example(numbers=[0x50, 0xF9])
@example(numbers=[0x37, 0xCE, 300])
@example(numbers=[0xF0, 300, 0xF0, 0x9F, 0x90, 0x9D])
@example(numbers=[510, 255])  # 0xED 0xA6 in the byte-level tokenizer
@example(numbers=[580, 503])  # and in that of Mistral
def test_growing_text_is_a_prefix_of_the_whole_text(codec: Codec, numbers: list[int]) -> None:
    """Any sequence of ids decodes, token by token; at most the bytes of an unfinished character are held back."""
    text, size = codec.text, 340
    byte_ids = [text._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    ids = [(byte_ids[n] if n < 256 else None) or n % size for n in numbers]
    stream, before = text.stream(), ""
    for count in range(len(ids) + 1):
        before += stream.decode(np.asarray(ids[:count], np.int32)[-1:])
        whole = text.decode(ids[:count])
        held = whole.removeprefix(before)
        assert whole.startswith(before)
        assert held == "\ufffd" * len(held) and len(held) <= 1
    known = text._backend.decode(ids)
    if None in byte_ids or "\ufffd" not in known:  # `tokenizers` replaces whole runs of byte tokens
        assert text.decode(ids) == known


def test_valid_characters_beside_broken_ones_are_kept() -> None:
    """The `tokenizers` library replaces a whole run of byte tokens that is not UTF-8."""
    text = MADE["llama_like"].text
    ids = [text._backend.token_to_id(f"<0x{byte:02X}>") for byte in b"\xe2P\xc3\xa9\xf0\x9f"]
    assert text._backend.decode(ids) == "\ufffd" * 6
    assert text.decode(ids) == "\ufffdPé\ufffd"


@settings(max_examples=200)
@given(
    text=st.one_of(st.text(), st.lists(st.sampled_from(["\u2126", "\u095c", "e\u0302\u0323", "a", " "])).map("".join))
)
@example(text="Take 10 k\u2126.")
@example(text="\u0932\u095c\u0915\u093e")
@example(text="Vie\u0323\u0302t Nam <|end|>")
def test_what_a_normaliser_changes_is_encoded_as_transformers_encodes_it(text: str) -> None:
    tokenizer, codec = byte_level(nfc=True), QWEN_LIKE.text
    ids = codec.encode_normalised(text)
    assert codec.decode(ids) == unicodedata.normalize("NFC", text)
    if "<|" not in text:
        assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert not set(ids) & codec.special_ids
    exact = MADE["byte_level"].text
    assert exact.encode_normalised(text) == exact.encode(text)


@every_codec
@settings(max_examples=50)
@given(text=texts)
def test_text_without_a_normaliser_is_encoded_exactly(codec: Codec, text: str) -> None:
    assert codec.text.encode_normalised(text) == codec.text.encode(text)


@every_codec
@settings(max_examples=100)
@given(structure=structures)
def test_linearisation_round_trip(codec: Codec, structure: list) -> None:
    linear = codec.linearise(structure)
    assert codec.parse(linear.tokens) == canonical(structure)
    assert linear.fed.shape == linear.tokens.shape


@every_codec
def test_a_copy_of_a_backend_is_equal_and_independent(codec: Codec) -> None:
    backend = codec.text._backend
    copy = copy_backend(backend)
    assert copy.to_str() == backend.to_str()
    added = len(backend.get_added_tokens_decoder())
    copy.encode_special_tokens = False
    copy.add_tokens(["<new>"])
    assert backend.encode_special_tokens and len(backend.get_added_tokens_decoder()) == added


def test_linearisation_follows_the_protocol(tokenizer: PreTrainedTokenizerFast) -> None:
    codec = Codec(tokenizer)
    answer = [Serial("a"), Parallel([Branch("T", "b"), Branch("U", "c")]), Serial("d")]
    linear = codec.linearise(answer)
    words = [tokenizer.convert_ids_to_tokens(int(i)) for i in linear.tokens]
    head = [tokenizer.convert_ids_to_tokens(i) for i in codec.form.separator]
    assert codec.text.decode(codec.form.separator) == SEPARATOR
    assert words == [
        "a", "<|title|>", "T", "<|/title|>", "<|title|>", "U", "<|/title|>", "<|para|>",
        "<|branch|>", "T", *head, "b", "<|/branch|>", "<|branch|>", "U", *head, "c", "<|/branch|>", "<|/para|>", "d",
    ]  # fmt: skip
    fed = [word for word, is_fed in zip(words, linear.fed, strict=True) if is_fed]
    assert fed == ["<|branch|>", "T", *head, "<|branch|>", "U", *head, "<|/para|>"]


def test_adding_tokens_keeps_the_old_ones() -> None:
    tokenizer = byte_level()
    before = tokenizer.get_vocab()
    special = add_special_tokens(tokenizer)
    after = tokenizer.get_vocab()
    assert {token: after[token] for token in before} == before
    assert special.ids == tuple(range(len(before), len(before) + 6))
    assert tuple(after[tag] for tag in TAGS.values()) == special.ids
    assert add_special_tokens(tokenizer) == special
    assert len(tokenizer) == len(before) + 6


def test_a_tokenizer_that_loses_characters_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    codec_text = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    with pytest.raises(TokenizerError, match="tokenizer: expected ': ' back"):
        Codec(codec_text)
    with pytest.raises(TokenizerError, match="text: expected Unicode text"):
        MADE["byte_level"].text.encode("\ud800")
    with pytest.raises(TokenizerError, match="text: expected Unicode text"):
        QWEN_LIKE.text.encode_normalised("\ud800")


SPECIAL = SpecialTokens(1, 2, 3, 4, 5, 6)
WELL_FORMED = [9, 1, 7, 2, 1, 8, 2, 3, 5, 7, 9, 6, 5, 8, 6, 4, 9]


def test_split_reads_titles_and_branches() -> None:
    first, block, last = split(WELL_FORMED, SPECIAL)
    assert isinstance(block, BlockIds)
    assert block.titles == ([7], [8])
    assert block.branches == ([7, 9], [8])
    assert np.concatenate([first.ids, last.ids]).tolist() == [9, 9]


@pytest.mark.parametrize("place", [i for i, token in enumerate(WELL_FORMED) if token <= 6])
def test_split_refuses_any_missing_tag(place: int) -> None:
    with pytest.raises(StructureError):
        split(WELL_FORMED[:place] + WELL_FORMED[place + 1 :], SPECIAL)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 8), max_size=12))
def test_split_accepts_only_what_the_grammar_generates(tokens: list[int]) -> None:
    """Check `split` against a regular expression over the tags."""
    letters = "".join("tTpPbB"[token - 1] if 1 <= token <= 6 else "." for token in tokens)
    blocks = re.fullmatch(r"\.*((t\.+T)+p(b\.*B)+P\.*)*", letters)
    paired = blocks and all(
        block.count("t") == block.count("b") >= 2 for block in re.findall(r"(?:t\.+T)+p(?:b\.*B)+P", letters)
    )
    try:
        items = split(tokens, SPECIAL)
    except StructureError:
        assert not paired
    else:
        assert paired
        assert sum(isinstance(item, BlockIds) for item in items) == letters.count("p")


def test_parse_wants_the_title_at_the_head_of_its_branch() -> None:
    codec = MADE["byte_level"]
    tokens = codec.linearise([Parallel([Branch("one", "x"), Branch("two", "y")])]).tokens
    at = int(np.flatnonzero(tokens == codec.special.branch_start)[1]) + 1
    tokens[at] = codec.text.encode("!")[0]
    with pytest.raises(StructureError, match=r"branch 2: expected .* title and separator"):
        codec.parse(tokens)
