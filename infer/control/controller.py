"""The interface between an answer under way and its decisions on the host (protocol, section 5).

The device samples in each segment until a token of a stop set, a limit or the end. A sequence in which a segment waits
is not fed until its controller has decided what follows.
"""

from __future__ import annotations

from infer.answers.answer import RequestOutput
from infer.decode.guidance import RowGuidance


class Controller:
    """Decisions about one answer. This one lets serial text go on; others decide more."""

    @property
    def error(self) -> str:
        """Return why the answer cannot go on; empty: it can."""
        return ""

    def start(self) -> RowGuidance | None:
        """Return the decisions before the prompt is fed; None: there are none."""
        return None

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return an output as the reader of the answer gets it."""
        return output

    def follow(self, output: RequestOutput) -> RowGuidance:
        """Return the decisions for a sequence that waits.

        Args:
            output: what `read` returned last.
        """
        return RowGuidance()
