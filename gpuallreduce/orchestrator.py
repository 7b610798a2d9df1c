"""Runs plans: fills in kernel arguments, launches all local ranks, and turns a failed launch into
an error.

Knows nothing of geometry: what moves where is the plan's and the kernel's business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuallreduce import diagnosis
from gpuallreduce.algorithms import ALGORITHMS, BY_NAME
from gpuallreduce.algorithms.base import placed
from gpuallreduce.args import ABORTED, CLOSED, GarReport, set_table
from gpuallreduce.bootstrap.peers import Labels
from gpuallreduce.devices.base import Device, LaunchArgs
from gpuallreduce.errors import CompileError, Error
from gpuallreduce.memory import LINE_BYTES, Segments, layout_segment
from gpuallreduce.plan import Plan
from gpuallreduce.topology import Topology
from gpuallreduce.transport import Transport

__all__ = ["Addresses", "Orchestrator"]

CLAIM_BYTES = 8  # from the abort word to the word that the reporting thread claims
SPINS = 2000  # pauses before a waiting rank first yields its core (about 100 us)
ALGORITHM_CODES = {name: code for code, name in enumerate(BY_NAME)}


@dataclass(frozen=True)
class Addresses:
    """Memory of a call: one input and output per local rank, and every rank's where access is
    direct.

    The tables are ctypes arrays of pointers in rank order; whoever passes them keeps them alive.
    Seeds are what shard_reduce folds onto, one for each local rank.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    peer_inputs: ctypes.Array[ctypes.c_void_p] | None = None
    peer_outputs: ctypes.Array[ctypes.c_void_p] | None = None
    seeds: Sequence[int] | None = None


