"""All-reduce of CUDA ranks on several nodes: bits, order on streams, graphs, what cannot succeed.

A process for each rank; nodes are told apart by GPUALLREDUCE_NODE, for NCCL by NCCL_HOSTID.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import textwrap
import time

import gpus
import pytest
from jobs import Rank, finish_job, start_job

from gpuallreduce import jit

pytestmark = pytest.mark.skipif(
    gpus.are_real(), reason="nodes that share a machine, each with GPUs of its own, are emulated"
)

SETUP = """
rank = int(os.environ["GPUALLREDUCE_RANK"])
sizes = [int(size) for size in os.environ["LAYOUT"].split(",")]
node = next(n for n in range(len(sizes)) if rank < sum(sizes[: n + 1]))
os.environ["GPUALLREDUCE_NODE"] = os.environ["NCCL_HOSTID"] = f"node{node}"
import itertools
import cupy
from gpuallreduce import reference
from gpuallreduce.inputs import random_inputs
from gpuallreduce.types import DTYPES, OPS, dtype_of, op_of
runtime, nranks = cupy.cuda.runtime, sum(sizes)
def start(timeout=30, device=f"cuda:{rank}"):
    return gar.init(device=device, timeout=timeout)
def copy(target, source, nbytes, stream=None):
    with stream or cupy.cuda.get_current_stream() as stream:
        if nbytes:
            runtime.memcpyAsync(target, source, nbytes, 4, stream.ptr)
        stream.synchronize()
def put(array):
    memory = cupy.cuda.alloc(max(1, array.nbytes))
    copy(memory.ptr, array.ctypes.data, array.nbytes)
    return cupy.ndarray(array.shape, array.dtype, memory)
def get(there):
    array = np.empty(there.shape, there.dtype)
    copy(array.ctypes.data, there.data.ptr, array.nbytes)
    return array
def arrays(name, op, count, seed=5):
    return random_inputs(dtype_of(name), op_of(op), count, nranks, seed)
def same(a, b):
    return a.tobytes() == b.tobytes()
def check(comm, name, op, count, **keywords):
    inputs = arrays(name, op, count)
    x, y = put(inputs[rank]), put(np.zeros_like(inputs[rank]))
    comm.allreduce(x, y, op=op, **keywords)
    comm.synchronize()
    want = reference.allreduce(inputs, op)
    assert same(get(y), want), (name, op, count)
    assert same(get(x), inputs[rank]), (name, op, count)
def fails(comm, call):
    def both():
        call()
        comm.synchronize()
    start = time.monotonic()
    return [*error_of(both), time.monotonic() - start]
"""


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(layout: tuple[int, ...], body: str, **settings: object) -> list[subprocess.Popen[str]]:
    """Starts a job with so many ranks on each node."""
    environ = {
        **gpus.variables(gpus=sum(layout), sms=16, **settings),
        "GPUALLREDUCE_ADDRESS": f"127.0.0.1:{free_port()}",
        "GPUALLREDUCE_SECRET": secrets.token_hex(16),
        "EMULATED_NCCL_FAILED_WORK_STAYS": "1",
        "LAYOUT": ",".join(map(str, layout)),
    }
    return start_job(sum(layout), SETUP + textwrap.dedent(body), **environ)


def run(layout: tuple[int, ...], body: str, **settings: object) -> list[Rank]:
    """Runs a job that must succeed on every rank."""
    ranks = finish_job(start(layout, body, **settings), timeout=120)
    for number, rank in enumerate(ranks):
        assert rank.status == 0, f"rank {number} ended with {rank.status}:\n{rank.stderr}"
    return ranks


# ---- bits ----------------------------------------------------------------------------------------

BITS = """
comm = start()
pairs = [(d, o) for d, row in DTYPES.items() for o in OPS if row.kind in OPS[o].kinds]
for name, op in pairs[::STEP]:  # test_shards.py has the kernels of every pair
    check(comm, name, op, 700)
