"""NCCL through the fabric: real CuPy on emulated GPUs, against NumPy.

Knows nothing of the inside of the NCCL stand-in; whether that behaves like NCCL has tests of its
own.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_gpu.activate import FOLDER_VARIABLE, environment
from emulated_gpu.child import in_child, run_in_child
from jobs import finish_job, run_job, start_job

from gpuallreduce.errors import (
    Aborted,
    Closed,
    DeviceError,
    InvalidArgument,
    NotSupported,
)
from gpuallreduce.fabric.nccl_types import (
    OPS,
    TYPES,
    code_of_version,
    element,
    text_of_version,
)
from gpuallreduce.types import DTYPES, dtype_of, op_of

pytest.importorskip("cupy_backends", reason="the emulated GPUs run CuPy: install .[test,cuda13]")

NEWEST = code_of_version("2.30.3")
FOLDS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def pairs() -> list[tuple[str, str]]:
    """Every pair of dtype and operator that NCCL serves."""
    found = []
    for dtype, op in itertools.product(DTYPES, (*OPS, "band", "bor", "bxor")):
        try:
            element(dtype_of(dtype), op_of(op), NEWEST)
        except NotSupported:
            continue
        found.append((dtype, op))
    return found


def exact(dtype: str, op: str, rank: int, count: int, seed: int = 0) -> np.ndarray:
    """Data whose fold is exact in the dtype, in any order and with any rounding between."""
    index = np.arange(count) + seed
    row = DTYPES[dtype]
    if row.kind in ("int", "uint"):  # integers wrap, whatever the order
        random = np.random.default_rng([rank, seed])
        return random.integers(0, 256, count * row.itemsize, np.uint8).view(row.numpy)
    if op == "prod":
        values = np.where((index + rank) % 3 == 0, -2, 1)
    elif row.itemsize == 1:  # three bits of mantissa at most
        values = (index + rank) % 2
    else:
        values = (index * 3 + rank * 5) % 13 - 6
    if row.kind == "complex":
        return (values + 1j * ((index + rank) % 5)).astype(row.numpy)
    return values.astype(row.numpy)


def folded(arrays: list[np.ndarray], op: str) -> np.ndarray:
    dtype = arrays[0].dtype
    wide = arrays if dtype.kind in "iuc" else [a.astype(np.float64) for a in arrays]
    with np.errstate(over="ignore"):
        result = wide[0]
        for each in wide[1:]:
            result = FOLDS["sum" if op == "avg" else op](result, each)
    return (result / len(arrays) if op == "avg" else result).astype(dtype)


def addresses(arrays: list[Any]) -> list[int]:
    return [array.ptr for array in arrays]


def refused(call: Any, *arguments: Any, **keywords: Any) -> Exception:
    """The error that a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call(*arguments, **keywords)
    return caught.value


# What NCCL has, and what it has not


def test_the_table_holds_what_nccl_has_and_nothing_else():
    plain = {name for name in DTYPES if name in TYPES}
    assert {dtype for dtype, _ in pairs()} == plain | {"complex64", "complex128"}
    for dtype, op in pairs():
        what = element(dtype_of(dtype), op_of(op), NEWEST)
        assert what.op_code == OPS[op]
        parts = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
        assert what.type_code == TYPES[parts].code
        assert DTYPES[parts].itemsize * what.per_item == DTYPES[dtype].itemsize


@pytest.mark.parametrize(
    ("dtype", "op", "said"),
    [
        ("bool", "sum", "no bool"),
        ("int16", "sum", "no int16"),
        ("uint16", "max", "no uint16"),
        ("complex64", "prod", "prod cannot"),
        ("int32", "band", "no band"),
        ("uint8", "bor", "no bor"),
        ("int64", "bxor", "no bxor"),
    ],
)
def test_what_nccl_lacks_is_refused_with_the_way_out(dtype, op, said):
    with pytest.raises(NotSupported, match=said) as caught:
        element(dtype_of(dtype), op_of(op), NEWEST)
    assert "our own algorithms" in str(caught.value)


def test_integers_have_no_average_although_nccl_truncates_one():
    with pytest.raises(NotSupported, match="not defined"):
        element(dtype_of("int32"), op_of("avg"), NEWEST)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_needs_the_version_that_brought_it(dtype):
    element(dtype_of(dtype), op_of("sum"), code_of_version("2.24.3"))
    with pytest.raises(NotSupported, match=r"since 2\.24, and 2\.23\.4 is installed"):
        element(dtype_of(dtype), op_of("sum"), code_of_version("2.23.4"))


