"""How ranks on several nodes meet: real processes, nodes by name and by network namespace."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence

import pytest
from jobs import PROLOGUE, Rank, finish_job

from gpuallreduce.bootstrap.census import Census, Home, known_nodes
from gpuallreduce.bootstrap.environment import identify
from gpuallreduce.bootstrap.interfaces import Interface, chosen, interfaces
from gpuallreduce.bootstrap.peers import Labels
from gpuallreduce.errors import InvalidArgument, NotSupported

MEET = """
import signal
from gpuallreduce.bootstrap.environment import identify
from gpuallreduce.bootstrap.nodes import meet
from gpuallreduce.bootstrap.rendezvous import Rendezvous
def come(timeout=20):
    return meet(identify(os.environ, across=True), timeout=timeout)
def come_together(timeout):
    # The time runs once all processes of the test are there, however slowly they start.
    number, count, address = os.environ["TEST_LINE"].split()
    line = identify({}, rank=int(number), nranks=int(count), address=address)
    Rendezvous.join(line, timeout=20).close()
    return come(timeout)
def memfd(text):
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd
def contents(parts):
    texts = []
    for part in parts:
        for fd in part.fds:
            texts.append(os.pread(fd, 100, 0).decode())
            os.close(fd)
    return texts
"""
TELL = """
with come() as nodes:
    everyone, node = nodes.everyone, nodes.node
    rank = everyone.rank
    met = [part.payload["rank"] for part in everyone.exchange("all", {"rank": rank})]
    mates = node.exchange("node", {"rank": rank}, fds=[memfd(f"of {rank}")])
    report({
        "names": nodes.names, "node_of": nodes.node_of, "this": nodes.this,
        "local_rank": nodes.local_rank, "sizes": nodes.sizes,
        "ranks_of": [list(nodes.ranks_of(i)) for i in range(len(nodes.names))],
        "met": met, "mates": [part.payload["rank"] for part in mates], "fds": contents(mates),
        "node": [node.rank, node.nranks], "same": everyone is node,
    })
