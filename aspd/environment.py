"""Environment variables set before libraries are imported; variables of the user take precedence."""

import os
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# Compiled programs are cached on disk, up to 1 GB; `JAX_ENABLE_COMPILATION_CACHE=false` disables the cache.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _PROGRAMS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aspd-jax" / "programs"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_PROGRAMS)
    if os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30)) != "-1":
        # JAX writes a program and then a file with its access time. A process killed in between leaves a program that
        # may be incomplete and is never rewritten, and without the access time JAX adds no further programs.
        with suppress(OSError):
            _names = set(os.listdir(_PROGRAMS))
            for _name in _names:
                if _name.endswith("-cache") and f"{_name.removesuffix('cache')}atime" not in _names:
                    (_PROGRAMS / _name).unlink(missing_ok=True)
