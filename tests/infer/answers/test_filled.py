"""Text and structure of templates that are filled."""

from __future__ import annotations

import pytest

from aspd_jax.fields import fields_template
from aspd_jax.structure import plain_text
from aspd_jax.template import Hole, Template
from infer.answers.events import FilledReader
from infer.answers.filled import Filled, hole_text


@pytest.mark.parametrize(("behind", "stop"), [(" ", " "), ("\n", "\n"), (", born ", ", born"), ("", "")])
def test_free_text_ends_at_the_literal_text_behind_it(behind: str, stop: str) -> None:
    """Check white space alone, too; that behind other text is left to the model."""
    first, last = Hole("first", (), None), Hole("last", (), None)
    template = Template(["Name: ", first, *([behind] if behind else []), *([last] if behind else [])])
    text = hole_text(template, first)
    assert text.stop == stop
    assert text.read(" Ada Lovelace, born 1815\nin", True)[0] == {
        " ": "Ada", "\n": "Ada Lovelace, born 1815", ", born": "Ada Lovelace", "": "Ada Lovelace, born 1815\nin"
    }[stop]  # fmt: skip


NUMBERS = {"type": "object", "properties": {"": {"type": "integer"}, "a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("growing", "text"), [((), '{"": 1, "a": 2}'), (("a",), '{"": 1, "a": 2'), (("", "a"), '{"": 1')]
)
def test_a_field_may_have_an_empty_name(growing: tuple[str, ...], text: str) -> None:
    template = fields_template(NUMBERS)
    assert template is not None
    filled = Filled(template, {"": "1", "a": "2"}, (tuple(template.holes),), frozenset(growing), is_final=True)
    assert filled.text == text == plain_text(filled.structure)


def test_a_template_that_is_decoded_again_is_not_sent_twice() -> None:
    """Check a stream whose request begins again after a failure of the engine."""
    template = fields_template(NUMBERS)
    assert template is not None
    filled, reader = Filled(template, {}), FilledReader(())
    sent = [event.text for text in ('{"": 1', "", '{"": ', '{"": 12') for event in reader.read(filled, text)]
    assert sent == ['{"": 1', "2"]
