"""A call before it runs: what was asked (Request), what was decided (Config) and what will happen
(Plan).

Pure data and arithmetic: knows nothing of memory, devices or processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpuallreduce.args import GarHeader
from gpuallreduce.jit import Kernel
from gpuallreduce.types import DTYPES, OPS, Dtype, Op

__all__ = [
    "ACCESSES",
    "COLLECTIVES",
    "ORDERS",
    "Config",
    "Plan",
    "Region",
    "Request",
    "Shards",
    "decode_header",
    "shard_range",
]

COLLECTIVES = (
    *("allreduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"),
    *("shard_reduce", "shard_gather"),  # of one node's ranks, as parts of a call of several nodes
)
ORDERS = ("rank", "any")
ACCESSES = ("staged", "direct", "engine")
LINE_BYTES = 128  # kLineBytes of primitives.cuh
_SHARD_BITS = 11  # of a shard count and of a rank count in a header


@dataclass(frozen=True)
class Shards:
    """How one node's ranks share a call of several nodes.

    Attributes:
        count: shards of the array; shard s belongs to rank s of every node.
        seeded: shards are folded onto what the nodes before have folded.
        rounded: this node is the last to fold: it finishes and rounds.
        fold_ranks: ranks of all nodes together.
    """

    count: int
    seeded: bool = False
    rounded: bool = True
    fold_ranks: int = 0

    @property
    def code(self) -> int:
        """What of it a call header holds; of large numbers the last digits tell them apart."""
        mask = (1 << _SHARD_BITS) - 1
        code = (self.count & mask) << _SHARD_BITS | self.fold_ranks & mask
        return code << 2 | int(self.seeded) << 1 | int(self.rounded)


def shard_range(count: int, owner: int, nshards: int, itemsize: int) -> tuple[int, int]:
    """First element and number of elements of a shard, as the kernels cut an array.

    Shards are whole cache lines. So it does not matter whether a kernel counts complex elements or
    twice as many parts: the shards are the same bytes.

    Args:
        count: elements of the array.
        owner: the shard.
        nshards: shards of the array.
        itemsize: bytes of an element, a power of two.
    """
    grain = max(1, LINE_BYTES // itemsize)
    longest = (count + nshards - 1) // nshards
    each = (longest + grain - 1) // grain * grain
    first = min(owner * each, count)
    return first, min(each, count - first)


@dataclass(frozen=True)
class Request:
    """What every rank asks for in a call.

    Attributes:
        collective: one of COLLECTIVES.
        dtype: element type.
        op: operator; ``sum`` where the collective has none.
        count: elements; for reduce_scatter and all_gather of one rank's block.
        nranks: ranks of the communicator.
        order: ``rank`` (the numeric contract) or ``any``.
        direct: True if every rank's arrays can be addressed by all ranks.
        in_place: True if the output is the input.
        root: for broadcast and reduce.
        shards: for shard_reduce and shard_gather.
    """

    collective: str
    dtype: Dtype
    op: Op
    count: int
    nranks: int
    order: str = "rank"
    direct: bool = False
    in_place: bool = True
    root: int = 0
    shards: Shards | None = None

    @property
    def reduces(self) -> bool:
        """Whether elements are combined, or only moved."""
        return self.collective in ("allreduce", "reduce", "reduce_scatter", "shard_reduce")

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's array (of one block for reduce_scatter and all_gather)."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Config:
    """What the tuner decided; every field can be forced by a keyword of the call.

    Attributes:
        algorithm: name of an algorithm.
        access: ``staged`` (through slots), ``direct`` (peers touch the arrays themselves), or
            ``engine`` (another library moves the data; the kernel is where ranks meet).
        chunk_count: elements of one chunk.
        nchannels: blocks per rank, each with its own slots and words.
        streaming: store the output past the caches.
        push: slots lie with the receiver.
        nthreads: threads of a block; host blocks have one.
        depth: chunks that are under way between nodes at once, at most.
    """

    algorithm: str
    access: str
    chunk_count: int
    nchannels: int = 1
    streaming: bool = False
    push: bool = False
    nthreads: int = 1
    depth: int = 0


@dataclass(frozen=True)
class Region:
    """The slots and words of one kernel family in every rank's segment.

    Attributes:
        name: kernel family; families never share slots.
        nsets: sets of slots (2 where data go out and come back).
        nslots: slots of a set, a power of two.
        slot_bytes: capacity of a slot.
        per_peer: one slot for every peer side by side, else one.
        partials: slots hold accumulators, which may be wider than elements.
    """

    name: str
    nsets: int
    nslots: int
    slot_bytes: int
    per_peer: bool
    partials: bool = False


@dataclass(frozen=True)
class Plan:
    """What a call does.

    Attributes:
        request: what was asked.
        config: what was decided.
        kernel: the kernel that runs on every rank.
        region: where its slots lie.
        order: order of the fold (``rank``, or the algorithm's).
        bytes_within: bytes that one rank sends to ranks of its node (the largest over the ranks).
        bytes_between: bytes that one rank sends to other nodes (the largest over the ranks).
        transport: how ranks address each other's memory.
        items: kernel elements in one array element (see types.Reduction).
        costs: for every algorithm its estimated time in us, or why it cannot serve.
    """

    request: Request
    config: Config
    kernel: Kernel
    region: Region
    order: str
    bytes_within: int
    transport: str
    bytes_between: int = 0
    items: int = 1
    costs: dict[str, float | str] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        """Bytes that one rank sends to its peers."""
        return self.bytes_within + self.bytes_between

    def describe(self) -> str:
        """A few lines for people: what runs, in which order it sums, what it moves, and why it was
        chosen.
        """
        request, config = self.request, self.config
        what = request.collective
        if request.reduces:
            what += f" {request.op.name}"
        if request.shards is not None:
            what += f" in {request.shards.count} shards"
        sends = f"{self.bytes_sent} bytes a rank"
        if self.bytes_between:
            sends = (
                f"{self.bytes_within} bytes a rank inside its node and {self.bytes_between} "
                "between nodes,"
            )
        lines = [
            f"{what} of {request.count} x {request.dtype.name} on {request.nranks} ranks "
            f"({request.nbytes} bytes, {'in place' if request.in_place else 'out of place'})",
            f"  algorithm  {config.algorithm}, {config.access}, kernel {self.kernel.symbol}",
            f"  order      {self.order}",
            f"  channels   {config.nchannels}, chunks of {config.chunk_count} elements "
            f"({config.chunk_count * request.dtype.itemsize} bytes)",
            f"  sends      {sends} over {self.transport}",
        ]
        if config.depth:
            lines.append(f"  depth      {config.depth} chunks between nodes at once")
        if config.streaming:
            lines.append("  stores     past the caches")
        for name, cost in self.costs.items():
            mark = "*" if name == config.algorithm else " "
            text = cost if isinstance(cost, str) else f"{cost:.2f} us estimated"
            lines.append(f"  {mark} {name:<12} {text}")
        return "\n".join(lines)

    @property
    def kernel_count(self) -> int:
        """Elements as the kernel counts them; none where an engine moves the data."""
        return 0 if self.config.access == "engine" else self.request.count * self.items

    @property
    def kernel_chunk_count(self) -> int:
        """Elements of a chunk as the kernel counts them."""
        return self.config.chunk_count * self.items

    def header(self, algorithm_code: int) -> GarHeader:
        """What every rank's kernel compares with its peers'.

        The kernel fills in the sequence number, and every call the detail: memory layout, offsets
        in symmetric buffers, fused parts.

        Args:
            algorithm_code: position of the algorithm in BY_NAME.
        """
        request, config = self.request, self.config
        signature = 0
        for value, bits in (
            (COLLECTIVES.index(request.collective), 8),
            (request.dtype.code, 8),
            (request.op.code, 8),
            (ORDERS.index(request.order), 4),
            (algorithm_code, 8),
            (ACCESSES.index(config.access), 4),
            (request.shards.code if request.shards else request.root, 24),
        ):
            signature = signature << bits | value
        geometry = config.chunk_count << 16 | int(config.push) << 15 | config.nchannels
        return GarHeader(0, request.count, signature, geometry, 0)


def decode_header(header: GarHeader, algorithms: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a header by name, for messages."""
    signature = header.signature
    fields: dict[str, Any] = {}
    for name, bits, names in (
        ("root", 24, None),
        ("access", 4, ACCESSES),
        ("algorithm", 8, algorithms),
        ("order", 4, ORDERS),
        ("op", 8, tuple(OPS)),
        ("dtype", 8, tuple(DTYPES)),
        ("collective", 8, COLLECTIVES),
    ):
        value = signature & ((1 << bits) - 1)
        signature >>= bits
        fields[name] = names[value] if names and value < len(names) else value
    decoded = {
        "sequence": header.sequence,
        "collective": fields.pop("collective"),
        "count": header.count,
    }
    decoded.update(reversed(list(fields.items())))
    if str(decoded["collective"]).startswith("shard_"):
        code, mask = decoded.pop("root"), (1 << _SHARD_BITS) - 1
        decoded["nshards"], decoded["fold_ranks"] = code >> 2 + _SHARD_BITS, code >> 2 & mask
        decoded["seeded"], decoded["rounded"] = bool(code & 2), bool(code & 1)
    decoded["chunk_count"], decoded["nchannels"] = header.geometry >> 16, header.geometry & 0x7FFF
    decoded["arrangement"] = f"{header.detail:#x}"
    return decoded