@pytest.mark.parametrize(("code", "text"), [(2708, "2.7.8"), (21805, "2.18.5"), (23003, "2.30.3")])
def test_versions_read_as_nccl_numbers_them(code, text):
    assert text_of_version(code) == text
    assert code < 10000 or code_of_version(text) == code


@in_child(gpus=1)
def test_numbers_of_types_and_operators_are_those_of_cupy() -> None:
    from cupy.cuda import nccl

    for name, row in TYPES.items():
        known = getattr(nccl, f"NCCL_{name.upper()}", None)  # CuPy lacks float8
        assert known == row.code or (known is None and name.startswith("float8"))
    for name, code in OPS.items():
        assert getattr(nccl, f"NCCL_{name.upper()}") == code


# Whether it is there


@in_child(gpus=1)
def test_it_is_available_and_says_its_version() -> None:
    from gpuallreduce.fabric.nccl import Nccl

    assert Nccl.available() is None
    assert Nccl.version() == "2.30.3"


UNAVAILABLE = """
    import warnings
    warnings.simplefilter("error")  # CuPy's own warning must not come through
    from gpuallreduce.fabric.nccl import Nccl
    report(Nccl.available())
    report(error_of(Nccl, [0]))
"""


def check_unavailable(reports: list[Any], why: str) -> None:
    reason, (kind, text) = reports
    assert why in reason
    assert "pip install nvidia-nccl-cu13" in reason
    assert "nvidia-nccl-cu12" in reason
    assert (kind, text) == ("NotSupported", reason)


def test_without_the_library_it_says_what_to_install():
    body = f"""
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from emulated_gpu import activate
    activate.LIBRARIES = tuple(name for name in activate.LIBRARIES if "nccl" not in name)
    activate.activate(gpus=1)
    from importlib import metadata
    names = [distribution.name.lower() for distribution in metadata.distributions()]
    if any(name.startswith("nvidia-nccl") for name in names):  # then the loader would find it
        sys.modules["cupy_backends.cuda.libs.nccl"] = None
    {UNAVAILABLE}"""
    (rank,) = run_job(1, body, **{FOLDER_VARIABLE: environment()[FOLDER_VARIABLE]})
    check_unavailable(rank.reports, "libnccl.so.2 cannot be loaded")


def test_a_library_that_is_too_old_is_named_with_what_to_install():
    variables = {**environment(gpus=1), "EMULATED_NCCL_VERSION": "21703"}
    (rank,) = run_job(1, UNAVAILABLE, **variables)
    check_unavailable(rank.reports, "NCCL 2.18 or later is needed, and 2.17.3 is installed")


# One process, many GPUs


@pytest.mark.parametrize("nranks", [2, 4, 8])
@in_child(gpus=8)
def test_every_dtype_and_operator_equals_numpy_on_exact_data(nranks: int) -> None:
    from nccl_ranks import Ranks

    from gpuallreduce.fabric.nccl import Nccl

    count = 1003
    here = Ranks(range(nranks))
    with Nccl(here.devices) as nccl:
        for dtype, op in pairs():
            hosts = [exact(dtype, op, rank, count) for rank in range(nranks)]
            expected = folded(hosts, op)
            inputs, outputs = here.put(hosts), here.put([np.zeros_like(x) for x in hosts])
            call = {"dtype": dtype, "op": op, "streams": here.pointers}
            nccl.all_reduce(addresses(inputs), addresses(outputs), count, **call)
            here.synchronize()
            for array, host in zip(inputs, hosts, strict=True):
                np.testing.assert_array_equal(array.get(), host)
            nccl.all_reduce(addresses(inputs), addresses(inputs), count, **call)
            here.synchronize()
            for array in (*outputs, *inputs):
                np.testing.assert_array_equal(array.get(), expected, err_msg=f"{op} of {dtype}")
        nccl.check()


