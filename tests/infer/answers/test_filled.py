"""Text and structure of templates that are filled."""

from __future__ import annotations

import pytest

from aspd_jax.fields import fields_template
from aspd_jax.structure import plain_text
from infer.answers.filled import Filled, FilledBlock

NUMBERS = {"type": "object", "properties": {"": {"type": "integer"}, "a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("growing", "text"), [((), '{"": 1, "a": 2}'), (("a",), '{"": 1, "a": 2'), (("", "a"), '{"": 1')]
)
def test_a_field_may_have_an_empty_name(growing: tuple[str, ...], text: str) -> None:
    template = fields_template(NUMBERS)
    assert template is not None
    block = FilledBlock(template.holes, frozenset(growing))
    filled = Filled(template, {"": "1", "a": "2"}, (block,), is_final=True)
    assert filled.text == text == plain_text(filled.structure)