few = (("float32", "sum"), ("bfloat16", "avg"), ("int8", "prod"), ("complex64", "sum"))
for (name, op), count in itertools.product(few, (0, 1, 2, 31, 33, 1024, 5001)):
    check(comm, name, op, count)
for name, op in few:  # many chunks, so that every slot is used again
    check(comm, name, op, 20_000, chunk_bytes=2048)
check(comm, "float32", "sum", 300_001)
x = put(arrays("float32", "sum", 5001)[rank])
for _ in range(2):
    comm.allreduce(x)  # in place
comm.synchronize()
once = reference.allreduce(arrays("float32", "sum", 5001), "sum")
assert same(get(x), reference.allreduce([once] * nranks, "sum"))
z, source = comm.empty(5001), arrays("float32", "sum", 5001)[rank]
copy(z.data.ptr, source.ctypes.data, z.nbytes)
comm.allreduce(z)
comm.synchronize()
assert same(get(z), once)
comm.barrier()
report(comm.plan(x).describe())
comm.close()
"""


@pytest.mark.parametrize(
    ("layout", "step"), [((2, 2), 9), ((1, 2, 1), 50), ((3, 1), 50), ((1,) * 4, 50), ((2,) * 4, 50)]
)
def test_nodes_together_give_the_bits_of_the_reference(layout, step):
    ranks = run(layout, BITS.replace("STEP", str(step)))
    for rank in ranks:
        assert f"NCCL between {len(layout)} nodes" in rank.reports[0]
        assert "hierarchical" in rank.reports[0]


def test_chunks_fit_the_slots_whatever_is_asked_for():
    body = """
    from gpuallreduce.across import slots as module
    module.BUFFER_BYTES = 1 << 16
    comm = start()
    for order in ("rank", "any"):
        plan = comm.plan(put(np.ones(20_000, np.int32)), chunk_bytes=1 << 20, order=order)
        report(plan.config.chunk_count)
        check(comm, "int32", "sum", 20_000, chunk_bytes=1 << 20, order=order)
    """
    for rank in run((2, 1, 1), body):
        in_rank_order, in_any = rank.reports
        assert 100 < in_rank_order < 1500  # a seed, a partial and a result
        assert in_rank_order < in_any < 20_000


def test_any_order_is_close_and_has_the_same_bits_on_all_ranks():
    body = """
    import hashlib
    comm, digest = start(), hashlib.sha256()
    for name, op in (("float32", "sum"), ("float16", "avg"), ("int32", "max"), ("bfloat16", "sum")):
        for count, keywords in ((5001, {}), (20_000, {"chunk_bytes": 4096})):
            inputs = arrays(name, op, count)
            x = put(inputs[rank])
            comm.allreduce(x, op=op, order="any", **keywords)
            comm.synchronize()
            digest.update(get(x).tobytes())
            want = reference.allreduce(inputs, op)
            with np.errstate(invalid="ignore"):
                found, bound = get(x).astype(np.float64), np.abs(np.float64(inputs)).sum(0)
                wrong = np.abs(found - want.astype(np.float64)) > 0.01 * bound
            assert not wrong.any(), (name, op, found[wrong], want[wrong])
    refused = error_of(comm.allreduce, put(np.ones(9, np.int16)), order="any")
    assert refused[0] == "NotSupported" and "int16" in refused[1], refused
    check(comm, "int16", "sum", 100)  # nothing was sent, and bytes go in rank order
    for op in ("max", "min"):  # NCCL's own drop NaN
        x = np.full(9, rank, np.float32)
        x[rank] = np.nan
        y = put(x)
        comm.allreduce(y, op=op, order="any")
        comm.synchronize()
        assert (np.isnan(get(y)) == (np.arange(9) < nranks)).all(), get(y)
    report(digest.hexdigest())
    """
    ranks = run((2, 1, 1), body)
    assert len({rank.reports[0] for rank in ranks}) == 1


# ---- order on streams ----------------------------------------------------------------------------


def test_calls_follow_the_streams_they_are_given_and_each_other():
    body = """
    comm = start()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    inputs = [arrays("float32", "sum", 9000, seed=turn) for turn in range(12)]
    pinned = cupy.cuda.alloc_pinned_memory(12 * 36_000)
    results = np.frombuffer(pinned, np.float32, 12 * 9000).reshape(12, 9000)
    sources = [put(each[rank]) for each in inputs]
    x = put(np.zeros(9000, np.float32))
    for turn, source in enumerate(sources):  # nothing but streams keeps these in order
        stream = streams[turn % 3]
        if turn:
            stream.wait_event(before)
        runtime.memcpyAsync(x.data.ptr, source.data.ptr, 36_000, 4, stream.ptr)
        comm.allreduce(x, stream=stream, chunk_bytes=4096)
        runtime.memcpyAsync(results[turn].ctypes.data, x.data.ptr, 36_000, 4, stream.ptr)
        before = cupy.cuda.Event()
        before.record(stream)
    comm.synchronize()
    before.synchronize()
    for turn in range(12):
        assert same(results[turn], reference.allreduce(inputs[turn], "sum")), turn
    many = [put(arrays("float32", "sum", count)[rank]) for count in (10, 3000, 0, 777)]
    comm.allreduce_many(many)
    comm.synchronize()
    for each in many:
        want = reference.allreduce(arrays("float32", "sum", each.size), "sum")
        assert same(get(each), want), each.size
    inputs = arrays("float32", "sum", 60 * 50)
    turned = put(inputs[rank].reshape(60, 50)).T  # strided on the GPU
    comm.allreduce(turned[::2])
    comm.synchronize()
    want = reference.allreduce(inputs, "sum").reshape(60, 50).T
    found = get(turned.T).T
    assert same(np.ascontiguousarray(found[::2]), np.ascontiguousarray(want[::2]))
    """
    run((2, 1), body, delay_us=400)


def test_graphs_are_replayed_with_changing_inputs():
    body = """
    comm = start()
    inputs = [arrays("bfloat16", "sum", 9000, seed=turn) for turn in range(8)]
    x, y = put(inputs[0][rank]), put(np.zeros_like(inputs[0][rank]))
    stream = cupy.cuda.Stream(non_blocking=True)
    comm.allreduce(x, y, stream=stream, chunk_bytes=4096)  # loads what a capture cannot
    comm.synchronize()
    stream.begin_capture()
    comm.allreduce(x, y, stream=stream, chunk_bytes=4096)
    comm.allreduce(y, stream=stream, order="any")
    graph = stream.end_capture()
    for turn in range(24):
        copy(x.data.ptr, inputs[turn % 8][rank].ctypes.data, x.nbytes, stream)
        if turn % 3 == 2:  # calls of graphs and calls of programs follow each other
            comm.allreduce(x, y, stream=stream)
        else:
            graph.launch(stream)
        stream.synchronize()
        want = reference.allreduce(inputs[turn % 8], "sum")
        if turn % 3 == 2:
            assert same(get(y), want), turn
        else:
            close = np.float64(get(y)) - nranks * np.float64(want)
            assert (np.abs(close) <= 0.02 * nranks * np.abs(np.float64(want))).all(), turn
    comm.barrier()
    """
    run((1, 2), body)


# What a test of order is worth: each of these takes one wait away, and must be noticed.
LOST_WAITS = {
    "a partial is sent before it is folded": ("_lift", "way.stream.wait_event"),
    "a seed is folded before it has come": ("_fold", "call.kernels.wait_event"),
    "a result is sent before it is folded": ("_lower", "way.stream.wait_event"),
    "a result is gathered before it has come": ("_gather", "call.kernels.wait_event"),
    "the engine sums before it is folded": ("_combine", "way.stream.wait_event"),
    "the header is sent before it is written": ("_agree", "self._follow(up.stream"),
    "the header is compared before it has come": ("_agree", "self._follow(kernels"),
}
MUTANT = """
import inspect, textwrap
from gpuallreduce.across import cuda as module
method, wait = WAIT
owner = module.Turns if hasattr(module.Turns, method) else module.CudaAcross
lines = textwrap.dedent(inspect.getsource(getattr(owner, method))).splitlines()
(at,) = [i for i, line in enumerate(lines) if wait in line]
lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + "pass"
space = sys.modules[owner.__module__].__dict__
exec("\\n".join(lines), space)
setattr(owner, method, space[method])
comm = start(timeout=8)
wrong = []
def many():
    for turn in range(12):
        inputs = arrays("int32", "sum", 6_000, seed=turn)
        x, y = put(inputs[rank]), put(inputs[rank])
        comm.allreduce(x, order="any" if method == "_combine" else "rank", chunk_bytes=2048)
        comm.allreduce(y, chunk_bytes=2048)
        comm.synchronize()
        if not same(get(x), reference.allreduce(inputs, "sum")):
            wrong.append(turn)
    if method == "_agree":  # no difference may go unseen
        found = fails(comm, lambda: comm.allreduce(put(np.ones(3 + rank))))
        if "MismatchError" not in found[0]:
            wrong.append(found)
        if comm._calls.across._progress.state()[2]:
            wrong.append("folded")
