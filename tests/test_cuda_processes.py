"""CUDA ranks in a process each: memory by IPC or through the host, and calls that cannot succeed:
every rank raises, within the limit, and says who and what.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import gpus
import numpy as np
import pytest
from jobs import finish_job, run_job, start_job

SETUP = """
import cupy
comm = gar.init(device="cuda", timeout=20)
rank, nranks = comm.rank, comm.nranks
def put(array):
    copy = cupy.empty(array.shape, array.dtype)
    copy.set(array)
    return copy
def numbers(rank, turn=0):
    return ((np.arange(5001) * 3 + rank * 17 + turn * 5) % 64).astype(np.float32)
def total(turn=0):
    return sum(numbers(r, turn) for r in range(nranks))
def fails(call):
    def both():
        call()
        comm.synchronize()
    return error_of(both)
"""

EVERY_WAY = """
ways = ({}, {"algorithm": "one_shot"}, {"algorithm": "two_shot"}, {"algorithm": "ring"},
        {"algorithm": "ring", "order": "any"})
for turn in range(10):
    x = put(numbers(rank, turn))
    y = cupy.empty_like(x)
    comm.allreduce(x, y, **ways[turn % len(ways)])
    comm.synchronize()
    assert (y.get() == total(turn)).all(), turn
z = comm.empty(5001)
z.set(numbers(rank))
comm.allreduce(z, access="direct")
comm.barrier()
assert (z.get() == total()).all()
report(comm.plan(x).transport)
comm.close()
"""


@pytest.mark.parametrize("nranks", [2, 4])
def test_every_algorithm_between_processes(nranks):
    ranks = run_job(nranks, SETUP + EVERY_WAY, **gpus.variables())
    assert all(rank.reports == ["CUDA IPC"] for rank in ranks)


@pytest.mark.skipif(gpus.are_real(), reason="a real driver cannot be told to refuse")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ipc": 0}, "exporting memory of cuda:"),
        ({"topology": "islands2"}, "cannot access each other's memory"),
    ],
)
def test_ranks_agree_on_host_memory_where_ipc_is_refused(settings, reason):
    ranks = run_job(3, SETUP + EVERY_WAY, **gpus.variables(**settings))
    (transports,) = {tuple(rank.reports) for rank in ranks}
    assert transports[0].startswith("pinned host memory (rank ")
    assert reason in transports[0]


def test_gpus_are_told_apart_by_uuid():
    body = """
    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["GPUALLREDUCE_RANK"]
    """
    check = """
    assert cupy.cuda.runtime.getDeviceCount() == 1
    report(comm.topology.path)
    """
    if gpus.are_real() and gpus.start().cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    text = textwrap.dedent(body) + SETUP + textwrap.dedent(check) + EVERY_WAY
    ranks = run_job(2, text, **gpus.variables())
    assert all(rank.reports[1] == "CUDA IPC" for rank in ranks)
    assert all(rank.reports[0] != "one device" for rank in ranks)


MISMATCHES = {
    "count": ("comm.allreduce(put(np.ones(4 + rank)))", ["count=4", "count=5"]),
    "dtype": (
        "comm.allreduce(put(np.ones(4, np.float32 if rank else np.int32)))",
        ["dtype=float32", "dtype=int32"],
    ),
    "op": ("comm.allreduce(put(np.ones(4)), op='sum' if rank else 'max')", ["op=sum", "op=max"]),
    "large count, where channels differ": (
        "comm.allreduce(put(np.ones(4 if rank else 1 << 20, np.float32)))",
        ["count=4,", f"count={1 << 20}"],
    ),
    "engine": (
        "comm.allreduce(put(np.ones(4)), order='any', algorithm='nccl' if rank else 'ring')",
        ["algorithm=nccl", "algorithm=ring"],
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_differ_raise_on_every_rank(what):
    call, words = MISMATCHES[what]
    if what == "engine":
        body = f"""
        comm.allreduce(put(np.ones(4)), order="any", algorithm="nccl")  # connected
        comm.synchronize()
        report(fails(lambda: {call}))
        """
    else:
        body = f"report(fails(lambda: {call}))"
    for rank in run_job(2, SETUP + textwrap.dedent(body), **gpus.variables()):
        kind, message = rank.reports[0]
        assert kind == "MismatchError"
        assert all(word in message for word in words), message


def test_a_rank_that_does_not_come_is_named():
    body = """
    comm.timeout = 1.5
    x = put(numbers(rank))
    if rank != 2:
        start = time.monotonic()
        report(fails(lambda: comm.allreduce(x)))
        report(time.monotonic() - start)
        report(error_of(lambda: comm.allreduce(x)))
    else:
        time.sleep(4)
    """
    ranks = finish_job(start_job(3, SETUP + textwrap.dedent(body), **gpus.variables()))
    for rank in ranks[:2]:
        (kind, message), seconds, again = rank.reports
        assert kind == "Timeout"
        assert "rank 2 did not make this call" in message
        assert seconds < 10
        assert again[0] == "Aborted"


@pytest.mark.parametrize("call", ["comm.allreduce(x)", "comm.allreduce(x, order='any', **nccl)"])
def test_a_killed_rank_is_named_at_once(call):
    body = f"""
    import os, signal
    nccl = {{"algorithm": "nccl"}}
    x = put(numbers(rank))
    {call}
    if rank == 1:
        comm.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    report(fails(lambda: {call}))
    report(time.monotonic() - start)
    """
    ranks = finish_job(start_job(3, SETUP + textwrap.dedent(body), **gpus.variables()))
    assert ranks[1].status == -signal.SIGKILL
    for rank in (ranks[0], ranks[2]):
        (kind, message), seconds = rank.reports
        assert kind == "Aborted", message
        assert "rank 1 is gone" in message
        assert seconds < 10


def test_a_rank_that_aborts_or_closes_is_named():
    body = """
    x = put(numbers(rank))
    comm.allreduce(x)
    if rank == 1:
        comm.synchronize()
        comm.{end}()
        time.sleep(1)
    else:
        report(fails(lambda: comm.allreduce(x)))
    """
    for end, words in (("abort", "rank 1 aborted"), ("close", "rank 1 has closed")):
        text = SETUP + textwrap.dedent(body).replace("{end}", end)
        ranks = finish_job(start_job(2, text, **gpus.variables()))
        kind, message = ranks[0].reports[0]
        assert kind == "Aborted"
        assert words in message


def test_a_failed_call_that_nobody_asked_about_is_raised_by_close():
    body = """
    comm.timeout = 1
    x = put(numbers(rank))
    if rank == 0:
        comm.allreduce(x)
        report(error_of(comm.close))
        report(error_of(comm.close))
    else:
        time.sleep(3)
    """
    ranks = finish_job(start_job(2, SETUP + textwrap.dedent(body), **gpus.variables()))
    (kind, message), again = ranks[0].reports
    assert kind == "Timeout"
    assert "rank 1" in message
    assert again is None


def test_memory_is_kept_until_all_ranks_have_left():
    """The first to close must not free what its peers may still read; the last one frees."""
    body = """
    import gc
    def used():
        return -cupy.cuda.runtime.memGetInfo()[0]
    x = put(numbers(rank))
    comm.allreduce(x)
    comm.synchronize()
    held = used()
    if rank == 0:
        comm.close()
        report(used() >= held)
        time.sleep(1.5)
        gar.Communicator(["cuda"]).close()
        report(used() < held)
    else:
        time.sleep(0.7)
        comm.close()
        report(used() < held)
    """
    ranks = run_job(2, SETUP + textwrap.dedent(body), **gpus.variables())
    assert ranks[0].reports == [True, True]
    assert ranks[1].reports == [True]


def test_a_rank_without_memory_makes_all_raise():
    body = """
    import cupy
    if os.environ["GPUALLREDUCE_RANK"] == "1":
        cupy.cuda.runtime.setDevice(1 % cupy.cuda.runtime.getDeviceCount())
        room = cupy.cuda.runtime.memGetInfo()[0]
        hog = cupy.cuda.runtime.malloc(room - (1 << 20))
    report(error_of(lambda: gar.init(device="cuda", timeout=20)))
    """
    for rank in run_job(2, body, **gpus.variables()):
        kind, message = rank.reports[0]
        assert kind == "DeviceError"
        assert "rank 1" in message
        assert "allocating" in message or "memory" in message


def test_a_process_that_dies_leaves_the_gpus_usable():
    body = """
    x = put(numbers(rank))
    comm.allreduce(x)
    comm.synchronize()
    report("ready")
    time.sleep(60)
    """
    processes = start_job(2, SETUP + textwrap.dedent(body), **gpus.variables())
    time_limit = time.monotonic() + 30
    for process in processes:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        assert time.monotonic() < time_limit
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.communicate(timeout=10)
    run_job(2, SETUP + EVERY_WAY, **gpus.variables())


def test_a_forked_child_is_told(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs = gpus.put_all(names, [np.ones(3, np.float32)] * 2)
    comm.allreduce(xs)
    comm.synchronize()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.allreduce(xs)
        except Exception as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read().startswith("Closed: this communicator belongs to the process that")


def test_a_forked_child_leaves_the_watch_over_processes_alone():
    body = """
    import gc, signal
    x = put(numbers(rank))
    comm.allreduce(x)
    comm.synchronize()
    if rank == 1:
        comm.allreduce(x)
        os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if child == 0:
        del comm
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    comm.allreduce(x)
    start = time.monotonic()
    report(fails(lambda: comm.allreduce(x)))
    report(time.monotonic() - start)
    """
    first, _ = finish_job(start_job(2, SETUP + textwrap.dedent(body), **gpus.variables()))
    (kind, message), seconds = first.reports
    assert kind == "Aborted", message
    assert "rank 1 is gone" in message
    assert seconds < 10


def test_a_call_that_one_rank_cannot_launch_is_given_up_by_all():
    body = """
    from gpuallreduce.devices.cuda_streams import Lane
    nccl = {"algorithm": "nccl", "order": "any"}
    x = put(numbers(rank))
    comm.allreduce(x, **nccl)
    if rank == 1:
        comm.synchronize()
    def refused(*arguments, **keywords):
        raise gar.DeviceError("refused")
    if rank == 1 and WHERE == "engine":
        comm._calls._engine.all_reduce = refused
    if rank == 1 and WHERE == "streams":
        Lane.begin = refused
    start = time.monotonic()
    report(fails(lambda: comm.allreduce(x, **nccl)))
    report(time.monotonic() - start)
    comm.close()
    """
    for where in ("engine", "streams"):
        code = f"WHERE = {where!r}\n" + SETUP + textwrap.dedent(body)
        first, second = run_job(2, code, **gpus.variables())
        assert second.reports[0] == ["DeviceError", "refused"]
        assert first.reports[0] == ["Aborted", "rank 1 aborted the communicator."]
        assert first.reports[1] < 10


def test_pages_that_one_rank_cannot_map_make_all_raise():
    body = """
    from gpuallreduce.devices import cuda_memory
    def refused(mapped, pages, ordinal):
        raise gar.DeviceError("no page may be pinned")
    if os.environ["GPUALLREDUCE_RANK"] == "1":
        cuda_memory.HostMapped.__init__ = refused
    report(error_of(lambda: gar.init(device="cuda", timeout=20)))
    """
    for rank in run_job(2, body, **gpus.variables(), GPUALLREDUCE_PROBE="0"):
        kind, message = rank.reports[0]
        assert kind == "DeviceError"
        assert "rank 1" in message
        assert "no page may be pinned" in message


def test_what_was_shared_with_a_rank_that_died_is_given_back():
    body = """
    import gc, signal
    comm.allreduce(put(numbers(rank)))
    comm.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    report(fails(comm.barrier)[0])
    before = cupy.cuda.runtime.memGetInfo()[0]
    comm.close()
    report(cupy.cuda.runtime.memGetInfo()[0] - before)
    """
    first, _ = finish_job(start_job(2, SETUP + textwrap.dedent(body), **gpus.variables()))
    kind, given_back = first.reports
    assert kind == "Aborted"
    assert given_back > 1 << 20


def run_alone(body: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """One process that uses GPUs."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={**os.environ, **gpus.variables(**settings)},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        timeout=60,
    )


