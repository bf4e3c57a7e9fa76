"""Draw the pictures of README and docs from answers of Qwen2.5-Coder-0.5B-Instruct: `python -m docs.draw MODEL.gguf`.

S: steps of an answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from matplotlib.figure import Figure

import aspd  # noqa: F401 (sets XLA's flags)
from aspd_jax import Branch, Layout, Parallel, Serial, build_layout, load_model
from aspd_jax.pictures import SERIAL_COLOUR, TITLE_COLOUR, branch_colour
from infer import Engine, Result, SamplingParams
from infer.offline.demonstration import LIST_QUESTION, ORDER, ORDER_SCHEMA, order_prompt
from notebooks.figures import draw_visibility, svg

HERE = Path(__file__).parent / "pictures"
PARAMS = SamplingParams(max_new_tokens=400, repetition_penalty=1.05)
LABEL = 42  # maximum characters of a label


class Lane(NamedTuple):
    """A part of an answer, and the steps in which its text grows.

    Attributes:
        name: what the part is.
        steps: ascending numbers of steps, from 1.
        leads: those of these steps in which its heading grows.
        is_branch: whether the part is a branch.
    """

    name: str
    steps: tuple[int, ...]
    leads: tuple[int, ...] = ()
    is_branch: bool = False


def growth(results: Iterable[Result]) -> tuple[list[Lane], Result]:
    """Return the lanes of a growing answer in reading order, and the whole answer.

    Args:
        results: partial results, at most one step apart.
    """
    grown: dict[tuple[int, int], list[int]] = {}
    lengths: dict[tuple[int, int], int] = {}
    leads: dict[tuple[int, int], list[int]] = {}
    for result in results:
        for key, text, title in _parts(result):
            if (length := len(text.strip())) > lengths.get(key, 0):
                lengths[key] = length
                grown.setdefault(key, []).append(result.stats.steps)
                if title and text == title:
                    leads.setdefault(key, []).append(result.stats.steps)
    names = dict(_names(result))
    lanes = [
        Lane(names[key], tuple(grown[key]), tuple(leads.get(key, ())), key[1] > 0) for key in names if key in grown
    ]
    return lanes, result


def _parts(result: Result) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Yield item and branch, text and heading of each part; branch 0: serial text."""
    for number, item in enumerate(result.structure):
        if isinstance(item, Parallel):
            for branch, each in enumerate(item.branches, 1):
                yield (number, branch), each.text or each.title, each.title
        else:
            yield (number, 0), item.text, ""


def _names(result: Result) -> Iterator[tuple[tuple[int, int], str]]:
    for number, item in enumerate(result.structure):
        if isinstance(item, Parallel):
            for branch, each in enumerate(item.branches, 1):
                whole = each.text if each.caption in each.text else f"{each.caption} {each.text}"
                text = " ".join(whole.replace("*", "").lstrip(" ,{").split())
                yield (number, branch), text if len(text) <= LABEL else text[: LABEL - 1] + "…"
        else:
            yield (number, 0), "introduction" if number == 0 else "text"


def with_headings(lanes: Sequence[Lane]) -> list[Lane]:
    """Add a lane for the steps between the introduction and the first branch, which decode the headings of a list."""
    begin, end = lanes[0].steps[-1], min(lane.steps[0] for lane in lanes if lane.is_branch)
    steps = tuple(range(begin + 1, end))
    return [lanes[0], Lane("headings of all items", steps, steps), *lanes[1:]]


