"""Public names of a package that are imported at their first use, so that commands without a model need no JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: name of the package.
        modules: public names by the module that defines them, relative to the package.

    Raises:
        AttributeError: the returned function was asked for a name that no module has.
    """
    sources = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{sources[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