@in_child(gpus=4)
def test_the_other_verbs_move_and_fold_what_they_say_in_and_out_of_place() -> None:
    from nccl_ranks import Ranks

    from gpuallreduce.fabric.nccl import Nccl

    here, nranks = Ranks(range(4)), 4
    with Nccl(here.devices) as nccl:
        for count, dtype in ((1, "float32"), (1003, "complex64"), (70001, "int64")):
            block = count * DTYPES[dtype].itemsize
            blocks = [exact(dtype, "sum", rank, count * nranks) for rank in range(nranks)]
            single = [exact(dtype, "sum", rank, count) for rank in range(nranks)]
            total = folded(blocks, "sum").reshape(nranks, count)

            inputs, outputs = here.put(blocks), here.put([np.zeros_like(x) for x in single])
            own = [array.ptr + rank * block for rank, array in enumerate(inputs)]
            call = {"dtype": dtype, "op": "sum", "streams": here.pointers}
            nccl.reduce_scatter(addresses(inputs), addresses(outputs), count, **call)
            nccl.reduce_scatter(addresses(inputs), own, count, **call)
            here.synchronize()
            for rank in range(nranks):
                np.testing.assert_array_equal(outputs[rank].get(), total[rank])
                kept = inputs[rank].get().reshape(nranks, count)
                np.testing.assert_array_equal(kept[rank], total[rank])

            inputs, outputs = here.put(single), here.put([np.zeros_like(x) for x in blocks])
            own = [array.ptr + rank * block for rank, array in enumerate(outputs)]
            nccl.all_gather(addresses(inputs), addresses(outputs), block, streams=here.pointers)
            here.synchronize()
            in_place = [array.get() for array in outputs]
            nccl.all_gather(own, addresses(outputs), block, streams=here.pointers)
            here.synchronize()
            for rank in range(nranks):
                np.testing.assert_array_equal(in_place[rank], np.concatenate(single))
                np.testing.assert_array_equal(outputs[rank].get(), np.concatenate(single))

            outputs = here.put([np.zeros_like(x) for x in single])
            for root in range(nranks):
                inputs = here.put(single)
                ends = [addresses(inputs), addresses(outputs)]
                nccl.broadcast(*ends, block, root=root, streams=here.pointers)
                nccl.broadcast(ends[0], ends[0], block, root=root, streams=here.pointers)
                here.synchronize()
                for array in (*inputs, *outputs):
                    np.testing.assert_array_equal(array.get(), single[root])


@in_child(gpus=4)
def test_messages_of_all_pairs_at_once_arrive_whole_and_in_order() -> None:
    from nccl_ranks import Ranks

    from gpuallreduce.fabric.nccl import Nccl, Transfer

    here, nranks = Ranks(range(4)), 4
    with Nccl(here.devices) as nccl:
        sends, receives, expected = [], [], []
        for a, b in itertools.product(range(nranks), repeat=2):  # to itself too
            for number, nbytes in enumerate((5, 200_001)):
                host = np.random.default_rng([a, b, number]).integers(0, 256, nbytes, np.uint8)
                source = here.put([host if rank == a else host[:0] for rank in range(nranks)])[a]
                sink = here.put([np.zeros_like(host)] * nranks)[b]
                sends.append((source, Transfer(a, b, source.ptr, nbytes)))
                receives.append((sink, Transfer(b, a, sink.ptr, nbytes)))
                expected.append(host)
        nccl.send_recv(
            [transfer for _, transfer in sends],
            [transfer for _, transfer in receives],
            streams=here.pointers,
        )
        here.synchronize()
        for (sink, _), host in zip(receives, expected, strict=True):
            np.testing.assert_array_equal(sink.get(), host)
        error = refused(nccl.send_recv, [Transfer(9, 0, 0, 1)], [], streams=here.pointers)
        assert isinstance(error, InvalidArgument)


