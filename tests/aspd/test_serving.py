"""Every option of `aspd serve` reaches the server or its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aspd
from aspd_jax import load_model
from aspd_jax.language_model import save_adapter
from infer import Engine
from infer.server.config import ServerConfig

SERVER: dict[str, tuple[list[str], Any]] = {
    "host": (["0.0.0.0"], "0.0.0.0"), "port": (["8123"], 8123), "name": (["mine"], "mine"),
    "cors_origins": (["https://a.example", "https://b.example"], ("https://a.example", "https://b.example")),
    "max_waiting": (["3"], 3), "max_body": (["2000"], 2000), "max_new_tokens": (["17"], 17), "timeout": (["9"], 9.0),
    "drain": (["2.5"], 2.5), "fields": (["parallel"], "parallel"), "calibration": (["prior"], "prior"),
    "warm_up": (["none"], "none"),
}  # fmt: skip
FIELDS = {"cors_origins": "origins"}  # of `ServerConfig`, where they have another name


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Engine, ServerConfig]]:
    """Record what the command would serve."""
    found: list[tuple[Engine, ServerConfig]] = []
    monkeypatch.setattr("infer.server.serve.serve", lambda engine, config: found.append((engine, config)))
    monkeypatch.delenv("ASPD_API_KEY", raising=False)
    return found


@pytest.mark.further
def test_options_of_serve(served: list[tuple[Engine, ServerConfig]], tmp_path: Path) -> None:
    for name, rank in (("one", 2), ("two", 3)):
        save_adapter(load_model("demo", lora_rank=rank, lora_alpha=4.0), tmp_path / name, "demo")
    (tmp_path / "keys").write_text("first\nsecond\n")
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    words = [
        *("serve", "--model", "demo", "--dtype", "bfloat16", "--max-length", "512", "--batch", "3", "--mesh", "data=1"),
        *("--adapters", f"one={tmp_path / 'one'}", f"two={tmp_path / 'two'}", "--adapter-slots", "4"),
        *("--adapter-rank", "8", "--adapter-folder", str(tmp_path), "--chat-template", str(tmp_path / "chat.jinja")),
        *("--key-file", str(tmp_path / "keys"), "--drafts", "lookup", "--draft-tokens", "5", "--lists", "serial"),
    ]
    for name, (value, _) in SERVER.items():
        words += [f"--{name.replace('_', '-')}", *value]
    assert aspd.main(words) == 0
    ((engine, config),) = served
    assert {name: getattr(config, FIELDS.get(name, name)) for name in SERVER} == {n: v for n, (_, v) in SERVER.items()}
    assert config.keys == ("first", "second") and config.adapter_folder == str(tmp_path)
    assert engine.max_length == 512 and engine.max_batch == 3 and str(engine.lm.config.dtype) == "bfloat16"
    assert engine.lm.tokenizer.chat_template == (tmp_path / "chat.jinja").read_text()
    assert [engine.adapters.number(name) for name in ("one", "two")] == [1, 2]
    assert (engine.config.draft_tokens, engine._lists) == (5, "serial")


@pytest.mark.further
def test_other_addresses_need_keys(served: list[tuple[Engine, ServerConfig]], capsys: Any) -> None:
    words = ["serve", "--model", "demo", "--host", "0.0.0.0", "--max-length", "256", "--batch", "1"]
    assert aspd.main(words) == 2 and "--host: expected a loopback address or API keys" in capsys.readouterr().err
    assert aspd.main([*words, "--insecure"]) == 0 and len(served) == 1
