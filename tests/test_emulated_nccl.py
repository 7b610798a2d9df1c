"""The NCCL stand-in behaves like NCCL: order, rounding, groups, graphs, hangs and refusals.

Knows nothing of gpuallreduce's fabric: what is tested is the ground that its tests stand on.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated_gpu.activate import environment
from emulated_gpu.child import in_child
from jobs import run_job

pytest.importorskip("cupy_backends", reason="the emulated GPUs run CuPy: install .[test,cuda13]")

STAGE_BYTES = 1 << 20
CODES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
FOLDS: list[Callable[..., Any]] = [np.add, np.multiply, np.fmax, np.fmin, np.add]
SUM, PROD, MAX, MIN, AVG = range(5)
UNHANDLED_CUDA_ERROR, INVALID_ARGUMENT, INVALID_USAGE = 1, 4, 5


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def rounded(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """To the dtype; NVIDIA's float8 types saturate."""
    if dtype.kind in "iu":
        return values.astype(dtype)
    if dtype.itemsize == 1:
        largest = float(ml_dtypes.finfo(dtype).max)
        values = np.where(np.isnan(values), values, np.clip(values, -largest, largest))
    return values.astype(dtype)


def ring_fold(hosts: list[np.ndarray], op: int, *, last: int) -> np.ndarray:
    """Hop by hop from the rank after ``last`` round to ``last``, rounded at every hop."""
    dtype, nranks = hosts[0].dtype, len(hosts)
    wide = (
        {1: np.float32, 2: np.float32}.get(dtype.itemsize, dtype) if dtype.kind in "fV" else dtype
    )
    arrays = [host.astype(wide) for host in hosts]
    if op == AVG and dtype.kind not in "iu":
        scale = rounded(np.array(1, wide) / np.array(nranks, wide), dtype).astype(wide)
        arrays = [rounded(array * scale, dtype).astype(wide) for array in arrays]
    order = [(last + 1 + i) % nranks for i in range(nranks)]
    with np.errstate(all="ignore"):
        result = arrays[order[0]]
        for rank in order[1:]:
            result = rounded(FOLDS[op](result, arrays[rank]), dtype).astype(wide)
        if op == AVG and dtype.kind in "iu":
            floor = result // nranks  # C's division goes towards zero
            result = floor + ((result < 0) & (result % nranks != 0))
    return rounded(result, dtype)