"""


def tcp_address(host: str = "127.0.0.1") -> str:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        return f"{host}:{sock.getsockname()[1]}"


def start(
    environs: Sequence[dict[str, str]], body: str, *, prefixes: Sequence[Sequence[str]] = ()
) -> list[subprocess.Popen[str]]:
    """A process for each set of variables, started by what stands in its prefix."""
    code = PROLOGUE + MEET + textwrap.dedent(body)
    line = f"unix:test-line-{secrets.token_hex(8)}"
    processes = []
    both = itertools.zip_longest(environs, prefixes, fillvalue=())
    for number, (environ, prefix) in enumerate(both):
        command = [*prefix, sys.executable, "-c", code]
        pipe = subprocess.PIPE
        variables = {**os.environ, **dict(environ)}
        variables["TEST_LINE"] = f"{number} {len(environs)} {line}"
        processes.append(
            subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True, cwd="/")
        )
    return processes


def members(
    nodes: str, address: str | None = None, *, start_only: Sequence[int] | None = None
) -> list[dict[str, str]]:
    """Variables of each rank of a job; ``nodes`` has a letter for each, the name of its node."""
    address = address or tcp_address()
    return [
        {
            "GPUALLREDUCE_RANK": str(rank),
            "GPUALLREDUCE_NRANKS": str(len(nodes)),
            "GPUALLREDUCE_ADDRESS": address,
            "GPUALLREDUCE_SECRET": "test",
            "GPUALLREDUCE_NODE": node,
        }
        for rank, node in enumerate(nodes)
        if start_only is None or rank in start_only
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[Rank]:
    ranks = finish_job(processes)
    for number, rank in enumerate(ranks):
        assert rank.status == 0, f"process {number} ended with {rank.status}:\n{rank.stderr}"
    return ranks


def run(environs: Sequence[dict[str, str]], body: str) -> list[Rank]:
    return finish(start(environs, body))


def all_report(ranks: list[Rank], kind: str, *texts: str) -> None:
    for rank in ranks:
        ((found, message),) = rank.reports
        assert found == kind, message
        for text in texts:
            assert text in message


# ---------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("nodes", ["aabb", "aaab", "abcc", "aaaa"])
def test_ranks_find_out_which_node_each_is_on_and_meet_on_it(nodes: str) -> None:
    check_meeting(nodes, run(members(nodes), TELL))


def test_several_nodes_can_be_tried_over_a_unix_socket_too() -> None:
    address = f"unix:test-{secrets.token_hex(8)}"
    check_meeting("abb", run(members("abb", address), TELL))


def check_meeting(nodes: str, ranks: list[Rank]) -> None:
    names = sorted(set(nodes))
    of = [[rank for rank, each in enumerate(nodes) if each == name] for name in names]
    for rank, found in enumerate(ranks):
        (told,) = found.reports
        this = names.index(nodes[rank])
        local_rank = of[this].index(rank)
        assert told == {
            "names": names,
            "node_of": [names.index(name) for name in nodes],
            "this": this,
            "local_rank": local_rank,
            "sizes": [len(ranks_of) for ranks_of in of],
            "ranks_of": of,
            "met": list(range(len(nodes))),
            "mates": of[this],
            "fds": [f"of {mate}" for mate in of[this]],
            "node": [local_rank, len(of[this])],
            "same": len(names) == 1,
        }


def test_ranks_that_can_share_memory_are_on_one_node_without_being_told() -> None:
    environs = members("aaa")
    for environ in environs:
        del environ["GPUALLREDUCE_NODE"]
    for rank in run(environs, TELL):
        assert rank.reports[0]["names"] == [socket.gethostname()]
        assert rank.reports[0]["same"]
        assert rank.reports[0]["fds"] == ["of 0", "of 1", "of 2"]


def test_one_rank_is_one_node() -> None:
    environ = members("a", f"unix:test-{secrets.token_hex(8)}")
    check_meeting("a", run(environ, TELL))


def test_ranks_that_alternate_between_nodes_are_refused_on_every_rank() -> None:
    all_report(
        run(members("abab"), "report(error_of(come))"),
        "InvalidArgument",
        "a has ranks 0, 2; b has ranks 1, 3",
        "--map-by slot",
        "--rank-by slot",
        "--distribution=block",
        "torchrun",
    )


def test_disorder_is_found_exactly_where_ranks_of_a_node_are_apart() -> None:
    for nodes in itertools.product("abc", repeat=5):
        homes = {rank: Home(node, node, "") for rank, node in enumerate(nodes)}
        census = Census.taken(homes, "")
        runs = [name for name, _ in itertools.groupby(nodes)]
        assert (census.disorder() is None) == (len(runs) == len(set(runs)))
        assert [census.names[number] for number in census.node_of] == list(nodes)
        assert Census.found_in(census.message()) == census


def test_nodes_of_one_name_are_told_apart() -> None:
    homes = {0: Home("boot 1", "n", ""), 1: Home("boot 2", "n", ""), 2: Home("boot 3", "m", "")}
    assert Census.taken(homes, "").names == ("n#0", "n#1", "m")


# ---------------------------------------------------------------------------- what fails


def test_descriptors_do_not_leave_a_node_and_say_so_on_every_rank() -> None:
    body = """
        with come() as nodes:
            rank = nodes.everyone.rank
            fds = [memfd("x")] if rank == 1 else []
            report(error_of(nodes.everyone.exchange, "map", fds=fds))
            nodes.everyone.exchange("the next stage")
    """
    text = "rank 1 (node a) failed in stage 'map': NotSupported: 1 descriptors cannot be passed to"
    all_report(run(members("aab"), body), "DeviceError", text, "Nodes.node")


def test_a_node_that_does_not_come_is_missed_by_all_that_came() -> None:
    came = members("aabb", start_only=[0, 1])
    ranks = run(came, "report(error_of(come_together, timeout=0.5))")
    all_report(ranks, "Timeout", "for ranks 2, 3 of 4, while ranks 0, 1 (node a) came", "127.0.0.1")


def test_the_node_of_a_missing_rank_is_named_where_its_neighbours_tell() -> None:
    came = members("aaab", start_only=[0, 2, 3])
    ranks = run(came, "report(error_of(come_together, timeout=0.5))")
    all_report(ranks, "Timeout", "for rank 1 (node a) of 4, while ranks 0, 2 (node a), 3 (node b)")


def test_what_is_known_of_nodes_grows_with_the_ranks_that_came() -> None:
    homes = {rank: Home(node, node, "") for rank, node in enumerate("aaabb")}
    for size in range(6):
        for came in itertools.combinations(range(5), size):
            known = known_nodes({rank: homes[rank] for rank in came})
            assert all(homes[rank].name == name for rank, name in known.items())
            assert set(came) <= set(known)


def test_a_node_with_another_secret_is_not_let_in() -> None:
    environs = members("ab")
    environs[1]["GPUALLREDUCE_SECRET"] = "another"
    first, second = run(environs, "report(error_of(come_together, timeout=1.5))")
    all_report([first], "Timeout", "for rank 1 of 2, while rank 0 (node a) came")
    all_report([second], "MismatchError", "different secrets")


def test_a_rank_that_is_killed_is_named_with_its_node_on_both_ways() -> None:
    body = """
        nodes = come()
        rank = nodes.everyone.rank
        nodes.everyone.exchange("first")
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        errors = [error_of(nodes.everyone.exchange, "second")]
        if nodes.this == 1:
            errors.append(error_of(nodes.node.exchange, "on the node"))
        report(errors)
    """
    *ranks, killed = finish_job(start(members("aabb"), body))
    assert killed.status == -signal.SIGKILL
    for rank in ranks:
        assert rank.status == 0, rank.stderr
        everyone, *node = rank.reports[0]
        assert everyone[0] == "DeviceError"
        assert "rank 3 (node b) failed in stage 'second'" in everyone[1]
        for kind, text in node:
            assert kind == "DeviceError"
            assert "rank 3 failed in stage 'on the node'" in text


def test_labels_name_ranks_of_the_job_and_nodes() -> None:
    labels = Labels(nodes=dict(enumerate("aabb")))
    assert labels.names([1, 0, 2]) == "ranks 0, 1 (node a), 2 (node b)"
    assert labels.rank(3) == "rank 3 (node b)"
    assert labels.rank(4) == "rank 4"
    assert Labels(first=4).names([0, 1]) == "ranks 4, 5"


# ---------------------------------------------------------------------------- who and where

TORCH = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_the_launcher_s_master_address_is_where_nodes_meet() -> None:
    environ = {**TORCH, "GPUALLREDUCE_SECRET": "s"}
    assert identify(environ, across=True).address == "host:29501"
    assert identify({**environ, "MASTER_ADDR": "fd00::1"}, across=True).address == "[fd00::1]:29501"
    assert identify({**environ, "GPUALLREDUCE_ADDRESS": "a:1"}, across=True).address == "a:1"
    assert identify(environ, across=True, address="b:1").address == "b:1"
    one_node = {**environ, "LOCAL_WORLD_SIZE": "4"}
    assert identify(one_node, across=True).address == identify(one_node).address


def test_without_the_word_several_machines_are_still_refused() -> None:
    with pytest.raises(NotSupported, match="HOST:PORT"):
        identify({**TORCH, "GPUALLREDUCE_SECRET": "s"})


def test_nodes_that_meet_over_tcp_need_a_secret() -> None:
    with pytest.raises(InvalidArgument, match="GPUALLREDUCE_SECRET"):
        identify(TORCH, across=True)


def test_a_master_port_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="MASTER_PORT"):
        identify({**TORCH, "MASTER_PORT": "x"}, across=True)


@pytest.mark.parametrize("name", ["x" * 65, "a\nb"])
def test_names_of_nodes_that_messages_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="GPUALLREDUCE_NODE"):
        identify({"GPUALLREDUCE_NODE": name})


THERE = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "fd00::2"),
    Interface("eth0", "192.168.1.2"),
    Interface("eth1", "10.1.2.3"),
    Interface("ib0", "fd01::3"),
]


@pytest.mark.parametrize(
    ("wanted", "address"),
    [
        ("eth", "192.168.1.2"),
        ("=eth1", "10.1.2.3"),
        ("ib0,eth0", "fd01::3"),
        ("none,eth1", "10.1.2.3"),
        ("10.0.0.0/8", "10.1.2.3"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.2.200/24", "10.1.2.3"),
        ("fd00::/16", "fd00::2"),
        ("^lo,eth0", "10.1.2.3"),
    ],
)
def test_an_interface_is_chosen_by_name_or_network(wanted: str, address: str) -> None:
    assert chosen(wanted, THERE) == address


@pytest.mark.parametrize("wanted", ["wlan0", "=eth", "172.16.0.0/12", "^lo,eth,ib", "1.2.3.4/99"])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(wanted: str) -> None:
    with pytest.raises(InvalidArgument, match=r"lo 127\.0\.0\.1, eth0 fd00::2, eth0 192"):
        chosen(wanted, THERE)


def test_this_machine_s_interfaces_are_found() -> None:
    found = interfaces()
    assert Interface("lo", "127.0.0.1") in found
    assert {one.name for one in found} <= {name for _, name in socket.if_nameindex()}


# ---------------------------------------------------------------------------- real networks


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[list[list[str]]]:
    """Two network namespaces joined by a cable, as prefixes of commands that run in them."""
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    if shutil.which("ip") is None:
        pytest.skip("there is no ip (Debian and Ubuntu: apt install iproute2)")
    names = [f"gar-{os.getpid()}-{secrets.token_hex(3)}-{end}" for end in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        first, second = names
        # Made inside, so that a name is free and nothing is left outside, whatever happens.
        ip("-n", first, "link", "add", "cable0", "type", "veth", "peer", "cable1", "netns", second)
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.99.0.{number + 1}/24", "dev", f"cable{number}")
            ip("-n", name, "link", "set", f"cable{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]


def test_namespaces_are_nodes_that_meet_over_their_network(namespaces: list[list[str]]) -> None:
    first, second = namespaces
    environs = [
        {
            **TORCH,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "MASTER_ADDR": "10.99.0.1",
            "GPUALLREDUCE_SECRET": "test",
        }
        for rank in range(4)
    ]
    # The name of the host stands for no address here: the interface says where to listen.
    environs[0] |= {"GPUALLREDUCE_INTERFACE": "10.99.0.0/16", "MASTER_ADDR": "no.such.host.invalid"}
    ranks = finish(start(environs, TELL, prefixes=[first, first, second, second]))
    host = socket.gethostname()
    for rank, found in enumerate(ranks):
        (told,) = found.reports
        assert told["names"] == [f"{host}#0", f"{host}#1"]
        assert told["node_of"] == [0, 0, 1, 1]
        assert told["met"] == [0, 1, 2, 3]
        assert told["mates"] == told["ranks_of"][rank // 2]
        assert told["fds"] == [f"of {mate}" for mate in told["mates"]]


def test_machines_that_claim_one_node_are_refused_on_every_rank(
    namespaces: list[list[str]],
) -> None:
    environs = members("aaa", "10.99.0.1:29400")
    first, second = namespaces
    processes = start(environs, "report(error_of(come))", prefixes=[first, first, second])
    both = "both say that they are on node a, and are on different machines"
    all_report(finish(processes), "InvalidArgument", both, "GPUALLREDUCE_NODE")
