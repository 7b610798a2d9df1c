"""The symmetric buffers of a communicator: what lies where in them, and when their life ends.

Knows nothing of calls; it answers where peers find the same place in their own buffers.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuallreduce.memory import SymmetricBuffer

__all__ = ["AddressTable", "Place", "SymmetricBuffers", "address_table"]

AddressTable = ctypes.Array[ctypes.c_void_p]


def address_table(addresses: Sequence[int]) -> AddressTable:
    """Addresses by rank, as kernels read them."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


@dataclass(frozen=True)
class Place:
    """An address as all ranks can say it: which buffer, and how far in."""

    buffer: SymmetricBuffer
    offset: int

    def table(self) -> AddressTable:
        """The same place on every rank, as addressed from this process."""
        return address_table([base + self.offset for base in self.buffer.addresses])


class SymmetricBuffers:
    """The buffers of a process with one rank. A buffer lives as long as an array over it."""

    def __init__(self) -> None:
        self._by_address: dict[int, SymmetricBuffer] = {}

    def add(self, buffer: SymmetricBuffer, rank: int, *, gone: Callable[[int], None]) -> None:
        """Takes charge of a buffer whose local pages the caller has handed out as an array.

        Args:
            buffer: the buffer.
            rank: the local rank.
            gone: told where the buffer began when its last array is gone.
        """
        begin = buffer.addresses[rank]
        mine = buffer.mappings[rank].memory
        # The caller's arrays own this rank's pages; when the last is gone, so are the peers'.
        buffer.mappings = tuple(pages for i, pages in enumerate(buffer.mappings) if i != rank)
        self._by_address[begin] = buffer
        weakref.finalize(mine, self._end, begin, gone)

    def _end(self, begin: int, gone: Callable[[int], None]) -> None:
        self._by_address.pop(begin, None)
        gone(begin)

    def find(self, address: int) -> Place | None:
        """Where an address lies, if it lies in a buffer."""
        for begin, buffer in list(self._by_address.items()):  # another thread may drop arrays
            if begin <= address < begin + max(buffer.nbytes, 1):
                return Place(buffer, address - begin)
        return None

    def clear(self) -> None:
        """Forgets all buffers; arrays over them stay usable."""
        self._by_address.clear()
