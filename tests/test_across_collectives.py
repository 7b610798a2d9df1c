"""The collectives beside all-reduce on several nodes: host ranks under a real mpirun, CUDA ranks on
emulated GPUs.
"""

from __future__ import annotations

import secrets
import textwrap
from pathlib import Path

import gpus
import pytest
from test_across import check, found_in, kernels_of, mpirun
from test_across import run as run_command
from test_across_cuda import check_the_others_name, run, start

from gpuallreduce import jit, reference
from gpuallreduce.across.chunks import parts_of
from gpuallreduce.inputs import random_inputs
from gpuallreduce.types import DTYPES, OPS

RANKS = Path(__file__).parent / "across_collectives_ranks.py"
LAYOUTS = ((2, 2), (3, 1), (1, 1, 1))
FEW = (("float32", "sum"), ("bfloat16", "avg"), ("int8", "prod"), ("complex64", "sum"))
BLOCKS = (0, 1, 7, 275)
RIGHT = (
    "reductions_have_the_bits_of_the_reference",
    "every_dtype_is_moved_as_it_is",
    "long_arrays_are_moved_in_parts",
    "arrays_of_every_layout_are_moved_and_reduced",
    "collectives_of_all_kinds_follow_each_other",
)
# What every rank must raise: the kind, and the texts of which all are in the message.
FAILURES: dict[str, tuple[str, list[str]]] = {
    "roots_that_differ": ("MismatchError", [": broadcast(", "root=0", "root=1"]),
    "roots_of_reductions_that_differ": ("MismatchError", [": reduce(", "root=0", "root=1"]),
    "counts_that_differ": ("MismatchError", [": all_gather(", "count=4", "count=5"]),
    "dtypes_that_differ": ("MismatchError", ["dtype=float32", "dtype=int32"]),
    "collectives_that_differ": ("MismatchError", [": reduce(", ": allreduce("]),
    "a_reduction_where_others_move": ("MismatchError", [": broadcast(", ": reduce("]),
    "a_rank_that_does_not_come": ("Timeout", ["rank {last} (node node{end})"]),
}
FEW_FAILURES = ("roots_that_differ", "collectives_that_differ", "a_rank_that_does_not_come")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs find the contract's bits, and leave what they found."""
    folder = tmp_path_factory.mktemp("collectives")
    for name, op in FEW:
        jit.compile_host_together(kernels_of(name, op))
        for nranks in {sum(layout) for layout in LAYOUTS}:
            for count in BLOCKS:
                arrays = random_inputs(
                    DTYPES[name], OPS[op], nranks * count, nranks, 7, special=True
                )
                file = f"{nranks}-{name}-{op}-{nranks * count}-7"
                (folder / file).write_bytes(reference.allreduce(arrays, op).tobytes())
    return folder


