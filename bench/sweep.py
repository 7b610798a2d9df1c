"""Measures one row after the other: which calls, on which arrays, checked and timed.

Knows nothing of how rows are shown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np

from gpuallreduce.errors import NotSupported
from gpuallreduce.plan import Plan
from gpuallreduce.types import Dtype, Op, dtype_of, op_of, reduction

from .buffers import Buffers, Pattern, neutral
from .measure import Clock, HostClock, Settings, Timing, measure
from .options import Options, dtype_label, sizes
from .peers import Peer
from .places import Array, Place
from .ranks import Ranks, given
from .report import Mode, Row

__all__ = ["Sweep", "defined_pairs"]


def defined_pairs(options: Options) -> tuple[list[tuple[Dtype, Op]], list[str]]:
    """Pairs of dtype and operator to measure, and names of those that are not defined.

    Raises:
        NotSupported: none is defined.
    """
    pairs, skipped = [], []
    reason: NotSupported | None = None
    for dtype in map(dtype_of, options.dtypes):
        for op in map(op_of, options.ops):
            try:
                reduction(dtype, op)
                pairs.append((dtype, op))
            except NotSupported as error:
                reason = error
                skipped.append(f"{dtype_label(dtype.name)} {op.name}")
    if not pairs and reason is not None:
        raise reason
    return pairs, skipped


@dataclass(frozen=True)
class _Case:
    """One library's call, out of place or in place. In place, outputs are the inputs."""

    name: str
    inputs: list[Array]
    outputs: list[Array]
    call: Callable[[], Any]
    neutral: np.ndarray[Any, Any]
    place: Place

    @property
    def in_place(self) -> bool:
        return self.inputs is self.outputs

    def write(self) -> None:
        """Writes this process's inputs: then they are in its own caches, whoever read them last."""
        for array in self.inputs:
            self.place.write(array, self.neutral)


