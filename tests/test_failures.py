"""Calls that cannot succeed: every rank raises, within the limit, and says who and what; nothing
hangs or stays behind.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from jobs import finish_job, run_job, start_job

MISMATCHES = {
    "count": (
        "comm.allreduce(np.ones(4 + min(comm.rank, 1), np.float32))",
        ["count=4", "count=5", "differ in count"],
    ),
    "large count, where algorithms may differ": (
        "comm.allreduce(np.ones(4 if comm.rank else 1 << 22, np.float32))",
        ["count=4,", f"count={1 << 22}"],
    ),
    "dtype": (
        "comm.allreduce(np.ones(4, np.float32 if comm.rank else np.int32))",
        ["dtype=float32", "dtype=int32"],
    ),
    "op": ("comm.allreduce(np.ones(4), op='sum' if comm.rank else 'max')", ["op=sum", "op=max"]),
    "order": (
        "comm.allreduce(np.ones(4), algorithm='ring', order='any' if comm.rank else 'rank')",
        ["order=any", "order=rank"],
    ),
    "algorithm": (
        "comm.allreduce(np.ones(4), algorithm='ring' if comm.rank else 'two_shot')",
        ["algorithm=ring", "algorithm=two_shot"],
    ),
    "chunk": (
        "comm.allreduce(np.ones(4000), chunk_bytes=1024 if comm.rank else 2048)",
        ["chunk_count=128", "chunk_count=256"],
    ),
    "channels": (
        "comm.allreduce(np.ones(4000), nchannels=1 + comm.rank % 2)",
        ["nchannels=1", "nchannels=2"],
    ),
    "root": ("comm.broadcast(np.ones(4), root=min(comm.rank, 1))", ["root=0", "root=1"]),
    "collective": (
        "comm.broadcast(np.ones(4)) if comm.rank else comm.allreduce(np.ones(4))",
        ["broadcast(", "allreduce("],
    ),
    "layout": (
        "comm.allreduce(np.ones((3, 4), order='F' if comm.rank else 'C'))",
        ["arrangement=0x0", "differ in arrangement", "memory layout"],
    ),
    "parts of a fused call": (
        "comm.allreduce_many([np.ones(3), np.ones(5)] if comm.rank else [np.ones(5), np.ones(3)])",
        ["fused in one call"],
    ),
    "access": (
        "comm.allreduce((comm.empty(99999), np.ones(99999, np.float32))[comm.rank == 0])",
        ["access=direct", "access=staged"],
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_raises_on_every_rank_with_both_sides_values(name):
    call, words = MISMATCHES[name]
    job = run_job(
        3,
        f"""
        comm = gar.init(timeout=20)
        comm.allreduce(np.ones(3))
        start = time.monotonic()
        report(error_of(lambda: {call}))
        report(time.monotonic() - start)
        report(error_of(lambda: comm.allreduce(np.ones(3))))
    """,
    )
    for rank in job:
        (kind, text), seconds, again = rank.reports
        assert kind == "MismatchError", text
        for word in words:
            assert word in text
        assert seconds < 10  # found by comparing headers, not by waiting for the limit
        assert again[0] == "Aborted"
        assert "MismatchError" in again[1]


def test_calls_in_another_order_are_a_mismatch():
    job = run_job(
        2,
        """
        comm = gar.init(timeout=20)
        first, second = np.ones(3), np.ones(4)
        report(error_of(lambda: [comm.allreduce(x) for x in ((first, second) if comm.rank else
        (second, first))]))
    """,
    )
    assert [rank.reports[0][0] for rank in job] == ["MismatchError"] * 2


def test_a_rank_that_never_arrives_is_named_by_all_others_within_the_limit():
    job = run_job(
        4,
        """
        comm = gar.init(timeout=30)
        comm.allreduce(np.ones(3))
        comm.timeout = 1.0
        if comm.rank == 2:
            time.sleep(3)
        start = time.monotonic()
        report(error_of(lambda: comm.allreduce(np.ones(3))))
        report(time.monotonic() - start)
        report(error_of(lambda: comm.allreduce(np.ones(3))))
        start = time.monotonic()
        comm.close()
        report(time.monotonic() - start)
    """,
    )
    for number, rank in enumerate(job):
        (kind, text), seconds, again, closing = rank.reports
        if number != 2:
            assert kind == "Timeout"
            assert "rank 2 did not make this call" in text
            assert 0.9 < seconds < 2.9
        else:
            assert kind == "Timeout"  # what the others found, although it came after the limit
            assert "rank 2 did not make this call" in text
        assert again[0] == "Aborted"
        assert closing < 1


def test_several_missing_ranks_are_all_named():
    job = run_job(
        4,
        """
        comm = gar.init(timeout=1.0)
        report(error_of(lambda: comm.allreduce(np.ones(3))) if comm.rank in (0, 2) else
        time.sleep(2.5))
    """,
    )
    for number in (0, 2):
        assert "ranks 1, 3 did not make this call" in job[number].reports[0][1]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_long_before_the_limit(victim):
    job = finish_job(
        start_job(
            3,
            f"""
        comm = gar.init(timeout=30)
        comm.allreduce(np.ones(3))
        if comm.rank == {victim}:
            comm.allreduce(np.ones(300000))  # so that the others have left the first call
            os.kill(os.getpid(), 9)
        start = time.monotonic()
        report(error_of(lambda: [comm.allreduce(np.ones(300000)) for _ in range(3)]))
        report(time.monotonic() - start)
    """,
        )
    )
    for number, rank in enumerate(job):
        if number == victim:
            assert rank.status == -signal.SIGKILL
            continue
        (kind, text), seconds = rank.reports
        assert kind == "Aborted"
        assert f"rank {victim} is gone" in text
        assert seconds < 10


def test_a_killed_rank_is_noticed_while_rank_0_is_busy_elsewhere():
    job = finish_job(
        start_job(
            3,
            """
        comm = gar.init(timeout=30)
        comm.allreduce(np.ones(3))
        if comm.rank == 1:
            os.kill(os.getpid(), 9)
        if comm.rank == 0:
            time.sleep(4)
        start = time.monotonic()
        report(error_of(lambda: comm.allreduce(np.ones(3))))
        report(time.monotonic() - start)
    """,
        )
    )
    (kind, text), seconds = job[2].reports
    assert kind == "Aborted"
    assert "rank 1 is gone" in text
    assert seconds < 3


def test_nothing_stays_behind_after_kill_9():
    before = set(os.listdir("/dev/shm"))
    processes = start_job(
        2,
        """
        comm = gar.init(timeout=30)
        x = comm.empty(1000)
        comm.allreduce(x)
        report(os.getpid())
        import signal
        signal.pause()
    """,
    )
    try:
        pids = []
        for process in processes:
            line = process.stdout.readline()
            pids.append(int(line.removeprefix("REPORT ")))
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=30)
    assert set(os.listdir("/dev/shm")) <= before
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_rank_that_closed_is_named_at_once_but_may_leave_a_finished_call():
    job = run_job(
        3,
        """
        comm = gar.init(timeout=30)
        x = np.ones(100000)
        for _ in range(20):
            comm.allreduce(x)
        if comm.rank == 1:
            comm.close()
            report("closed")
        else:
            start = time.monotonic()
            report(error_of(lambda: comm.allreduce(x)))
            report(time.monotonic() - start)
    """,
    )
    assert job[1].reports == ["closed"]
    for number in (0, 2):
        (kind, text), seconds = job[number].reports
        assert kind == "Aborted"
        assert "rank 1 has closed its communicator" in text or "rank 1 is gone" in text
        assert seconds < 10


def test_keyboard_interrupt_leaves_a_wait_and_tells_the_peers():
    processes = start_job(
        2,
        """
        comm = gar.init(timeout=60)
        comm.allreduce(np.ones(3))
        if comm.rank == 0:
            report("waiting")
            try:
                comm.allreduce(np.ones(3))
            except KeyboardInterrupt:
                report("interrupted")
            report(error_of(lambda: comm.allreduce(np.ones(3))))
        else:
            time.sleep(1.5)
            report(error_of(lambda: comm.allreduce(np.ones(3))))
    """,
    )
    first = processes[0].stdout.readline()
    assert "waiting" in first
    time.sleep(0.1)  # the signal may come before or inside the wait: both must work
    processes[0].send_signal(signal.SIGINT)
    assert "interrupted" in processes[0].stdout.readline()
    assert "Aborted" in processes[0].stdout.readline()
    job = finish_job(processes)
    assert job[1].reports[-1][0] == "Aborted"


@pytest.mark.parametrize("way", ["abort", "close"])
def test_abort_and_close_from_another_thread_end_a_call_in_bounded_time(way):
    job = run_job(
        2,
        f"""
        import threading
        comm = gar.init(timeout=60)
        comm.allreduce(np.ones(3))
        start = time.monotonic()
        if comm.rank == 0:
            threading.Timer(0.2, comm.{way}).start()
        else:
            time.sleep(0.5)
        report(error_of(lambda: comm.allreduce(np.ones(3))))
        report(time.monotonic() - start)
        comm.abort()
        comm.close()
        comm.close()
    """,
    )
    for rank in job:
        assert rank.reports[0][0] == "Aborted"
        assert "aborted" in rank.reports[0][1]
        assert rank.reports[1] < 10


def test_an_aborted_communicator_makes_no_more_calls(ranks):
    import numpy as np

    import gpuallreduce as gar

    comm = ranks(2)
    comm.abort()
    with pytest.raises(gar.Aborted, match="aborted"):
        comm.allreduce([np.ones(2) for _ in range(2)])


def test_closed_communicators_say_so(ranks):
    import numpy as np

    import gpuallreduce as gar

    comm = ranks(2)
    comm.close()
    for call in (
        comm.barrier,
        lambda: comm.allreduce([np.ones(2)] * 2),
        lambda: comm.empty(3),
        lambda: comm.plan([np.ones(2)] * 2),
    ):
        with pytest.raises(gar.Closed):
            call()


def test_start_up_without_a_rank_names_it():
    job = finish_job(
        start_job(
            3,
            """
        if os.environ["GPUALLREDUCE_RANK"] == "1":
            sys.exit(0)
        report(error_of(lambda: gar.init(timeout=1.5)))
    """,
        )
    )
    for number in (0, 2):
        kind, text = job[number].reports[0]
        assert kind == "Timeout"
        assert "rank 1" in text


def test_a_rank_that_cannot_start_fails_the_others_and_is_named():
    job = finish_job(
        start_job(
            3,
            """
        import resource
        if os.environ["GPUALLREDUCE_RANK"] == "1":
            used = int(open("/proc/self/statm").read().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), used + (32 << 20)))
        report(error_of(lambda: gar.init(timeout=20)))
    """,
            OPENBLAS_NUM_THREADS="1",
            OMP_NUM_THREADS="1",
        )
    )
    for rank in job:
        kind, text = rank.reports[0]
        assert kind == "DeviceError"
        assert "rank 1" in text


def test_a_forked_child_does_not_join_its_parents_calls():
    job = run_job(
        2,
        """
        comm = gar.init(timeout=30)
        comm.allreduce(np.ones(3))
        child = os.fork()
        if child == 0:
            try:
                comm.allreduce(np.ones(3))
                os._exit(1)
            except gar.Error as error:
                os._exit(0 if "fork" in str(error) else 2)
        report(os.waitpid(child, 0)[1])
        x = np.ones(3)
        comm.allreduce(x)
        report(x.tolist())
    """,
    )
    for rank in job:
        assert rank.reports == [0, [2.0, 2.0, 2.0]]


def test_a_forked_child_exits_and_can_make_its_own_communicator():
    """The parent's threads do not exist there, so nothing may wait for them."""
    job = run_job(
        1,
        """
        import signal
        comm = gar.Communicator(["host"] * 2)
        comm.allreduce([np.ones(3), np.ones(3)])
        gar.allreduce([np.ones(3), np.ones(3)])
        closed = gar.Communicator(["host"] * 2)
        closed.allreduce([np.ones(3), np.ones(3)])
        closed.close()
        time.sleep(0.3)  # until the launcher's threads sleep
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            del comm, closed
            own = gar.Communicator(["host"] * 2)
            x = [np.ones(3), np.ones(3)]
            own.allreduce(x)
            gar.allreduce(x)
            os._exit(0 if x[0].tolist() == [4.0] * 3 else 1)
        report(os.waitpid(child, 0)[1])
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            sys.exit(0)
        report(os.waitpid(child, 0)[1])
    """,
    )
    assert job[0].reports == [0, 0]


