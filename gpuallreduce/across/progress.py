"""How far a GPU has come in calls of several nodes, told by the GPU itself; and which calls it and
its neighbours make.

Knows nothing of data, nor of how messages travel.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from gpuallreduce import args
from gpuallreduce.args import GarHeader, GarNodesArgs
from gpuallreduce.devices.cuda import CudaDevice, argument, load
from gpuallreduce.devices.cuda_memory import DeviceBlock, HostMapped
from gpuallreduce.jit import Kernel
from gpuallreduce.memory import LINE_BYTES, PAGE_BYTES, SharedPages

__all__ = ["HEADER_BYTES", "Progress"]

HEADER_BYTES = ctypes.sizeof(GarHeader)
POST, CHECK, TICK = (
    Kernel(f"nodes_{name}", "nodes.cuh", name, arguments="GarNodesArgs")
    for name in ("post_call", "check_call", "tick")
)
NWORDS = 8
HALT_S = 600.0  # a process that can no longer halt anything will soon be gone with its streams
# One shape for all: a kernel is one thread.
GRID = BLOCK = (1, 1, 1)


class Progress:
    """Words that one GPU writes, and the headers of its calls.

    Attributes:
        mine: where the header of the present call lies, on the GPU.
        theirs: where those of the node before and of the one behind are to be put.
    """

    def __init__(self, device: CudaDevice, *, abort: int, before: bool, behind: bool) -> None:
        """For the one local rank of a device.

        Args:
            device: which runs the rank.
            abort: address of the word that is nonzero once a rank of the node gave up.
            before, behind: whether this rank has a neighbour on that side.
        """
        self._device = device
        self._ordinal = device.ordinals[0]
        fd = SharedPages.create_fd(PAGE_BYTES)
        try:
            self._pages = SharedPages(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self._mapped = HostMapped(self._pages, self._ordinal)
        self._headers = DeviceBlock(self._ordinal, 3 * HEADER_BYTES, zeros=3 * HEADER_BYTES)
        self.mine = self._headers.address
        self.theirs = (self.mine + HEADER_BYTES, self.mine + 2 * HEADER_BYTES)
        seen = self._pages.address + NWORDS * LINE_BYTES
        self._seen = [GarHeader.from_address(seen + i * HEADER_BYTES) for i in range(3)]
        self._args = GarNodesArgs(
            mine=self.mine,
            theirs=self.theirs[0],
            seen=seen,
            words=self._pages.address,
            abort=abort,
            limit_ns=int(HALT_S * 1e9),
            neighbours=int(before) | int(behind) << 1,
        )
        for kernel in (POST, CHECK, TICK):
            load(kernel, self._ordinal)

    def post(self, header: GarHeader, stream: Any) -> None:
        """Enqueues the begin of a call: afterwards ``mine`` is its header.

        Args:
            header: of the call; the GPU numbers it.
            stream: of the call.
        """
        self._args.header = header
        self._launch(POST, stream)

    def check(self, stream: Any) -> None:
        """Enqueues the comparison of ``mine`` with ``theirs``. If they differ, nothing behind it
        runs until ``halt``.
        """
        self._launch(CHECK, stream)

    def tick(self, word: int, stream: Any) -> None:
        """Enqueues a step of one of the words. Once a rank of the node has given up, nothing
        behind it runs until ``halt``.
        """
        self._args.word = word
        self._launch(TICK, stream)

    def stop(self) -> None:
        """To be called before messages are ended: nothing behind the GPU's next step runs until
        ``halt``.
        """
        self._device.store_release(self._pages.address + args.NODES_HALTED * LINE_BYTES, 1)

    def halt(self) -> None:
        """Lets the GPU go on once no message can be sent any more; see NOTE halts in nodes.cuh."""
        self._device.store_release(self._pages.address + args.NODES_HALTED * LINE_BYTES, 2)

    def state(self) -> tuple[int, ...]:
        """Calls begun and met, chunks folded and gathered, calls ended."""
        return tuple(self._word(number) for number in range(args.NODES_DIFFERS))

    def waiting(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._word(args.NODES_ENDED) != self._word(args.NODES_BEGUN)

    def meeting(self) -> bool:
        """Whether the GPU waits for all ranks of the job to come."""
        return self._word(args.NODES_MEETING) % 2 == 1

    def differing(self) -> tuple[int, GarHeader, GarHeader] | None:
        """The neighbour whose call differs, 0 before and 1 behind, this rank's header and its; once
        seen.
        """
        number = self._word(args.NODES_DIFFERS)
        return (number - 1, self._seen[2], self._seen[number - 1]) if number else None

    def close(self) -> None:
        """Gives the memory back; no call may be running."""
        self._headers.free()
        self._mapped.close()

    def _word(self, number: int) -> int:
        return self._device.load_acquire(self._pages.address + number * LINE_BYTES)

    def _launch(self, kernel: Kernel, stream: Any) -> None:
        load(kernel, self._ordinal)(GRID, BLOCK, (argument(self._args),), stream=stream)
