"""Target accelerators by name: limits of a chip, and devices to compile for, which need not be present."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from math import prod
from typing import Any

import jax
from jax.experimental import topologies

from aspd_jax.errors import ConfigError


@dataclass(frozen=True)
class Chip:
    """Limits of one device, from the vendor's data sheet.

    Attributes:
        platform: `tpu` or `cuda`.
        memory: bytes of HBM.
        bandwidth: HBM bandwidth in bytes per second.
        flops: peak of dense bfloat16 products in FLOP/s.
        axes: number of sizes in the name of a topology.
    """

    platform: str
    memory: float
    bandwidth: float
    flops: float
    axes: int


GIB = 2.0**30
CHIPS = {
    "v5e": Chip("tpu", 16 * GIB, 819e9, 197e12, 2),
    "v5p": Chip("tpu", 95 * GIB, 2765e9, 459e12, 3),
    "v6e": Chip("tpu", 32 * GIB, 1640e9, 918e12, 2),
    "tpu7x": Chip("tpu", 96 * GIB, 3690e9, 1153e12, 3),  # one of the two devices of a chip
    "h100": Chip("cuda", 80 * GIB, 3350e9, 989e12, 3),
}
ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # libtpu requires a value; compilation ignores it
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
NAMES = "v5e:2x4, v6e:1x1, v5p:2x2x2, tpu7x:2x2x1 or h100:1x1x8"
PACKAGES = {
    "tpu": ("libtpu", "libtpu"),
    "cuda": ("jax_plugins.xla_cuda12", "--no-deps jax-cuda12-plugin jax-cuda12-pjrt"),
}


@dataclass(frozen=True)
class Topology:
    """Devices of one kind to compile for."""

    name: str
    chip: Chip
    devices: tuple[Any, ...]


def open_topology(name: str) -> Topology:
    """Return the devices of a topology such as `v6e:2x4`, or `h100:1x1x8` for 8 GPUs of one host.

    The process uses the CPU from then on, because compilation needs none of the target devices.

    Raises:
        ConfigError: the name is unknown, or a package is not installed.
    """
    kind, _, sizes = name.partition(":")
    chip = CHIPS.get(kind)
    if chip is None or not re.fullmatch("x".join([r"[1-9]\d*"] * chip.axes), sizes):
        raise ConfigError(f"unknown topology {name!r}; expected a name such as {NAMES}")
    module, package = PACKAGES[chip.platform]
    if not _installed(module):
        raise ConfigError(
            f"--topology: expected the compiler of {kind}, got none. "
            f"Run: pip install {package} (requirements-accelerators.txt)"
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # these programs are analysed once and never run
    options: dict[str, Any] = {}
    if chip.platform == "cuda":
        options = {"target_config": files(__package__).joinpath("h100.txtpb").read_text(), "topology": sizes}
    else:
        # Without a TPU, libtpu would query the network for one. Nothing runs, so multiple loads of libtpu are safe.
        for variable, value in ALONE.items():
            os.environ.setdefault(variable, value)
        options = {"topology_name": name}
        if prod(map(int, sizes.split("x"))) < 4:
            options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        described = topologies.get_topology_desc(platform=chip.platform, **options)
    except Exception as error:  # XLA raises no specific type
        reason = str(error).splitlines()[0]
        raise ConfigError(f"topology {name!r}: {reason}; expected a name such as {NAMES}") from None
    return Topology(name, chip, tuple(described.devices))


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