def ring_all_reduce(hosts: list[np.ndarray], op: int) -> np.ndarray:
    """A megabyte at a time, in slices, of which slice s ends at rank s."""
    nranks, count = len(hosts), hosts[0].size
    result = np.empty_like(hosts[0])
    chunk = STAGE_BYTES // hosts[0].itemsize
    for first in range(0, count, chunk):
        length = min(chunk, count - first)
        slice_count = -(-length // nranks)
        for rank in range(nranks):
            low = first + min(length, rank * slice_count)
            high = first + min(length, (rank + 1) * slice_count)
            result[low:high] = ring_fold([host[low:high] for host in hosts], op, last=rank)
    return result


def anything(dtype: str, rank: int, count: int) -> np.ndarray:
    """Inexact data: floats of many sizes, integers of all bits."""
    random = np.random.default_rng([rank, count])
    where = numpy_dtype(dtype)
    if where.kind in "iu":
        return random.integers(0, 256, count * where.itemsize, np.uint8).view(where)
    sizes = 2.0 ** random.integers(-3, 4, count)
    return (random.standard_normal(count) * sizes).astype(where)


def same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


def status_of(call: Callable[..., Any], *arguments: Any) -> int:
    """The number of NCCL's error."""
    from cupy.cuda import nccl

    with pytest.raises(nccl.NcclError) as caught:
        call(*arguments)
    return int(caught.value.status)


def library() -> ctypes.CDLL:
    found = ctypes.CDLL("libnccl.so.2")
    found.ncclGetLastError.restype = ctypes.c_char_p
    found.ncclGetLastError.argtypes = [ctypes.c_void_p]
    return found


def last_error() -> str:
    return library().ncclGetLastError(None).decode()


@in_child(gpus=4)
def test_sums_round_at_every_hop_in_ring_order() -> None:
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    here, nranks = Ranks(range(4)), 4
    comms = nccl.NcclCommunicator.initAll(nranks)
    assert [comm.rank_id() for comm in comms] == [0, 1, 2, 3]
    assert [comm.device_id() for comm in comms] == [0, 1, 2, 3]
    assert [comm.size() for comm in comms] == [4] * 4
    for (dtype, code), op in itertools.product(CODES.items(), range(5)):
        count = 1003 if dtype != "float16" or op != SUM else STAGE_BYTES // 2 + 1001
        hosts = [anything(dtype, rank, count) for rank in range(nranks)]
        arrays = here.put(hosts)
        reduced = here.put([np.zeros_like(x) for x in hosts])
        nccl.groupStart()
        for comm, array, out, stream in zip(comms, arrays, reduced, here.pointers, strict=True):
            comm.reduce(array.ptr, out.ptr, count, code, op, 2, stream)
            comm.allReduce(array.ptr, array.ptr, count, code, op, stream)
        nccl.groupEnd()
        here.synchronize()
        for array in arrays:
            same_bits(array.get(), ring_all_reduce(hosts, op))
        same_bits(reduced[2].get(), ring_fold(hosts, op, last=2))
        for rank in (0, 1, 3):
            assert not reduced[rank].get().any()


@in_child(gpus=2)
def test_a_scaled_sum_multiplies_before_it_adds() -> None:
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    here = Ranks(range(2))
    comms = nccl.NcclCommunicator.initAll(2)
    hosts = [anything("bfloat16", rank, 1000) for rank in range(2)]
    arrays = here.put(hosts)
    half = np.array(0.3, ml_dtypes.bfloat16)
    ops = [ctypes.c_int() for _ in comms]
    for comm, op in zip(comms, ops, strict=True):
        scalar = ctypes.c_void_p(half.ctypes.data)
        handle = ctypes.c_void_p(comm.comm)
        create = library().ncclRedOpCreatePreMulSum
        assert create(ctypes.byref(op), scalar, CODES["bfloat16"], 1, handle) == 0
    nccl.groupStart()
    for comm, array, op, stream in zip(comms, arrays, ops, here.pointers, strict=True):
        comm.allReduce(array.ptr, array.ptr, 1000, CODES["bfloat16"], op.value, stream)
    nccl.groupEnd()
    here.synchronize()
    scaled = [(host.astype(np.float32) * np.float32(half)).astype(host.dtype) for host in hosts]
    for array in arrays:
        same_bits(array.get(), ring_all_reduce(scaled, SUM))
    for comm, op in zip(comms, ops, strict=True):
        assert library().ncclRedOpDestroy(op, ctypes.c_void_p(comm.comm)) == 0
    arguments = (arrays[0].ptr, arrays[0].ptr, 1, CODES["bfloat16"], ops[0].value, here.pointers[0])
    assert status_of(comms[0].allReduce, *arguments) == INVALID_ARGUMENT


@in_child(gpus=2)
def test_every_half_and_small_float_keeps_its_bits_and_rounds_to_nearest_even() -> None:
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    here = Ranks(range(2))
    comms = nccl.NcclCommunicator.initAll(2)
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        where = numpy_dtype(dtype)
        every = np.arange(1 << 8 * where.itemsize).astype(f"u{where.itemsize}").view(where)
        every = every[~np.isnan(every.astype(np.float32))]
        for other in (np.zeros_like(every), every[::-1].copy(), np.roll(every, 77)):
            arrays = here.put([every, other])
            nccl.groupStart()
            for comm, array, stream in zip(comms, arrays, here.pointers, strict=True):
                comm.allReduce(array.ptr, array.ptr, every.size, CODES[dtype], SUM, stream)
            nccl.groupEnd()
            here.synchronize()
            actual = [array.get() for array in arrays]
            same_bits(*actual)
            expected = ring_all_reduce([every, other], SUM)
            numbers = ~np.isnan(expected.astype(np.float32))
            assert (np.isnan(actual[0].astype(np.float32)) == ~numbers).all()
            same_bits(actual[0][numbers], expected[numbers])


@in_child(gpus=4)
def test_split_makes_groups_of_equal_colour_ordered_by_key() -> None:
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    here = Ranks(range(4))
    comms = nccl.NcclCommunicator.initAll(4)
    colors, keys = (7, 0, 7, -1), (5, 0, 1, 0)
    nccl.groupStart()
    parts = [comm.commSplit(*both) for comm, *both in zip(comms, colors, keys, strict=True)]
    nccl.groupEnd()
    assert parts[3] is None
    assert [part.rank_id() for part in parts[:3]] == [1, 0, 0]
    assert [part.size() for part in parts[:3]] == [2, 1, 2]
    arrays = here.put([np.array([10**rank], np.int64) for rank in range(4)])
    nccl.groupStart()
    for part, array, stream in zip(parts[:3], arrays, here.pointers, strict=False):
        part.allReduce(array.ptr, array.ptr, 1, CODES["int64"], SUM, stream)
    nccl.groupEnd()
    here.synchronize()
    assert [int(array.get()[0]) for array in arrays] == [101, 10, 101, 1000]


@in_child(gpus=2)
def test_calls_return_before_peers_come_and_keep_their_order_over_streams() -> None:
    import cupy
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    first, second = Ranks(range(2)), Ranks(range(2))
    comms = nccl.NcclCommunicator.initAll(2)
    arrays = first.put([np.array([rank + 1.0]) for rank in range(2)])
    for rank in range(2):
        for streams, op in ((first, SUM), (second, PROD), (first, SUM)):
            ends = (arrays[rank].ptr, arrays[rank].ptr, 1, CODES["float64"], op)
            comms[rank].allReduce(*ends, streams.pointers[rank])
        if rank == 0:
            assert not first.streams[0].done
            assert not second.streams[0].done
    first.synchronize()
    second.synchronize()
    assert [float(array.get()[0]) for array in arrays] == [18.0, 18.0]  # ((1 + 2) ** 2) * 2
    # on the NULL stream of each rank's own GPU, whatever is current
    with cupy.cuda.Device(1):
        for comm, array in zip(comms, arrays, strict=True):
            comm.allReduce(array.ptr, array.ptr, 1, CODES["float64"], SUM, 0)
    for device in range(2):
        cupy.cuda.Device(device).synchronize()
    assert [float(array.get()[0]) for array in arrays] == [36.0, 36.0]


@in_child(gpus=2)
def test_a_captured_group_runs_at_every_replay() -> None:
    import cupy
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    here = Ranks(range(2))
    comms = nccl.NcclCommunicator.initAll(2)
    arrays = here.put([np.array([1, 2, 3], np.int32)] * 2)
    relaxed = cupy.cuda.runtime.streamCaptureModeRelaxed
    graphs = []
    for device, stream in enumerate(here.streams):
        with cupy.cuda.Device(device):
            stream.begin_capture(relaxed)
    nccl.groupStart()
    for comm, array, stream in zip(comms, arrays, here.pointers, strict=True):
        comm.allReduce(array.ptr, array.ptr, 3, CODES["int32"], SUM, stream)
    nccl.groupEnd()
    for device, stream in enumerate(here.streams):
        with cupy.cuda.Device(device):
            graphs.append(stream.end_capture())
    for array in arrays:
        np.testing.assert_array_equal(array.get(), [1, 2, 3])
    for _ in range(5):
        for device, (graph, stream) in enumerate(zip(graphs, here.streams, strict=True)):
            with cupy.cuda.Device(device):
                graph.launch(stream)
    here.synchronize()
    for array in arrays:
        np.testing.assert_array_equal(array.get(), np.array([1, 2, 3]) * 32)


@in_child(gpus=2)
def test_counts_that_differ_hang_until_the_limit_and_break_the_communicator() -> None:
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    here = Ranks(range(2))
    comms = nccl.NcclCommunicator.initAll(2)
    os.environ["EMULATED_NCCL_TIMEOUT_S"] = "0.3"
    arrays = here.put([np.ones(10, np.float32)] * 2)
    for comm, array, count, stream in zip(comms, arrays, (10, 9), here.pointers, strict=True):
        comm.allReduce(array.ptr, array.ptr, count, CODES["float32"], SUM, stream)
    here.synchronize()
    for comm, array, stream in zip(comms, arrays, here.pointers, strict=True):
        assert status_of(comm.check_async_error) in (3, 6)
        ends = (array.ptr, array.ptr, 10, CODES["float32"], SUM, stream)
        assert status_of(comm.allReduce, *ends) in (3, 6)


@in_child(gpus=2)
def test_a_message_of_another_length_than_expected_hangs_until_the_limit() -> None:
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    here = Ranks(range(2))
    comms = nccl.NcclCommunicator.initAll(2)
    os.environ["EMULATED_NCCL_TIMEOUT_S"] = "0.3"
    arrays = here.put([np.ones(10, np.uint8)] * 2)
    comms[0].send(arrays[0].ptr, 10, CODES["uint8"], 1, here.pointers[0])
    comms[1].recv(arrays[1].ptr, 9, CODES["uint8"], 0, here.pointers[1])
    here.synchronize()
    assert {status_of(comm.check_async_error) for comm in comms} <= {3, 6}


@in_child(gpus=2)
def test_wrong_arguments_are_refused_with_their_reason() -> None:
    from cupy.cuda import nccl
    from nccl_ranks import GUARD_BYTES, Ranks

    here = Ranks(range(2))
    comms = nccl.NcclCommunicator.initAll(2)
    (array, _), (stream, _) = here.put([np.ones(10, np.float32)] * 2), here.pointers
    comm, f32 = comms[0], CODES["float32"]
    on_host = np.ones(10, np.float32).ctypes.data
    block = (array.memory.data.mem.size - GUARD_BYTES) // 4  # CuPy's pool rounds up
    for call, said in {
        (comm.allReduce, 0, array.ptr, 10, f32, SUM, stream): "sendbuff is not memory",
        (comm.allReduce, array.ptr, on_host, 10, f32, SUM, stream): "recvbuff is not memory",
        (comm.allReduce, array.ptr, array.ptr, 10, 12, SUM, stream): "no data type 12",
        (comm.allReduce, array.ptr, array.ptr, 10, -1, SUM, stream): "no data type -1",
        (comm.allReduce, array.ptr, array.ptr, 10, f32, 5, stream): "no operator 5",
        (comm.allReduce, array.ptr, array.ptr, 1 << 40, f32, SUM, stream): "after the allocation",
        (comm.allGather, array.ptr, array.ptr, block, f32, stream): "recvbuff ends",
        (comm.reduceScatter, array.ptr, array.ptr, block, f32, SUM, stream): "sendbuff ends",
        (comm.broadcast, array.ptr, array.ptr, 10, f32, 2, stream): "no rank 2",
        (comm.send, array.ptr, 10, f32, -1, stream): "no rank -1",
        (nccl.NcclCommunicator, 0, bytes(128), 0): "nranks is 0",
        (nccl.NcclCommunicator, 2, bytes(128), 2): "rank 2 of 2 does not exist",
    }.items():
        assert status_of(*call) == INVALID_ARGUMENT
        assert said in last_error()
    strange = here.pointers[1]
    ends = (array.ptr, array.ptr, 10)
    assert status_of(comm.allReduce, *ends, f32, SUM, strange) == UNHANDLED_CUDA_ERROR
    assert "not of the communicator's GPU" in last_error()
    assert status_of(nccl.groupEnd) == INVALID_USAGE
    comm.destroy()
    assert status_of(comm.allReduce, array.ptr, array.ptr, 10, f32, SUM, stream) == INVALID_ARGUMENT
    assert "NULL" in last_error()


@in_child(gpus=2)
def test_an_error_in_a_group_means_that_nothing_of_it_runs() -> None:
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    here = Ranks(range(2))
    comms = nccl.NcclCommunicator.initAll(2)
    arrays = here.put([np.ones(10, np.float32)] * 2)
    nccl.groupStart()
    ends = [(array.ptr, array.ptr, 10) for array in arrays]
    comms[0].allReduce(*ends[0], CODES["float32"], SUM, here.pointers[0])
    assert status_of(comms[1].allReduce, *ends[1], 99, SUM, here.pointers[1]) == INVALID_ARGUMENT
    assert status_of(nccl.groupEnd) == INVALID_ARGUMENT
    here.synchronize()
    np.testing.assert_array_equal(arrays[0].get(), np.ones(10, np.float32))


@in_child(gpus=2)
def test_ranks_on_one_gpu_are_refused_unless_enabled() -> None:
    import cupy
    from cupy.cuda import nccl

    os.environ.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)

    def connect() -> list[Any]:
        unique_id, comms = nccl.get_unique_id(), []
        nccl.groupStart()
        with cupy.cuda.Device(1):
            comms = [nccl.NcclCommunicator(2, unique_id, rank) for rank in range(2)]
        nccl.groupEnd()
        return comms

    assert status_of(connect) == INVALID_USAGE
    assert "Duplicate GPU detected : rank 0 and rank 1" in last_error()
    assert status_of(nccl.NcclCommunicator.initAll, [1, 1]) == INVALID_USAGE
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    assert [comm.device_id() for comm in connect()] == [1, 1]


