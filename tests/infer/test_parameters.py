"""Sampling parameters: every interface offers what `SamplingParams` declares, with its bounds and its help."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pydantic
import pytest

from aspd import build_parser
from aspd.options import sampling_params
from aspd_jax.errors import RequestError
from infer import SamplingParams
from infer.decode.state import DecodeState
from infer.evaluation.config import DecodingSection
from infer.proxy.upstream import sampling_arguments
from infer.request import BIASES, PARAMETERS, STRINGS, Bounds, Parameter
from infer.server.messages import ChatRequest, CompletionRequest
from infer.server.neutral import Neutral, Strict
from infer.server.responses import ResponsesRequest
from tests.conftest import ROOT

BODIES: dict[type[Strict], dict[str, Any]] = {
    ChatRequest: {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]},
    CompletionRequest: {"model": "demo", "prompt": "Hi"},
    ResponsesRequest: {"model": "demo", "input": "Hi"},
}
LIMITS = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}
LIMITS |= {name: name for name in LIMITS.values()}  # pydantic's words for integers that may be written as 5.0
OWN_FIELDS = ("n", "logprobs", "prediction")  # of HTTP, in the form of each endpoint
GENERATE = ["generate", "--prompt", "Hi"]


class Interfaces(NamedTuple):
    """The parameters that the interfaces offer, as they report them.

    Attributes:
        cli: default and help by option of `aspd generate`.
        http: default, bounds and description by field, for each kind of request.
        yaml: default by key of the section `decoding`.
        device: dtype by array.
    """

    cli: dict[str, tuple[Any, str]]
    http: dict[type, dict[str, tuple[Any, Bounds, str]]]
    yaml: dict[str, Any]
    device: dict[str, str]


def bounds_of(schema: dict[str, Any]) -> Bounds:
    """Return the bounds of a number in a JSON schema, or of the numbers in an object."""
    for part in (*schema.get("anyOf", ()), schema.get("additionalProperties", {}), schema):
        if limits := {LIMITS[name]: part[name] for name in LIMITS if name in part}:
            return Bounds(**limits)
    return Bounds()


@pytest.fixture
def interfaces(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Interfaces:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["generate", "--help"])
    form = r"(?m)^ +--([\w-]+) \S+\s+(.*?)(?:; may be repeated)?(?: \(default: .*\))?$"
    lines = re.findall(form, capsys.readouterr().out)
    helps = {option.replace("-", "_"): text for option, text in lines}
    defaults = vars(build_parser().parse_args(GENERATE))
    http = {}
    for kind in BODIES:
        properties = kind.model_json_schema()["properties"]
        http[kind] = {
            name: (schema.get("default", {}), bounds_of(schema), schema.get("description", ""))
            for name, schema in properties.items()
            if name in PARAMETERS
        }
    yaml = {item.name: item.default for item in dataclasses.fields(DecodingSection)}
    parts = [get_type_hints(part) for part in get_type_hints(DecodeState).values() if hasattr(part, "_fields")]
    (arrays,) = (part for part in parts if "temperature" in part)
    dtypes = {name: hint.dtypes[0] for name, hint in arrays.items()}
    return Interfaces({name: (defaults[name], helps[name]) for name in helps if name in defaults}, http, yaml, dtypes)


def differences(parameter: Parameter, found: Interfaces) -> list[str]:
    """Return the interfaces that do not offer a parameter as it is declared."""
    name, offers = parameter.name, {}
    if parameter.cli is not None:
        default = [] if parameter.kind in (STRINGS, BIASES) else parameter.cli.default
        offers["cli"] = found.cli.get(name) == (default, parameter.help)
    if parameter.http is not None:
        declared = (parameter.http.default, parameter.http.bounds, parameter.help)
        offers["http"] = all(fields.get(name) == declared for fields in found.http.values())
    if parameter.yaml is not None:
        offers["yaml"] = name in found.yaml and found.yaml[name] == parameter.yaml.default
    if parameter.device:
        offers["device"] = found.device.get(name) == {int: "int32", float: "float32"}[parameter.kind]
    return [interface for interface, same in offers.items() if not same]


@pytest.mark.parametrize("name", PARAMETERS)
def test_interfaces_offer_what_is_declared(name: str, interfaces: Interfaces) -> None:
    parameter = PARAMETERS[name]
    assert differences(parameter, interfaces) == []
    for interface in ("cli", "yaml"):
        assert (name in getattr(interfaces, interface)) == (getattr(parameter, interface) is not None)
    for fields in interfaces.http.values():
        assert name not in fields or parameter.http is not None or name in OWN_FIELDS


def test_a_missing_offer_shows(interfaces: Interfaces) -> None:
    """Negative control: one option, field, key or array less, or another help or bound."""
    parameter = PARAMETERS["min_p"]

    def without(offers: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in offers.items() if name != "min_p"}

    for interface in ("cli", "yaml", "device"):
        fewer = interfaces._replace(**{interface: without(getattr(interfaces, interface))})
        assert differences(parameter, fewer) == [interface]
    chat = interfaces.http | {ChatRequest: without(interfaces.http[ChatRequest])}
    assert differences(parameter, interfaces._replace(http=chat)) == ["http"]
    assert differences(dataclasses.replace(parameter, help="another"), interfaces) == ["cli", "http"]
    looser = parameter.http._replace(bounds=Bounds(ge=0))  # type: ignore[union-attr]
    assert differences(dataclasses.replace(parameter, http=looser), interfaces) == ["http"]


def outside(bounds: Bounds) -> list[float]:
    """Return numbers just outside of bounds."""
    beyond = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
    return [limit + beyond[name] for name, limit in bounds.limits.items()]


def spelled(kind: Any, value: float) -> Any:
    """Return a number as a value of a parameter."""
    return {"5": float(value)} if kind == BIASES else kind(value)


BOUNDED = [parameter for parameter in PARAMETERS.values() if parameter.bounds.limits]


@pytest.mark.parametrize("parameter", BOUNDED, ids=lambda parameter: parameter.name)
def test_interfaces_keep_the_bounds(parameter: Parameter) -> None:
    name, kind = parameter.name, parameter.kind
    numbers = outside(parameter.bounds)
    for number in [*numbers, math.nan, math.inf] if kind is float else numbers:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: spelled(kind, number)})
        if parameter.cli is not None:
            text = f"5={number}" if kind == BIASES else str(kind(number))
            options = build_parser().parse_args([*GENERATE, f"--{name.replace('_', '-')}={text}"])
            with pytest.raises(RequestError, match=name):
                sampling_params(options)
        if parameter.yaml is not None and name != "seed":  # seeds of questions wrap around
            with pytest.raises(RequestError, match=name):
                DecodingSection(**{name: spelled(kind, number)})
    if parameter.http is not None:
        for model, body in BODIES.items():
            neutral = model.neutral.get(name, Neutral())  # -1 for `top_k`
            for number in outside(parameter.http.bounds):
                if neutral.accepts(number):
                    continue
                with pytest.raises(pydantic.ValidationError, match=name):
                    model.model_validate({**body, name: spelled(kind, number)})
    for limit in (parameter.bounds.ge, parameter.bounds.le):
        if limit is not None:
            SamplingParams(**{"max_new_tokens": 1, name: spelled(kind, limit)})


def test_the_proxy_forwards_what_is_declared() -> None:
    for parameter in PARAMETERS.values():
        if parameter.http is None or parameter.kind not in (int, float):
            continue
        value = parameter.kind(0.5 if parameter.kind is float else 3)
        sent = sampling_arguments(SamplingParams(**{parameter.name: value}), 0)
        forwarded = {name for name in sent if sent[name] == value and sent[name] is not False}
        assert forwarded == set(parameter.proxy.names if parameter.proxy else ()), parameter.name
    sent = sampling_arguments(SamplingParams(), 0)
    assert (sent["temperature"], sent["top_p"]) == (0.0, 1.0) and not {"top_k", "seed", "stop"} & set(sent)


ADDED = """
import numpy as np
from aspd import build_parser
from aspd.options import sampling_params
from aspd_jax import load_model
from infer import Engine
from infer.evaluation.config import DecodingSection
from infer.scheduling import admission
from infer.server.messages import ChatRequest

