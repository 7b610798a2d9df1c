"""Host devices: ranks on processor cores, arrays in NumPy memory, kernels compiled by the system's
C++ compiler.

Knows nothing of algorithms, plans or other ranks: it loads kernels and launches them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuallreduce.args import GarArgs, GarLaunch
from gpuallreduce.arrays import HostArrays
from gpuallreduce.errors import DeviceError, InvalidArgument
from gpuallreduce.jit import Kernel, compile_host, compile_host_runtime
from gpuallreduce.plan import Plan

__all__ = ["HostDevice"]

PREPARED_LIMIT = (
    4096  # prepared calls kept; a program that never repeats a size must not grow without end
)


@functools.cache
def _runtime() -> ctypes.PyDLL:
    """The launcher. PyDLL: its functions take Python objects and hold the interpreter's lock."""
    library = ctypes.PyDLL(str(compile_host_runtime()))
    library.gar_host_new.restype = ctypes.py_object
    library.gar_host_new.argtypes = [ctypes.c_int, ctypes.c_uint32, ctypes.py_object]
    for name in ("gar_host_idle", "gar_host_mine"):
        getattr(library, name).restype = ctypes.c_int
        getattr(library, name).argtypes = [ctypes.py_object]
    library.gar_host_load_acquire.restype = ctypes.c_uint64
    library.gar_host_load_acquire.argtypes = [ctypes.c_uint64]
    library.gar_host_claim.restype = ctypes.c_int
    library.gar_host_claim.argtypes = [ctypes.c_uint64]
    library.gar_host_poll_context.restype = ctypes.c_void_p
    library.gar_host_poll_context.argtypes = [ctypes.py_object]
    for name, arguments in {
        "gar_host_prepare": [
            *[ctypes.py_object] * 3,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.POINTER(GarLaunch),
        ],
        "gar_host_add_symmetric": [ctypes.py_object, ctypes.c_uint64, ctypes.c_uint64],
        "gar_host_remove_symmetric": [ctypes.py_object, ctypes.c_uint64],
        "gar_host_forget": [ctypes.py_object],
        "gar_host_close": [ctypes.py_object],
        "gar_host_drain": [ctypes.py_object],
        "gar_host_watch": [
            ctypes.py_object,
            ctypes.POINTER(GarArgs),
            ctypes.POINTER(ctypes.c_int),
            ctypes.POINTER(ctypes.c_uint32),
            ctypes.c_uint32,
        ],
        "gar_host_store_release": [ctypes.c_uint64, ctypes.c_uint64],
    }.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    return library


_load_lock = threading.Lock()
_loaded: dict[Kernel, int] = {}


def load(kernel: Kernel) -> int:
    """Address of a kernel's entry point in this process, compiled if need be."""
    address = _loaded.get(kernel)
    if address is None:
        with _load_lock:
            library = ctypes.CDLL(str(compile_host(kernel)))
            entry = getattr(library, kernel.symbol)
            address = _loaded[kernel] = ctypes.cast(entry, ctypes.c_void_p).value or 0
    return address


