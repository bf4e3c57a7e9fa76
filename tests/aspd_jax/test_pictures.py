"""Pictures: every filled square, bar and word is compared with its data."""

from __future__ import annotations

import re
from html import unescape
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from aspd_jax import Branch, Layout, Parallel, Serial, SpecialTokens, build_layout
from aspd_jax.pictures import SERIAL_COLOUR, answer_html, branch_colour, page
from docs.draw import Lane, draw_lanes, growth, with_headings
from notebooks.figures import Span, draw_timeline, draw_visibility, svg
from tests.conftest import ROOT
from tests.helpers.answers import EXAMPLE, linearise
from tests.helpers.brute_force import lay_out, mask

SPECIAL = SpecialTokens(17, 18, 19, 20, 21, 22)
IDS = linearise(SPECIAL, EXAMPLE, end=None)


def layout_of(ids: list[int]) -> Layout:
    return Layout(*(field[0] for field in build_layout(np.asarray([ids]), SPECIAL)))


def test_the_matrix_is_the_mask() -> None:
    layout = layout_of(IDS)
    figure = draw_visibility(layout, [f"t{token}" for token in IDS], title="x")
    shown = np.asarray(figure.axes[0].images[0].get_array())
    tokens = lay_out(IDS, [1] * len(IDS), SPECIAL.branch_start, SPECIAL.branch_end, "sequential")
    assert ((shown > 0) == mask(tokens)).all()
    assert set(np.unique(shown[np.asarray(layout.branch) == 0])) == {0, 1}, "serial rows have a colour of their own"
    colours = figure.axes[0].images[0].get_cmap()
    assert colours(3)[:3] == pytest.approx(to_rgb(branch_colour(1)))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [f"t{token}" for token in IDS]
    positions = figure.axes[1].collections[0].get_offsets()[:, 1]
    assert positions.tolist() == np.asarray(layout.position).tolist()
    shared = np.asarray(draw_visibility(layout, siblings="shared").axes[0].images[0].get_array())
    assert (shared > 0).sum() > (shown > 0).sum(), "negative control: siblings that see each other are drawn"


@pytest.mark.parametrize("leads", [0, 5])
def test_the_timeline_is_that_of_the_spans(leads: int) -> None:
    spans = [
        Span("serial", 0, 0, 4, "", 4),
        Span("titles", 0, 4, 12, "", leads),
        Span("branch", 1, 12, 20, "pens", 7),
        Span("branch", 2, 12, 17, "maps <&>", 4),
        Span("serial", 0, 20, 23, "", 3),
    ]
    figure = draw_timeline(spans, "an answer")
    bars = [(bar.get_x(), bar.get_width(), bar.get_y() + 0.4) for bar in figure.axes[0].patches]
    for span in spans:
        assert (span.start, span.end - span.start, pytest.approx(span.lane)) in bars
    below = [bar for bar in bars if bar[2] == pytest.approx(3.5)]
    assert sum(bar[1] for bar in below) == 4 + leads + 7 + 4 + 3, "serial mode writes no names and no closing tags"
    drawn = svg(figure)
    assert drawn == svg(draw_timeline(spans, "an answer")), "the same figure is the same text"
    assert ElementTree.fromstring(drawn).tag.endswith("svg") and "http-equiv" not in drawn


texts = st.text("ab<&>\"'\n中 ", max_size=12)


@settings(max_examples=100)
@given(
    st.lists(
        st.builds(Serial, texts.filter(bool))
        | st.builds(
            Parallel, st.lists(st.builds(Branch, texts.filter(bool), texts), min_size=2, max_size=4).map(tuple)
        ),
        max_size=4,
    )
)
def test_html_has_every_word_and_no_markup_of_theirs(items: list[Serial | Parallel]) -> None:
    whole = page("a <title>", answer_html(tuple(items)))
    words = [unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", whole, re.DOTALL)]
    segments = [[item.text] if isinstance(item, Serial) else [b.text for b in item.branches] for item in items]
    expected = [
        text if isinstance(item, Serial) else text.strip("\n")
        for item, texts in zip(items, segments, strict=True)
        for text in texts
    ]
    assert words == expected
    assert "a &lt;title&gt;" in whole and not re.findall(r"<(?:a|b)<", whole)
    assert not re.search(r"(?:src|href)=", whole), "nothing beside it is needed"


def test_siblings_differ_in_colour() -> None:
    near = [(branch_colour(n), branch_colour(n + 1)) for n in range(20)]
    assert all(a != b != SERIAL_COLOUR for a, b in near)


def partial(steps: int, *items: Serial | Parallel) -> Any:
    return SimpleNamespace(structure=items, stats=SimpleNamespace(steps=steps))


def test_lanes_are_the_steps_in_which_parts_grow() -> None:
    """Check the lanes of a growing answer, headings included, and the bars of their picture."""
    block = partial(4, Serial("One: "), Parallel((Branch("1. **a**", "1. **a** b c"), Branch("2. d", "2. d e"))))
    results = [
        partial(1, Serial("One: ")),
        partial(2, Serial("One: "), Parallel((Branch("1. **a**", "1. **a**"), Branch("2. d", "")))),
        partial(3, Serial("One: "), Parallel((Branch("1. **a**", "1. **a** b"), Branch("2. d", "2. d e")))),
        block,
    ]
    lanes, last = growth(results)
    assert last is block and [lane.name for lane in lanes] == ["introduction", "1. a b c", "2. d e"]
    assert [lane.steps for lane in lanes] == [(1,), (2, 3, 4), (2, 3)]
    assert [lane.leads for lane in lanes] == [(), (2,), (2,)]
    later = [lanes[0], lanes[1]._replace(steps=(4, 5), leads=())]
    assert with_headings(later)[1] == Lane("headings of all items", (2, 3), (2, 3)), "steps that no part has"
    axes = draw_lanes("Why?", lanes, 4, [("serial", 9)]).axes[0]
    bars = {(bar.get_x(), round(bar.get_y() + 0.4, 1), bar.get_width()) for bar in axes.patches}
    assert bars == {(0, 0, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (2, 2, 1), (0, 3.3, 9)}
    assert [*axes.get_xticks()] == [0, 4, 9], "the steps of the answer, and of serial mode"


def test_pictures_are_static() -> None:
    """Check that every picture is shown without CSS animation, and is on a page."""
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    pictures = [*(ROOT / "docs" / "pictures").iterdir()]
    assert len(pictures) == 3
    for picture in pictures:
        assert "animation" not in picture.read_text() and f"pictures/{picture.name}" in pages
