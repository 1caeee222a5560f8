"""Systems: accelerator, node, scale-up domain and scale-out fabric, read from TOML files with a source for each figure.

`load("h100-sxm")` reads a file of this package, `load("mine.toml")` the user's own, which may say
`like = "h100-sxm"` and give only what differs. Files are in TFLOP/s, GB/s (1e9) and microseconds, as the
names of the keys say; the dataclasses are in FLOP/s, bytes/s and seconds. docs/systems.md says how to write one.

Torch-free.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from timetrial import cachedir
from timetrial.errors import UserError
from timetrial.systems import files
from timetrial.systems.ranges import nearest

FORMATS = ("fp32", "tf32", "bf16", "fp8", "fp6", "fp4")
GENERATIONS = ("hopper", "blackwell", "blackwell-ultra", "ada", "cdna3", "cdna4", "cpu")
SCALE_UP_KINDS = ("nvlink", "xgmi", "pcie", "memory", "none")
VENDORS = ("nvidia", "amd", "instinct")
"""What a published name of an accelerator may begin with, and need not."""
LOCAL = "local"
"""The name of the machine that this runs on, once it is calibrated."""
SCALE_OUT_KINDS = ("infiniband", "ethernet", "none")


@dataclass(frozen=True)
class Accelerator:
    """One GPU or CPU, as a framework sees one device."""

    name: str
    generation: str
    """One of GENERATIONS."""
    peak_flops: Mapping[str, float]
    """Format (of FORMATS) -> dense matrix products, FLOP/s. A format that the hardware lacks is absent."""
    memory_bytes: int
    """What the driver reports as the device's memory, bytes."""
    memory_bytes_per_s: float
    """Peak of the data sheet, bytes/s."""
    sms: int
    """Streaming multiprocessors (AMD: compute units; CPU: cores)."""
    tdp_w: float
    """Thermal design power, watts."""

    @property
    def vendor(self) -> str:
        """nvidia, amd or cpu: whose software stacks run on it."""
        return {"cdna3": "amd", "cdna4": "amd", "cpu": "cpu"}.get(self.generation, "nvidia")


@dataclass(frozen=True)
class Node:
    """One operating system's machine."""

    accelerators: int
    """8, or 4 for the compute trays of NVL72 racks."""


@dataclass(frozen=True)
class ScaleUp:
    """The fabric of NVLink, xGMI or PCIe that a group of accelerators shares."""

    domain: int
    """Accelerators in one domain; may be several nodes (NVL72) or part of one (NVL bridges)."""
    bytes_per_s: float
    """Per accelerator, one direction, to all its peers together, bytes/s."""
    peer_bytes_per_s: float
    """Per accelerator, one direction, to one peer, bytes/s: less than `bytes_per_s` in a mesh without switches."""
    latency_s: float
    """One step of a ring, seconds."""
    in_switch_reduction: bool
    """The switches add up (NVLink SHARP)."""
    kind: str
    """One of SCALE_UP_KINDS."""


@dataclass(frozen=True)
class ScaleOut:
    """The network between nodes or domains. All zero where kind is "none"."""

    bytes_per_s: float
    """Per accelerator, one direction, bytes/s."""
    latency_s: float
    """One step of a ring, seconds."""
    kind: str
    """One of SCALE_OUT_KINDS."""
    rails: int
    """Network adapters of a node, each on its own rail."""


@dataclass(frozen=True)
class Host:
    """The processor that feeds the accelerators."""

    launch_s: float
    """One kernel launched by the framework's eager code, seconds."""


@dataclass(frozen=True)
class Power:
    """Measured power."""

    average_w: float
    """Average over a training run of one accelerator with its share of the node, watts."""
    basis: str
    """What was measured."""


@dataclass(frozen=True)
class System:
    """One kind of machine."""

    name: str
    title: str
    aliases: tuple[str, ...]
    """Names under which results are published, for `find`."""
    accelerator: Accelerator
    node: Node
    scale_up: ScaleUp
    scale_out: ScaleOut
    host: Host
    power: Power | None
    """None where nobody has published it."""
    rates: str
    """Whose measured kernels hold: a name that `rates.py` knows, or the path of a file of measured points."""
    sources: Mapping[str, str]
    """Dotted name of each figure, as in the file ("scale_up.gb_per_s") -> where it comes from."""
    assumed: frozenset[str]
    """Figures that nobody has published."""


def names() -> list[str]:
    """Systems that come with the package, sorted."""
    return files.names()


def load(name_or_path: str | Path) -> System:
    """A system of the package by its name, "local" of the last calibration, or one from a TOML file.

    Raises UserError on an unknown name, an unreadable file, and a figure that is missing, misspelt, out of range or
    without a source, with the figure's name and the allowed range.
    """
    text = str(name_or_path)
    if text == LOCAL and not local_path().exists():
        raise UserError("this machine has not been measured yet; run `timetrial calibrate`")
    if text != LOCAL and not text.endswith(".toml"):
        return _bundled(text)
    path = local_path() if text == LOCAL else Path(text)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"system file {text} cannot be read: {error.strerror}") from None
    figures = files.parse(content, text)
    if str(figures.get("rates", "")).endswith(".json"):
        figures["rates"] = str(path.parent / figures["rates"])
    return _build(figures, text)


def named(name: str) -> System:
    """A system by its own name, by its file, or by a name under which results are published. Raises UserError."""
    known = (LOCAL, *names())
    return load(name) if name in known or name.endswith(".toml") else find(name)


