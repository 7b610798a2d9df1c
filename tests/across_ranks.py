"""What each rank of a job on several nodes does in the tests of calls across them, by name.

Run by mpirun as ``across_ranks.py LAYOUT FOLDER NAME...``, where LAYOUT is the ranks of each node
(``3,5``); each rank writes what it found to a file in FOLDER.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [int(size) for size in sys.argv[1].split(",")]
RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
NODE_OF = [f"node{node}" for node, size in enumerate(SIZES) for _ in range(size)]
FOLDER = Path(sys.argv[2])
LAST, SECOND = len(NODE_OF) - 1, SIZES[0] <= RANK  # the last rank; whether this node is not first
if not os.environ.get("REAL_NODES"):
    os.environ["GPUALLREDUCE_NODE"] = NODE_OF[RANK]

import gpuallreduce as gar  # noqa: E402
from gpuallreduce.across import pace  # noqa: E402
from gpuallreduce.inputs import random_inputs  # noqa: E402
from gpuallreduce.types import DTYPES, OPS  # noqa: E402

LIMIT_S = 30.0
SHORT_S = 1.0
COUNTS = (0, 1, 7, 1100)
FEW = (("float32", "sum"), ("bfloat16", "avg"), ("int8", "prod"), ("complex64", "sum"))
Array = np.ndarray[Any, Any]


def job(timeout: float = LIMIT_S) -> gar.Communicator:
    return gar.init(timeout=timeout)


def arrays_of(name: str, op: str, count: int, seed: int = 7, *, special: bool = True) -> Any:
    return random_inputs(DTYPES[name], OPS[op], count, len(NODE_OF), seed, special=special)


def expected(name: str, op: str, count: int, seed: int = 7) -> bytes:
    """The contract's bits, which the test has computed once for all layouts."""
    return (FOLDER.parent / f"{len(NODE_OF)}-{name}-{op}-{count}-{seed}").read_bytes()


def bits(x: Array) -> bytes:
    return np.ascontiguousarray(x).tobytes()


# ---- bits ----------------------------------------------------------------------------------------


def check_pair(comm: gar.Communicator, name: str, op: str, count: int) -> None:
    """In and out of place, with guards round the arrays."""
    mine, want = arrays_of(name, op, count)[comm.rank], expected(name, op, count)
    room = np.full(mine.nbytes + 128, 0xA5, np.uint8)
    x = room[64 : 64 + mine.nbytes].view(mine.dtype)
    x[...] = mine
    comm.allreduce(x, op=op)
    assert bits(x) == want, (name, op, count, "in place")
    x[...] = 0
    source = mine.copy()
    comm.allreduce(source, x, op=op)
    assert bits(x) == want, (name, op, count, "out of place")
    assert bits(source) == bits(mine)
    assert (room[:64] == 0xA5).all()
    assert (room[64 + mine.nbytes :] == 0xA5).all()


def every_pair_has_the_bits_of_the_reference() -> None:
    with job() as comm:
        for name, dtype in DTYPES.items():
            for op in OPS.values():
                if dtype.kind in op.kinds:
                    check_pair(comm, name, op.name, 1100)


def every_count_has_the_bits_of_the_reference() -> None:
    with job() as comm:
        for name, op in FEW:
            for count in COUNTS:
                check_pair(comm, name, op, count)


def long_arrays_in_chunks_of_their_real_size_have_the_bits_of_the_reference() -> None:
    small, pace.SHARD_CHUNK_BYTES = pace.SHARD_CHUNK_BYTES, (16 << 10, 16 << 10)
    try:
        with job() as comm:
            check_pair(comm, "float32", "sum", 80_001)
    finally:
        pace.SHARD_CHUNK_BYTES = small


def any_order_is_close_and_has_the_same_bits_on_all_ranks() -> str:
    digest = hashlib.sha256()
    with job() as comm:
        for name, op in (("float32", "sum"), ("float64", "avg"), ("bfloat16", "sum")):
            for count in COUNTS:
                arrays = arrays_of(name, op, count, special=False)
                x = arrays[comm.rank].copy()
                comm.allreduce(x, op=op, order="any")
                digest.update(bits(x))
                wide = np.array([each.astype(np.float64) for each in arrays]).reshape(
                    len(arrays), count
                )
                exact = wide.mean(0) if op == "avg" else wide.sum(0)
                bound = np.abs(wide).sum(0) * (0.04 if name == "bfloat16" else 1e-5)
                assert (np.abs(x.astype(np.float64) - exact) <= bound).all(), (name, op, count)
    return digest.hexdigest()