LOCAL = """
import gc
import cupy, numpy as np
import gpuallreduce as gar
count = min(4, cupy.cuda.runtime.getDeviceCount())
names = [f"cuda:{rank % count}" for rank in range(4)]
def put(name, array):
    with cupy.cuda.Device(int(name[5:])):
        copy = cupy.empty(array.shape, array.dtype)
        copy.set(array)
        cupy.cuda.get_current_stream().synchronize()
        return copy
"""


BETWEEN_LAUNCHES = """
    from gpuallreduce.devices.cuda_streams import Lane
    comm = gar.Communicator(names, timeout=3)
    xs = [put(name, np.ones(2000, np.float32)) for name in names]
    comm.allreduce(xs)
    comm.synchronize()
    launch, first = Lane.launch, comm._device.lanes[0]
    def launch_and_drop(lane, *rest):
        launch(lane, *rest)
        if lane is first:  # its kernel now waits for those of the other ranks
            drop()
    Lane.launch = launch_and_drop
"""
DROPPED = {
    "a symmetric array": """
    held = [comm.empty(2000)]
    def drop():
        held.clear()
    """,
    "garbage that waits for the GPU when it is collected": """
    class Waits:
        def __init__(self):
            with cupy.cuda.Device(first.ordinal):
                self.memory = cupy.cuda.runtime.malloc(1 << 20)
        def __del__(self):
            with cupy.cuda.Device(first.ordinal):
                cupy.cuda.runtime.free(self.memory)
    gc.collect()
    loop = [Waits()]
    loop.append(loop)
    del loop
    def drop():
        global kept
        kept = [[] for _ in range(100000)]  # more than the collector lets pass
    """,
}