def test_threads_that_the_system_refuses_leave_a_usable_communicator():
    job = run_job(
        1,
        """
        import resource
        comm = gar.Communicator(["host"] * 12, timeout=5)
        xs = [np.ones(3) for _ in range(12)]
        comm.plan(xs)
        gar.Communicator(["host"] * 2).allreduce([np.ones(3), np.ones(3)])
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        old = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), old[1]))
        report(error_of(lambda: comm.allreduce(xs)))
        resource.setrlimit(resource.RLIMIT_AS, old)
        comm.allreduce(xs)
        report(xs[0].tolist())
        comm.close()
    """,
        OPENBLAS_NUM_THREADS="1",
        OMP_NUM_THREADS="1",
    )
    assert job[0].reports[0][0] == "DeviceError"
    assert job[0].reports[1] == [12.0] * 3


@pytest.mark.parametrize("call", ["comm.close()", "comm.barrier()", "comm.allreduce(np.ones(9))"])
def test_a_signal_handler_inside_a_wait_cannot_deadlock(call):
    job = run_job(
        2,
        f"""
        import signal
        comm = gar.init(timeout=30)
        x = np.ones(3)
        comm.allreduce(x)
        seen = []
        def handler(*_):
            seen.append(error_of(lambda: {call}))
        signal.signal(signal.SIGALRM, handler)
        start = time.monotonic()
        if comm.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            time.sleep(1)
        report(error_of(lambda: comm.allreduce(x)))
        report(time.monotonic() - start)
        report(seen)
    """,
    )
    assert job[0].reports[1] < 10
    assert len(job[0].reports[2]) == 1
    if "close" in call:
        assert job[0].reports[0][0] in ("Aborted", "Closed")


