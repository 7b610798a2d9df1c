"""What all ranks of a job learn at once: real connections, ranks as threads here and as processes
where they are to die.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuallreduce.bootstrap.census import Census
from gpuallreduce.bootstrap.environment import identify
from gpuallreduce.bootstrap.news import LONGEST_TEXT, News
from gpuallreduce.bootstrap.nodes import Nodes, meet
from gpuallreduce.bootstrap.wire import Connection, ConnectionLost, encode
from gpuallreduce.errors import Error

NRANKS = 4
SOON_S = 2.0  # what a machine with other work may take for what is done at once
# Rank 0, the first rank of another node, and the other ranks of both have different parts to play.
NODE_OF = {2: "01", 3: "011", 4: "0011"}
CHILD = """
import os, signal, sys, threading, time
from gpuallreduce.bootstrap.environment import identify
from gpuallreduce.bootstrap.census import Census
from gpuallreduce.bootstrap.news import News
rank, nranks, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
identity = identify({}, rank=rank, nranks=nranks, address=address, secret="test")
node_of = tuple(map(int, sys.argv[4]))
news = News.join(identity, Census(("a", "b"), node_of, sys.argv[5]), timeout=20)
"""
WAIT = "print('ready', flush=True)\nsys.stdin.read()\n"


def tcp_address() -> str:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def join(rank: int, nranks: int, address: str, secret: str = "test", timeout: float = 20) -> News:
    identity = identify({}, rank=rank, nranks=nranks, address=address, secret=secret)
    census = Census(("a", "b"), tuple(map(int, NODE_OF[nranks])), token_of(address))
    return News.join(identity, census, timeout=timeout)


def token_of(address: str) -> str:
    """Of the meeting before, which has the same random one on all ranks."""
    return f"test-{os.getpid()}-{address.replace(':', '-')}"


@contextlib.contextmanager
def joined(nranks: int, address: str | None = None, *, but: int = -1) -> Iterator[dict[int, News]]:
    """Ranks as threads of this process; one may be elsewhere."""
    address = address or tcp_address()
    with ThreadPoolExecutor(nranks) as pool:
        here = [rank for rank in range(nranks) if rank != but]
        came = {rank: pool.submit(join, rank, nranks, address) for rank in here}
        ranks = {rank: each.result() for rank, each in came.items()}
    try:
        yield ranks
    finally:
        for each in ranks.values():
            each.close()


@contextlib.contextmanager
def process(rank: int, nranks: int, address: str, body: str) -> Iterator[subprocess.Popen[str]]:
    """A rank in a process of its own, which waits at the end of ``body`` for its input to end."""
    command = [sys.executable, "-c", CHILD + textwrap.dedent(body)]
    command += [str(rank), str(nranks), address, NODE_OF[nranks], token_of(address)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/")
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# ---------------------------------------------------------------------------- texts


@pytest.mark.parametrize("teller", range(NRANKS))
def test_all_others_hear_what_a_rank_tells(teller: int) -> None:
    with joined(NRANKS) as ranks:
        assert [each.heard() for each in ranks.values()] == [None] * NRANKS
        ranks[teller].tell("why: \u00e9\n\U0001f600")
        for rank, each in ranks.items():
            if rank != teller:
                soon(lambda each=each: each.heard() == (teller, "why: \u00e9\n\U0001f600"))
        assert ranks[teller].heard() is None
        assert [each.lost() for each in ranks.values()] == [[]] * NRANKS


def test_of_many_texts_at_once_all_hear_one_of_another_rank() -> None:
    with joined(NRANKS) as ranks, ThreadPoolExecutor(4 * NRANKS) as pool:
        for number in range(4 * NRANKS):
            pool.submit(ranks[number % NRANKS].tell, f"by {number % NRANKS}")
        for rank, each in ranks.items():
            soon(lambda each=each: each.heard() is not None)
            author, text = each.heard()
            assert author != rank
            assert text == f"by {author}"


def test_the_first_text_stays_the_first() -> None:
    with joined(NRANKS) as ranks:
        ranks[1].tell("first")
        soon(lambda: ranks[3].heard() == (1, "first"))
        ranks[1].tell("second")
        ranks[2].tell("third")  # goes by rank 0
        soon(lambda: ranks[1].heard() == (2, "third"))
        assert [ranks[rank].heard() for rank in (0, 2, 3)] == [(1, "first")] * 3


@pytest.mark.parametrize("relays", [False, True])
def test_a_text_that_the_kernel_does_not_take_at_once_is_sent_bit_by_bit(relays: bool) -> None:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    news, other = News(0, {1: Connection(near)}, relays=relays), Connection(far)
    text = "\u20ac" * LONGEST_TEXT
    news.tell(text)
    end, message = time.monotonic() + SOON_S, None
    while message is None:
        assert time.monotonic() < end
        message = other.advance()
        news.heard()
    assert message.body == {"news": ["text", 0, text]}
    news.close()
    other.close()


@pytest.mark.parametrize("teller", [0, 1, 3])
def test_a_long_text_is_cut_and_says_so(teller: int) -> None:
    with joined(NRANKS) as ranks:
        ranks[teller].tell("\u20ac" * 100_000)
        soon(lambda: ranks[2].heard() is not None)
        _, text = ranks[2].heard()
        assert len(text) == LONGEST_TEXT
        assert text == "\u20ac" * (LONGEST_TEXT - 6) + " [...]"


def test_a_rank_can_tell_from_a_signal_handler_that_interrupts_its_own_asking() -> None:
    with joined(2) as ranks:
        turns = []

        def handler(*_: object) -> None:
            turns.append(None)
            for each in ranks.values():
                each.lost()
                each.tell("interrupted")
                each.heard()

        previous = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-4)
        try:
            end = time.monotonic() + 20
            while len(turns) < 200 and time.monotonic() < end:
                for each in ranks.values():
                    each.heard()
                    each.tell("mine")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert len(turns) >= 200
        for rank, each in ranks.items():
            soon(lambda each=each: each.heard() is not None)
            assert each.heard()[0] == 1 - rank
            assert each.lost() == []


# ---------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("leaver", range(3))
def test_who_says_goodbye_has_left_and_is_not_lost(leaver: int) -> None:
    with joined(3) as ranks:
        ranks[leaver].close(17)
        ranks[leaver].close(18)
        others = [each for rank, each in ranks.items() if rank != leaver]
        for each in others:
            soon(lambda each=each: each.left() == {leaver: 17})
        # The others go on, even without rank 0.
        others[0].tell("still here")
        soon(lambda: others[1].heard() == (others[0].rank, "still here"))
        others[0].close(19)
        soon(lambda: others[1].left() == {leaver: 17, others[0].rank: 19})
        assert others[1].lost() == []


def test_nobody_needs_to_listen_when_a_rank_tells_and_closes() -> None:
    with joined(NRANKS) as ranks:
        start = time.monotonic()
        for each in ranks.values():
            for _ in range(1000):
                each.tell("x" * LONGEST_TEXT)
            each.close()
        assert time.monotonic() - start < SOON_S


def test_when_all_have_closed_the_relays_end() -> None:
    def relays() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "gpuallreduce-news"}

    before = relays()
    with joined(3) as ranks:
        mine = relays() - before
        assert len(mine) == 2
        ranks[0].close()
        ranks[1].close()
        assert all(each.is_alive() for each in mine)
        ranks[2].close()
        for each in mine:
            each.join(SOON_S)
            assert not each.is_alive()


def test_after_its_end_nothing_is_told() -> None:
    with joined(2) as ranks:
        ranks[1].close()
        ranks[1].tell("late")
        ranks[1].close()
        soon(lambda: ranks[0].left() == {1: 0})
        assert ranks[0].heard() is None
        assert ranks[1].lost() == []


# ---------------------------------------------------------------------------- death


@pytest.mark.parametrize("victim", range(3))
def test_all_others_see_that_a_rank_was_killed(victim: int) -> None:
    address = tcp_address()
    with (
        process(victim, 3, address, WAIT) as child,
        joined(3, address, but=victim) as ranks,
    ):
        assert line_of(child) == "ready"
        assert [each.lost() for each in ranks.values()] == [[], []]
        child.kill()
        for each in ranks.values():
            soon(lambda each=each: each.lost() == [victim])
            assert each.left() == {}
            assert each.heard() is None


def test_what_a_rank_told_before_it_was_killed_is_heard() -> None:
    body = "news.tell('last words')\nos.kill(os.getpid(), signal.SIGKILL)"
    address = tcp_address()
    with process(2, 3, address, body), joined(3, address, but=2) as ranks:
        for each in ranks.values():
            soon(lambda each=each: each.lost() == [2])
            assert each.heard() == (2, "last words")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interpreter_ends_although_nothing_was_closed(rank: int) -> None:
    address = tcp_address()
    with process(rank, 2, address, "") as child, joined(2, address, but=rank) as ranks:
        assert child.wait(20) == 0
        (other,) = ranks.values()
        soon(lambda: other.lost() == [rank])


@pytest.mark.parametrize("rank", range(3))
def test_a_forked_child_neither_hides_a_death_nor_speaks_for_its_parent(rank: int) -> None:
    body = """
        read, write = os.pipe()
        if os.fork() == 0:
            news.tell("by the child")
            assert news.lost() == []
            news.close()
            os.close(write)
            print("ready", flush=True)
            os.read(read, 1)  # until the parent ends
            sys.stdin.read()
            os._exit(0)
        sys.stdin.readline()
        news.tell("by the parent")
        sys.stdin.read()
    """
    address = tcp_address()
    with process(rank, 3, address, body) as child, joined(3, address, but=rank) as ranks:
        assert line_of(child) == "ready"
        first, second = ranks.values()
        first.tell("the relay goes on")
        soon(lambda: second.heard() == (first.rank, "the relay goes on"))
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        soon(lambda: first.heard() == (rank, "by the parent"))
        assert second.lost() == []
        assert second.left() == {}
        child.kill()
        for each in ranks.values():
            soon(lambda each=each: each.lost() == [rank])


# ---------------------------------------------------------------------------- meeting


def test_a_rank_with_another_secret_is_not_let_in() -> None:
    address = tcp_address()
    with ThreadPoolExecutor(2) as pool:
        right = pool.submit(join, 0, 2, address, timeout=1.0)
        wrong = pool.submit(join, 1, 2, address, secret="another", timeout=1.0)
        with pytest.raises(Error, match="for rank 1 of 2"):
            right.result()
        with pytest.raises(Error, match="different secrets"):
            wrong.result()


def test_ranks_of_several_nodes_have_news_and_stages_side_by_side() -> None:
    address = tcp_address()

    def come(rank: int) -> Nodes:
        environ = {"GPUALLREDUCE_NODE": "ab"[rank // 2]}
        identity = identify(
            environ, rank=rank, nranks=NRANKS, address=address, secret="test", across=True
        )
        return meet(identity, timeout=20, version="")

    def met(nodes: Nodes, stage: str) -> list[int]:
        parts = nodes.everyone.exchange(stage, {"rank": nodes.everyone.rank})
        return [part.payload["rank"] for part in parts]

    with ThreadPoolExecutor(NRANKS) as pool:
        ranks = list(pool.map(come, range(NRANKS)))
        for teller in (2, 0):
            assert list(pool.map(met, ranks, ["stage"] * NRANKS)) == [list(range(NRANKS))] * NRANKS
            ranks[teller].news.tell("so it is")
        assert list(pool.map(met, ranks, ["last"] * NRANKS)) == [list(range(NRANKS))] * NRANKS
        for rank in (0, 1, 3):
            soon(lambda rank=rank: ranks[rank].news.heard() is not None)
        ranks[1].close()
        soon(lambda: ranks[3].news.left() == {1: 0})
        for nodes in ranks:
            nodes.close()


# ---------------------------------------------------------------------------- wire


def test_posted_messages_arrive_whole_and_in_order_however_slowly_they_are_read() -> None:
    near, far = map(Connection, socket.socketpair())
    bodies = [{"number": number, "text": "x" * 50_000} for number in range(40)]
    done = [near.post(encode(body)) for body in bodies]
    assert not done[-1]  # more than the kernel takes at once
    found = []
    while len(found) < len(bodies):
        message = far.advance()
        if message is None:
            near.flush()
        else:
            found.append(message.body)
    assert found == bodies
    assert near.flush()
    near.close()
    far.close()


def test_what_is_posted_to_who_is_gone_is_dropped_and_what_it_said_is_not() -> None:
    near, far = map(Connection, socket.socketpair())
    far.post(encode({"last": "words"}))
    far.close()
    assert near.post(b"{}")
    message = near.advance()
    assert message is not None
    assert message.body == {"last": "words"}
    with pytest.raises(ConnectionLost):
        near.advance()
    near.close()