@pytest.mark.parametrize("what", DROPPED)
def test_what_is_dropped_between_launches_does_not_hold_them_up(what):
    """Freeing waits for a GPU's kernels, and they for ranks that are yet to be launched."""
    call = """
    comm.allreduce(xs)
    comm.synchronize()
    assert all((x.get() == 16).all() for x in xs)
    Lane.launch = launch
    gc.collect()
    comm.close()
    """
    body = "".join(map(textwrap.dedent, (BETWEEN_LAUNCHES, DROPPED[what], call)))
    done = run_alone(LOCAL + body, strict_sync=1)
    assert done.returncode == 0, done.stderr


def test_the_interpreter_ends_with_calls_under_way():
    body = """
    comm = gar.Communicator(names, timeout=10)
    xs = [put(name, np.ones(100000, np.float32)) for name in names]
    for _ in range(50):
        comm.allreduce(xs)
    """
    done = run_alone(LOCAL + textwrap.dedent(body))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_launches_that_block_are_refused_for_several_ranks():
    body = """
    import os
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    gar.Communicator(names[:1]).close()
    try:
        gar.Communicator(names)
    except gar.NotSupported as error:
        print(error)
    """
    done = run_alone(LOCAL + textwrap.dedent(body))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CUDA_LAUNCH_BLOCKING=1 makes every launch wait")


