"""How ranks of several nodes keep in step, without what a call moves: two ranks as threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_news import tcp_address

from gpuallreduce.across.in_step import GRACE_S, InStep
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.bootstrap.environment import identify
from gpuallreduce.bootstrap.nodes import meet
from gpuallreduce.errors import Aborted, Error, Timeout
from gpuallreduce.placement import local_ranks
from gpuallreduce.plan import Request
from gpuallreduce.types import DTYPES, OPS

REQUEST = Request("allreduce", DTYPES["uint8"], OPS["max"], count=1, nranks=2)


@contextlib.contextmanager
def two_nodes() -> Iterator[list[InStep]]:
    """One rank on each of two nodes."""
    address = tcp_address()

    def come(rank: int) -> tuple[contextlib.ExitStack, InStep]:
        environ = {"GPUALLREDUCE_NODE": "ab"[rank]}
        who = identify(environ, rank=rank, nranks=2, address=address, secret="x", across=True)
        with contextlib.ExitStack() as stack:
            nodes = stack.enter_context(meet(who, timeout=20))
            placement = local_ranks(["host"])
            stack.callback(placement.transport.close)
            assert nodes.news is not None
            in_step = InStep(nodes, NodeShards(placement, timeout=20), nodes.news)
            return stack.pop_all(), in_step

    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        ranks = []
        for held, in_step in pool.map(come, range(2)):
            stack.enter_context(held)
            ranks.append(in_step)
        yield ranks


def call(*ranks: InStep) -> None:
    for rank in ranks:
        rank.meet(REQUEST, 0, 20)
        rank.starts_to_wait()


def seconds_until_it_raises(rank: InStep) -> tuple[float, Error]:
    start = time.monotonic()
    while time.monotonic() < start + 20:
        try:
            rank.listen()
            rank.look()
        except Error as error:
            return time.monotonic() - start, error
        time.sleep(0.001)
    raise AssertionError("nothing was raised")


def test_a_reason_ends_the_call_that_it_is_of_at_once() -> None:
    with two_nodes() as (one, other):
        call(one, other)
        other.give_up(Timeout("it took too long"))
        took_s, error = seconds_until_it_raises(one)
        assert took_s < GRACE_S
        assert type(error) is Timeout
        assert str(error) == "rank 1 (node b) reports: it took too long"


@pytest.mark.parametrize("aborts", [False, True])
def test_a_reason_of_the_next_call_lets_this_one_go_on(aborts: bool) -> None:
    with two_nodes() as (one, other):
        call(one, other)
        other.ended()
        if not aborts:
            call(other)
        other.give_up(Aborted("so it was"))
        took_s, error = seconds_until_it_raises(one)
        assert took_s >= GRACE_S
        assert "rank 1 (node b) reports: so it was" in str(error)


def test_a_reason_of_the_next_call_ends_that_one_at_once() -> None:
    with two_nodes() as (one, other):
        call(one, other)
        other.ended()
        call(other)
        other.give_up(Timeout("it took too long"))
        one.ended()
        call(one)
        took_s, error = seconds_until_it_raises(one)
        assert took_s < GRACE_S
        assert "rank 1 (node b) reports: it took too long" in str(error)


def test_who_closes_after_its_part_is_missed_in_the_next_call_only() -> None:
    with two_nodes() as (one, other):
        call(one, other)
        other.leave()
        end = time.monotonic() + 1.5 * GRACE_S
        while time.monotonic() < end:
            one.listen()
            one.look()
            time.sleep(0.01)
        call(one)
        took_s, error = seconds_until_it_raises(one)
        assert took_s >= GRACE_S
        assert type(error) is Aborted
        assert "rank 1 (node b) has closed its communicator while rank 0 (node a)" in str(error)