params = sampling_params(build_parser().parse_args(["generate", "--prompt", "Hi", "--added", "0.5"]))
schema = ChatRequest.model_json_schema()["properties"]["added"]
assert (schema["default"], schema["exclusiveMinimum"], schema["description"]) == (1.0, 0, "a test"), schema
body = ChatRequest(model="demo", messages=[{"role": "user", "content": "Hi"}], added=0.25)
assert body.sampling_values()["added"] == 0.25
assert DecodingSection(added=0.75).params(None, 0, "serial").added == 0.75
engine = Engine(load_model("demo"), max_length=128, max_batch=1)
state = admission.new_state(engine.lm, engine.config, 1, 128)
new = admission.admission(engine.lm, engine.config, state, engine.check([1, 2], params, "serial"), 0)
(array,) = (part.added for part in new.read() if hasattr(part, "added"))
assert array == np.float32(0.5) and array.dtype == np.float32
print("everywhere")
"""


@pytest.mark.further
def test_a_new_parameter_takes_a_description_a_field_and_an_array(tmp_path: Path) -> None:
    """In a copy of the package; without the array the engine refuses to begin."""
    shutil.copytree(ROOT / "infer", tmp_path / "infer", ignore=shutil.ignore_patterns("__pycache__"))
    insert(
        tmp_path / "infer/request.py",
        "    min_p: float = ",
        "    added: float = _parameter(1.0, Bounds(gt=0, le=1))\n",
    )
    insert(tmp_path / "infer/request.py", "        min_p: minimum", "        added: a test.\n")
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{ADDED}"]
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "unexpected keyword argument 'added'" in failed.stderr, failed.stderr  # negative control
    insert(tmp_path / "infer/decode/state.py", "    min_p: Float32", '    added: Float32[Array, " B"]\n')
    passed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert passed.stdout == "everywhere\n", passed.stderr


def insert(file: Path, before: str, line: str) -> None:
    """Insert a line into a source file."""
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, line + before))
