"""Draw the pictures of README and docs from answers of SmolLM2: `python -m docs.draw`."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import aspd  # noqa: F401 (sets XLA's flags)
from aspd_jax import Branch, Layout, Parallel, Serial, build_layout, load_model
from infer import Engine, Result, SamplingParams
from infer.answers.answer import content_ids
from infer.engine import Prompt
from infer.offline.terminal import RECORD_SCHEMA, picture, record_prompt
from infer.request import Fields, Mode
from notebooks.figures import draw_timeline, draw_visibility, svg, timeline

HERE = Path(__file__).parent / "pictures"
QUESTION = "How can I make my home office more comfortable?"
PARAMS = SamplingParams(max_new_tokens=640, repetition_penalty=1.1)
SECONDS = 0.22  # of a frame
HOLD = 14  # frames that the last one stays
WIDTH = 138
FRAME = """<g class="frame" style="animation-delay:{{delay:.2f}}s{{last}}">
<style>.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, monospace; }} {styles}</style>
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
"""


def record(
    engine: Engine, prompt: Prompt, sides: Mapping[str, tuple[SamplingParams, Mode]], steps: int, height: int
) -> str:
    """Return an animated SVG of two growing answers.

    Args:
        engine: engine.
        prompt: messages.
        sides: sampling parameters and mode by the name of the side.
        steps: steps between two frames.
        height: lines of a frame.
    """
    grown = [list(engine.stream(prompt, params, mode, steps)) for params, mode in sides.values()]
    count = max(map(len, grown))
    frames = []
    for number in range(count):
        now = [results[min(number, len(results) - 1)] for results in grown]
        frames.append(_frame(number, dict(zip(sides, now, strict=True)), height))
    total = SECONDS * (count + HOLD)
    text, size = [], (0.0, 0.0)
    for number, (frame, (width, height)) in enumerate(frames):
        stays = HOLD if number == count - 1 else 0
        name = ";animation-name:last" if stays else ""
        text.append(frame.replace("{delay:.2f}", f"{SECONDS * number:.2f}").replace("{last}", name))
        size = max(size[0], width), max(size[1], height)
    one, end = 100 / (count + HOLD), 100 * (1 + HOLD) / (count + HOLD)
    style = (
        f".frame {{ visibility: hidden; animation: one {total:.2f}s infinite; }}"
        f"@keyframes one {_key_frames(one)} @keyframes last {_key_frames(end)}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}"><style>{style}</style>'
        f'<rect width="100%" height="100%" rx="8" fill="#15181e"/>{"".join(text)}</svg>\n'
    )


def _key_frames(share: float) -> str:
    """Return the key frames for an element that is visible for a share of the time, in percent."""
    return f"{{ 0%, {share:.3f}% {{ visibility: visible }} {share + 0.001:.3f}%, 100% {{ visibility: hidden }} }}"


def _frame(number: int, results: Mapping[str, Result], height: int) -> tuple[str, tuple[float, float]]:
    """Return a frame of both answers side by side, and its size."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(ratio=3)
    table.add_column(ratio=2)
    panels = []
    for name, result in results.items():
        title = f"{name}, step {result.stats.steps} {'[green]done[/]' if result.finish_reason else ''}"
        panels.append(Panel(picture(result), title=title, title_align="left", height=height))
    table.add_row(*panels)
    console.print(table)
    frame = console.export_svg(title="", code_format=FRAME, unique_id=f"f{number}")
    frame = re.sub(r' clip-path="[^"]*"', "", frame)  # no text is longer than its line
    return frame, (WIDTH * 12.2, (height + 1) * 24.4)


def main() -> None:
    """Draw all pictures."""
    HERE.mkdir(exist_ok=True)
    lm = load_model("smollm2-aspd")
    engine = Engine(lm, max_length=1024, max_batch=1, reuse=False)
    (answer,) = engine.generate([[{"role": "user", "content": QUESTION}]], PARAMS)
    lanes = draw_timeline(timeline(engine.config, answer), "one answer of SmolLM2-135M, by step")
    (HERE / "lanes.svg").write_text(svg(lanes))
    prices = {"\nPens:": " $60.", "\nMaps:": " $40.", "\nCups:": " $80."}
    parts = Parallel(tuple(Branch(lead, lead + rest) for lead, rest in prices.items()))
    ids = lm.codec.linearise((Serial("Prices."), parts, Serial("\nSum: $180."))).tokens
    layout = Layout(*(field[0] for field in build_layout(ids[None], lm.codec.special)))
    names = [lm.tokenizer.decode(int(token)).replace("\n", "⏎") for token in ids]
    (HERE / "visibility.svg").write_text(svg(draw_visibility(layout, names, title="who sees whom")))
    told = PARAMS.saying(content_ids(engine.config, answer))
    messages = [{"role": "user", "content": QUESTION}]
    (HERE / "demo.svg").write_text(
        record(engine, messages, {"adaptive": (PARAMS, "adaptive"), "serial": (told, "serial")}, 8, 32)
    )
    sides: dict[str, tuple[SamplingParams, Mode]] = {
        f"fields {order}": (SamplingParams(max_new_tokens=256, json_schema=RECORD_SCHEMA, fields=order), "serial")
        for order in get_args(Fields)[::-1]
    }
    (HERE / "fields.svg").write_text(record(engine, record_prompt(), sides, 1, 14))
    for file in sorted(HERE.glob("*.svg")):
        print(f"{file.relative_to(HERE.parent.parent)}: {file.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