def arrays_of_every_layout_and_shape_are_reduced() -> None:
    with job() as comm:
        total = len(NODE_OF) * (len(NODE_OF) + 1) // 2
        base = np.arange(210, dtype=np.int64)
        for shape in (
            lambda x: x.reshape(14, 15)[::2, 1::3],
            lambda x: np.asfortranarray(x.reshape(14, 15)),
            lambda x: x[::-1],
            lambda x: x.reshape(5, 6, 7).transpose(2, 0, 1),
            lambda x: x[5:6].reshape(()),
            lambda x: x[:0].reshape(0, 3),
        ):
            x = shape(base * (comm.rank + 1))
            want = np.array(shape(base * total))
            out = np.zeros_like(x)
            comm.allreduce(x.copy(order="K"), out)
            assert (out == want).all()
            comm.allreduce(x)
            assert x.shape == want.shape
            assert (x == want).all()
        z = comm.empty((14, 15), np.int64)
        z[:] = base.reshape(14, 15) * (comm.rank + 1)
        comm.allreduce(z)
        assert (z == base.reshape(14, 15) * total).all()


def many_arrays_have_the_bits_of_separate_calls() -> None:
    with job() as comm:
        counts = [3, 700, 0, 41, 1100]
        mine = [arrays_of("float32", "sum", count, count)[comm.rank] for count in counts]
        apart = [comm.allreduce(x.copy()) for x in mine]
        comm.allreduce_many(mine)
        assert [bits(x) for x in mine] == [bits(x) for x in apart]


