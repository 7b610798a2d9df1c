"""What each rank of a job on several nodes does in the tests of collectives beside all-reduce, by
name: see across_ranks.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from across_ranks import (
    FOLDER,
    LAST,
    LIMIT_S,
    NODE_OF,
    RANK,
    Array,
    arrays_of,
    bits,
    expected,
    failing,
    job,
    main,
    then_refused,
)

import gpuallreduce as gar
from gpuallreduce.across import host_moves
from gpuallreduce.types import DTYPES

NRANKS = len(NODE_OF)
FEW = (("float32", "sum"), ("bfloat16", "avg"), ("int8", "prod"), ("complex64", "sum"))
COUNTS = (0, 1, 7, 275)  # of one block


def expected_array(name: str, op: str, count: int) -> Array:
    return np.frombuffer(expected(name, op, count), np.uint8).view(DTYPES[name].numpy)


def guarded(like: Array) -> tuple[Array, Callable[[], bool]]:
    """An array of other content, and what tells whether something was written beside it."""
    room = np.full(like.nbytes + 128, 0xA5, np.uint8)
    inside = room[64 : 64 + like.nbytes].view(like.dtype).reshape(like.shape)
    return inside, lambda: bool((room[:64] == 0xA5).all() and (room[-64:] == 0xA5).all())


def reductions_have_the_bits_of_the_reference() -> None:
    with job() as comm:
        for turn, ((name, op), count) in enumerate((p, c) for p in FEW for c in COUNTS):
            total = NRANKS * count
            mine, want = arrays_of(name, op, total)[RANK], expected_array(name, op, total)
            before, root = bits(mine), turn % NRANKS
            out, intact = guarded(mine)
            comm.reduce(mine, out, op=op, root=root)
            assert bits(mine) == before
            assert bits(out) == (bits(want) if root == RANK else b"\xa5" * mine.nbytes)
            assert intact()
            x = mine.copy()
            comm.reduce(x, op=op, root=root)
            assert bits(x) == (bits(want) if root == RANK else before)
            block, intact = guarded(mine[:count])
            comm.reduce_scatter(mine, block, op=op)
            assert bits(block) == bits(want[RANK * count : (RANK + 1) * count]), (name, op, count)
            assert bits(mine) == before
            assert intact()
            made = comm.reduce_scatter(mine, op=op)
            assert bits(made) == bits(block)


def every_dtype_is_moved_as_it_is() -> None:
    with job() as comm:
        for name in DTYPES:
            for count in COUNTS:
                check_moves(comm, name, count)


def check_moves(comm: gar.Communicator, name: str, count: int) -> None:
    inputs = arrays_of(name, "sum", count)
    before = bits(inputs[RANK])
    for root in range(NRANKS):
        x, intact = guarded(inputs[RANK])
        x[...] = inputs[RANK]
        comm.broadcast(x, root=root)
        assert bits(x) == bits(inputs[root]), (name, count, root)
        assert intact()
    out, intact = guarded(np.concatenate(inputs))
    comm.all_gather(inputs[RANK], out)
    assert bits(out) == b"".join(map(bits, inputs)), (name, count)
    assert bits(inputs[RANK]) == before
    assert intact()


def long_arrays_are_moved_in_parts() -> None:
    with job() as comm:
        for count in (1023, 1024, 1025, 10_000, 40_001):
            check_moves(comm, "uint8", count)


def arrays_of_every_layout_are_moved_and_reduced() -> None:
    with job() as comm:
        base = np.arange(12 * 10, dtype=np.int64).reshape(12, 10)
        views: tuple[Callable[[Array], Array], ...] = (
            lambda x: x[::-1, ::3],
            np.asfortranarray,
            lambda x: x.T[:, : NRANKS * 2],
        )
        for root, view in enumerate(views):
            x = view(base * (RANK + 1))
            comm.broadcast(x, root=root)
            assert (x == view(base * (root + 1))).all()
            x = view(base * (RANK + 1))
            found = comm.all_gather(x, np.zeros((NRANKS * x.shape[0], 2 * x.shape[1]), int)[:, ::2])
            assert (found == np.concatenate([view(base * (r + 1)) for r in range(NRANKS)])).all()
            y = view(base * (RANK + 1))
            comm.reduce(y, root=root)
            total = NRANKS * (NRANKS + 1) // 2 if root == RANK else RANK + 1
            assert (y == view(base * total)).all()
        strided = np.zeros((12 // NRANKS, 30), np.int64)[:, ::3]
        comm.reduce_scatter((base * (RANK + 1))[:, ::-1], strided)
        want = np.split(base * (NRANKS * (NRANKS + 1) // 2), NRANKS)[RANK]
        assert (strided == want[:, ::-1]).all()
        gathered = comm.all_gather(np.array(RANK))
        assert gathered.tolist() == list(range(NRANKS))


def collectives_of_all_kinds_follow_each_other() -> None:
    with job() as comm:
        for number in range(30):
            x = np.arange(700) * (RANK + 1) + number
            comm.broadcast(x, root=number % NRANKS)
            comm.allreduce(x)
            assert (x == NRANKS * (np.arange(700) * (number % NRANKS + 1) + number)).all()
            parts = comm.all_gather(x[:9] + RANK)
            assert (parts.reshape(NRANKS, 9) == x[:9] + np.arange(NRANKS)[:, None]).all()
            comm.barrier()


# ---- what cannot succeed -------------------------------------------------------------------------


def _mismatch(mine: Callable[[gar.Communicator], Any], last: Callable[..., Any]) -> list[str]:
    comm = job()
    comm.broadcast(np.ones(3))
    found = failing(lambda: (last if RANK == LAST else mine)(comm), 15.0)
    then_refused(comm)
    return found


def roots_that_differ() -> list[str]:
    return _mismatch(
        lambda comm: comm.broadcast(np.ones(4)), lambda comm: comm.broadcast(np.ones(4), root=1)
    )


def roots_of_reductions_that_differ() -> list[str]:
    return _mismatch(
        lambda comm: comm.reduce(np.ones(4)), lambda comm: comm.reduce(np.ones(4), root=1)
    )


def counts_that_differ() -> list[str]:
    return _mismatch(
        lambda comm: comm.all_gather(np.ones(4)), lambda comm: comm.all_gather(np.ones(5))
    )


def dtypes_that_differ() -> list[str]:
    return _mismatch(
        lambda comm: comm.broadcast(np.ones(4, np.float32)),
        lambda comm: comm.broadcast(np.ones(4, np.int32)),
    )


def collectives_that_differ() -> list[str]:
    return _mismatch(lambda comm: comm.reduce(np.ones(4)), lambda comm: comm.allreduce(np.ones(4)))


def a_reduction_where_others_move() -> list[str]:
    return _mismatch(lambda comm: comm.broadcast(np.ones(4)), lambda comm: comm.reduce(np.ones(4)))


def a_rank_that_does_not_come() -> list[str]:
    comm = job()
    comm.all_gather(np.ones(3))
    comm.timeout = 1.0
    end = time.monotonic() + LIMIT_S
    while RANK == LAST and time.monotonic() < end and not (FOLDER / "gave-up").exists():
        time.sleep(0.01)  # later than anybody's limit: until others have said that they gave up
    found = failing(lambda: comm.broadcast(np.ones(3)), 9.0)
    (FOLDER / "gave-up").touch()
    then_refused(comm)
    return found


def a_rank_that_is_killed() -> list[str]:
    comm = job()
    comm.broadcast(np.ones(3))
    if RANK == LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.ones(300_000)

    def many() -> None:
        for number in range(50):
            comm.broadcast(x, root=number % NRANKS)
            comm.all_gather(x)

    found = failing(many, 8.0)
    then_refused(comm)
    return found


if __name__ == "__main__":
    if "killed" not in sys.argv[3]:
        host_moves.PART_BYTES, host_moves.LEAST_BLOCK_BYTES = 1024, 256
    main(globals())