@in_child(gpus=2)
def test_bad_calls_are_refused_and_the_next_good_one_works() -> None:
    from nccl_ranks import Ranks

    from gpuallreduce.fabric.nccl import Nccl

    here = Ranks(range(2))
    arrays = here.put([np.ones(100, np.float32)] * 2)
    host_memory = np.ones(100, np.float32)
    good: dict[str, Any] = {"dtype": "float32", "op": "sum", "streams": here.pointers}
    ends = addresses(arrays)
    with Nccl(here.devices) as nccl:
        error = refused(nccl.all_reduce, [host_memory.ctypes.data] * 2, ends, 100, **good)
        assert isinstance(error, DeviceError)
        assert "NCCL says: sendbuff is not memory that a GPU can reach" in str(error)
        error = refused(nccl.broadcast, ends, ends, 400, root=2, streams=here.pointers)
        assert isinstance(error, DeviceError)
        assert "there is no rank 2" in str(error)
        short = refused(nccl.all_reduce, ends[:1], ends, 100, **good)
        assert isinstance(short, InvalidArgument)
        assert isinstance(
            refused(nccl.all_reduce, ends, ends, 100, **{**good, "dtype": "bool"}), NotSupported
        )
        nccl.all_reduce(ends, ends, 100, **good)
        here.synchronize()
        nccl.check()
        for array in arrays:
            np.testing.assert_array_equal(array.get(), np.full(100, 2, np.float32))
    assert isinstance(refused(nccl.all_reduce, ends, ends, 100, **good), Closed)


def test_ranks_that_cannot_be_are_refused_before_anybody_waits():
    body = """
        from gpuallreduce.fabric.nccl import Nccl
        for keywords in (
            {"devices": []},
            {"devices": [0, 1], "ranks": [0]},
            {"devices": [0, 1], "ranks": [1, 1]},
            {"devices": [0], "ranks": [2], "nranks": 2},
            {"devices": [0], "ranks": [0], "nranks": 2},
            {"devices": [7]},
        ):
            report(error_of(lambda: Nccl(**keywords))[0])
        def other(**values):
            other = {"ranks": [1], "id": "", "gpus": ["other 0"], "error": "", "may_share": True}
            return lambda mine: [mine, {**other, **values}]
        for values in ({"error": "Broken: because"}, {"ranks": [0]}):
            report(error_of(lambda: Nccl([0], ranks=[0], nranks=2, exchange=other(**values))))
    """
    (rank,) = run_job(1, body, **environment(gpus=2))
    assert rank.reports[:6] == ["InvalidArgument"] * 6
    kind, text = rank.reports[6]
    assert kind == "DeviceError"
    assert "ranks [1] could not start NCCL: Broken: because" in text
    assert rank.reports[7][0] == "InvalidArgument"


# Several ranks on one GPU


def body_shared_gpu(allowed: bool) -> None:
    from nccl_ranks import Ranks

    from gpuallreduce.fabric.nccl import Nccl

    here = Ranks([0, 0, 1])
    if not allowed:
        error = refused(Nccl, here.devices)
        assert isinstance(error, NotSupported)
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in str(error)
        assert "2.30 or later" in str(error)
        return
    hosts = [exact("bfloat16", "sum", rank, 100) for rank in range(3)]
    arrays = here.put(hosts)
    ends, call = addresses(arrays), {"dtype": "bfloat16", "op": "sum"}
    with Nccl(here.devices) as nccl:
        nccl.all_reduce(ends, ends, 100, **call, streams=here.pointers)
        here.synchronize()
        for array in arrays:
            np.testing.assert_array_equal(array.get(), folded(hosts, "sum"))
        one_stream = [here.pointers[0], here.pointers[0], here.pointers[2]]
        error = refused(nccl.all_reduce, ends, ends, 100, **call, streams=one_stream)
        assert isinstance(error, InvalidArgument)


@pytest.mark.parametrize(
    ("variable", "version", "allowed"),
    [("0", "23003", False), ("1", "22907", False), ("1", "23003", True)],
)
def test_ranks_share_a_gpu_only_where_the_user_and_the_version_allow(
    variable, version, allowed, monkeypatch
):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    monkeypatch.setenv("EMULATED_NCCL_VERSION", version)
    run_in_child(body_shared_gpu, {"allowed": allowed}, gpus=2)


# Processes

MEET = """
    from gpuallreduce.bootstrap.environment import identify
    from gpuallreduce.bootstrap.rendezvous import Rendezvous
    from gpuallreduce.fabric.nccl import Nccl, Transfer
    sys.path.insert(0, os.environ["TESTS"])
    from nccl_ranks import Ranks
    from test_nccl import addresses, exact, folded
    process = identify(os.environ)
    rendezvous = Rendezvous.join(process, timeout=30)
    me, nprocesses = process.rank, process.nranks
    def exchange(mine):
        return [part.payload for part in rendezvous.exchange("nccl", mine)]
"""


