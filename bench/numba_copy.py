"""The copy kernel of the bandwidth tests once more, by numba-cuda: an independent instrument.

Knows nothing of our kernels or their compiler: if both give the same figure, it is the link's.
Another compiler, another launch path, the same 16-byte accesses. It runs on GPUs only: emulated
GPUs run no PTX, so tests on machines without a GPU compile it and no more.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gpuallreduce.errors import NotSupported

__all__ = ["NumbaCopy", "check_numba", "compiled_ptx"]

PACK_BYTES = 16
IN_FLIGHT = 8  # packs that a thread loads before it stores the first
GLOBAL = 1  # address space


def _numba_cuda() -> Any:
    try:
        from numba import cuda
    except ImportError as error:
        raise NotSupported(
            f"--instrument numba needs numba-cuda, and it cannot be imported ({error}): "
            "pip install 'numba-cuda[cu13]' (or [cu12])"
        ) from None
    return cuda


def check_numba() -> None:
    """Fails before anything is measured.

    Raises:
        NotSupported: numba-cuda is not installed; says how to.
    """
    _numba_cuda()


@functools.cache
def _accesses() -> tuple[Any, Any]:
    """16-byte load and store. numba's arrays have no element that is one access of 16 bytes."""
    from llvmlite import ir  # type: ignore[import-untyped]

    cgutils: Any = importlib.import_module("numba.core.cgutils")
    types: Any = importlib.import_module("numba.types")
    intrinsic: Any = importlib.import_module("numba.extending").intrinsic

    words = types.UniTuple(types.uint64, 2)
    vector = ir.VectorType(ir.IntType(64), 2)

    def pointer(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, ir.PointerType(vector, GLOBAL))

    def load(_context: Any, _address: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            value = builder.load(pointer(builder, arguments[0]), align=PACK_BYTES)
            halves = [builder.extract_element(value, ir.IntType(32)(i)) for i in (0, 1)]
            return cgutils.pack_array(builder, halves)

        return words(types.int64), generate

    def store(_context: Any, _address: Any, _value: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            value = ir.Constant(vector, ir.Undefined)
            for i, half in enumerate(cgutils.unpack_tuple(builder, arguments[1])):
                value = builder.insert_element(value, half, ir.IntType(32)(i))
            builder.store(value, pointer(builder, arguments[0]), align=PACK_BYTES)
            return None

        return types.void(types.int64, words), generate

    return intrinsic(load), intrinsic(store)


@functools.cache
def _kernel_function() -> Any:
    """The kernel as a Python function: whole packs, all threads of the grid side by side."""
    cuda = _numba_cuda()
    load, store = _accesses()

    def copy_packs(target, source, packs):  # type: ignore[no-untyped-def]
        thread = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        threads = cuda.gridDim.x * cuda.blockDim.x
        step = PACK_BYTES * threads
        done = packs - packs % (IN_FLIGHT * threads)
        for first in range(thread, done, IN_FLIGHT * threads):
            at = source + PACK_BYTES * first
            a, b, c, d = load(at), load(at + step), load(at + 2 * step), load(at + 3 * step)
            at += 4 * step
            e, f, g, h = load(at), load(at + step), load(at + 2 * step), load(at + 3 * step)
            to = target + PACK_BYTES * first
            store(to, a)
            store(to + step, b)
            store(to + 2 * step, c)
            store(to + 3 * step, d)
            to += 4 * step
            store(to, e)
            store(to + step, f)
            store(to + 2 * step, g)
            store(to + 3 * step, h)
        for rest in range(done + thread, packs, threads):
            store(target + PACK_BYTES * rest, load(source + PACK_BYTES * rest))

    return copy_packs


def _signature() -> Any:
    """Signed throughout: numba makes floats of sums of signed and unsigned integers."""
    from numba import types

    return types.void(types.int64, types.int64, types.int64)


def compiled_ptx(major: int, minor: int) -> str:
    """The kernel's PTX for a compute capability; needs no GPU."""
    cuda = _numba_cuda()
    ptx, _ = cuda.compile(_kernel_function(), _signature(), cc=(major, minor), output="ptx")
    return str(ptx)


class NumbaCopy:
    """Launches the kernel on the streams of others."""

    def __init__(self) -> None:
        """Compiles nothing yet.

        Raises:
            NotSupported: numba-cuda is not installed.
        """
        self._cuda = _numba_cuda()
        self._kernel = self._cuda.jit(_signature())(_kernel_function())

    def launch(self, shape: tuple[int, int], stream: int, where: tuple[int, int, int]) -> None:
        """Enqueues a copy on the current GPU.

        Args:
            shape: blocks, and threads of a block.
            stream: the CUDA stream.
            where: address of the target, of the source, and bytes: a multiple of 16.
        """
        target, source, nbytes = where
        launch = self._kernel[shape[0], shape[1], self._cuda.external_stream(stream)]
        launch(target, source, nbytes // PACK_BYTES)