class HostDevice:
    """The launcher of one communicator's local ranks.

    Attributes:
        call: ``call(array, out, op)`` runs a prepared all-reduce; it answers the result array, None
            if no such call was prepared, and False if a rank gave up.
        forked: True in a child of the process that made it.
    """

    arrays = HostArrays()
    arguments = GarArgs
    call: Callable[[Any, Any, Any], Any]
    forked: bool = False
    asynchronous = False
    poll: int
    poll_context: int

    def __init__(self, *, nlocal: int, spin: bool) -> None:
        """Makes the launcher.

        Args:
            nlocal: ranks of this process.
            spin: waiting threads may spin, since every rank has a core.
        """
        self._library = _runtime()
        self._state, self.call, self._launch = self._library.gar_host_new(
            int(spin), nlocal, np.ndarray
        )
        self._prepared = 0
        address = ctypes.cast(self._library.gar_host_poll, ctypes.c_void_p).value
        self.poll = address or 0
        self.poll_context: int = self._library.gar_host_poll_context(self._state)
        _live.add(self)

    def begin(self, stream: Any) -> None:
        """Host calls are complete on return: there are no streams."""
        if stream is not None:
            raise InvalidArgument(
                f"stream={stream!r}: ranks on host devices have no streams; leave it out"
            )

    def end(self) -> None:
        """There are no streams."""

    def launch(
        self, kernel: Kernel, args: Sequence[GarArgs], nblocks: int, *, nthreads: int = 1
    ) -> bool:
        """Runs a kernel once for every element of args, at the same time. False if a rank gave up.

        Raises whatever a signal handler raised meanwhile (KeyboardInterrupt).

        Raises:
            DeviceError: the system gave no thread for a rank; no kernel ran.
        """
        address = load(kernel)
        launches = (GarLaunch * len(args))()
        for launch, each in zip(launches, args, strict=True):
            launch.kernel, launch.args, launch.nblocks = address, ctypes.pointer(each), nblocks
        try:
            return bool(self._launch(ctypes.addressof(launches), len(args)))
        except OSError as error:
            raise DeviceError(
                f"the system gave no threads for {len(args)} ranks: {error}"
            ) from None

    def prepare(
        self,
        plan: Plan,
        args: Sequence[GarArgs],
        *,
        dtype: Any,
        in_place: bool,
        symmetric: tuple[int, int] = (0, 0),
    ) -> None:
        """See devices.base.Device."""
        if self._prepared >= PREPARED_LIMIT:
            self.forget()
        self._prepared += 1
        launches = (GarLaunch * len(args))()
        for launch, each in zip(launches, args, strict=True):
            launch.kernel, launch.args = load(plan.kernel), ctypes.pointer(each)
            launch.nblocks = plan.config.nchannels
        request = plan.request
        self._library.gar_host_prepare(
            self._state,
            dtype,
            request.op.name,
            request.nbytes,
            int(in_place),
            *symmetric,
            launches,
        )

    def forget(self) -> None:
        """Drops all prepared calls."""
        self._prepared = 0
        self._library.gar_host_forget(self._state)

    def add_symmetric(self, begin: int, nbytes: int) -> None:
        """Tells `call` that addresses in this range are part of a call's identity."""
        self._library.gar_host_add_symmetric(self._state, begin, begin + max(nbytes, 1))

    def watch(self, args: GarArgs, processes: Mapping[int, int], keep: Any) -> None:
        """Marks a rank as lost when its process ends while a call waits.

        Args:
            args: any launch's arguments, for where segments and reports lie.
            processes: for each rank a descriptor that is readable once its process has ended.
            keep: the control blocks; calls keep them alive.
        """
        count = len(processes)
        fds = (ctypes.c_int * count)(*processes.values())
        ranks = (ctypes.c_uint32 * count)(*processes)
        self._library.gar_host_watch(self._state, ctypes.byref(args), fds, ranks, count)

    def remove_symmetric(self, begin: int) -> None:
        """The buffer that began there is gone, and with it every prepared call."""
        self._library.gar_host_remove_symmetric(self._state, begin)
        self.forget()

    def close(self) -> None:
        """From now on `call` answers None."""
        self._library.gar_host_close(self._state)

    def idle(self) -> bool:
        """True if no launch runs."""
        return bool(self._library.gar_host_idle(self._state))

    @property
    def in_signal_handler(self) -> bool:
        """True if this very thread is inside a launch: a signal handler is running."""
        return bool(self._library.gar_host_mine(self._state))

    def drain(self, meanwhile: Callable[[], None], abandon: Callable[[], None]) -> None:
        """Waits until no launch runs, and ends the launcher's threads."""
        self._library.gar_host_drain(self._state)

    def streams(self) -> Sequence[int]:
        """There are none."""
        return ()

    def synchronize(self, meanwhile: Callable[[], None]) -> None:
        """Every launch had ended when it returned."""

    def read_word(self, address: int) -> int:
        """A word of a segment."""
        return ctypes.c_uint64.from_address(address).value

    def write_words(self, addresses: Sequence[int], value: int) -> None:
        """Stores a value in words of segments."""
        for address in addresses:
            ctypes.c_uint64.from_address(address).value = value

    def load_acquire(self, address: int) -> int:
        """Loads a 64-bit word so that what was stored before it is seen as well."""
        return int(self._library.gar_host_load_acquire(address))

    def claim(self, address: int) -> bool:
        """True for the first caller on a word, here or in a kernel."""
        return bool(self._library.gar_host_claim(address))

    def store_release(self, address: int, value: int) -> None:
        """Stores a 64-bit word so that whoever reads it also sees everything stored before."""
        self._library.gar_host_store_release(address, value)


_live: weakref.WeakSet[HostDevice] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child has none of the launcher's threads and must not take part in its parent's
    calls.
    """
    for device in list(_live):
        device.forked = True
        device.close()


os.register_at_fork(after_in_child=_close_in_child)
