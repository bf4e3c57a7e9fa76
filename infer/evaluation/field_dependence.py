"""Dependence between the fields of a JSON schema: what hiding the other fields costs, and which fields to show.

The cost of a field is the pipeline's measure (protocol, section 7): the increase in the loss of its value when the
model does not see its siblings, in nats per value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.fields import complete_schema, fields_template
from aspd_jax.template import Hole, Template
from infer.answers.logprobs import likeliest
from infer.engine import Engine, Prompt
from infer.evaluation.extraction import equal
from infer.request import SamplingParams

MIN_COST = 0.5  # nats per value; below, hiding siblings changes little
MIN_SHARE = 0.5  # minimum share of the cost that a sibling must save


@dataclass(frozen=True)
class FieldReport:
    """Dependence of a field on its siblings.

    Attributes:
        name: dotted path of the field.
        records: records in which serial mode gave it a value.
        cost: mean increase in the loss of its serial value when all siblings are hidden, in nats.
        differs: share of records in which parallel fields give another value.
        after: fields before it that save at least half of the cost when the field sees them, the best first; proposed
            `x-after`.
    """

    name: str
    records: int
    cost: float
    differs: float
    after: tuple[str, ...] = ()


def field_reports(
    engine: Engine, schema: Mapping[str, Any], prompts: Sequence[Prompt], max_new_tokens: int = 400
) -> list[FieldReport]:
    """Decode prompts in both ways, and report the dependence of every field.

    Args:
        engine: engine.
        schema: JSON schema of an object; its `x-after` are not used.
        prompts: prompts that ask for such an object.
        max_new_tokens: maximum tokens of an answer.

    Raises:
        RequestError: the schema has no fields that can be decoded in parallel, or no answer has a value of each.
    """
    bare = _without_after(schema)
    template = fields_template(bare)
    if template is None:
        raise RequestError("json_schema: expected two or more fields that can be decoded in parallel, got fewer")
    asked = SamplingParams(max_new_tokens=max_new_tokens, json_schema=complete_schema(bare), seed=0)
    together = SamplingParams(max_new_tokens=max_new_tokens, json_schema=bare, fields="parallel", seed=0)
    serial = engine.generate(prompts, asked, "serial")
    parallel = engine.generate(prompts, together, "serial")
    records = []
    for one, other in zip(serial, parallel, strict=True):
        values, others = _values(one.text, template), _values(other.text, template)
        if values:
            records.append((one.prompt_token_ids, values, others))
    if not records:
        expected = f"at least one complete answer in {max_new_tokens} tokens"
        raise RequestError(f"prompts: expected {expected}, got none of {len(prompts)}")
    return [_report(engine, template, hole, records) for hole in template.holes]


def _report(
    engine: Engine, template: Template, hole: Hole, records: Sequence[tuple[list[int], dict[str, Any], dict[str, Any]]]
) -> FieldReport:
    earlier = template.holes[: template.holes.index(hole)]  # what the serial value has seen; no cycle is proposed
    costs, differs = [], 0
    gains: dict[str, list[float]] = {other.name: [] for other in earlier}
    for prompt, values, others in records:
        differs += not equal(values[hole.name], others.get(hole.name))
        texts = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
        before = template.fill({name: text for name, text in texts.items() if name != hole.name})
        own = (hole.context or "").rstrip(" ")
        hidden = _loss(engine, prompt, own, texts[hole.name])
        costs.append(hidden - _loss(engine, prompt, before.rstrip(" "), texts[hole.name]))
        for other in earlier:
            shown = f"{other.context}{texts[other.name]},{own}"
            gains[other.name].append(hidden - _loss(engine, prompt, shown, texts[hole.name]))
    cost = float(np.mean(costs))
    saved = {name: float(np.mean(values)) for name, values in gains.items()}
    best = sorted((name for name in saved if saved[name] >= MIN_SHARE * cost), key=lambda name: -saved[name])
    after = tuple(best[:3]) if cost >= MIN_COST else ()
    return FieldReport(hole.name, len(records), cost, differs / len(records), after)


def _loss(engine: Engine, prompt: Sequence[int], context: str, value: str) -> float:
    """Return the loss of a value after prompt and context, in nats."""
    encode = engine.lm.codec.text.encode
    tokens = encode(f" {value}")
    before = [*prompt, *encode(context)]
    chosen, _, _ = likeliest(engine.lm, engine.config, np.asarray([*before, *tokens], np.int32), -1)
    return -float(chosen[len(before) : len(before) + len(tokens)].sum())


def _values(text: str, template: Template) -> dict[str, Any]:
    """Return the values of a JSON text by dotted path; empty if it is cut or has another form."""
    try:
        whole = json.loads(text)
        values = {}
        for hole in template.holes:
            value = whole
            for name in hole.path:
                value = value[name]
            values[hole.name] = value
        return values
    except (ValueError, KeyError, TypeError):
        return {}


def _without_after(schema: Any) -> Any:
    """Return a schema without `x-after`."""
    if isinstance(schema, Mapping):
        return {name: _without_after(value) for name, value in schema.items() if name != "x-after"}
    return [_without_after(value) for value in schema] if isinstance(schema, list) else schema


def field_table(reports: Sequence[FieldReport]) -> str:
    """Return the reports as a Markdown table."""
    lines = [
        "| field | records | cost of hidden siblings, nats | values that differ | x-after |",
        "|---|---|---|---|---|",
    ]
    for report in reports:
        after = ", ".join(report.after) or "-"
        lines.append(f"| {report.name} | {report.records} | {report.cost:.2f} | {report.differs:.0%} | {after} |")
    return "\n".join(lines)