class Orchestrator:
    """Owns the segments of a communicator and runs its plans.

    Attributes:
        labels: what messages call the ranks.
        reason: makes of an error what is known better elsewhere.
    """

    def __init__(self, transport: Transport, device: Device, topology: Topology) -> None:
        self.transport = transport
        self.device = device
        self.topology = topology
        self.labels = Labels()
        self.reason: Callable[[Error], Error] | None = None
        regions = [
            placed(region, topology)
            for algorithm in ALGORITHMS.values()
            for region in algorithm.regions()
        ]
        layout = layout_segment(topology.nranks, topology.max_channels, regions)
        buffer = transport.allocate(layout.nbytes, purpose="segments", zeros=layout.pad_bytes)
        controls = transport.allocate_controls(layout.control_bytes) or buffer
        self.segments = Segments(buffer, controls, layout, device)
        marks = device.arguments(reports_offset=layout.reports, nranks=layout.nranks)
        set_table(marks, "controls", controls.table)
        device.watch(marks, transport.processes(), controls)

    def arguments(self, plan: Plan, rank: int, *, timeout_s: float | None) -> LaunchArgs:
        """A plan's kernel arguments on one rank, all but a call's addresses and its detail."""
        layout = self.segments.layout
        region = layout.regions[plan.region.name]
        args = self.device.arguments()
        set_table(args, "segments", self.segments.buffer.table)
        set_table(args, "controls", self.segments.controls.table)
        args.count = plan.kernel_count
        args.chunk_count = plan.kernel_chunk_count
        args.slot_bytes = region.region.slot_bytes
        args.abort_offset, args.reports_offset = layout.abort, layout.reports
        args.calls_offset, args.sequence_offset = layout.calls, layout.sequence
        args.steps_offset, args.ready_offset = region.steps, region.ready
        args.credit_offset, args.slots_offset = region.credit, region.slots
        args.timeout_ns = 0 if timeout_s is None else max(1, int(timeout_s * 1e9))
        args.header = plan.header(ALGORITHM_CODES[plan.config.algorithm])
        args.rank, args.nranks, args.root = rank, self.topology.nranks, plan.request.root
        args.nsets, args.nlinks, args.nslots = (
            region.region.nsets,
            region.nlinks,
            region.region.nslots,
        )
        args.spin = 0 if self.topology.crowded or self.device.asynchronous else SPINS
        args.streaming, args.push = int(plan.config.streaming), int(plan.config.push)
        if plan.request.shards is not None:
            args.nshards = plan.request.shards.count
            args.fold_ranks = plan.request.shards.fold_ranks
        if rank == self.transport.ranks[0] and self.device.poll:
            # The caller's own thread runs the first rank, so it can let signal handlers run.
            args.poll, args.poll_context = self.device.poll, self.device.poll_context
        return args

    def run(self, plan: Plan, args: Sequence[LaunchArgs], addresses: Addresses) -> None:
        """Runs a plan on all local ranks and returns when it is done there; on asynchronous devices
        when it is launched.

        Raises:
            MismatchError, Timeout, Aborted: see diagnosis; the communicator is then broken.
        """
        for i, each in enumerate(args):
            each.input, each.output = addresses.inputs[i], addresses.outputs[i]
            if addresses.seeds is not None:
                each.seed = addresses.seeds[i]
            if addresses.peer_inputs is not None and addresses.peer_outputs is not None:
                set_table(each, "peer_inputs", addresses.peer_inputs)
                set_table(each, "peer_outputs", addresses.peer_outputs)
        config = plan.config
        try:
            done = self.device.launch(plan.kernel, args, config.nchannels, nthreads=config.nthreads)
        except CompileError:
            raise
        except BaseException:  # KeyboardInterrupt too: some local ranks may have been launched
            if self.device.asynchronous:
                self.abort()
            raise
        if not done:
            raise self.diagnose()

    def diagnose(self) -> Error:
        """Why the ranks gave up, as an error to raise."""
        reports: dict[int, GarReport] = {}
        for reporter in range(self.topology.nranks):
            report = self.segments.report(self.transport.ranks[0], reporter)
            # With acquire: the code was stored after the rest of the report.
            if self.device.load_acquire(ctypes.addressof(report)) != 0:
                reports[reporter] = report
        error = diagnosis.explain(reports, self.segments, self.transport, self.labels)
        return error if self.reason is None else self.reason(error)

    def abort_word(self) -> ctypes.c_uint64:
        """The word of the first local rank that is nonzero once any rank gave up."""
        return self.segments.control_word(self.transport.ranks[0], self.segments.layout.abort)

    def abort_address(self) -> int:
        """Where that word lies."""
        return self.segments.control_address(self.transport.ranks[0], self.segments.layout.abort)

    @property
    def aborted(self) -> bool:
        """True once any rank gave up: no call can succeed any more."""
        return self.segments.aborted(self.transport.ranks[0])

    def abort(self) -> None:
        """Makes every rank leave its call, or refuse the next one."""
        self._tell(ABORTED, abort=True)

    def leave(self) -> None:
        """Tells the peers that these ranks make no more calls. No launch may be running."""
        self._tell(CLOSED, abort=False)

    def depart(self) -> None:
        """Tells the peers that these ranks have let go of their memory."""
        segments = self.segments
        for rank in self.transport.ranks:
            for owner in range(self.topology.nranks):
                offset = segments.layout.departed + rank * LINE_BYTES
                self.device.store_release(segments.control_address(owner, offset), 1)

    def departed(self) -> bool:
        """Whether all ranks have departed or died, so that what they shared may be freed."""
        segments, mine = self.segments, self.transport.ranks[0]
        living = set(range(self.topology.nranks)).difference(self.transport.lost())
        offsets = [segments.layout.departed + rank * LINE_BYTES for rank in living]
        return all(
            self.device.load_acquire(segments.control_address(mine, offset)) for offset in offsets
        )

    def _tell(self, code: int, *, abort: bool) -> None:
        """Leaves a mere code in every segment, unless a kernel has left a whole report."""
        segments = self.segments
        for rank in self.transport.ranks:
            abort_word = segments.control_address(rank, segments.layout.abort)
            mine = self.device.claim(abort_word + CLAIM_BYTES)
            for owner in range(self.topology.nranks):
                if mine:
                    report = ctypes.addressof(segments.report(owner, rank))
                    self.device.store_release(report, code)
                if abort:
                    word = segments.control_address(owner, segments.layout.abort)
                    self.device.store_release(word, rank + 1)