def test_arrays_dropped_during_a_call_stay_alive():
    job = run_job(
        1,
        """
        import threading
        comm = gar.Communicator(["host"] * 2)
        for _ in range(3):
            xs = [np.ones(10_000_000, np.float32) for _ in range(2)]
            thread = threading.Thread(target=lambda: (time.sleep(0.002), xs.clear()))
            thread.start()
            comm.allreduce(xs)
            thread.join()
        report("alive")
    """,
    )
    assert job[0].reports == ["alive"]


def test_a_new_timeout_during_a_direct_call_does_not_pull_its_tables_away():
    job = run_job(
        2,
        """
        import threading
        comm = gar.init(timeout=20)
        x = comm.empty(1 << 20)
        for _ in range(3):
            comm.allreduce(x)
        for turn in range(5):
            if comm.rank == 0:
                setter = threading.Timer(0.05, lambda: setattr(comm, "timeout", 15.0))
                setter.start()
            else:
                time.sleep(0.15)
            comm.allreduce(x)
            comm.barrier()
            comm.allreduce(x)
        report("alive")
    """,
    )
    assert [rank.reports for rank in job] == [["alive"]] * 2


def test_empty_keeps_to_the_communicators_timeout_and_breaks_it():
    job = run_job(
        2,
        """
        comm = gar.init(timeout=20)
        comm.allreduce(np.ones(3))
        comm.timeout = 1.0
        if comm.rank == 1:
            time.sleep(4)
        start = time.monotonic()
        report(error_of(lambda: comm.empty(100)))
        report(time.monotonic() - start)
        pipes = [os.pipe() for _ in range(20)]  # new owners of old descriptors
        for _, write in pipes:
            os.close(write)
        report(error_of(lambda: comm.allreduce(np.ones(3))))
    """,
    )
    assert job[0].reports[0][0] == "Timeout"
    assert job[0].reports[1] < 3.9
    assert "is gone" not in job[0].reports[2][1]
    assert [rank.reports[2][0] for rank in job] == ["Aborted"] * 2


