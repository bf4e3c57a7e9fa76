"""Configurations: YAML files are read into frozen dataclasses, and unknown keys are refused."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import yaml
from yaml.constructor import ConstructorError

from aspd_jax.errors import ConfigError

Config = TypeVar("Config")

CONFIGS = Path(__file__).parent / "configs"  # a link to the project's configs/, copied into the package


class _Loader(yaml.SafeLoader):
    """Loader that refuses a key that occurs twice, of which YAML would ignore the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for place, key in enumerate(keys):
            if any(key.value == earlier.value for earlier in keys[:place]):
                raise ConstructorError(None, None, f"expected different keys, got {key.value!r} twice", key.start_mark)
        return super().construct_mapping(node, deep)


def check_port(name: str, port: int) -> None:
    """Check the number of a port; 0: any free one.

    Raises:
        ConfigError: it is no port.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"{name}: expected 0 to 65535, got {port}")


def at_least(name: str, value: float, least: float) -> None:
    """Check that a value is at least `least`.

    Raises:
        ConfigError: the value is smaller, or not a number.
    """
    if not value >= least:  # NaN is refused, too
        raise ConfigError(f"{name}: expected at least {least}, got {value}")


class Check(NamedTuple):
    """Condition of the values of a field, as an annotation.

    Attributes:
        expected: noun phrase for a value that meets it, for messages.
        holds: returns whether a value meets it; NaN meets none.
    """

    expected: str
    holds: Callable[[Any], bool]


Natural = Annotated[int, Check("at least 0", lambda value: value >= 0)]
Count = Annotated[int, Check("at least 1", lambda value: value >= 1)]
NonNegative = Annotated[float, Check("at least 0", lambda value: value >= 0)]
Dtype = Annotated[str, Check("float32 or bfloat16", lambda value: value in ("float32", "bfloat16"))]


class Section:
    """Base of the dataclasses of a configuration, which checks values by the annotations of their fields.

    Args:
        prefix: what precedes the name of a field in messages.
    """

    _prefix: ClassVar[str]

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls._prefix = prefix

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            check = next(iter(getattr(hint, "__metadata__", ())), None)
            if get_origin(hint) is Literal:
                check = Check(f"one of {', '.join(get_args(hint))}", get_args(hint).__contains__)
            if check is not None and not check.holds(value := getattr(self, name)):
                raise ConfigError(f"{self._prefix}{name}: expected {check.expected}, got {value!r}")


def find_config(path: str | Path) -> Path:
    """Return a path, or the included file of a name such as `configs/lora_7b.yaml` that does not exist as a path."""
    path = Path(path)
    included = CONFIGS.joinpath(*path.parts[1:])
    return included if path.parts[:1] == ("configs",) and not path.exists() and included.is_file() else path


def read_config(kind: type[Config], path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides.

    Args:
        kind: dataclass of the configuration; a section is a dataclass, or a dict of named dataclasses.
        path: YAML file, or the name of an included one (`find_config`); None: the defaults.
        overrides: `section.key=value` strings; values are YAML.

    Raises:
        ConfigError: a file or field is not valid; the message names it, and what was expected.
    """
    where = "the defaults" if path is None else str(path)
    path = None if path is None else find_config(path)
    if path is not None and not path.is_file():
        names = ", ".join(f"configs/{file.name}" for file in sorted(CONFIGS.glob("*.yaml")))
        raise ConfigError(f"{path}: expected a YAML file, got none. Included are {names}.")
    try:
        values = {} if path is None else yaml.load(path.read_bytes(), _Loader) or {}
    except (yaml.YAMLError, OSError, ValueError) as error:  # ValueError: of a date that does not exist
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected `key: value` lines, got {type(values).__name__}")
    change(values, overrides)
    return config_from_dict(kind, values, where)


def change(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `section.key=value` overrides to the values of a configuration, in place.

    Raises:
        ConfigError: a string is not an override, or its key is inside a value.
    """
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"overrides: expected key=value, got {override!r}")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{override!r}: {error}") from None
        *sections, name = key.split(".")
        inside: Any = values
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                raise ConfigError(f"{override!r}: {section}: expected `key: value` lines, got {inside!r}")
        inside[name] = value


def config_from_dict(kind: type[Config], values: dict[str, Any], where: str) -> Config:
    """Build a configuration from the values that `dataclasses.asdict` returns.

    Args:
        kind: dataclass of the configuration.
        values: values by key.
        where: source of the values, for messages.

    Raises:
        ConfigError: a field is not valid; the message names it, and what was expected.
    """
    config: Config = _value(kind, values, "", where, list(_names(kind, "")))
    return config


def _arguments(kind: Any, values: Any, name: str, where: str, all_names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a dataclass."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {name}: expected `key: value` lines, got {values!r}")
    hints = get_type_hints(kind)
    for key, value in values.items():
        path = f"{name}.{key}" if name else str(key)
        if key not in {item.name for item in fields(kind)}:
            same = [other for other in all_names if other.split(".")[-1] == key]
            near = same or difflib.get_close_matches(path, all_names, 1)
            raise ConfigError(f"{where}: unknown key {path!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        yield key, _value(hints[key], value, path, where, all_names)


def _names(kind: Any, prefix: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint, name = hints[item.name], f"{prefix}{item.name}"
        yield from _names(hint, f"{name}.") if is_dataclass(hint) else [name]


def _value(hint: Any, value: Any, name: str, where: str, all_names: Sequence[str] = ()) -> Any:
    kind: Any = hint
    if is_dataclass(hint):
        return kind(**dict(_arguments(hint, value, name, where, all_names)))
    if get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {name}: expected settings by name, got {value!r}")
        named = get_args(hint)[1]
        names = list(_names(named, f"{name}.*.")) if is_dataclass(named) else []
        return {str(key): _value(named, one, f"{name}.{key}", where, names) for key, one in value.items()}
    if hint == tuple[str, ...]:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{where}: {name}: expected a list of strings, got {value!r}")
        return tuple(value)
    wanted = hint if hint in (bool, int, float) else str
    if wanted is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 3e-4 as a string
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"{where}: {name}: expected {wanted.__name__}, got {value!r}")
    return value