try:
    many()
except gar.Error as error:
    wrong.append(f"{type(error).__name__}: {error}")
report(wrong)
os._exit(0)
"""


def test_no_wait_is_lost():
    unchanged = ("_agree", "progress.post(")
    body = MUTANT.replace("WAIT", repr(unchanged)).replace('+ "pass"', "+ lines[at].lstrip()")
    assert [rank.reports for rank in run((1, 1, 1), body, delay_us=2000)] == [[[]]] * 3


@pytest.mark.parametrize("name", LOST_WAITS)
def test_a_lost_wait_is_noticed(name):
    body = MUTANT.replace("WAIT", repr(LOST_WAITS[name]))
    ranks = run((1, 1, 1), body, delay_us=2000)
    assert any(rank.reports[0] for rank in ranks)


# ---- what cannot succeed -------------------------------------------------------------------------


def test_ranks_of_several_nodes_that_make_different_calls_all_raise():
    body = """
    comm = start(timeout=20)
    check(comm, "float32", "sum", 100)
    report(fails(comm, lambda: comm.allreduce(put(np.ones(100 + node // 2, np.float32)))))
    report(fails(comm, lambda: comm.allreduce(put(np.ones(100, np.float32)))))
    comm.close()
    """
    for rank in run((1, 1, 1), body):
        kind, text, took_s = rank.reports[0]
        assert kind == "MismatchError", text
        assert "rank 1 (node node1): call 2: allreduce(count=100, dtype=float32" in text
        assert "rank 2 (node node2): call 2: allreduce(count=101, dtype=float32" in text
        assert took_s < 10
        assert rank.reports[1][0] == "Aborted"


def test_ranks_of_one_node_that_make_different_calls_are_named_everywhere():
    body = """
    comm = start(timeout=20)
    dtype = np.float64 if rank == 1 else np.float32
    report(fails(comm, lambda: comm.allreduce(put(np.ones(100, dtype)))))
    comm.close()
    """
    for rank in run((2, 1), body):
        kind, text, _ = rank.reports[0]
        assert kind == "MismatchError", text
        assert "dtype=float64" in text
        assert "dtype=float32" in text


NOT_COMING = """
comm = start()
comm.barrier()
comm.timeout = 2
if rank != 2:
    report(fails(comm, lambda: comm.allreduce(put(np.ones(100, np.float32)))))
else:
    while (found := error_of(comm.synchronize)) is None:
        time.sleep(0.1)
    report([*found, 0])
if rank == 0:
    begun, met, *_ = comm._calls.across._progress.state()
    report(begun - met)
comm.close()
"""


def test_a_rank_that_does_not_come_is_named_by_all():
    ranks = run((1, 2), NOT_COMING)
    for rank in ranks:
        kind, text, took_s = rank.reports[0]
        assert kind == "Timeout", text
        assert "rank 2 (node node1) did not make this call" in text
        assert took_s < 12
    assert ranks[0].reports[1] == 1  # what rank 1 gave up was not sent


def test_what_was_given_up_would_be_sent_if_nothing_halted_it(tmp_path):
    shutil.copytree(jit.kernels_folder(), tmp_path / "kernels")
    source = tmp_path / "kernels" / "nodes.cuh"
    old, text = "return !given_up || halt(args);", source.read_text()
    assert text.count(old) == 1
    source.write_text(text.replace(old, "return true;"))
    body = f"""
import pathlib
from gpuallreduce import jit
jit.kernels_folder = lambda: pathlib.Path({str(tmp_path / "kernels")!r})
from gpuallreduce.across import guard
look = guard.Guard.look
guard.Guard.look = lambda self: time.sleep(0.3) or look(self)  # so that messages come first
"""
    assert run((1, 2), body + NOT_COMING)[0].reports[1] == 0


def test_a_node_that_does_not_come_is_named():
    body = """
    comm = start()
    comm.barrier()
    comm.timeout = 2
    if node == 0:
        report(fails(comm, lambda: comm.allreduce(put(np.ones(100, np.float32)))))
    else:
        while error_of(comm.synchronize) is None:
            time.sleep(0.1)
        report(["Timeout", "told: rank 1 (node node1) to make the same call", 0])
    comm.close()
    """
    for rank in run((1, 1), body):
        kind, text, took_s = rank.reports[0]
        assert kind == "Timeout", text
        assert "rank 1 (node node1) to make the same call" in text
        assert took_s < 12


def check_the_others_name(victim: int, processes: list[subprocess.Popen[str]]) -> None:
    """Kills a rank once all are ready; the others must raise in time, and say which it was."""
    for process in processes:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
    begin = time.monotonic()
    os.kill(processes[victim].pid, signal.SIGKILL)
    ranks = finish_job(processes, timeout=60)
    assert time.monotonic() - begin < 15
    for number, rank in enumerate(ranks):
        if number != victim:
            assert rank.status == 0, rank.stderr
            kind, text, _ = rank.reports[-1]
            assert kind in ("Aborted", "DeviceError"), text
            assert f"rank {victim}" in text or f"ranks {victim}" in text, text


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named_on_every_node(victim):
    body = """
    comm = start(timeout=20)
    comm.barrier()
    x = put(np.ones(200_000, np.float32))
    report("ready")
    def many():
        for _ in range(1 << 20):
            comm.allreduce(x)
            comm.synchronize()
    report(fails(comm, many))
    comm.close()
    """
    processes = start((2, 2), body)
    check_the_others_name(victim, processes)


def test_without_nccl_all_ranks_say_so():
    body = """
    if rank == 1:
        import gpuallreduce.fabric.nccl_start as start_module
        def missing():
            raise gar.NotSupported("NCCL is missing: pip install nvidia-nccl-cu13")
        start_module.nccl_module = missing
    report(error_of(start))
    """
    kinds = [rank.reports[0] for rank in run((1, 2), body)]
    for number, (kind, text) in enumerate(kinds):
        assert kind == ("NotSupported" if number == 1 else "DeviceError"), text
        assert "NCCL is missing" in text


def test_devices_of_different_kinds_are_refused_on_all_ranks():
    body = """
    report(error_of(start, device="host" if rank == 1 else "cuda:0"))
    """
    for rank in run((1, 1), body):
        kind, text = rank.reports[0]
        assert kind == "NotSupported"
        assert "different kinds: ['cuda:0', 'host']" in text


def test_an_abort_ends_calls_on_all_nodes():
    body = """
    comm = start(timeout=20)
    comm.barrier()
    if rank == 0:
        comm.allreduce(put(np.ones(100, np.float32)))
        comm.abort()
        report(["Aborted", "", 0])
    elif rank == 1:
        report(fails(comm, lambda: comm.allreduce(put(np.ones(100, np.float32)))))
    else:
        while (found := error_of(comm.synchronize)) is None:
            time.sleep(0.05)
        report([*found, 0])
    comm.close()
    """
    for rank in run((1, 1, 1), body):
        kind, text, took_s = rank.reports[0]
        assert kind == "Aborted", text
        assert took_s < 8


def test_a_trace_shows_messages_beside_kernels(tmp_path):
    body = f"""
    comm = gar.init(device=f"cuda:{{rank}}", timeout=30, trace={str(tmp_path / "trace.json")!r})
    x = put(arrays("float32", "sum", 200_000)[rank])
    for order in ("rank", "any"):
        comm.allreduce(x, order=order, chunk_bytes=64 << 10)
    comm.synchronize()
    comm.allreduce(x)
    comm.close()
    """
    run((2, 1), body)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = {(event["tid"], event["name"]) for event in events if event["ph"] != "M"}
    for rank in range(3):
        names = {name for tid, name in found if tid == rank}
        assert names >= {"reduce", "gather"}
        assert names >= ({"up", "down", "engine"} if rank != 1 else set())  # rank 1 owns no shard
    stages = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert len(stages) > 40
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in itertools.pairwise(stages))
    begun = {event["id2"]["local"]: event["ts"] for event in events if event["ph"] == "b"}
    ended = {event["id2"]["local"]: event["ts"] for event in events if event["ph"] == "e"}
    assert any(
        begun[message] < stage["ts"] and stage["ts"] + stage["dur"] < ended[message]
        for message in begun
        if message.startswith("0.")
        for stage in stages
    )


def test_a_call_may_come_between_a_captured_one_and_the_end_of_its_capture():
    body = """
    comm = start()
    inputs = arrays("float32", "sum", 9000)
    want = reference.allreduce(inputs, "sum")
    x, y = put(inputs[rank]), put(inputs[rank])
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    comm.allreduce(put(inputs[rank]))
    comm.synchronize()
    streams[0].begin_capture()
    comm.allreduce(x, stream=streams[0])
    comm.allreduce(y, stream=streams[1])
    graph = streams[0].end_capture()
    streams[1].synchronize()  # nothing else puts a graph behind other calls
    graph.launch(streams[0])
    for stream in streams:
        stream.synchronize()
    comm.synchronize()
    assert same(get(x), want)
    assert same(get(y), want)
    """
    run((1, 2), body)


def test_a_shorter_limit_of_a_later_call_does_not_end_an_earlier_one():
    body = """
    comm = start()
    inputs = arrays("float32", "sum", 900)
    x, y = put(inputs[rank]), put(inputs[rank])
    comm.barrier()
    if node == 1:
        time.sleep(3)  # what the other node waits for, and longer than the later call allows
    comm.allreduce(x)
    comm.allreduce(y, timeout=0.5)
    comm.synchronize()
    assert same(get(x), reference.allreduce(inputs, "sum"))
    """
    run((1, 1), body)


def test_a_rank_that_fails_once_nccl_is_connected_fails_on_all():
    body = """
    import threading
    from gpuallreduce.across import cuda as module
    class Full:
        def __init__(self, *_):
            raise gar.DeviceError("allocating 67108864 bytes failed: out of memory")
    if rank == 1:
        module.SlotRoom = Full
    report([*error_of(start), time.monotonic() - BEGIN])
    for thread in threading.enumerate():
        if "watch" in thread.name:
            thread.join(5)
    left = [thread.name for thread in threading.enumerate() if "gpuallreduce" in thread.name]
    report([name for name in left if "news" not in name])  # rank 0 passes news on to the last
    """
    begin = "BEGIN = time.monotonic()\n"
    for rank in run((1, 2, 1), begin + textwrap.dedent(body)):
        kind, text, took_s = rank.reports[0]
        assert kind == "DeviceError"
        assert "out of memory" in text
        assert took_s < 15
        assert rank.reports[1] == []
