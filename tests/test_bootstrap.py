"""How ranks find each other and exchange: real sockets, ranks as threads and as processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuallreduce.bootstrap import address as addresses
from gpuallreduce.bootstrap import handshake
from gpuallreduce.bootstrap.environment import Identity, identify
from gpuallreduce.bootstrap.rendezvous import Part, Rendezvous
from gpuallreduce.bootstrap.wire import Connection, Deadline, Malformed, encode
from gpuallreduce.errors import (
    Aborted,
    Closed,
    DeviceError,
    Error,
    InvalidArgument,
    MismatchError,
    NotSupported,
    Timeout,
)

ROOT = Path(__file__).parents[1]
LIMIT = 20.0  # no wait in this file is longer; none comes near it
SECRET = b"a secret of this test"


def unix_address() -> str:
    return f"unix:gpuallreduce-test-{os.getpid()}-{secrets.token_hex(8)}"


def tcp_address() -> str:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


ADDRESSES = pytest.mark.parametrize("new_address", [unix_address, tcp_address], ids=["unix", "tcp"])


def member(rank: int, nranks: int, address: str, secret: bytes = SECRET) -> Identity:
    return Identity(rank, nranks, rank, nranks, address, secret, "arguments")


class Running:
    """A call in a thread, with its result or exception."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "the call did not return"
        if self.error is not None:
            raise self.error
        return self._result

    def failure(self) -> BaseException:
        with contextlib.suppress(BaseException):
            self.result()
        assert self.error is not None, f"expected an error, got {self._result!r}"
        return self.error


def together(calls: list[Callable[[], Any]]) -> list[Running]:
    return [Running(call) for call in calls]


def start_join(rank: int, nranks: int, address: str, **options: Any) -> Running:
    secret = options.pop("secret", SECRET)
    options.setdefault("timeout", LIMIT)
    return Running(lambda: Rendezvous.join(member(rank, nranks, address, secret), **options))


@contextlib.contextmanager
def joined(nranks: int, address: str | None = None) -> Any:
    """All ranks of a job as objects of this process."""
    address = address or unix_address()
    running = [start_join(rank, nranks, address) for rank in range(nranks)]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(each.result()) for each in running]


def exchange(ranks: list[Rendezvous], stage: str = "stage", **options: Any) -> list[Running]:
    return together([lambda r=r: r.exchange(stage, {"rank": r.rank}, **options) for r in ranks])


def all_fail(running: list[Running], kind: type[Error], *texts: str) -> None:
    for each in running:
        error = each.failure()
        assert type(error) is kind, repr(error)
        for text in texts:
            assert text in str(error)


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def dial(address: str) -> Connection:
    """Connects as soon as somebody listens."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            return Connection(addresses.connect(address, timeout=LIMIT))
        except OSError:
            os.sched_yield()
    raise AssertionError(f"nobody listens at {address}")


MEMBER = """
import sys
from gpuallreduce.bootstrap.environment import Identity
from gpuallreduce.bootstrap.rendezvous import Rendezvous
rank, nranks, address, secret, stages = sys.argv[1:]
identity = Identity(int(rank), int(nranks), 0, 1, address, bytes.fromhex(secret), "arguments")
rendezvous = Rendezvous.join(identity, timeout=20)
for stage in stages.split(","):
    rendezvous.exchange(stage, {"rank": int(rank)})
