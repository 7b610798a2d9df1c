"""Memory that every rank can address: the layout of a segment, symmetric buffers, and what lies in
them.

Knows nothing of requests or kernels beyond the regions they ask for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gpuallreduce.args import GarReport
from gpuallreduce.errors import DeviceError
from gpuallreduce.plan import Region

__all__ = [
    "LINE_BYTES",
    "Mapped",
    "SharedPages",
    "RegionLayout",
    "SegmentLayout",
    "SymmetricBuffer",
    "layout_segment",
]

LINE_BYTES = 128  # kLineBytes of primitives.cuh
REPORT_BYTES = 256  # kReportBytes
PAGE_BYTES = 4096


@dataclass(frozen=True)
class RegionLayout:
    """Offsets of one kernel family's words and slots, in bytes from the start of a segment."""

    region: Region
    steps: int
    ready: int
    credit: int
    slots: int
    nlinks: int


@dataclass(frozen=True)
class SegmentLayout:
    """Where everything lies in a segment. The same on every rank; zero at birth.

    Its first ``control_bytes`` are the control block, which the host reads and writes while kernels
    run. Where it cannot reach segments the block lies elsewhere, and its place here is not used.

    Attributes:
        nranks, max_channels: what it was laid out for.
        abort: the abort word, and the claim word of the rank that reports.
        reports: one report per rank.
        departed: a word per rank: nonzero once it will touch no segment any more.
        control_bytes: bytes up to here are the control block.
        sequence, calls: the call counters and call lines.
        regions: by name.
        pad_bytes: the signal pad's share: all words before the first slot.
        nbytes: of the whole segment.
    """

    nranks: int
    max_channels: int
    abort: int
    reports: int
    departed: int
    control_bytes: int
    sequence: int
    calls: int
    regions: dict[str, RegionLayout]
    pad_bytes: int
    nbytes: int