@pytest.mark.parametrize("step", [1, 3, 64])
def test_parts_follow_each_other_and_cover_what_is_moved(step: int) -> None:
    for nbytes in (0, 1, 2, 63, 64, 65, 192, 193):
        parts = parts_of(nbytes, step)
        assert [byte for first, length in parts for byte in range(first, first + length)] == list(
            range(nbytes)
        )
        assert all(length == step for _, length in parts[:-1])
        assert all(0 < length <= step for _, length in parts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_host_ranks_get_the_bits_of_one_node_and_all_raise_what_cannot_succeed(
    layout: tuple[int, ...], folder: Path
) -> None:
    # Whatever differs is found by one comparison in a node, by one between nodes, or far away.
    few = {name: FAILURES[name] for name in FEW_FAILURES}
    failures = FAILURES if layout == (3, 1) else few
    found = check(layout, folder, (*RIGHT, *failures), RANKS)
    names = {"last": sum(layout) - 1, "end": len(layout) - 1}
    for name, (kind, texts) in failures.items():
        for rank, of_rank in found.items():
            raised, message = of_rank[name]
            assert raised == kind, (name, rank, message)
            for text in texts:
                assert text.format(**names) in message, (name, rank)


def test_a_host_rank_that_is_killed_is_named_by_all_others(folder: Path) -> None:
    mine = folder / secrets.token_hex(4)
    mine.mkdir()
    layout, names = (1, 2), ("a_rank_that_is_killed",)
    run_command(mpirun(layout, mine, names, "--enable-recovery", ranks=RANKS))
    found = found_in(mine)
    assert sorted(found) == [0, 1]
    for of_rank in found.values():
        kind, message = of_rank["a_rank_that_is_killed"]
        assert kind == "Aborted"
        assert "rank 2 (node node1) is gone" in message


# ---- CUDA ranks ----------------------------------------------------------------------------------

emulated = pytest.mark.skipif(
    gpus.are_real(), reason="nodes that share a machine, each with GPUs of its own, are emulated"
)

MOVES = """
from gpuallreduce.across import cuda_moves
def check_moves(comm, name, count, **keywords):
    inputs = arrays(name, "sum", count)
    for root in range(nranks):
        x = put(inputs[rank])
        comm.broadcast(x, root=root, **keywords)
        comm.synchronize()
        assert same(get(x), inputs[root]), (name, count, root)
    x, out = put(inputs[rank]), put(np.zeros(nranks * count, inputs[0].dtype))
    comm.all_gather(x, out, **keywords)
    comm.synchronize()
    assert same(get(out), np.concatenate(inputs)), (name, count)
    assert same(get(x), inputs[rank])
def check_reductions(comm, name, op, count, root):
    inputs = arrays(name, op, nranks * count)
    want = reference.allreduce(inputs, op)
    x, out = put(inputs[rank]), put(np.zeros_like(inputs[0]))
    comm.reduce(x, out, op=op, root=root)
    block = comm.reduce_scatter(x, op=op)
    comm.synchronize()
    assert same(get(x), inputs[rank])
    assert same(get(out), want if rank == root else np.zeros_like(want)), (name, op, count)
    assert same(get(block), want[rank * count : (rank + 1) * count]), (name, op, count)
    comm.reduce(x, op=op, root=root)
    comm.synchronize()
    assert same(get(x), want if rank == root else inputs[rank]), (name, op, count)
"""


@emulated
@pytest.mark.parametrize("layout", [(2, 1), (1, 1)], ids=str)
def test_cuda_ranks_get_the_bits_of_one_node(layout: tuple[int, ...]) -> None:
    body = """
    comm = start()
    for turn, (name, op) in enumerate(FEW):
        for count in (0, 1, 7, 1100):
            check_reductions(comm, name, op, count, turn % nranks)
    for name in DTYPES:
        check_moves(comm, name, 33)
    for count in (0, 1, 5000):
        check_moves(comm, "float32", count)
    cuda_moves.PART_BYTES, cuda_moves.LEAST_BLOCK_BYTES = 4096, 1024
    for count in (1023, 1024, 1025, 4096, 30_001):
        check_moves(comm, "uint8", count)
    turned = put(arrays("int32", "sum", 600)[rank].reshape(20, 30)).T  # strided on the GPU
    comm.broadcast(turned[::2], root=nranks - 1)
    comm.synchronize()
    here, there = (arrays("int32", "sum", 600)[r].reshape(20, 30).T for r in (rank, nranks - 1))
    want = here.copy()
    want[::2] = there[::2]
    assert (get(turned.T).T == want).all()
    comm.close()
    """
    run(layout, MOVES + f"FEW = {FEW!r}\n" + textwrap.dedent(body))


@emulated
def test_cuda_calls_of_all_kinds_follow_the_streams_they_are_given_and_each_other() -> None:
    body = """
    comm = start()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    inputs = [arrays("float32", "sum", 3000 * nranks, seed=turn) for turn in range(12)]
    sources = [put(each[rank]) for each in inputs]
    pinned = cupy.cuda.alloc_pinned_memory(12 * 12_000 * nranks)
    results = np.frombuffer(pinned, np.float32, 12 * 3000 * nranks).reshape(12, -1)
    x, block = put(np.zeros(3000 * nranks, np.float32)), put(np.zeros(3000, np.float32))
    for turn, source in enumerate(sources):  # nothing but streams keeps these in order
        stream = streams[turn % 3]
        if turn:
            stream.wait_event(before)
        runtime.memcpyAsync(x.data.ptr, source.data.ptr, x.nbytes, 4, stream.ptr)
        comm.reduce_scatter(x, block, stream=stream)
        comm.broadcast(x, root=turn % nranks, stream=stream)
        comm.reduce(x, root=0, stream=stream)
        comm.all_gather(block, x, stream=stream)
        runtime.memcpyAsync(results[turn].ctypes.data, x.data.ptr, x.nbytes, 4, stream.ptr)
        before = cupy.cuda.Event()
        before.record(stream)
    comm.synchronize()
    before.synchronize()
    for turn in range(12):
        assert same(results[turn], reference.allreduce(inputs[turn], "sum")), turn
    """
    run((2, 1), body, delay_us=300)


@emulated
def test_graphs_of_moves_are_replayed_with_changing_inputs() -> None:
    body = """
    comm = start()
    x, out = put(np.zeros(500, np.int32)), put(np.zeros(500 * nranks, np.int32))
    stream = cupy.cuda.Stream(non_blocking=True)
    def both():
        comm.broadcast(x, root=1, stream=stream)
        comm.all_gather(x, out, stream=stream)
        comm.reduce(out, root=2, stream=stream)
    stream.begin_capture()
    refused = error_of(both)
    stream.end_capture()
    assert refused[0] == "NotSupported" and "before the capture" in refused[1], refused
    both()
    comm.synchronize()
    stream.begin_capture()
    both()
    graph = stream.end_capture()
    for turn in range(12):
        mine = np.arange(500, dtype=np.int32) + 1000 * turn + rank
        copy(x.data.ptr, mine.ctypes.data, mine.nbytes, stream)
        graph.launch(stream) if turn % 3 else both()
        stream.synchronize()
        assert same(get(x), mine + 1 - rank), turn
        times = nranks if rank == 2 else 1
        assert same(get(out), np.tile((mine + 1 - rank) * times, nranks)), turn
    comm.barrier()
    """
    run((1, 2), body)


MISMATCH = """
comm = start(timeout=20)
FIRST
call = (OTHER) if rank == nranks - 1 else (MINE)
report(fails(comm, call))
report(fails(comm, lambda: comm.broadcast(put(np.ones(3, np.float32)))))
comm.close()
"""
ONES = "put(np.ones(100, np.float32))"
MISMATCHES = {
    "roots": (f"comm.broadcast({ONES})", f"comm.broadcast({ONES}, root=1)", "root=1"),
    "a reduction": (f"comm.broadcast({ONES})", f"comm.reduce({ONES})", ": reduce("),
    "an all-reduce": (f"comm.all_gather({ONES})", f"comm.allreduce({ONES})", ": allreduce("),
    "roots of reductions": (f"comm.reduce({ONES})", f"comm.reduce({ONES}, root=1)", "root=1"),
}


@emulated
@pytest.mark.parametrize("name", MISMATCHES)
def test_cuda_ranks_that_make_different_calls_all_raise(name: str) -> None:
    mine, other, text = MISMATCHES[name]
    connect = f"comm.broadcast({ONES}); comm.synchronize()" if name == "a reduction" else ""
    body = MISMATCH.replace("FIRST", connect)
    body = body.replace("MINE", f"lambda: {mine}").replace("OTHER", f"lambda: {other}")
    for number, rank in enumerate(run((2, 1), body)):
        kind, message, took_s = rank.reports[0]
        assert kind == "MismatchError", (number, message)
        assert text in message, number
        assert took_s < 12
        assert rank.reports[1][0] == "Aborted"


@emulated
def test_no_cuda_rank_moves_data_before_all_are_known_to_make_its_call() -> None:
    # Ranks 0 and 3 have neighbours that make their call.
    body = """
    comm = start(timeout=20)
    comm.barrier()
    check_moves(comm, "int32", 10)
    x = put(np.full(100, rank, np.int32))
    call = lambda: comm.broadcast(x[: 80 if rank < 2 else 90], root=0 if rank < 2 else 3)
    report(fails(comm, call))
    report(get(x).tolist() == [rank] * 100)
    report(comm._calls.across._progress.meeting())
    comm.close()
    """
    for number, rank in enumerate(run((1, 1, 1, 1), MOVES + textwrap.dedent(body))):
        kind, message, _ = rank.reports[0]
        assert kind == "MismatchError", (number, message)
        assert rank.reports[1], number
        # Who knew of no difference had come to where all meet, and did not get past it.
        assert rank.reports[2] == (number in (0, 3)), number


@emulated
@pytest.mark.parametrize("victim", [2])
def test_a_killed_cuda_rank_is_named_on_every_node(victim: int) -> None:
    body = """
    comm = start(timeout=20)
    x = put(np.ones(50_000, np.float32))
    comm.broadcast(x)
    comm.synchronize()
    report("ready")
    def many():
        for turn in range(1 << 20):
            comm.broadcast(x, root=turn % nranks)
            comm.all_gather(x)
            comm.synchronize()
    report(fails(comm, many))
    comm.close()
    """
    processes = start((2, 1), body)
    check_the_others_name(victim, processes)


@emulated
@pytest.mark.parametrize("layout", [(2, 1), (1, 1, 1)], ids=str)
def test_a_cuda_rank_that_does_not_come_is_named_by_all(layout: tuple[int, ...]) -> None:
    body = """
    comm = start()
    x = put(np.ones(100, np.float32))
    if len(sizes) == 3:  # else the first move connects the ranks
        comm.broadcast(x)
        comm.synchronize()
    comm.timeout = 1
    if rank != 2:
        report(fails(comm, lambda: comm.all_gather(x)))
    else:
        while (found := error_of(comm.synchronize)) is None:
            time.sleep(0.1)
        report([*found, 0])
    comm.close()
    """
    for rank in run(layout, body):
        kind, text, took_s = rank.reports[0]
        assert kind == "Timeout", text
        assert f"rank 2 (node node{len(layout) - 1}) to make the same call" in text
        assert took_s < 12


@emulated
def test_an_abort_ends_moves_on_all_cuda_ranks() -> None:
    body = """
    comm = start(timeout=20)
    x = put(np.ones(100, np.float32))
    if rank == 0:
        comm.broadcast(x)
        comm.all_gather(x)
        comm.abort()
        report(["Aborted", "", 0])
    elif rank == 1:
        report(fails(comm, lambda: [comm.broadcast(x), comm.all_gather(x), comm.all_gather(x)]))
    else:
        comm.broadcast(x)
        while (found := error_of(comm.synchronize)) is None:
            time.sleep(0.05)
        report([*found, 0])
    comm.close()
    """
    for rank in run((2, 1), body):
        kind, text, took_s = rank.reports[0]
        assert kind == "Aborted", text
        assert took_s < 8