def many_calls_in_a_row_see_their_own_inputs() -> None:
    with job() as comm, job() as other:
        x, y = np.empty(600, np.int64), np.empty(90, np.int64)
        n = len(NODE_OF)
        for number in range(40):
            x[...] = np.arange(600) * number + comm.rank
            y[...] = number * (comm.rank + 1)
            comm.allreduce(x, order=("rank", "any")[number % 2], timeout=LIMIT_S + number % 3)
            other.allreduce(y)
            assert (x == n * np.arange(600) * number + n * (n - 1) // 2).all(), number
            assert (y == number * n * (n + 1) // 2).all(), number
            comm.timeout = LIMIT_S + number % 4
        assert comm.timeout == LIMIT_S + 3


def nobody_leaves_a_barrier_before_all_have_come() -> None:
    with job() as comm:
        comm.barrier()
        for turn in range(3):
            mark = FOLDER / f"turn{turn}-{comm.rank}"
            mark.touch()
            comm.barrier()
            assert len(list(FOLDER.glob(f"turn{turn}-*"))) == comm.nranks


def plans_say_what_runs() -> None:
    with job() as comm:
        text = comm.plan(np.ones(1100, np.float32)).describe()
        assert f"MPI between {len(SIZES)} nodes" in text
        assert "hierarchical" in text


# ---- what cannot succeed -------------------------------------------------------------------------


def failing(call: Callable[[], Any], within_s: float) -> list[str]:
    """The error that a call raises, soon enough."""
    start = time.monotonic()
    try:
        call()
    except BaseException as error:  # KeyboardInterrupt too
        raised = error
    else:
        raise AssertionError("the call succeeded")
    took_s = time.monotonic() - start
    assert took_s < within_s, f"{took_s:.1f} s: {raised}"
    return [type(raised).__name__, str(raised)]


def then_refused(comm: gar.Communicator) -> None:
    for call in (lambda: comm.allreduce(np.ones(3)), comm.barrier):
        kind, _ = failing(call, 5.0)
        assert kind == "Aborted"
    start = time.monotonic()
    comm.close()
    assert time.monotonic() - start < 5.0


def _mismatch(call: Callable[[gar.Communicator], Any]) -> list[str]:
    comm = job()
    comm.allreduce(np.ones(3))
    found = failing(lambda: call(comm), 10.0)
    then_refused(comm)
    return found


def counts_that_differ_between_nodes() -> list[str]:
    return _mismatch(lambda comm: comm.allreduce(np.ones(5 if SECOND else 4)))


def dtypes_that_differ_between_nodes() -> list[str]:
    return _mismatch(lambda comm: comm.allreduce(np.ones(4, np.float32 if SECOND else np.int32)))


def operators_that_differ_between_nodes() -> list[str]:
    return _mismatch(lambda comm: comm.allreduce(np.ones(4), op="max" if SECOND else "sum"))


def a_count_that_one_rank_has_otherwise() -> list[str]:
    return _mismatch(lambda comm: comm.allreduce(np.ones(5 if RANK == LAST else 4)))


def a_layout_that_one_rank_has_otherwise() -> list[str]:
    order = "F" if RANK == LAST else "C"
    return _mismatch(lambda comm: comm.allreduce(np.ones((3, 4), order=order)))


def _late(ranks: list[int]) -> list[str]:
    comm = job()
    comm.allreduce(np.ones(3))
    comm.timeout = SHORT_S
    if comm.rank in ranks:
        # Later than anybody's limit: until the others have said that they gave up.
        end = time.monotonic() + LIMIT_S
        gave_up = FOLDER / "-".join(["gave-up", *map(str, ranks)])
        while not gave_up.exists() and time.monotonic() < end:
            time.sleep(0.01)
    found = failing(lambda: comm.allreduce(np.ones(3)), SHORT_S + 8.0)
    (FOLDER / "-".join(["gave-up", *map(str, ranks)])).touch()
    then_refused(comm)
    return found


def a_rank_that_does_not_come() -> list[str]:
    return _late([LAST])


def a_node_that_does_not_come() -> list[str]:
    return _late(list(range(SIZES[0])))


def _ends(end: Callable[[gar.Communicator], None], who: int) -> list[str]:
    comm = job()
    comm.allreduce(np.ones(3))
    if comm.rank == who:
        end(comm)
        comm.close()
        return ["ended", ""]
    found = failing(lambda: [comm.allreduce(np.ones(3000)) for _ in range(50)], 15.0)
    then_refused(comm)
    return found


def a_rank_that_aborts() -> list[str]:
    return _ends(lambda comm: comm.abort(), LAST)


def a_rank_that_closes() -> list[str]:
    return _ends(lambda comm: comm.close(), LAST)


def a_rank_0_that_closes() -> list[str]:
    return _ends(lambda comm: comm.close(), 0)


def a_rank_that_aborts_from_another_thread() -> list[str]:
    comm = job()
    comm.allreduce(np.ones(3))
    if comm.rank == 0:
        threading.Timer(0.2, comm.abort).start()
    found = failing(lambda: [comm.allreduce(np.ones(9)) for _ in range(1 << 30)], 15.0)
    then_refused(comm)
    return found


def a_rank_that_is_interrupted() -> list[str]:
    comm = job()
    comm.allreduce(np.ones(3))
    if comm.rank == LAST:
        me = threading.main_thread().ident
        assert me is not None
        threading.Timer(0.3, lambda: signal.pthread_kill(me, signal.SIGINT)).start()
    calls = lambda: [comm.allreduce(np.ones(3000)) for _ in range(1 << 30)]  # noqa: E731
    found = failing(calls, 15.0)
    then_refused(comm)
    return found


def _killed(who: int) -> list[str]:
    comm = job()
    comm.allreduce(np.ones(3))
    if comm.rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    found = failing(lambda: [comm.allreduce(np.ones(3000)) for _ in range(50)], 5.0)
    then_refused(comm)
    return found


def rank_0_is_killed() -> list[str]:
    return _killed(0)


def rank_1_is_killed() -> list[str]:
    return _killed(1)


def rank_2_is_killed() -> list[str]:
    return _killed(2)


def rank_3_is_killed() -> list[str]:
    return _killed(3)


def a_cable_that_is_cut() -> list[str]:
    comm = job()
    x = np.full(3000, comm.rank + 1.0)
    comm.allreduce(x)
    assert (x == sum(range(1, comm.nranks + 1))).all()
    comm.timeout = 2.0
    (FOLDER / f"ready-{comm.rank}").touch()
    found = failing(lambda: [comm.allreduce(np.ones(300_000)) for _ in range(1 << 30)], 30.0)
    then_refused(comm)
    return found


def main(names: dict[str, Any]) -> None:
    """Runs what was asked for, in that order; a failure of one is told, and the others run."""
    pace.SHARD_CHUNK_BYTES = (512, 512)  # many chunks of small arrays
    for name in sys.argv[3:]:
        try:
            found, error = names[name](), None
        except BaseException:
            found, error = None, traceback.format_exc()
        with open(FOLDER / f"rank{RANK}", "a") as file:
            file.write(json.dumps([name, found, error]) + "\n")
        left = [thread.name for thread in threading.enumerate() if "pump" in thread.name]
        if error is None and left:
            with open(FOLDER / f"rank{RANK}", "a") as file:
                file.write(json.dumps([name, None, f"threads are left: {left}"]) + "\n")

    if len(sys.argv) == 4 and ("killed" in sys.argv[3] or "cable" in sys.argv[3]):
        os._exit(0)  # MPI's own end would wait for who is not there


if __name__ == "__main__":
    main(globals())
