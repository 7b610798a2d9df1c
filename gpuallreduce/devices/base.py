"""What every kind of device can do: launch a kernel for all local ranks, and tell words apart that
others write meanwhile.

Knows nothing of collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gpuallreduce.args import GarArgs, GarDeviceArgs
from gpuallreduce.arrays import Arrays
from gpuallreduce.jit import Kernel
from gpuallreduce.plan import Plan

__all__ = ["Device", "LaunchArgs"]

LaunchArgs = GarArgs | GarDeviceArgs


class Device(Protocol):
    """The devices of the ranks of one communicator in this process.

    Attributes:
        arrays: how it gets at the memory of arrays.
        arguments: the struct that its kernels take.
        call: ``call(array, out, op)`` runs a prepared all-reduce; it answers the result array, None
            if no such call was prepared, and False if a rank gave up.
        forked: True in a child of the process that made it.
        poll, poll_context: what a waiting kernel on the caller's thread asks, or 0.
        asynchronous: True if ``launch`` returns before the kernels have ended.
    """

    @property
    def arrays(self) -> Arrays:
        """See the class."""

    @property
    def arguments(self) -> type[GarArgs] | type[GarDeviceArgs]:
        """See the class."""

    @property
    def call(self) -> Callable[[Any, Any, Any], Any]:
        """See the class."""

    @property
    def forked(self) -> bool:
        """See the class."""

    @property
    def poll(self) -> int:
        """See the class."""

    @property
    def poll_context(self) -> int:
        """See the class."""

    @property
    def asynchronous(self) -> bool:
        """See the class."""

    def begin(self, stream: Any) -> None:
        """Orders what follows, until the next ``begin``, behind what a stream holds.

        Args:
            stream: what the caller passed as ``stream=``, or None.

        Raises:
            InvalidArgument: it is no stream of these devices.
        """

    def end(self) -> None:
        """Orders what the caller does next behind what was launched since ``begin``."""

    def launch(
        self, kernel: Kernel, args: Sequence[Any], nblocks: int, *, nthreads: int = 1
    ) -> bool:
        """Runs a kernel once for every element of args, at the same time. False if a rank gave up.

        Raises:
            DeviceError: the kernels could not run.
        """

    def prepare(
        self,
        plan: Plan,
        args: Sequence[Any],
        *,
        dtype: Any,
        in_place: bool,
        symmetric: tuple[int, int] = (0, 0),
    ) -> None:
        """Makes ``call`` run this plan for every array with this dtype object and its size.

        Args:
            plan: of an all-reduce.
            args: its arguments on each local rank.
            dtype: the object by which arrays name their element type.
            in_place: whether results replace inputs.
            symmetric: addresses of input and output where peers use them too, else 0: then they are
                part of what must be equal.
        """

    def forget(self) -> None:
        """Drops all prepared calls."""

    def add_symmetric(self, begin: int, nbytes: int) -> None:
        """Tells ``call`` that addresses in this range are part of a call's identity."""

    def remove_symmetric(self, begin: int) -> None:
        """The buffer that began there is gone."""

    def watch(self, args: Any, processes: Mapping[int, int], keep: Any) -> None:
        """Marks a rank as lost when its process ends.

        Args:
            args: any launch's arguments, for where reports lie.
            processes: for each rank a descriptor that is readable once its process has ended.
            keep: the control blocks, where the mark is left.
        """

    def close(self) -> None:
        """From now on ``call`` answers None."""

    def idle(self) -> bool:
        """True if no thread is inside a launch."""

    @property
    def in_signal_handler(self) -> bool:
        """True if this very thread is inside a launch."""

    def streams(self) -> Sequence[int]:
        """The stream of the present call on each local rank, as other libraries take it."""

    def synchronize(self, meanwhile: Callable[[], None]) -> None:
        """Waits until everything launched has ended.

        Args:
            meanwhile: called now and then.

        Raises:
            DeviceError: the device failed.
        """

    def drain(self, meanwhile: Callable[[], None], abandon: Callable[[], None]) -> None:
        """As ``synchronize``, and gives up what launching needed. Raises nothing.

        Args:
            meanwhile: called now and then.
            abandon: called if a device has failed.
        """

    def read_word(self, address: int) -> int:
        """A word of a segment; no call may be running."""

    def write_words(self, addresses: Sequence[int], value: int) -> None:
        """Stores a value in words of segments; no call may be running."""

    def load_acquire(self, address: int) -> int:
        """Loads a word of a control block so that what was stored before it is seen as well."""

    def claim(self, address: int) -> bool:
        """True for the first caller on a word of a control block."""

    def store_release(self, address: int, value: int) -> None:
        """Stores a word of a control block so that whoever reads it also sees what came before."""