def draw_lanes(title: str, lanes: Sequence[Lane], steps: int, others: Sequence[tuple[str, int]]) -> Figure:
    """Draw the parts of an answer over its steps, and other ways to decode it as bars below.

    Args:
        title: what is answered.
        lanes: parts.
        steps: number of steps of the answer.
        others: name and number of steps of other modes, serial mode last.
    """
    rows = len(lanes) + len(others)
    longest = max(count for _, count in others)
    figure = Figure(figsize=(9, 0.9 + 0.3 * rows), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        colour = branch_colour(row) if lane.is_branch else SERIAL_COLOUR
        for step in lane.steps:
            axes.barh(row, 1, left=step - 1, height=0.8, color=TITLE_COLOUR if step in lane.leads else colour)
        axes.text(lane.steps[-1] + 0.01 * longest, row, lane.name, va="center", fontsize=8)
    for row, (name, count) in enumerate(others, len(lanes)):
        axes.barh(row + 0.3, count, height=0.8, color=SERIAL_COLOUR)
        axes.text(0.01 * longest, row + 0.3, name, va="center", fontsize=8, color="white")
    axes.axvline(steps, color="black", linewidth=0.8, linestyle=":")
    axes.text(steps + 0.01 * longest, -0.75, f"{steps} steps", va="center", fontsize=8)
    axes.set_xticks(sorted({0, steps, *(count for _, count in others)}))
    axes.set_yticks([])
    axes.set(xlabel="steps", xlim=(0, 1.02 * longest), ylim=(rows, -1))
    axes.set_title(fill(title, 105), fontsize=9, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def draw_list(engine: Engine) -> Figure:
    """Draw a list that is decoded in parallel, and serial mode with the same question."""
    messages = [{"role": "user", "content": LIST_QUESTION}]
    lanes, result = growth(engine.stream(messages, PARAMS, "adaptive", 1))
    (serial,) = engine.generate([messages], PARAMS, "serial")
    tokens = result.stats.content_tokens
    below = f"the same {tokens} tokens, one after the other"
    print(f"list: {result.stats.steps} steps for {tokens} tokens; the serial answer takes {serial.stats.steps}")
    title = f"{LIST_QUESTION}  Headings (orange) first, then all items side by side"
    return draw_lanes(title, with_headings(lanes), result.stats.steps, [(below, tokens)])


def draw_record(engine: Engine) -> Figure:
    """Draw a record whose fields are decoded in parallel, and exact and serial decoding."""
    params = {
        fields: SamplingParams(max_new_tokens=200, json_schema=ORDER_SCHEMA, fields=fields)
        for fields in ("parallel", "exact", "serial")
    }
    lanes, result = growth(engine.stream(order_prompt(), params["parallel"], "serial", 1))
    others = []
    for fields in ("exact", "serial"):
        (other,) = engine.generate([order_prompt()], params[fields], "serial")
        others.append((f"{fields}: {other.stats.steps} steps", other.stats.steps))
        print(fields, other.text)
    print("parallel", result.text)
    return draw_lanes(f"“{ORDER}”", [lane for lane in lanes if lane.is_branch], result.stats.steps, others)


def draw_mask() -> Figure:
    """Draw the visibility of a short answer with three branches, whose titles are leads."""
    lm = load_model("smollm2-aspd")
    prices = {"\nPens:": " $60.", "\nMaps:": " $40.", "\nCups:": " $80."}
    parts = Parallel(tuple(Branch(lead, lead + rest) for lead, rest in prices.items()))
    ids = lm.codec.linearise((Serial("Prices."), parts, Serial("\nSum: $180."))).tokens
    layout = Layout(*(field[0] for field in build_layout(ids[None], lm.codec.special)))
    names = [lm.tokenizer.decode(int(token)).replace("\n", "⏎") for token in ids]
    return draw_visibility(layout, names, title="who sees whom")


def main() -> None:
    """Draw all pictures."""
    engine = Engine(load_model(sys.argv[1]), max_length=512, max_batch=1)
    figures = {"lanes": draw_list(engine), "fields": draw_record(engine), "visibility": draw_mask()}
    for name, figure in figures.items():
        file = HERE / f"{name}.svg"
        file.write_text(svg(figure))
        print(f"{file.relative_to(HERE.parent.parent)}: {file.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