@pytest.mark.parametrize("way", ["abort", "close"])
def test_abort_and_close_end_another_threads_empty(way):
    job = run_job(
        2,
        f"""
        import threading
        comm = gar.init(timeout=30)
        start = time.monotonic()
        if comm.rank == 0:
            threading.Timer(0.3, comm.{way}).start()
            report(error_of(lambda: comm.empty(100)) is not None)
            report(time.monotonic() - start)
        else:
            time.sleep(1.5)
    """,
    )
    assert job[0].reports[0] is True
    assert job[0].reports[1] < 10


def test_symmetric_sizes_must_agree():
    job = run_job(
        2,
        """
        comm = gar.init(timeout=20)
        report(error_of(lambda: comm.empty(10 + comm.rank)))
        x = comm.empty(10)
        x[...] = comm.rank + 1
        comm.allreduce(x)
        report(x.tolist())
    """,
    )
    for rank in job:
        assert rank.reports[0][0] == "MismatchError"
        assert "[40, 44]" in rank.reports[0][1]
        assert rank.reports[1] == [3.0] * 10


def test_symmetric_memory_is_given_back_when_its_array_is_gone():
    job = run_job(
        2,
        """
        comm = gar.init(timeout=20)
        def mapped():
            return sum("memfd:gpuallreduce" in line for line in open("/proc/self/maps"))
        before = mapped()
        for _ in range(20):
            x = comm.empty(1 << 18)
            comm.allreduce(x)
            del x
        report(mapped() - before)
        report(len(os.listdir("/proc/self/fd")))
        kept = [comm.empty(10) for _ in range(50)]
        report(len(os.listdir("/proc/self/fd")))
    """,
    )
    for rank in job:
        assert rank.reports[0] == 0
        assert rank.reports[1] == rank.reports[2] < 40  # arrays cost no descriptors


def test_the_interpreter_exits_without_close():
    start = time.monotonic()
    run_job(2, "comm = gar.init(timeout=60); comm.allreduce(np.ones(3))")
    assert time.monotonic() - start < 30
    assert threading.active_count() >= 1
