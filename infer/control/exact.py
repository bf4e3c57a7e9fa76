"""Controller of answers whose fields are decoded in parallel as a draft of the serial answer (protocol, section 5)."""

from __future__ import annotations

from dataclasses import replace

from aspd_jax.template import Template
from aspd_jax.tokens import TextCodec
from infer.answers.answer import RequestOutput
from infer.control.constraint import Constraint
from infer.control.controller import Controller
from infer.control.draft_text import DraftText
from infer.control.filling import Filling
from infer.control.tags import text_rule
from infer.decode.guidance import RowGuidance
from infer.decode.state import RUNNING
from infer.request import Request

GRACE = 8  # steps that a value of a draft may lag behind


class Exact(Controller):
    """Decisions for answers that are drafted as a template, and then decoded serially with the draft as draft text.

    The answer equals that of the serial controller, which never sees the draft's tokens.

    Args:
        draft: controller of the template.
        serial: controller of the answer.
        request: request with a draft.
        codec: codec of the tokenizer.
    """

    def __init__(self, draft: Filling, serial: Constraint, request: Request, codec: TextCodec) -> None:
        assert request.draft is not None
        self._draft, self._serial, self._request, self._codec = draft, serial, request, codec
        self._template: Template = request.draft
        self._fields = len(self._template.holes)
        self._drafted = RequestOutput()  # the draft as far as it is decoded
        self._start: int | None = None  # position behind the prompt
        self._checks, self._discarded = False, 0

    @property
    def error(self) -> str:
        return self._serial.error

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return the answer; while the draft is decoded, it has no tokens."""
        if self._checks:
            return replace(self._serial.read(output), discarded=self._discarded, drafted_fields=self._fields)
        self._drafted = self._draft.read(output)
        return replace(output, items=[], open_branches=frozenset(), drafted_fields=self._fields)

    def follow(self, output: RequestOutput) -> RowGuidance:
        """Return the decisions of the draft, and then those of the answer."""
        if self._checks:
            return self._serial.follow(output)
        if self._start is None:
            self._start = output.position
            if opening := self._codec.encode_exactly(self._template.opening):
                return RowGuidance(text=opening, spent=len(opening), content=len(opening))
        guidance = self._draft.follow(self._drafted)
        if guidance.finish == RUNNING and not self._draft.lags(GRACE):
            return guidance
        filled = self._drafted.template
        assert filled is not None
        self._checks, self._discarded = True, self._draft.sampled
        text = DraftText(self._template.fill(filled.values), self._codec)
        return RowGuidance(
            serial=text_rule(forks=False),
            resume_at=self._start - 1,
            restarts=True,
            spent=output.tokens_left - self._request.budget,
            content=output.content_left - self._request.content_budget,
            check=self._serial.begin(text, self._request.prompt[-1]),
        )
