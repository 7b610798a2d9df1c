"""All-reduce over several nodes, as one CUDA rank takes part in it: shards are folded and gathered
inside the node on the call's stream, and travel between nodes on two streams beside it.

Knows nothing of how a node's ranks address each other, nor of what ends a call that cannot go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from gpuallreduce import args
from gpuallreduce.across.base import Across
from gpuallreduce.across.chunks import chunks_of
from gpuallreduce.across.cuda_moves import CudaMoves
from gpuallreduce.across.guard import Guard
from gpuallreduce.across.line import Line, agreed
from gpuallreduce.across.progress import HEADER_BYTES, Progress
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.across.slots import SlotRoom, longest
from gpuallreduce.across.stamps import Stamps
from gpuallreduce.across.turns import Call, Turns
from gpuallreduce.args import GarHeader
from gpuallreduce.arrays import Bound
from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.devices.cuda import CudaDevice, load
from gpuallreduce.devices.cuda_runtime import (
    cuda_errors,
    cupy_module,
    in_any_capture,
    on_device,
)
from gpuallreduce.devices.cuda_streams import is_capturing
from gpuallreduce.errors import Error, NotSupported
from gpuallreduce.fabric.nccl import Nccl
from gpuallreduce.fabric.nccl_ending import abort_together
from gpuallreduce.plan import Plan, Request, Shards
from gpuallreduce.types import OPS

__all__ = ["CudaAcross"]

NO_LIMIT_S = 1e9
KEPT_PLANS = 4096
PAUSE_S = 0.001
_UNTRACED = nullcontext()


class CudaAcross(Across):
    """As Across, for a rank on a GPU. See turns.py for what its streams do."""

    engine = "NCCL"

    def __init__(
        self, nodes: Nodes, shards: NodeShards, device: CudaDevice, *, timeout: float
    ) -> None:
        """Connects this rank with the owners of the same shard on other nodes; a collective.

        Args:
            nodes: where the ranks of the job are.
            shards: of this node's ranks.
            device: of this rank.
            timeout: seconds until they must be connected.

        Raises:
            NotSupported: NCCL is missing or too old; every rank raises.
            Timeout, DeviceError: NCCL could not connect the nodes; every rank raises.
        """
        super().__init__(nodes, shards)
        self._device, (self._ordinal,) = device, device.ordinals
        here, last = nodes.this, self.nnodes - 1
        self._before, self._behind = here > 0, here < last
        orchestrator = shards.orchestrator
        around = [node for node in (here - 1, here + 1) if 0 <= node <= last]
        self._room: SlotRoom | None = None
        self._loaded: dict[int, Plan] = {}
        self._stamps: Stamps | None = None
        self._end: Any = None  # behind the last call outside of graphs
        with ExitStack() as stack:
            self._line = Line.connect(nodes, self._ordinal, owner=self.owner, timeout=timeout)
            self._moves = CudaMoves(nodes, device)
            if self._line is not None:
                stack.callback(abort_together, [self._line], _nothing)
            problem: Error | None = None
            try:
                if self.owner:
                    self._room = SlotRoom(self._ordinal)
                    stack.callback(self._room.close)
                self._progress = Progress(
                    device,
                    abort=orchestrator.abort_address(),
                    before=self.owner and self._before,
                    behind=self.owner and self._behind,
                )
                stack.callback(self._progress.close)
                self._mark = self._event()
            except Error as error:
                problem = error
            agreed(nodes, problem, "memory for calls between nodes", timeout)
            try:
                if self._line is not None:
                    self._line.warm_up(around, self._progress.mine, timeout)
            except Error as error:
                problem = error
            agreed(nodes, problem, "NCCL's first messages", timeout)
            stack.pop_all()
        self._turns = Turns(
            here,
            self.nnodes,
            shards,
            line=self._line,
            progress=self._progress,
            stage=self._stage,
        )
        self._guard = Guard(
            self._in_step,
            orchestrator,
            line=self._line,
            moves=self._moves,
            progress=self._progress,
            explain=self._difference,
            awaited=" and ".join(map(self.peer_name, around)) if self.owner else "",
            interrupt=nodes.everyone.interrupt,
            busy=self._busy,
        )

    # ---- what the plan needs to know ------------------------------------------------------------

    def longest_chunk(self, request: Request, depth: int) -> int:
        """See Across: what slots have room for."""
        return longest(request, depth) * self.nshards

    def check_pair(self, plan: Plan) -> None:
        """See Across. In rank order NCCL moves bytes only."""
        if plan.request.order == "any":
            pair = OPS["sum"] if plan.request.op.name == "avg" else plan.request.op
            Nccl.check_pair(plan.request.dtype, pair)

    # ---- calls ----------------------------------------------------------------------------------

    def set_timeout(self, timeout: float | None) -> None:
        """See Across."""
        super().set_timeout(timeout)
        self._guard.set_timeout(timeout)

    def allreduce(
        self,
        source: int,
        target: int,
        plan: Plan,
        *,
        detail: int = 0,
        asked: Request | None = None,
    ) -> None:
        """See Across. Enqueues; the host waits for nothing."""
        self._load(plan)
        asked = plan.request if asked is None else asked
        with self._in_call(plan, detail, asked, tells=self.owner) as kernels:
            self._turns.run(self._call(source, target, plan, kernels))

    def move(self, bound: Bound, plan: Plan, *, detail: int = 0) -> None:
        """See Across. Enqueues; the host waits at the first such call only, for all ranks."""
        if not self._moves.ready and is_capturing(self._device.lanes[0].stream):
            raise NotSupported(
                f"the first {plan.request.collective} between nodes connects all ranks, which "
                "cannot be captured into a graph: make one such call before the capture"
            )
        with self._in_call(plan, detail, plan.request, tells=True) as kernels:
            if not self._moves.ready:
                self._connect(kernels)
            if not self.neighbours_suffice:
                self._progress.tick(args.NODES_MEETING, kernels)
                self._moves.meet(kernels)  # see NOTE all before data
                self._progress.tick(args.NODES_MEETING, kernels)

            def step() -> None:
                self._progress.tick(args.NODES_GATHERED, kernels)

            self._moves.run(bound, plan.request, kernels, step)

    @contextmanager
    def _in_call(self, plan: Plan, detail: int, asked: Request, *, tells: bool) -> Iterator[Any]:
        """Enqueues a call: what is enqueued in the block runs once this rank's node and its
        neighbours are known to make it too. If the call fails, it ends on all ranks.

        Args:
            plan: what runs.
            detail: see Across.
            asked: what ranks compare.
            tells: whether this rank's GPU tells how far it has come.
        """
        self._guard.start()
        kernels = self._device.lanes[0].stream
        captured = is_capturing(kernels)
        if self._line is not None:
            for way in (self._line.up, self._line.down):
                way.use(captured=captured)
        enqueuing = cuda_errors("enqueuing a call between nodes")
        try:
            with self._device.in_one_call(), enqueuing, on_device(self._ordinal):
                self._in_step.meet(asked, detail, self.timeout)
                if tells:
                    self._agree(replace(plan, request=asked), detail, kernels)
                yield kernels
                self._join(kernels)
                if not captured:
                    self._end = self._end or self._event()
                    self._end.record(kernels)
                if tells:
                    self._progress.tick(args.NODES_ENDED, kernels)
        except Error as error:
            raise self._guard.conclude(error) from error
        except BaseException as error:  # KeyboardInterrupt too: the others must not wait
            self._guard.fail(error)
            raise

    def _connect(self, kernels: Any) -> None:
        """Connects all ranks, once this one has seen its neighbours make the call."""
        met = self._event()
        met.record(kernels)
        while not met.done:  # NCCL starts while no kernel of ours waits for anybody
            if not self._guard.look():
                break
            time.sleep(PAUSE_S)
        if self.shards.orchestrator.aborted:
            raise self.shards.orchestrator.diagnose()
        self._guard.connecting = True
        try:
            # Who waits for another node has said so by then; and NCCL needs time to start.
            inside = self.shards.timeout or NO_LIMIT_S
            self._moves.connect(max(inside, self.nodes.everyone.timeout))
        finally:
            self._guard.connecting = False

    def settle(self) -> None:
        """See Across."""
        if self._guard.look():
            self._in_step.ended()
        if self._stamps is not None:
            self._stamps.settle()

    def abort(self) -> None:
        """See Across."""
        self._in_step.hurried = True
        orchestrator = self.shards.orchestrator
        if not orchestrator.aborted:  # else another rank's reason must stay the first
            orchestrator.abort()
        self._guard.fail(orchestrator.diagnose())

    def close(self) -> None:
        """See Across."""
        self._guard.stop()
        if self._line is not None:
            self._line.close()
        self._moves.close()
        self._progress.close()
        if self._room is not None:
            self._room.close()
        self._in_step.leave()
        self.nodes.everyone.close()

    # ---- before the first turn ------------------------------------------------------------------

    def _load(self, plan: Plan) -> None:
        """Compiles and loads what the call needs, before any rank can wait for this one."""
        if id(plan) in self._loaded:
            return
        request, shards = plan.request, self._shards_of(plan.request)
        for collective in ("shard_reduce", "shard_gather"):
            part = replace(
                request,
                collective=collective,
                count=min(request.count, plan.config.chunk_count),
                nranks=self.shards.topology.nranks,
                order="rank",
                shards=shards,
            )
            load(self.shards.plan(part).kernel, self._ordinal)
        if len(self._loaded) >= KEPT_PLANS:
            self._loaded.clear()
        self._loaded[id(plan)] = plan  # kept, so that its id is no other's

    def _agree(self, plan: Plan, detail: int, kernels: Any) -> None:
        """Compares the call with the neighbours', on the GPU; afterwards both ways may go on."""
        progress = self._progress
        progress.post(self.header(plan, detail), kernels)
        if self._line is None:
            progress.check(kernels)
            return
        up, down = self._line.up, self._line.down
        self._follow(up.stream, kernels)
        here = self.nodes.this
        sides = ((self._before, here - 1), (self._behind, here + 1))
        sends = [(node, progress.mine, HEADER_BYTES) for there, node in sides if there]
        receives = [
            (node, progress.theirs[side], HEADER_BYTES)
            for side, (there, node) in enumerate(sides)
            if there
        ]
        up.move(sends, receives)
        self._follow(kernels, up.stream)
        progress.check(kernels)
        for way in (up, down):
            self._follow(way.stream, kernels)

    def _call(self, source: int, target: int, plan: Plan, kernels: Any) -> Call:
        request = plan.request
        shards = self._shards_of(request)
        step, owner = plan.config.chunk_count, self.nodes.local_rank
        chunks = chunks_of(request.count, request.dtype.itemsize, self.nshards, owner, step)
        room, depth = self._room, plan.config.depth
        slots = None if room is None else room.slots(request, chunks, depth)
        return Call(request, source, target, shards, chunks, self.lag(plan), kernels, slots)

    def _shards_of(self, request: Request) -> Shards:
        in_rank_order = request.order == "rank"
        return Shards(
            self.nshards,
            seeded=in_rank_order and self._before,
            rounded=not (in_rank_order and self._behind),
            fold_ranks=request.nranks,
        )

    def _join(self, kernels: Any) -> None:
        """What the caller does next comes behind both ways."""
        if self._line is not None:
            for way in (self._line.up, self._line.down):
                self._follow(kernels, way.stream)

    def _stage(
        self, stream: Any, name: str, turn: int, *, message: bool = False
    ) -> AbstractContextManager[None]:
        """Records what the block enqueues, if stages are recorded."""
        if self.trace is None or is_capturing(stream):
            return _UNTRACED
        if self._stamps is None:
            self._stamps = Stamps(self.trace, self._ordinal)
        return self._stamps.stage(stream, name, message=message, chunk=turn)

    def _busy(self) -> bool:
        with on_device(self._ordinal), in_any_capture():
            return self._end is not None and not self._end.done

    # ---- details --------------------------------------------------------------------------------

    def _follow(self, stream: Any, other: Any) -> None:
        """What a stream is given next comes behind what the other holds."""
        self._mark.record(other)
        stream.wait_event(self._mark)

    def _event(self) -> Any:
        with on_device(self._ordinal), cuda_errors("making an event"):
            return cupy_module().cuda.Event(disable_timing=True)

    def _difference(self, side: int, mine: GarHeader, theirs: GarHeader) -> str:
        """What to say of a neighbour's call that is not this rank's."""
        return self.difference(self.nodes.this + (-1, 1)[side], mine, theirs)


def _nothing() -> None:
    """What follows the abort of connections that carried nothing yet."""