@in_child(gpus=2)
def test_ranks_that_do_not_fit_each_other_are_refused() -> None:
    from cupy.cuda import nccl

    for others in (((2, 0), (2, 0)), ((2, 0), (3, 1))):  # (nranks, rank)
        unique_id, statuses = nccl.get_unique_id(), []

        def join(
            nranks: int, rank: int, key: bytes = unique_id, found: list[int] = statuses
        ) -> None:
            found.append(status_of(nccl.NcclCommunicator, nranks, key, rank))

        threads = [threading.Thread(target=join, args=each) for each in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [INVALID_ARGUMENT] * 2


@in_child(gpus=2)
def test_an_abort_ends_the_peers_wait_and_shows_there() -> None:
    from cupy.cuda import nccl
    from nccl_ranks import Ranks

    here = Ranks(range(2))
    comms = nccl.NcclCommunicator.initAll(2)
    array = here.put([np.ones(10, np.float32)] * 2)[0]
    comms[0].allReduce(array.ptr, array.ptr, 10, CODES["float32"], SUM, here.pointers[0])
    comms[0].check_async_error()
    comms[1].abort()
    here.synchronize()
    assert status_of(comms[0].check_async_error) == 6
    assert "rank 1 aborted" in last_error()
    assert status_of(comms[1].check_async_error) == INVALID_ARGUMENT  # CuPy has let it go


def test_where_the_maker_of_the_id_has_ended_joining_fails_at_once():
    body = """
        import subprocess
        from cupy.cuda import nccl
        script = "from cupy.cuda import nccl; print(nccl.get_unique_id().hex())"
        made = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
        report(error_of(nccl.NcclCommunicator, 2, bytes.fromhex(made.stdout.decode()), 0))
    """
    (rank,) = run_job(1, body, **environment(gpus=1))
    assert rank.reports[0][0] == "NcclError"
    assert "SYSTEM_ERROR" in rank.reports[0][1]
