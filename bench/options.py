"""What a benchmark is asked to do, checked before anything runs.

Knows nothing of the command line, communicators, processes or time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuallreduce.errors import InvalidArgument
from gpuallreduce.locals import check_devices
from gpuallreduce.types import DTYPES, OPS, dtype_of

__all__ = [
    "DEVICE_KINDS",
    "PEERS",
    "Options",
    "dtype_label",
    "parse_bytes",
    "parse_devices",
    "parse_dtypes",
    "parse_ops",
    "parse_peers",
    "sizes",
]

# nccl-tests' names of types, and ours.
NCCL_DTYPES = {
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bfloat16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_LABELS = {ours: theirs for theirs, ours in NCCL_DTYPES.items()}
PEERS = ("mpi", "nccl")
DEVICE_KINDS = ("host", "cuda")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Options:
    """One benchmark.

    Attributes:
        min_bytes, max_bytes: first and last size of one rank's array.
        step_factor, step_bytes: how sizes grow; one of them is None.
        iterations: least number of calls in one timed round (nccl-tests' iters).
        warmup: untimed calls before each row.
        checks: how often results are checked per row and mode; 0: not.
        ops, dtypes: names; several only from ``all``.
        device: kind of devices; ``devices`` may say more.
        devices: a device for each rank; empty: not said.
        ranks: ranks of one process; None: not said.
        processes: ranks in a process each; None: not said.
        nodes: ranks of each node of a job on this machine, in a process each; empty: not said.
        json_path, plot_path: files to write.
        timeout_s: seconds that one wait of a call may last; None: the communicator's own limit.
        algorithm, order: forced choices; None: the tuner's and the default.
        symmetric: arrays from ``comm.empty`` instead of ordinary ones.
        peers: libraries to compare with.
        rounds: timed rounds per row; the table has their medians.
        round_ms: a round goes on for at least about this long.
        latency: print latency columns; on CUDA devices they are always there.
        graph_launches: nccl-tests' -G: calls are captured as CUDA graphs of ``iterations`` calls,
            and a round launches a multiple of this many graphs; 0: no graphs.
    """

    min_bytes: int = 32 << 20
    max_bytes: int = 32 << 20
    step_factor: int | None = None
    step_bytes: int | None = None
    iterations: int = 20
    warmup: int = 5
    checks: int = 1
    ops: tuple[str, ...] = ("sum",)
    dtypes: tuple[str, ...] = ("float32",)
    device: str = "host"
    devices: tuple[str, ...] = ()
    ranks: int | None = None
    processes: int | None = None
    nodes: tuple[int, ...] = ()
    json_path: str | None = None
    plot_path: str | None = None
    timeout_s: float | None = None
    algorithm: str | None = None
    order: str | None = None
    symmetric: bool = False
    peers: tuple[str, ...] = ()
    rounds: int = 5
    round_ms: float = 5.0
    latency: bool = False
    graph_launches: int = 0

    def __post_init__(self) -> None:
        """Checks what single options cannot know of each other.

        Raises:
            InvalidArgument: the options contradict each other; says which.
        """
        self._check_places()
        if self.min_bytes > self.max_bytes:
            raise InvalidArgument(
                f"-b {self.min_bytes} is larger than -e {self.max_bytes}: give -e at least "
                "that (both are 32M unless given)"
            )
        if self.step_factor is not None and self.step_bytes is not None:
            raise InvalidArgument("-f and -i were both given: sizes grow by a factor or by a step")
        if self.step_factor is not None and self.min_bytes == 0 < self.max_bytes:
            raise InvalidArgument("-b 0 never grows by a factor: start at 1 or more, or use -i")
        if self.plot_path is not None and not self.plot_path.endswith(".png"):
            raise InvalidArgument(f"--plot {self.plot_path}: the file's name must end in .png")

    def _check_places(self) -> None:
        """Checks what says where ranks live, and what only some kinds of devices can do."""
        if self.devices:
            kind, given = self.kind, f"--devices {','.join(self.devices)}"
            if self.device not in (kind, "host"):
                raise InvalidArgument(f"{given} with --device {self.device}: leave --device out")
            if self.ranks is not None:
                raise InvalidArgument(f"{given} has a device for each rank: leave -g out")
            if self.processes not in (None, len(self.devices)):
                raise InvalidArgument(
                    f"{given} has {len(self.devices)} devices for --processes {self.processes}: "
                    "give one for each process"
                )
        self._check_nodes()
        if self.graph_launches and self.kind == "host":
            raise InvalidArgument(
                f"-G {self.graph_launches}: host devices have no CUDA graphs; leave -G out, or use "
                "--device cuda"
            )
        if "nccl" in self.peers and self.kind == "host":
            raise InvalidArgument("--peer nccl reduces GPU memory: use it with --device cuda")
        if self.needs_mpi and self.kind != "host":
            raise InvalidArgument("--peer mpi is measured on host devices; GPUs have --peer nccl")
        if self.ranks is not None and (self.processes is not None or self.needs_mpi):
            asked = "--processes" if self.processes is not None else "--peer mpi"
            raise InvalidArgument(
                f"-g {self.ranks} with {asked}: -g counts ranks of one process, and {asked} gives "
                "each rank a process of its own; use --processes N alone"
            )

    def _check_nodes(self) -> None:
        """Checks what else says how many ranks there are."""
        if not self.nodes:
            return
        given, total = f"--nodes {','.join(map(str, self.nodes))}", sum(self.nodes)
        if self.ranks is not None:
            raise InvalidArgument(f"{given} says how many ranks there are: leave -g out")
        if self.processes not in (None, total):
            raise InvalidArgument(
                f"{given} has {total} ranks, one process each: leave --processes out"
            )
        if self.devices and len(self.devices) != total:
            raise InvalidArgument(
                f"--devices has {len(self.devices)} devices, and {given} has {total} ranks: give "
                "one for each"
            )

    @property
    def kind(self) -> str:
        """The kind of devices."""
        return self.devices[0].partition(":")[0] if self.devices else self.device

    @property
    def needs_mpi(self) -> bool:
        """Whether MPI takes part: its launcher then starts the processes."""
        return "mpi" in self.peers

    @property
    def shows_latency(self) -> bool:
        """Whether the table has latency columns. On GPUs people misread one time as the other."""
        return self.latency or self.kind == "cuda"

    @property
    def wants_latency(self) -> bool:
        """Whether anything shows latency: it costs time to measure."""
        return self.shows_latency or self.json_path is not None or self.plot_path is not None

    @property
    def wants_memory_limits(self) -> bool:
        """Whether results are to be seen against what the machine's memory can do."""
        return self.kind == "host" and (self.symmetric or bool(self.peers))


def sizes(options: Options) -> list[int]:
    """Sizes in bytes from the first to the last, as nccl-tests steps through them."""
    result, nbytes = [], options.min_bytes
    step = (1 << 20) if options.step_bytes is None else options.step_bytes
    while nbytes <= options.max_bytes:
        result.append(nbytes)
        nbytes = nbytes * options.step_factor if options.step_factor else nbytes + step
        if nbytes == 0:
            break
    return result


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 8, 512K or 1.5G; K, M, G and T are powers of 1024.

    Raises:
        InvalidArgument: it is no such size, or not a whole number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise InvalidArgument(
            f"expected bytes such as 8, 512K, 128M or 1G (powers of 1024), found {text!r}"
        )
    whole, _, fraction = match[1].partition(".")
    divisor: int = 10 ** len(fraction)
    nbytes, rest = divmod(int(whole + fraction) * _UNITS[match[2].upper()], divisor)
    if rest:
        raise InvalidArgument(f"{text!r} is not a whole number of bytes")
    return nbytes


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Our names for a type of nccl-tests, a type of ours, or ``all``."""
    if text == "all":
        return tuple(DTYPES)
    name = NCCL_DTYPES.get(text, text)
    if name not in DTYPES:
        known = ", ".join(dict.fromkeys([*NCCL_DTYPES, *DTYPES]))
        raise InvalidArgument(f"type {text!r} does not exist; there are {known}, all")
    return (dtype_of(name).name,)


def dtype_label(name: str) -> str:
    """nccl-tests' name where it has one, else ours."""
    return _LABELS.get(name, name)


def parse_devices(text: str) -> tuple[str, ...]:
    """Devices such as cuda:0,cuda:1: one for each rank."""
    return tuple(check_devices(text.split(",")))


def parse_peers(text: str) -> tuple[str, ...]:
    """A peer's name."""
    if text not in PEERS:
        raise InvalidArgument(f"peer {text!r} does not exist; there is {', '.join(PEERS)}")
    return (text,)


def parse_ops(text: str) -> tuple[str, ...]:
    """An operator's name, or ``all`` of them."""
    if text == "all":
        return tuple(OPS)
    if text not in OPS:
        raise InvalidArgument(f"operator {text!r} does not exist; there are {', '.join(OPS)}, all")
    return (text,)