sys.stdin.read()
"""


@contextlib.contextmanager
def process(rank: int, nranks: int, address: str, stages: str) -> Any:
    """A rank as a process: joins, runs the stages, then stays until it is killed."""
    arguments = [str(rank), str(nranks), address, SECRET.hex(), stages]
    child = subprocess.Popen(
        [sys.executable, "-c", MEMBER, *arguments], cwd=ROOT, stdin=subprocess.PIPE
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=LIMIT)


def kill(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait(LIMIT)


# ---------------------------------------------------------------------------- exchange


@pytest.mark.parametrize("nranks", [1, 2, 5, 16])
def test_every_rank_gets_every_part_in_rank_order(nranks: int) -> None:
    with joined(nranks) as ranks:
        for stage in ("one", "two", "three"):
            for each in exchange(ranks, stage):
                parts = each.result()
                assert parts == [Part({"rank": rank}) for rank in range(nranks)]


@ADDRESSES
def test_descriptors_arrive_open_and_with_their_content(new_address: Callable[[], str]) -> None:
    with joined(3, new_address()) as ranks:
        sent = [[memfd(b"%d of %d" % (i, r.rank)) for i in range(r.rank + 1)] for r in ranks]
        calls = [lambda r=r: r.exchange("fds", fds=sent[r.rank]) for r in ranks]
        for each in together(calls):
            for rank, part in enumerate(each.result()):
                assert len(part.fds) == rank + 1
                for index, fd in enumerate(part.fds):
                    assert os.pread(fd, 100, 0) == b"%d of %d" % (index, rank)
                    assert not os.get_inheritable(fd)
                    assert fd not in sent[rank]
                    os.close(fd)
        for fds in sent:
            for fd in fds:
                os.close(fd)


def test_own_descriptors_are_copies_with_one_rank_too() -> None:
    fd = memfd(b"x")
    with joined(1) as (rank,):
        (part,) = rank.exchange("fds", fds=[fd])
    os.close(fd)
    assert os.pread(part.fds[0], 1, 0) == b"x"
    os.close(part.fds[0])


def test_all_ranks_see_the_same_payload_whatever_json_makes_of_it() -> None:
    with joined(2) as ranks:
        calls = [lambda r=r: r.exchange("s", {"t": (1, 2), "n": {3: None}}) for r in ranks]
        for each in together(calls):
            assert [p.payload for p in each.result()] == [{"t": [1, 2], "n": {"3": None}}] * 2


def test_payloads_larger_than_socket_buffers_arrive() -> None:
    with joined(3) as ranks:
        text = "x" * (3 << 20)
        for each in together([lambda r=r: r.exchange("s", {"text": text}) for r in ranks]):
            assert all(part.payload["text"] == text for part in each.result())


@ADDRESSES
def test_nothing_is_left_open_or_running(new_address: Callable[[], str]) -> None:
    with joined(4, new_address()) as ranks:
        for each in exchange(ranks):
            each.result()
    before, threads = open_fds(), threading.active_count()
    for failing in (False, True):
        fd = memfd(b"x")
        with joined(4, new_address()) as ranks:
            assert threading.active_count() == threads
            options = {"error": ValueError("no")} if failing else {"fds": [fd]}
            for each in exchange(ranks, **options):
                if failing:
                    each.failure()
                else:
                    for part in each.result():
                        os.close(part.fds[0])
        os.close(fd)
    assert open_fds() == before
    assert threading.active_count() == threads


def test_descriptors_do_not_leak_when_another_rank_fails() -> None:
    fd = memfd(b"x")
    with joined(3) as ranks:
        before = open_fds()
        calls = [lambda r=r: r.exchange("s", fds=[fd]) for r in ranks[:2]]
        calls.append(lambda: ranks[2].exchange("s", error=ValueError("no")))
        all_fail(together(calls), DeviceError)
        assert open_fds() == before
    os.close(fd)


# ---------------------------------------------------------------------------- stages that fail


@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_that_fails_makes_all_raise_and_the_next_stage_works(bad: int) -> None:
    with joined(3) as ranks:
        problem = MemoryError("no room")
        calls = [
            lambda r=r: r.exchange("map", error=problem if r.rank == bad else None) for r in ranks
        ]
        running = together(calls)
        text = f"rank {bad} failed in stage 'map': MemoryError: no room"
        all_fail(running, DeviceError, text)
        assert running[bad].failure().__cause__ is problem
        for each in exchange(ranks, "again"):
            assert len(each.result()) == 3


def test_all_ranks_that_failed_are_named() -> None:
    with joined(3) as ranks:
        calls = [
            lambda r=r: r.exchange("map", error=OSError("bad") if r.rank else None) for r in ranks
        ]
        all_fail(together(calls), DeviceError, "rank 1 failed", "rank 2 failed")


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"payload": {"x": object()}}, "InvalidArgument"),
        ({"payload": {"x": "y" * (17 << 20)}}, "the limit is"),
        ({"fds": [987654]}, "Bad file descriptor"),
        ({"fds": [0] * 1000}, "1000 descriptors"),
    ],
    ids=["not JSON", "too long", "closed descriptor", "too many descriptors"],
)
def test_what_cannot_be_sent_is_an_error_of_that_rank_at_once(
    bad: int, options: dict[str, Any], text: str
) -> None:
    with joined(2) as ranks:
        calls = [lambda r=r: r.exchange("map", **(options if r.rank == bad else {})) for r in ranks]
        all_fail(together(calls), DeviceError, f"rank {bad} failed in stage 'map'", text)


def test_different_stages_raise_on_all_ranks_with_both_names() -> None:
    with joined(3) as ranks:
        calls = [lambda r=r: r.exchange("b" if r.rank == 1 else "a") for r in ranks]
        all_fail(together(calls), MismatchError, "ranks 0, 2 in 'a'", "rank 1 in 'b'")
        all_fail(exchange(ranks), Aborted, "different stages")


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_to_a_stage_is_named(absent: int) -> None:
    with joined(4) as ranks:
        here = [rank for rank in ranks if rank.rank != absent]
        all_fail(exchange(here, "map", timeout=0.2), Timeout, "'map'", f"rank {absent}")
        # When it comes at last it does not wait, and learns why.
        late = exchange([ranks[absent]], "map")[0].failure()
        assert isinstance(late, Timeout if absent else DeviceError)


def test_a_timeout_may_be_endless() -> None:
    with joined(3) as ranks:
        for each in exchange(ranks, timeout=float("inf")):
            each.result()


def test_the_shortest_timeout_of_all_ranks_holds() -> None:
    with joined(3) as ranks:
        patient = exchange([ranks[0]], timeout=LIMIT)
        hasty = exchange([ranks[1]], timeout=0.1)
        all_fail(patient + hasty, Timeout, "waited 0.1 s for rank 2", "ranks 0, 1 came")


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_killed_between_stages_the_others_raise_and_name_it(victim: int) -> None:
    address = unix_address()
    with process(victim, 4, address, "first") as child:
        running = [start_join(rank, 4, address) for rank in range(4) if rank != victim]
        ranks = [each.result() for each in running]
        for each in exchange(ranks, "first"):
            assert [part.payload["rank"] for part in each.result()] == [0, 1, 2, 3]
        kill(child)
        for rank in ranks:
            if 0 in (rank.rank, victim):
                assert rank.lost() == [victim]
        all_fail(exchange(ranks, "second"), DeviceError, f"rank {victim} failed in stage 'second'")
        for rank in ranks:
            rank.close()


def test_killed_while_the_others_wait_for_it_they_raise_at_once() -> None:
    address = unix_address()
    with process(2, 3, address, "first") as child:
        ranks = [each.result() for each in [start_join(rank, 3, address) for rank in (0, 1)]]
        for each in exchange(ranks, "first"):
            each.result()
        waiting = exchange(ranks, "second")
        kill(child)
        all_fail(waiting, DeviceError, "rank 2 failed in stage 'second'")
        for rank in ranks:
            rank.close()


def test_lost_tells_who_closed_without_waiting() -> None:
    with joined(3) as ranks:
        assert [rank.lost() for rank in ranks] == [[], [], []]
        ranks[2].close()
        assert ranks[0].lost() == [2]
        assert ranks[1].lost() == []
        ranks[0].close()
        assert ranks[1].lost() == [0]


def test_lost_is_remembered_after_a_failure() -> None:
    with joined(3) as ranks:
        ranks[1].close()
        all_fail(exchange([ranks[0], ranks[2]]), DeviceError, "rank 1")
        assert ranks[0].lost() == [1]


def test_a_closed_rendezvous_says_so() -> None:
    with joined(2) as ranks:
        ranks[0].close()
        ranks[0].close()
        with pytest.raises(Closed, match="'map'"):
            ranks[0].exchange("map")


# ---------------------------------------------------------------------------- joining


@ADDRESSES
def test_rank_0_may_come_last(new_address: Callable[[], str]) -> None:
    address = new_address()
    others = [start_join(rank, 3, address) for rank in (1, 2)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(Rendezvous.join(member(0, 3, address), timeout=LIMIT))
        for each in others:
            stack.enter_context(each.result())


@pytest.mark.parametrize("missing", [[1], [2, 4], [1, 2, 3, 4]])
def test_exactly_the_missing_ranks_are_named_to_all_that_came(missing: list[int]) -> None:
    address = unix_address()
    here = [rank for rank in range(5) if rank not in missing]
    running = [start_join(rank, 5, address, timeout=0.4) for rank in here]
    text = ", ".join(map(str, missing))
    plural = "s" if len(missing) > 1 else ""
    all_fail(running, Timeout, f"for rank{plural} {text} of 5, while ")


def test_without_rank_0_the_others_name_rank_0() -> None:
    running = [start_join(1, 3, (address := unix_address()), timeout=0.2)]
    all_fail(running, Timeout, "for rank 0, which did not come", address)


def test_the_shortest_join_timeout_holds_for_all() -> None:
    address = unix_address()
    running = [start_join(0, 3, address), start_join(1, 3, address, timeout=0.2)]
    all_fail(running, Timeout, "waited 0.2 s", "for rank 2 of 3")


@ADDRESSES
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_with_one_rank_fail_everybody(
    new_address: Callable[[], str], rank: int
) -> None:
    address = new_address()
    running = [start_join(r, 4, address) for r in (0, 1, 2, rank)]
    all_fail(running, MismatchError, f"two processes claim rank {rank}", str(os.getpid()))


def test_different_numbers_of_ranks_fail_everybody() -> None:
    address = unix_address()
    running = [start_join(0, 3, address), start_join(1, 3, address), start_join(2, 4, address)]
    all_fail(running, MismatchError, "rank 0 expects 3 ranks and rank 2 expects 4")


def test_different_versions_fail_everybody() -> None:
    address = unix_address()
    running = [start_join(rank, 2, address, version=f"1.{rank}") for rank in range(2)]
    all_fail(running, MismatchError, "rank 0 runs gpuallreduce 1.0 and rank 1 runs 1.1")


def test_different_machines_fail_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuallreduce.bootstrap import assembly

    machines = iter(range(100))
    monkeypatch.setattr(assembly, "_machine", lambda: f"machine {next(machines)}")
    address = tcp_address()
    running = [start_join(rank, 2, address) for rank in range(2)]
    all_fail(running, NotSupported, "rank 0 and rank 1 are on different machines")


def test_a_rank_that_dies_while_gathering_fails_everybody() -> None:
    address = unix_address()
    running = [start_join(0, 4, address), start_join(1, 4, address)]
    connection = dial(address)
    handshake.introduce(connection, SECRET, deadline=Deadline.after(LIMIT))
    now = time.monotonic()
    hello = {"rank": 2, "nranks": 4, "pid": 7, "now": now, "deadline": [now + LIMIT, LIMIT]}
    from gpuallreduce.bootstrap import assembly

    hello |= {"version": assembly._version(), "machine": assembly._machine()}
    connection.send(encode(hello), deadline=Deadline.after(LIMIT), awaiting="rank 0")
    connection.close()
    all_fail(running, DeviceError, "rank 2 failed while the ranks were gathering")


def test_an_address_can_be_used_again_by_the_next_job() -> None:
    address = unix_address()
    with joined(3, address) as first, joined(3, address) as second:
        for each in exchange(first) + exchange(second):
            each.result()


def test_an_abstract_name_is_free_after_kill_9() -> None:
    address = unix_address()
    with process(0, 2, address, "never") as child:
        dial(address).close()  # it listens
        kill(child)
    with joined(2, address) as ranks:
        for each in exchange(ranks):
            each.result()


def test_an_address_that_another_program_keeps_is_a_clear_error() -> None:
    address = unix_address()
    with contextlib.closing(addresses.listen(address)):
        all_fail([start_join(0, 2, address, timeout=0.2)], Timeout, "another process listens")


# ---------------------------------------------------------------------------- hostile clients


def wrong_secret(connection: Connection) -> None:
    with pytest.raises(handshake.Refused, match="different secrets"):
        handshake.introduce(connection, b"wrong", deadline=Deadline.after(LIMIT))


def raw(data: bytes) -> Callable[[Connection], None]:
    def send(connection: Connection) -> None:
        socket.socket(fileno=os.dup(connection.fileno())).sendall(data)

    return send


def then_nonsense(connection: Connection) -> None:
    handshake.introduce(connection, SECRET, deadline=Deadline.after(LIMIT))
    connection.send(encode({"rank": "x"}), deadline=Deadline.after(LIMIT), awaiting="rank 0")


def framed(data: bytes) -> bytes:
    return struct.pack("!II", len(data), 0) + data


HOSTILE = {
    "wrong secret": wrong_secret,
    "garbage": raw(b"GET / HTTP/1.1\r\n\r\n"),
    "oversized length": raw(struct.pack("!II", 0xFFFFFFFF, 0)),
    "silent": raw(b""),
    "half a frame": raw(framed(b'{"nonce"')[:-3]),
    "not JSON": raw(framed(b"\xff\xfe")),
    "deep JSON": raw(framed(b"[" * 4000)),
    "not an object": raw(framed(b"[1]")),
    "no proof": raw(framed(b'{"nonce":1}')),
    "odd proof": raw(framed(json.dumps({"nonce": "a", "proof": "\u00e9"}).encode())),
    "nonsense after the proof": then_nonsense,
}


@ADDRESSES
@pytest.mark.parametrize("attack", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_client_does_not_disturb_the_ranks(
    new_address: Callable[[], str], attack: Callable[[Connection], None]
) -> None:
    address = new_address()
    running = [start_join(0, 3, address), start_join(1, 3, address)]
    with contextlib.closing(dial(address)) as client:
        attack(client)
        started = time.monotonic()
        running.append(start_join(2, 3, address))
        ranks = [each.result() for each in running]
        assert time.monotonic() - started < handshake.HANDSHAKE_SECONDS
        for each in exchange(ranks):
            each.result()
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - {"silent", "half a frame"}))
def test_a_client_that_is_wrong_is_dropped_at_once(name: str) -> None:
    address = unix_address()
    running = start_join(0, 2, address)
    with contextlib.closing(dial(address)) as client:
        HOSTILE[name](client)
        deadline = Deadline.after(handshake.HANDSHAKE_SECONDS / 2)
        with pytest.raises(DeviceError, match="connection"):
            [None for _ in iter(lambda: client.recv(deadline=deadline, awaiting="the end"), None)]
    start_join(1, 2, address).result().close()
    running.result().close()


def test_a_silent_client_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.05)
    address = unix_address()
    running = start_join(0, 2, address)
    with contextlib.closing(dial(address)) as client:
        deadline = Deadline.after(LIMIT)
        assert "nonce" in client.recv(deadline=deadline, awaiting="the greeting").body
        with pytest.raises(DeviceError, match="closed the connection"):
            client.recv(deadline=deadline, awaiting="the end")
    start_join(1, 2, address).result().close()
    running.result().close()


def test_more_silent_clients_than_are_served_at_once_only_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
    address = unix_address()
    running = [start_join(0, 2, address)]
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(contextlib.closing(dial(address)))
        running.append(start_join(1, 2, address))
        for each in running:
            each.result().close()


@pytest.mark.parametrize(
    "meet",
    [
        lambda connection: handshake.Doorkeeper(connection, SECRET),
        lambda connection: handshake.introduce(connection, SECRET, deadline=Deadline.after(LIMIT)),
    ],
    ids=["listening", "connecting"],
)
def test_another_user_is_refused_on_a_unix_socket(
    meet: Callable[[Connection], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = map(Connection, socket.socketpair())
    uid = os.getuid()
    assert ours.peer_uid() == uid
    with contextlib.closing(ours), contextlib.closing(theirs):
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        with pytest.raises(handshake.Refused, match="user"):
            meet(ours)


def test_an_impostor_that_does_not_know_the_secret_gets_no_rank() -> None:
    address = unix_address()
    with contextlib.closing(addresses.listen(address)) as door:
        door.setblocking(True)
        door.settimeout(LIMIT)
        running = start_join(1, 2, address)
        sock, _ = door.accept()
        with contextlib.closing(Connection(sock)) as impostor:
            keeper = handshake.Doorkeeper(impostor, b"wrong")
            advance = Running(lambda: [None for _ in iter(keeper.advance, {})])
            assert isinstance(advance.failure(), handshake.Refused)
        all_fail([running], MismatchError, "different secrets")


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    deadline = Deadline.after(LIMIT)
    with contextlib.closing(ours), contextlib.closing(theirs):
        running = Running(lambda: handshake.introduce(ours, SECRET, deadline=deadline))
        greeting = {"greeting": "gpuallreduce", "protocol": handshake.PROTOCOL, "nonce": "00"}
        theirs.send(encode(greeting), deadline=deadline, awaiting="")
        proof = theirs.recv(deadline=deadline, awaiting="a proof").body["proof"]
        theirs.send(encode({"proof": proof}), deadline=deadline, awaiting="")
        assert isinstance(running.failure(), handshake.Refused)


def test_another_protocol_version_is_named() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    deadline = Deadline.after(LIMIT)
    with contextlib.closing(ours), contextlib.closing(theirs):
        greeting = {"greeting": "gpuallreduce", "protocol": 99, "nonce": "00"}
        theirs.send(encode(greeting), deadline=deadline, awaiting="")
        with pytest.raises(handshake.Refused, match="protocol 99"):
            handshake.introduce(ours, SECRET, deadline=deadline)


# ---------------------------------------------------------------------------- wire


def test_receiving_stops_at_the_deadline_and_says_for_what() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        raw(framed(b"{}")[:5])(theirs)
        with pytest.raises(Timeout, match=r"waited 0\.05 s for the weather"):
            ours.recv(deadline=Deadline.after(0.05), awaiting="the weather")


def test_sending_to_nobody_who_reads_stops_at_the_deadline() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        frame = encode({"x": "y" * (8 << 20)})
        with pytest.raises(Timeout, match="a reader"):
            ours.send(frame, deadline=Deadline.after(0.05), awaiting="a reader")


def test_descriptors_stay_with_their_message_when_several_are_queued() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    deadline = Deadline.after(LIMIT)
    with contextlib.closing(ours), contextlib.closing(theirs):
        for index in range(4):
            fds = [memfd(b"%d" % index)] * (index % 2 * 2)
            ours.send(encode({"i": index}), deadline=deadline, awaiting="", fds=fds)
        for index in range(4):
            message = theirs.recv(deadline=deadline, awaiting="")
            assert message.body == {"i": index}
            assert [os.pread(fd, 9, 0) for fd in message.fds] == [b"%d" % index] * (index % 2 * 2)


def test_descriptors_come_once_with_a_message_larger_than_the_socket_s_buffer() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    deadline = Deadline.after(LIMIT)
    fd = memfd(b"x")
    with contextlib.closing(ours), contextlib.closing(theirs):
        frame = encode({"x": "y" * (8 << 20)})
        sending = Running(lambda: ours.send(frame, deadline=deadline, awaiting="", fds=[fd]))
        message = theirs.recv(deadline=deadline, awaiting="")
        sending.result()
        assert len(message.body["x"]) == 8 << 20
        assert len(message.fds) == 1
        os.close(message.fds[0])
    os.close(fd)


def test_descriptors_of_a_message_that_is_dropped_are_closed() -> None:
    fd = memfd(b"x")
    before = open_fds()
    for frame in (b"no JSON", b"[]"):
        ours, theirs = map(Connection, socket.socketpair())
        with contextlib.closing(ours), contextlib.closing(theirs):
            ours.send(frame, deadline=Deadline.after(LIMIT), awaiting="", fds=[fd])
            with pytest.raises(Malformed):
                theirs.recv(deadline=Deadline.after(LIMIT), awaiting="")
    assert open_fds() == before
    os.close(fd)


def test_a_socket_that_is_connected_to_itself_is_no_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: itself)
    with pytest.raises(ConnectionRefusedError):
        addresses.connect("127.0.0.1:1", timeout=LIMIT)
    assert itself.fileno() < 0


def test_descriptors_that_were_announced_and_did_not_come_are_an_error() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        raw(struct.pack("!II", 2, 1) + b"{}")(theirs)
        with pytest.raises(Malformed, match="announced 1 descriptors and 0 arrived"):
            ours.recv(deadline=Deadline.after(LIMIT), awaiting="")


# ---------------------------------------------------------------------------- identify

OURS = {"GPUALLREDUCE_RANK": "1", "GPUALLREDUCE_NRANKS": "2", "GPUALLREDUCE_ADDRESS": "unix:a"}
TORCH = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "host-123@1",
}
MPICH = {"PMI_RANK": "4", "PMI_SIZE": "5"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "5",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
LAUNCHERS = {
    "gpuallreduce run": OURS,
    "torchrun": TORCH,
    "Open MPI": OPEN_MPI,
    "MPICH/PMI": MPICH,
    "SLURM": SLURM,
}


@pytest.mark.parametrize("index", range(5), ids=list(LAUNCHERS))
def test_each_launcher_is_known_and_wins_over_those_after_it(index: int) -> None:
    source = list(LAUNCHERS)[index]
    environ: dict[str, str] = {}
    for later in list(LAUNCHERS.values())[index:]:
        environ |= later
    for variables in (LAUNCHERS[source], environ):
        found = identify(variables, parent_pid=9)
        assert (found.source, found.rank, found.nranks) == (source, index + 1, index + 2)
        assert (found.local_rank, found.local_nranks) == (index + 1, index + 2)


def test_arguments_win_over_every_launcher() -> None:
    environ = {name: text for each in LAUNCHERS.values() for name, text in each.items()}
    found = identify(environ, rank=7, nranks=9, address="unix:mine", secret="s")
    assert (found.rank, found.nranks, found.source) == (7, 9, "arguments")
    assert (found.address, found.secret) == ("unix:mine", b"s")
    found = identify(environ, address="unix:mine")
    assert (found.rank, found.address) == (1, "unix:mine")


def test_without_a_launcher_it_is_rank_0_of_1() -> None:
    found = identify({})
    assert (found.rank, found.nranks, found.source) == (0, 1, "single process")


@pytest.mark.parametrize("source", LAUNCHERS)
def test_all_ranks_of_a_job_meet_at_one_place_with_one_secret(source: str) -> None:
    variables = LAUNCHERS[source]
    other = {
        n: "0" if n.endswith(("RANK", "PROCID", "LOCALID")) else t for n, t in variables.items()
    }
    first, second = identify(variables, parent_pid=9), identify(other, parent_pid=9)
    assert second.rank == 0
    assert (first.address, first.secret) == (second.address, second.secret)
    assert first.address.startswith("unix:")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (TORCH, "MASTER_PORT"),
        (TORCH, "TORCHELASTIC_RUN_ID"),
        (TORCH, "TORCHELASTIC_RESTART_COUNT"),
        (OPEN_MPI, "PMIX_NAMESPACE"),
        (SLURM, "SLURM_JOB_ID"),
        (SLURM, "SLURM_STEP_ID"),
    ],
)
def test_another_job_of_the_launcher_meets_elsewhere(variables: dict[str, str], name: str) -> None:
    assert identify(variables).address != identify({**variables, name: "1234"}).address


def test_another_parent_meets_elsewhere_unless_the_launcher_names_its_job() -> None:
    assert identify(MPICH, parent_pid=1).address != identify(MPICH, parent_pid=2).address
    assert identify(OPEN_MPI, parent_pid=1).address == identify(OPEN_MPI, parent_pid=2).address


@pytest.mark.parametrize("source", LAUNCHERS)
def test_every_instance_meets_at_a_place_of_its_own(source: str) -> None:
    places = {identify(LAUNCHERS[source], instance=i).address for i in range(3)}
    assert len(places) == 3


def test_the_default_address_is_of_this_user() -> None:
    assert identify({}).address.startswith(f"unix:gpuallreduce-{os.getuid()}-")


def test_torchrun_s_own_port_is_never_the_address() -> None:
    assert "29500" not in identify(TORCH).address


def test_a_batch_script_that_srun_did_not_start_is_a_single_process() -> None:
    batch = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}
    assert identify({**batch, "SLURM_PROCID": "0"}).source == "single process"


@pytest.mark.parametrize(("node", "local_nranks"), [("0", 3), ("1", 3), ("2", 2)])
def test_slurm_s_tasks_per_node_are_read(node: str, local_nranks: int) -> None:
    environ = {
        **SLURM,
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": node,
        "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    }
    found = identify(environ, address="host:1", secret="s")
    assert (found.local_rank, found.local_nranks) == (1, local_nranks)
    with pytest.raises(NotSupported, match="several machines"):
        identify(environ)


@pytest.mark.parametrize(
    ("environ", "options", "text"),
    [
        ({}, {"rank": 0}, "rank= was given without nranks="),
        ({}, {"nranks": 2}, "nranks= was given without rank="),
        ({}, {"rank": 2, "nranks": 2}, "rank 2 of 2"),
        ({}, {"rank": -1, "nranks": 2}, "rank -1 of 2"),
        ({}, {"rank": 0, "nranks": 0}, "rank 0 of 0"),
        ({}, {"rank": "0", "nranks": 2}, "must be an integer"),
        ({"GPUALLREDUCE_RANK": "0"}, {}, "GPUALLREDUCE_NRANKS is not"),
        ({"GPUALLREDUCE_NRANKS": "2"}, {}, "GPUALLREDUCE_RANK is not"),
        ({"RANK": "0"}, {}, "WORLD_SIZE is not"),
        ({"PMI_RANK": "0"}, {}, "PMI_SIZE is not"),
        ({**TORCH, "RANK": "one"}, {}, "RANK must be an integer, found 'one'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, {}, "OMPI_COMM_WORLD_SIZE must be an integer"),
        ({**OURS, "GPUALLREDUCE_RANK": "2"}, {}, "rank 2 of 2"),
        ({**TORCH, "LOCAL_RANK": "3"}, {}, "local rank 3 of 3"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "x"}, {}, "SLURM_STEP_TASKS_PER_NODE must look"),
        ({}, {"address": "nonsense"}, "'nonsense' is malformed"),
        ({}, {"address": "unix:"}, "is malformed"),
        ({}, {"address": "unix:" + "x" * 101}, "is malformed"),
        ({}, {"address": "host:"}, "is malformed"),
        ({}, {"address": ":80"}, "is malformed"),
        ({}, {"address": "host:0"}, "is malformed"),
        ({}, {"address": "host:65536"}, "is malformed"),
        ({}, {"rank": 0, "nranks": 2, "address": "h:1"}, "GPUALLREDUCE_SECRET"),
    ],
)
def test_what_cannot_be_right_is_refused_with_its_name(
    environ: dict[str, str], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        identify(environ, **options)
    assert text in str(caught.value)


def test_a_launcher_over_several_machines_needs_an_address() -> None:
    with pytest.raises(NotSupported, match="HOST:PORT"):
        identify({**TORCH, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})


def test_the_secret_is_not_shown() -> None:
    assert "hidden" not in repr(identify({}, secret="hidden"))


@pytest.mark.parametrize(
    ("text", "where"),
    [("unix:a-b:c", "a-b:c"), ("host:80", ("host", 80)), ("[::1]:80", ("::1", 80))],
)
def test_addresses_are_read(text: str, where: object) -> None:
    assert addresses.parse(text) == where