def layout_segment(nranks: int, max_channels: int, regions: Sequence[Region]) -> SegmentLayout:
    """Lays out a segment: all words first (the signal pad), then each family's slots.

    Raises:
        ValueError: a region breaks what kernels rely on: ``step % nslots`` must survive the wrap of
            step, and a chunk rounded up to whole lines must fit its slot.
    """
    for region in regions:
        if region.nslots < 2 or region.nslots & (region.nslots - 1):
            raise ValueError(f"region {region.name}: nslots={region.nslots} is no power of two")
        if region.slot_bytes % LINE_BYTES:
            raise ValueError(
                f"region {region.name}: slot_bytes={region.slot_bytes} is no multiple of "
                f"{LINE_BYTES}"
            )
    at = 0

    def take(nbytes: int) -> int:
        nonlocal at
        start, at = at, at + nbytes
        return start

    def lines(count: int) -> int:
        return take(count * LINE_BYTES)

    abort = lines(1)
    at = REPORT_BYTES
    reports = take(nranks * REPORT_BYTES)
    departed = lines(nranks)
    at = control_bytes = -(-at // PAGE_BYTES) * PAGE_BYTES
    sequence = lines(max_channels)
    calls = lines(max_channels * 2 * nranks)
    words = []
    for region in regions:
        pairs = max_channels * region.nsets * nranks
        words.append((lines(max_channels), lines(pairs), lines(pairs)))
    at = pad_bytes = -(-at // PAGE_BYTES) * PAGE_BYTES
    laid: dict[str, RegionLayout] = {}
    for region, (steps, ready, credit) in zip(regions, words, strict=True):
        nlinks = nranks if region.per_peer else 1
        slots = take(max_channels * region.nslots * region.nsets * nlinks * region.slot_bytes)
        laid[region.name] = RegionLayout(region, steps, ready, credit, slots, nlinks)
    return SegmentLayout(
        nranks,
        max_channels,
        abort,
        reports,
        departed,
        control_bytes,
        sequence,
        calls,
        laid,
        pad_bytes,
        at,
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapped(Protocol):
    """Memory of one rank as this process sees it.

    Attributes:
        address: where it begins.
        memory: what arrays over it keep alive.
    """

    address: int
    memory: Any

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array over a part of it; it keeps the memory alive."""


class SharedPages:
    """Shared pages of this process: anonymous memory in a file without a name (memfd).

    Nothing is left behind when every process that holds it is gone, however it ended. Pages cost
    memory once touched. The C library's mmap, not Python's, which keeps a descriptor open for each.

    Attributes:
        address: where the pages begin.
        memory: a buffer over them; they are unmapped when nothing refers to it any more.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps the first bytes of a memfd; the descriptor stays the caller's.

        Raises:
            DeviceError: the system refused.
        """
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise DeviceError(
                f"mapping {nbytes} bytes of shared memory failed: "
                f"{os.strerror(ctypes.get_errno())}. Check the limit on address space (ulimit -v)"
            )
        self.address = int(address)
        self.memory = (ctypes.c_char * nbytes).from_address(self.address)
        weakref.finalize(self.memory, _libc.munmap, self.address, nbytes).atexit = False

    @staticmethod
    def create_fd(nbytes: int) -> int:
        """A new memfd of zeros; the caller owns the descriptor."""
        fd = os.memfd_create("gpuallreduce", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise DeviceError(f"shared memory of {nbytes} bytes was refused: {error}") from error
        return fd

    def array(
        self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        """An array over a part of the pages; it keeps them alive."""
        count = int(np.prod(shape, dtype=np.int64))
        buffer = memoryview(self.memory).cast("B")
        flat = np.frombuffer(buffer, np.uint8, count * dtype.itemsize, offset)
        return flat.view(dtype).reshape(shape)


@dataclass
class SymmetricBuffer:
    """The same number of bytes on every rank, all addresses known to this process.

    Attributes:
        addresses: where this process sees each rank's bytes, in rank order.
        nbytes: of one rank.
        identity: equal on all ranks, different for every buffer of a communicator.
        mappings: the memory of each rank, kept alive.
    """

    addresses: tuple[int, ...]
    nbytes: int
    identity: int
    mappings: tuple[Mapped, ...]

    def __post_init__(self) -> None:
        self.table = (ctypes.c_void_p * len(self.addresses))(*self.addresses)

    def array(self, rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """The rank's array at the start of its bytes."""
        return self.mappings[rank].array(0, shape, dtype)


class Words(Protocol):
    """Reads and writes words of segments, wherever they lie; no call may be running."""

    def read_word(self, address: int) -> int:
        """One word."""

    def write_words(self, addresses: Sequence[int], value: int) -> None:
        """The same value in all of them."""


class Segments:
    """Every rank's segment and control block with names for their words; what the host reads and
    writes there.

    Attributes:
        buffer: the segments.
        controls: the control blocks; the segments themselves where the host can reach them.
        layout: of both.
    """

    def __init__(
        self,
        buffer: SymmetricBuffer,
        controls: SymmetricBuffer,
        layout: SegmentLayout,
        words: Words,
    ) -> None:
        self.buffer = buffer
        self.controls = controls
        self.layout = layout
        self._words = words

    def word(self, rank: int, offset: int) -> int:
        """A word of a rank's segment; no call may be running."""
        return self._words.read_word(self.buffer.addresses[rank] + offset)

    def control_address(self, rank: int, offset: int) -> int:
        """Where a word of a rank's control block lies."""
        return self.controls.addresses[rank] + offset

    def control_word(self, rank: int, offset: int) -> ctypes.c_uint64:
        """A word of a rank's control block."""
        return ctypes.c_uint64.from_address(self.control_address(rank, offset))

    def report(self, owner: int, reporter: int) -> GarReport:
        """What `reporter` wrote into `owner`'s segment; its code is 0 if it did not give up."""
        offset = self.layout.reports + reporter * REPORT_BYTES
        return GarReport.from_address(self.control_address(owner, offset))

    def aborted(self, rank: int) -> bool:
        """True once some rank gave up."""
        return self.control_word(rank, self.layout.abort).value != 0

    def preset_steps(self, value: int) -> None:
        """Sets every counter and word of all ranks as if that many steps had been taken. For tests
        of the wrap.

        No call may be running, and the last must have ended on every rank.
        """
        layout = self.layout
        lines: list[tuple[int, int]] = [
            (layout.sequence, layout.max_channels),
            (layout.calls, layout.max_channels * 2 * layout.nranks),
        ]
        for region in layout.regions.values():
            pairs = layout.max_channels * region.region.nsets * layout.nranks
            lines += [
                (region.steps, layout.max_channels),
                (region.ready, pairs),
                (region.credit, pairs),
            ]
        addresses = [
            base + start + number * LINE_BYTES
            for base in self.buffer.addresses
            for start, count in lines
            for number in range(count)
        ]
        self._words.write_words(addresses, value % (1 << 64))