def in_processes(nprocesses: int, body: str, **variables: str) -> Any:
    return {
        "nranks": nprocesses,
        "body": MEET + body,
        **environment(gpus=8),
        "TESTS": str(Path(__file__).parent),
        **variables,
    }


@pytest.mark.parametrize(("nprocesses", "each"), [(2, 2), (4, 1)])
def test_processes_reduce_gather_and_send_as_numpy_does(nprocesses, each):
    body = f"""
    each = {each}
    nranks = nprocesses * each
    # ranks are dealt out: a process's ranks are not neighbours
    ranks = [me + local * nprocesses for local in range(each)]
    here = Ranks(ranks)
    with Nccl(ranks, ranks=ranks, nranks=nranks, exchange=exchange) as nccl:
        for count, dtype in ((1003, "float16"), (300_007, "float32")):
            hosts = [exact(dtype, "sum", rank, count) for rank in range(nranks)]
            arrays = here.put([hosts[rank] for rank in ranks])
            ends, nbytes = addresses(arrays), hosts[0].nbytes
            nccl.all_reduce(ends, ends, count, dtype=dtype, op="sum", streams=here.pointers)
            here.synchronize()
            for array in arrays:
                np.testing.assert_array_equal(array.get(), folded(hosts, "sum"))
            arrays = here.put([hosts[rank] for rank in ranks])
            all = here.put([np.zeros((nranks, count), dtype) for _ in ranks])
            nccl.all_gather(addresses(arrays), addresses(all), nbytes, streams=here.pointers)
            one = here.put([np.zeros(count, dtype) for _ in ranks])
            nccl.reduce_scatter(addresses(all), addresses(one), count, dtype=dtype, op="max",
                                streams=here.pointers)
            here.synchronize()
            for rank, gathered, own in zip(ranks, all, one):
                np.testing.assert_array_equal(gathered.get(), hosts)
                np.testing.assert_array_equal(own.get(), hosts[rank])
            round = here.put([np.zeros(count, dtype) for _ in ranks])
            sends = [Transfer(r, (r + 1) % nranks, a.ptr, nbytes) for r, a in zip(ranks, arrays)]
            takes = [Transfer(r, (r - 1) % nranks, a.ptr, nbytes) for r, a in zip(ranks, round)]
            nccl.send_recv(sends, takes, streams=here.pointers)
            here.synchronize()
            for rank, array in zip(ranks, round):
                np.testing.assert_array_equal(array.get(), hosts[rank - 1])
        nccl.check()
    """
    run_job(**in_processes(nprocesses, body))


def test_processes_with_one_gpu_all_hear_that_it_is_not_enabled():
    body = """
    report(error_of(Nccl, [0], ranks=[me], nranks=nprocesses, exchange=exchange))
    """
    for rank in run_job(**in_processes(2, body, NCCL_MULTI_RANK_GPU_ENABLE="0")):
        ((kind, text),) = rank.reports
        assert kind == "NotSupported"
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in text


def test_where_one_process_cannot_start_the_others_hear_why():
    body = """
    report(error_of(Nccl, [me * 8], ranks=[me], nranks=nprocesses, exchange=exchange))
    """
    first, second = run_job(**in_processes(2, body))
    assert second.reports[0][0] == "InvalidArgument"
    assert first.reports[0][0] == "DeviceError"
    assert 'device "cuda:8" does not exist' in first.reports[0][1]


WAITING = """
    nccl = Nccl([me], ranks=[me], nranks=nprocesses, exchange=exchange)
    here = Ranks([me])
    ends = addresses(here.put([np.ones(10, np.float32)]))
    call = {"dtype": "float32", "op": "sum", "streams": here.pointers}
    nccl.all_reduce(ends, ends, 10, **call)
    here.synchronize()
    rendezvous.exchange("both have come so far")
"""


def test_a_peer_that_aborts_ends_the_wait_and_shows_in_check():
    body = f"""{WAITING}
    if me == 0:
        nccl.all_reduce(ends, ends, 10, **call)
        here.synchronize()
        report(error_of(nccl.check))
    else:
        nccl.abort()
        report(error_of(nccl.all_reduce, ends, ends, 10, **call))
        report(error_of(nccl.check))
    nccl.close()
    """
    first, second = run_job(**in_processes(2, body))
    ((kind, text),) = first.reports
    assert kind == "DeviceError"
    assert "rank 1 aborted" in text
    assert second.reports[0][0] == "Aborted"
    assert second.reports[1] is None