def test_a_broken_gpu_is_an_error_of_the_device():
    """An illegal access of somebody's kernel breaks CUDA for the process; calls say so."""
    if gpus.are_real():
        pytest.skip("it would break the GPU for this machine's other processes too")
    body = """
    from gpuallreduce.devices.cuda_strided import plan_move
    from gpuallreduce.devices.cuda import load, argument
    comm = gar.Communicator(names, timeout=5)
    xs = [put(name, np.ones(64, np.float32)) for name in names]
    comm.allreduce(xs)
    comm.synchronize()
    kernel, args, nblocks = plan_move(xs[0][::2], xs[0][::2])
    gone = put(names[0], np.ones(1 << 20, np.float32))
    args.target = gone.data.ptr
    del gone
    cupy.get_default_memory_pool().free_all_blocks()
    with cupy.cuda.Device(0):
        load(kernel, 0)((1,), (32,), (argument(args),))
    try:
        for _ in range(3):
            comm.allreduce(xs)
            comm.synchronize()
    except gar.Error as error:
        print(type(error).__name__, error)
    """
    done = run_alone(LOCAL + textwrap.dedent(body))
    assert done.returncode == 0, done.stderr
    assert "DeviceError" in done.stdout, done.stdout
    assert "illegal memory access" in done.stdout