def local_path() -> Path:
    """Where a calibration writes the system "local"."""
    return cachedir.root() / "systems" / f"{LOCAL}.toml"


def find(accelerator: str) -> System:
    """The system whose accelerator is published under this name ("NVIDIA H100-SXM5-80GB", "DGX-B200").

    Case, spaces, punctuation and the vendor's name before it do not count. Raises UserError, with the nearest name,
    where no system has the name.
    """
    key, known = _key(accelerator), _by_alias()
    found = known.get(key) or known.get(re.sub(f"^(?:{'|'.join(VENDORS)})+", "", key))
    if found is None:
        begin = [name for name in names() if key and _key(name).startswith(key)]
        hint = f" (did you mean {' or '.join(begin)}?)" if begin else nearest(accelerator.lower(), names())
        raise UserError(
            f"no system for the accelerator {accelerator!r}{hint}; there are {', '.join(names())}, or give a path that "
            "ends in .toml"
        )
    return _bundled(found)


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@lru_cache(maxsize=1)
def _by_alias() -> dict[str, str]:
    table: dict[str, str] = {}
    for name in names():
        for alias in (name, *_bundled(name).aliases):
            if table.setdefault(_key(alias), name) != name:
                raise ValueError(f"alias {alias!r} belongs to {table[_key(alias)]} and {name}")
    return table


@lru_cache(maxsize=64)
def _bundled(name: str) -> System:
    if name not in names():
        hint = nearest(name, names())
        raise UserError(
            f"unknown system {name!r}{hint}; there are {', '.join(names())}, or give a path that ends in .toml"
        )
    return _build(files.bundled(name), f"{name}.toml")


def _build(figures: dict[str, Any], where: str) -> System:
    read = files.Reader(figures, where)
    scale_out_kind = read.choice("scale_out.kind", SCALE_OUT_KINDS)
    fabric = scale_out_kind != "none"
    domain = int(read.number("scale_up.domain"))
    per_node = int(read.number("node.accelerators"))
    if domain % per_node and per_node % domain:
        raise UserError(
            f"system file {where}: scale_up.domain is {domain} and node.accelerators {per_node}; one must be a multiple"
            " of the other"
        )
    up = read.number("scale_up.gb_per_s") * 1e9
    peer = read.number("scale_up.peer_gb_per_s", default=up / 1e9) * 1e9
    if peer > up:
        raise UserError(f"system file {where}: scale_up.peer_gb_per_s is above scale_up.gb_per_s, which is all peers")
    power = None
    if "power.average_w" in figures:
        power = Power(read.number("power.average_w"), read.text("power.basis"))
    sources: dict[str, str] = figures["sources"]
    return System(
        name=read.text("name"),
        title=read.text("title"),
        aliases=read.texts("aliases"),
        accelerator=_accelerator(read),
        node=Node(per_node),
        scale_up=ScaleUp(
            domain=domain,
            bytes_per_s=up,
            peer_bytes_per_s=peer,
            latency_s=read.number("scale_up.latency_us") / 1e6,
            in_switch_reduction=read.flag("scale_up.in_switch_reduction"),
            kind=read.choice("scale_up.kind", SCALE_UP_KINDS),
        ),
        scale_out=ScaleOut(
            bytes_per_s=read.number("scale_out.gb_per_s") * 1e9 if fabric else 0.0,
            latency_s=read.number("scale_out.latency_us") / 1e6 if fabric else 0.0,
            kind=scale_out_kind,
            rails=int(read.number("scale_out.rails")) if fabric else 0,
        ),
        host=Host(read.number("host.launch_us") / 1e6),
        power=power,
        rates=read.text("rates"),
        sources=sources,
        assumed=frozenset(name for name, text in sources.items() if text.rstrip(" .").endswith("assumed")),
    )


def _accelerator(read: files.Reader) -> Accelerator:
    where, figures = read.where, read.figures
    peaks = {}
    for fmt in FORMATS:
        name = f"accelerator.peak_tflops.{fmt}"
        if name in figures or fmt in ("fp32", "bf16"):
            peaks[fmt] = read.number(name) * 1e12
    generation = read.choice("accelerator.generation", GENERATIONS)
    ladder = [fmt for fmt in ("tf32", "bf16", "fp8", "fp4") if fmt in peaks]
    for wide, narrow in itertools.pairwise(ladder):
        if generation != "cpu" and peaks[narrow] < peaks[wide]:
            raise UserError(
                f"system file {where}: accelerator.peak_tflops.{narrow} is below {wide}; give dense rates of both"
            )
    sizes = [name for name in ("accelerator.memory_gb", "accelerator.memory_gib") if name in figures]
    if len(sizes) != 1:
        problem = "twice" if sizes else "missing"
        raise UserError(
            f"system file {where}: memory is {problem}; give accelerator.memory_gib or accelerator.memory_gb"
        )
    unit = 1e9 if sizes[0].endswith("_gb") else 2.0**30
    return Accelerator(
        name=read.text("accelerator.name"),
        generation=generation,
        peak_flops=peaks,
        memory_bytes=round(read.number(sizes[0]) * unit),
        memory_bytes_per_s=read.number("accelerator.memory_gb_per_s") * 1e9,
        sms=int(read.number("accelerator.sms")),
        tdp_w=read.number("accelerator.tdp_w"),
    )