def test_a_peer_that_is_killed_ends_the_wait_and_shows_in_check():
    body = f"""{WAITING}
    if me == 0:
        nccl.all_reduce(ends, ends, 10, **call)
        here.synchronize()
        report(error_of(nccl.check))
        nccl.abort()
    else:
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    """
    first, second = finish_job(start_job(**in_processes(2, body)))
    assert second.status == -signal.SIGKILL
    assert first.status == 0, first.stderr
    ((kind, text),) = first.reports
    assert kind == "DeviceError"
    assert "the process of rank 1 ended" in text


# Waiting and giving up


@in_child(gpus=2)
def test_abort_from_another_thread_ends_a_call_that_waits_for_a_peer() -> None:
    import threading

    import cupy
    from cupy.cuda import nccl as raw
    from nccl_ranks import Ranks

    from gpuallreduce.fabric.nccl import Nccl

    here = Ranks(range(2))
    arrays = here.put([np.ones(10, np.float32)] * 2)
    nccl = Nccl(here.devices)
    # The second rank never calls: what a peer that is stuck elsewhere looks like.
    alone = nccl._comms[0]
    alone.allReduce(
        arrays[0].ptr, arrays[0].ptr, 10, raw.NCCL_FLOAT32, raw.NCCL_SUM, here.pointers[0]
    )
    assert not here.streams[0].done
    nccl.check()
    aborting = threading.Thread(target=nccl.abort)
    aborting.start()
    with cupy.cuda.Device(0):
        here.streams[0].synchronize()
    aborting.join()
    ends = addresses(arrays)
    call = {"dtype": "float32", "op": "sum", "streams": here.pointers}
    assert isinstance(refused(nccl.all_reduce, ends, ends, 10, **call), Aborted)
    nccl.close()
    with Nccl(here.devices) as again:  # the GPUs are fine
        again.all_reduce(ends, ends, 10, **call)
        here.synchronize()
        again.check()


@in_child(gpus=2)
def test_work_that_is_being_finalised_is_no_error() -> None:
    import ctypes
    import threading

    from cupy.cuda import nccl as raw
    from nccl_ranks import Ranks

    from gpuallreduce.fabric.nccl import Nccl

    here = Ranks(range(2))
    arrays = here.put([np.ones(10, np.float32)] * 2)
    with Nccl(here.devices) as nccl:
        numbers = (10, raw.NCCL_FLOAT32, raw.NCCL_SUM)
        first, second = nccl._comms
        first.allReduce(arrays[0].ptr, arrays[0].ptr, *numbers, here.pointers[0])
        finalize = ctypes.CDLL("libnccl.so.2").ncclCommFinalize
        finalize.argtypes = [ctypes.c_void_p]
        thread = threading.Thread(target=finalize, args=(first.comm,))
        thread.start()
        progress = 0
        while not progress:  # until NCCL says ncclInProgress, which CuPy cannot name
            try:
                first.check_async_error()
            except KeyError as error:
                progress = error.args[0]
        assert progress == 7
        nccl.check()
        second.allReduce(arrays[1].ptr, arrays[1].ptr, *numbers, here.pointers[1])
        thread.join()
        here.synchronize()
        nccl.check()
        np.testing.assert_array_equal(arrays[0].get(), np.full(10, 2, np.float32))


@in_child(gpus=2)
def test_an_error_in_the_block_aborts_so_that_leaving_it_does_not_wait() -> None:
    from cupy.cuda import nccl as raw
    from nccl_ranks import Ranks

    from gpuallreduce.fabric.nccl import Nccl

    os.environ["EMULATED_NCCL_TIMEOUT_S"] = "3600"
    here = Ranks(range(2))
    array = here.put([np.ones(10, np.float32)] * 2)[0]
    numbers = (10, raw.NCCL_FLOAT32, raw.NCCL_SUM)

    def fail() -> None:
        with Nccl(here.devices) as nccl:
            nccl._comms[0].allReduce(array.ptr, array.ptr, *numbers, here.pointers[0])
            raise ZeroDivisionError

    assert isinstance(refused(fail), ZeroDivisionError)
    here.synchronize()
