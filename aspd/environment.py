"""What libraries are told before they are imported; a user's own environment comes first."""

import os
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# Compiled programs stay on disk between commands, up to 1 GB; `JAX_ENABLE_COMPILATION_CACHE=false` turns that off.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _PROGRAMS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aspd-jax" / "programs"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_PROGRAMS)
    if os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30)) != "-1":
        # JAX writes a program, and then when it was used. A process that is killed before the second leaves a program
        # that may be half, which JAX never writes again; and without its time JAX writes no other program either.
        with suppress(OSError):
            _names = set(os.listdir(_PROGRAMS))
            for _name in _names:
                if _name.endswith("-cache") and f"{_name.removesuffix('cache')}atime" not in _names:
                    (_PROGRAMS / _name).unlink(missing_ok=True)