class Sweep:
    """All rows of a benchmark."""

    def __init__(self, options: Options, ranks: Ranks, peers: Sequence[Peer]) -> None:
        """Allocates for the largest size. A collective.

        Args:
            options: what to measure.
            ranks: who measures.
            peers: libraries to measure in turn with ours.
        """
        self.pairs, self.skipped = defined_pairs(options)
        self._options, self._ranks, self._peers = options, ranks, peers
        nbytes = sizes(options)[-1]
        self._ours = Buffers(ranks, nbytes, symmetric=options.symmetric)
        # Ordinary memory is what a peer knows best; where ours is ordinary too, both use the same.
        # To NCCL all memory of a GPU is ordinary.
        self._theirs = self._ours
        if options.symmetric and peers and ranks.place.kind == "host":
            self._theirs = Buffers(ranks, nbytes, symmetric=False)
        self._settings = Settings(
            warmup=options.warmup,
            iterations=options.iterations * max(1, options.graph_launches),
            rounds=options.rounds,
            round_s=options.round_ms / 1e3,
            latency=options.wants_latency,
        )

    def __len__(self) -> int:
        return len(self.pairs) * len(sizes(self._options))

    def rows(
        self, *, begin: Callable[[str], None], round_done: Callable[[], None]
    ) -> Iterator[Row]:
        """Measures; a collective.

        Args:
            begin: told what comes next.
            round_done: called after every round.
        """
        for dtype, op in self.pairs:
            for nbytes in sizes(self._options):
                begin(f"{dtype_label(dtype.name)} {op.name} {nbytes} B")
                yield self._row(dtype, op, nbytes, round_done)

    def _row(self, dtype: Dtype, op: Op, nbytes: int, round_done: Callable[[], None]) -> Row:
        count = nbytes // dtype.itemsize
        ours = [self._our_case(dtype, op, count, in_place) for in_place in (False, True)]
        cases = list(ours)
        for peer in self._peers:
            if peer.supports(dtype, op):
                cases += [self._peer_case(peer, dtype, op, count, p) for p in (False, True)]
        wrong = self._check(cases, dtype, op, count)
        timings = measure(cases, self._clock(), self._settings, round_done=round_done)
        return Row(
            nbytes=count * dtype.itemsize,
            count=count,
            dtype=dtype_label(dtype.name),
            op=op.name,
            nranks=self._ranks.nranks,
            out_of_place=self._mode(ours[0], op, cases, timings, wrong),
            in_place=self._mode(ours[1], op, cases, timings, wrong),
        )

    def _clock(self) -> Clock:
        place = self._ranks.place
        if place.kind == "host":
            return HostClock(self._ranks)
        module = import_module("gpuallreduce.bench.cuda_clock")
        graph_calls = self._options.iterations if self._options.graph_launches else 0
        return cast(Clock, module.CudaClock(self._ranks, place, graph_calls=graph_calls))

    def _forced(self) -> dict[str, Any]:
        asked = {"algorithm": self._options.algorithm, "order": self._options.order}
        return {name: value for name, value in asked.items() if value is not None}

    def plan(self) -> Plan:
        """Of the first pair's largest call, out of place."""
        (dtype, op), nbytes = self.pairs[0], sizes(self._options)[-1]
        count = nbytes // dtype.itemsize
        inputs, outputs = self._ours.inputs(dtype, count), self._ours.outputs(dtype, count)
        return self._plan(inputs, outputs, op)

    def _plan(self, inputs: list[Array], outputs: list[Array], op: Op) -> Plan:
        out = None if inputs is outputs else given(outputs)
        return self._ranks.comm.plan(given(inputs), out, op=op.name, **self._forced())

    def _our_case(self, dtype: Dtype, op: Op, count: int, in_place: bool) -> _Case:
        inputs = self._ours.inputs(dtype, count)
        outputs = inputs if in_place else self._ours.outputs(dtype, count)
        call = functools.partial(
            self._ranks.comm.allreduce,
            given(inputs),
            None if in_place else given(outputs),
            op=op.name,
            **self._forced(),
            **self._ranks.place.keywords,
        )
        return self._case("gpuallreduce", inputs, outputs, call, dtype, op)

    def _peer_case(self, peer: Peer, dtype: Dtype, op: Op, count: int, in_place: bool) -> _Case:
        inputs = self._theirs.inputs(dtype, count)
        outputs = inputs if in_place else self._theirs.outputs(dtype, count)
        call = peer.call(inputs, outputs, dtype, op)
        return self._case(peer.name, inputs, outputs, call, dtype, op)

    def _case(
        self,
        library: str,
        inputs: list[Array],
        outputs: list[Array],
        call: Callable[[], Any],
        dtype: Dtype,
        op: Op,
    ) -> _Case:
        value = np.full(1, neutral(op)).astype(dtype.numpy)
        return _Case(library, inputs, outputs, call, value, self._ranks.place)

    def _check(self, cases: Sequence[_Case], dtype: Dtype, op: Op, count: int) -> list[int | None]:
        """Wrong elements of each case on all ranks: results, and inputs that had to stay."""
        ranks = self._ranks
        if self._options.checks == 0:
            return [None] * len(cases)
        wrong = [0] * len(cases)
        for seed in range(self._options.checks):
            pattern = Pattern(dtype, op, count, ranks.nranks, seed, ranks.place)
            for i, case in enumerate(cases):
                for rank, array in zip(ranks.local, case.inputs, strict=True):
                    pattern.fill(array, rank)
                case.call()
                ranks.place.wait()
                wrong[i] += sum(map(pattern.wrong_result, case.outputs))
                if not case.in_place:
                    pairs = zip(case.inputs, ranks.local, strict=True)
                    wrong[i] += sum(pattern.wrong_input(array, rank) for array, rank in pairs)
        return [ranks.total(each) for each in wrong]

    def _mode(
        self,
        ours: _Case,
        op: Op,
        cases: Sequence[_Case],
        timings: Sequence[Timing],
        wrong: Sequence[int | None],
    ) -> Mode:
        plan = self._plan(ours.inputs, ours.outputs, op)
        here = {case.name: i for i, case in enumerate(cases) if case.in_place == ours.in_place}
        names = [peer.name for peer in self._peers]
        return Mode(
            ours=timings[here[ours.name]],
            nwrong=wrong[here[ours.name]],
            algorithm=plan.config.algorithm,
            access=plan.config.access,
            order=plan.request.order,
            peers={name: timings[here[name]] if name in here else None for name in names},
            peers_nwrong={name: wrong[here[name]] if name in here else None for name in names},
            bytes_within=plan.bytes_within,
            bytes_between=plan.bytes_between,
        )