def test_host_memory_can_be_asked_for():
    asked = {"GPUALLREDUCE_REACH": "host"}
    for rank in run_job(2, SETUP + EVERY_WAY, **gpus.variables(), **asked):
        assert "pinned host memory" in rank.reports[0]
        assert "GPUALLREDUCE_REACH=host asks for it" in rank.reports[0]
    body = """
    import os
    for reach in ("host", "guest"):
        os.environ["GPUALLREDUCE_REACH"] = reach
        try:
            with gar.Communicator(names) as comm:
                xs = [put(name, np.ones(5000, np.float32)) for name in names]
                comm.allreduce(xs)
                comm.synchronize()
                assert all((x.get() == 4).all() for x in xs)
                print(comm.plan(xs).transport)
        except gar.InvalidArgument as error:
            print(error)
    """
    done = run_alone(LOCAL + textwrap.dedent(body))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "pinned host memory (GPUALLREDUCE_REACH=host asks for it)"
    assert second == "GPUALLREDUCE_REACH='guest' is not known; there are peer and host"


def test_arrays_in_host_memory_need_no_slots_where_gpus_do_not_reach_each_other():
    body = """
    import os
    os.environ["GPUALLREDUCE_REACH"] = "host"
    with gar.Communicator(names) as comm:
        xs = comm.empty(5000)
        plain = [put(name, np.ones(5000, np.float32)) for name in names]
        print(comm.plan(xs, algorithm="two_shot").config.access)
        print(comm.plan(plain, algorithm="two_shot").config.access)
        for name, x in zip(names, xs):
            with cupy.cuda.Device(int(name[5:])):
                x.set(np.ones(5000, np.float32))
                cupy.cuda.get_current_stream().synchronize()
        comm.allreduce(xs, access="direct")
        comm.synchronize()
        assert all((x.get() == 4).all() for x in xs)
    """
    done = run_alone(LOCAL + textwrap.dedent(body))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["direct", "staged"]


def test_numba_arrays_are_used_in_place():
    """In a process of its own: numba keeps what it once found out about the driver."""
    pytest.importorskip("numba_cuda", reason="pip install numba-cuda")
    body = """
    from numba import cuda
    comm = gar.Communicator(names[:2])
    inputs = [np.arange(500, dtype=np.float32) * (rank + 1) for rank in range(2)]
    arrays = []
    for name, each in zip(names, inputs):
        with cuda.gpus[int(name[5:])]:
            arrays.append(cuda.to_device(each))
            cuda.synchronize()
    assert comm.allreduce(arrays) is arrays
    comm.synchronize()
    for name, array in zip(names, arrays):
        with cuda.gpus[int(name[5:])]:
            assert (array.copy_to_host() == sum(inputs)).all()
    """
    done = run_alone(LOCAL + textwrap.dedent(body))
    assert done.returncode == 0, done.stderr


def test_what_is_launched_behind_a_call_that_was_given_up_is_no_other_call():
    body = """
    comm.timeout = 1.0
    comm.barrier()
    x, y = put(numbers(rank)), put(numbers(rank)[:100])
    stream = cupy.cuda.Stream(non_blocking=True)
    if rank == 1:
        stream.launch_host_func(lambda _: time.sleep(3), None)
    comm.allreduce(x, stream=stream)
    if rank == 0:
        comm.allreduce(y, stream=stream)
    report(fails(lambda: None))
    comm.close()
    """
    for rank in run_job(2, SETUP + textwrap.dedent(body), **gpus.variables()):
        kind, text = rank.reports[0]
        assert kind == "Timeout", text
        assert "rank 1 did not make this call" in text
