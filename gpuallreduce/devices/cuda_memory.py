"""Memory of GPUs that ranks share: allocated, exported to other processes, imported from them, and
host pages that GPUs map.

Knows nothing of what the memory is for.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import numpy as np

from gpuallreduce.devices.cuda_runtime import (
    cuda_errors,
    cupy_module,
    in_any_capture,
    on_device,
)
from gpuallreduce.errors import DeviceError, NotSupported
from gpuallreduce.memory import SharedPages

__all__ = ["DeviceBlock", "HostMapped", "ImportedBlock", "collect"]

# cudaMalloc cuts small allocations out of blocks of this size, and a handle opens its whole block.
BLOCK_BYTES = 2 << 20
REGISTER_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
OPEN_WITH_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class _Owner:
    """What arrays over a block keep alive."""


class _Block:
    """Device memory at an address, and arrays over it.

    Attributes:
        ordinal: the GPU that addresses it.
        address: where it begins.
        nbytes: of the block.
        memory: what arrays keep alive.
    """

    def __init__(self, ordinal: int, address: int, nbytes: int) -> None:
        self.ordinal, self.address, self.nbytes = ordinal, address, nbytes
        self.memory: Any = _Owner()

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A CuPy array over a part of it, which keeps ``memory`` alive."""
        cupy = cupy_module()
        whole = cupy.cuda.UnownedMemory(self.address, self.nbytes, self.memory, self.ordinal)
        with on_device(self.ordinal):
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(whole, offset))


class DeviceBlock(_Block):
    """Memory of a GPU, straight from cudaMalloc so that it can be exported as it is."""

    def __init__(self, ordinal: int, nbytes: int, *, zeros: int) -> None:
        """Allocates, and waits until the first ``zeros`` bytes are zero.

        Raises:
            DeviceError: there is not enough memory.
        """
        collect()
        runtime = cupy_module().cuda.runtime
        size = max(1, -(-nbytes // BLOCK_BYTES)) * BLOCK_BYTES
        with on_device(ordinal), cuda_errors(f"allocating {size} bytes on cuda:{ordinal}"):
            address = runtime.malloc(size)
            stream = cupy_module().cuda.Stream(non_blocking=True)
            runtime.memsetAsync(address, 0, zeros, stream.ptr)
            stream.synchronize()
        super().__init__(ordinal, address, size)

    def handle(self) -> bytes:
        """What another process opens it by.

        Raises:
            DeviceError: CUDA refuses, as in some containers.
        """
        with on_device(self.ordinal), cuda_errors(f"exporting memory of cuda:{self.ordinal}"):
            return bytes(cupy_module().cuda.runtime.ipcGetMemHandle(self.address))

    def free_with_arrays(self) -> None:
        """Frees it some time after this block and the last array over it are gone; see NOTE
        freeing.
        """
        weakref.finalize(self.memory, _bury, self.ordinal, self.address).atexit = False

    def free(self) -> None:
        """Frees it; nothing may use it any more."""
        with on_device(self.ordinal), contextlib.suppress(DeviceError), cuda_errors("freeing"):
            cupy_module().cuda.runtime.free(self.address)


class ImportedBlock(_Block):
    """Memory that another process exported, as this process's GPU addresses it."""

    def __init__(self, ordinal: int, handle: bytes, nbytes: int) -> None:
        """Opens a handle.

        Raises:
            DeviceError: CUDA refuses: the GPUs cannot reach each other, or the process is gone.
        """
        with on_device(ordinal), cuda_errors(f"opening a peer's memory on cuda:{ordinal}"):
            address = cupy_module().cuda.runtime.ipcOpenMemHandle(handle, OPEN_WITH_PEER_ACCESS)
        super().__init__(ordinal, address, nbytes)

    def close(self) -> None:
        """Gives the mapping up."""
        with on_device(self.ordinal), contextlib.suppress(DeviceError), cuda_errors("closing"):
            cupy_module().cuda.runtime.ipcCloseMemHandle(self.address)


class HostMapped(_Block):
    """Shared pages of the host that every GPU of this process maps, at the host's own address."""

    def __init__(self, pages: SharedPages, ordinal: int) -> None:
        """Registers the pages with CUDA.

        Raises:
            DeviceError: CUDA refuses.
            NotSupported: GPUs see the pages at another address.
        """
        nbytes = len(pages.memory)
        super().__init__(ordinal, pages.address, nbytes)
        self.memory = pages.memory
        runtime = cupy_module().cuda.runtime
        with on_device(ordinal), cuda_errors(f"mapping {nbytes} bytes of host memory to GPUs"):
            runtime.hostRegister(self.address, nbytes, REGISTER_PORTABLE_MAPPED)
            seen = runtime.pointerGetAttributes(self.address).devicePointer
        if seen != self.address:
            self.close()
            raise NotSupported(
                "GPUs of this system see host memory at other addresses than the host does; "
                "64-bit Linux with unified addressing is needed"
            )

    def close(self) -> None:
        """Gives the mapping up; nothing may use it any more."""
        with on_device(self.ordinal), contextlib.suppress(DeviceError), cuda_errors("unmapping"):
            cupy_module().cuda.runtime.hostUnregister(self.address)


# NOTE freeing. cudaFree waits for the kernels of its GPU, and these may wait for ranks that the
# same thread has yet to launch. So nothing is freed by a finalizer, which may run anywhere: blocks
# are laid aside and freed by ``collect`` where no call is half launched.
_buried: list[tuple[int, int]] = []
_lock = threading.Lock()


def _bury(ordinal: int, address: int) -> None:
    _buried.append((ordinal, address))


def collect() -> None:
    """Frees blocks whose arrays are gone; see NOTE freeing."""
    if not _buried:
        return
    with _lock:
        blocks, _buried[:] = list(_buried), []
    for ordinal, address in blocks:
        with (
            on_device(ordinal),
            in_any_capture(),
            contextlib.suppress(DeviceError),
            cuda_errors("freeing"),
        ):
            cupy_module().cuda.runtime.free(address)
