"""All-reduce of host ranks on several nodes, under a real mpirun: bits, and what cannot succeed.

Nodes are told apart by GPUALLREDUCE_NODE, or by network namespaces with a cable between them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuallreduce import jit, reference
from gpuallreduce.across.chunks import chunk_count, chunks_of, lag_of
from gpuallreduce.algorithms import ALGORITHMS
from gpuallreduce.inputs import random_inputs
from gpuallreduce.plan import Request, Shards
from gpuallreduce.types import DTYPES, OPS

HERE = Path(__file__).parent
RANKS = HERE / "across_ranks.py"
LAYOUTS = ((4, 4), (2, 2, 2, 2), (3, 5), (1,) * 8, (2, 2))  # ranks of each node
PAIRS = [(d, op) for d, row in DTYPES.items() for op in OPS if row.kind in OPS[op].kinds]
FEW = (("float32", "sum"), ("bfloat16", "avg"), ("int8", "prod"), ("complex64", "sum"))
LONG = ("float32", "sum", 80_001)
BITS = (
    "every_count_has_the_bits_of_the_reference",
    "long_arrays_in_chunks_of_their_real_size_have_the_bits_of_the_reference",
    "any_order_is_close_and_has_the_same_bits_on_all_ranks",
    "arrays_of_every_layout_and_shape_are_reduced",
    "many_arrays_have_the_bits_of_separate_calls",
    "many_calls_in_a_row_see_their_own_inputs",
    "nobody_leaves_a_barrier_before_all_have_come",
    "plans_say_what_runs",
)
Found = dict[int, dict[str, Any]]


def mpirun(
    layout: tuple[int, ...],
    folder: Path,
    names: tuple[str, ...],
    *more: str,
    ranks: Path = RANKS,
) -> list[str]:
    """The command of a job."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun (Debian and Ubuntu: apt install openmpi-bin)")
    command = ["mpirun", "-n", str(sum(layout)), "--oversubscribe", *more]
    command += ["--mca", "btl_vader_backing_directory", str(folder)]
    command += [sys.executable, str(ranks), ",".join(map(str, layout)), str(folder), *names]
    return command


ENVIRON = {
    **{name: text for name, text in os.environ.items() if not name.startswith("GPUALLREDUCE_NODE")},
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end; one that does not end is killed with all its processes."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=ENVIRON, stdout=pipe, stderr=pipe, text=True, cwd="/", start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=110)
    finally:
        if process.poll() is None:
            process.terminate()  # mpirun ends its ranks, which are in groups of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def found_in(folder: Path) -> Found:
    """What each rank found, by name; fails on what it did not expect."""
    found: Found = {}
    for path in folder.glob("rank*"):
        rank = int(path.name.removeprefix("rank"))
        found[rank] = {}
        for line in path.read_text().splitlines():
            name, value, error = json.loads(line)
            assert error is None, f"rank {rank}, {name}: {error}"
            found[rank][name] = value
    return found


# ---- bits ----------------------------------------------------------------------------------------


def kernels_of(name: str, op: str) -> list[jit.Kernel]:
    """What the nodes of all layouts run for a pair."""
    found = set()
    for layout in LAYOUTS:
        for number, size in enumerate(layout):
            shards = Shards(1, number > 0, number + 1 == len(layout))
            for each in (shards, Shards(1)):
                asked = Request("shard_reduce", DTYPES[name], OPS[op], 1, size, shards=each)
                found.add(ALGORITHMS["one_shot"].kernel(asked, "staged"))
    return sorted(found, key=lambda kernel: kernel.symbol)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs leave what they found, each in a folder of its own."""
    return tmp_path_factory.mktemp("across")


def expect(folder: Path, name: str, op: str, count: int) -> None:
    """Computes the contract's bits; the layouts of as many ranks share them."""
    for nranks in {sum(layout) for layout in LAYOUTS}:
        arrays = random_inputs(DTYPES[name], OPS[op], count, nranks, 7, special=True)
        result = reference.allreduce(arrays, op)
        (folder / f"{nranks}-{name}-{op}-{count}-7").write_bytes(result.tobytes())


@pytest.fixture(scope="module")
def few(folder: Path) -> Path:
    for name, op in FEW:
        jit.compile_host_together(kernels_of(name, op))
        for count in (0, 1, 7, 1100):
            expect(folder, name, op, count)
    expect(folder, *LONG)
    return folder


def check(
    layout: tuple[int, ...], folder: Path, names: tuple[str, ...], ranks: Path = RANKS
) -> Found:
    mine = folder / secrets.token_hex(4)
    mine.mkdir()
    done = run(mpirun(layout, mine, names, ranks=ranks))
    found = found_in(mine)
    assert done.returncode == 0, done.stderr
    assert not list(mine.glob("vader*"))  # MPI's shared memory; ours has no name
    assert sorted(found) == list(range(sum(layout))), done.stderr
    for of_rank in found.values():
        assert set(of_rank) == set(names)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(map(str, layout)))
def test_nodes_together_give_the_bits_of_the_reference(layout: tuple[int, ...], few: Path) -> None:
    found = check(layout, few, BITS)
    digests = {
        of_rank["any_order_is_close_and_has_the_same_bits_on_all_ranks"]
        for of_rank in found.values()
    }
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(map(str, layout)))
def test_every_pair_has_the_bits_of_the_reference(layout: tuple[int, ...], folder: Path) -> None:
    if not (folder / f"8-{PAIRS[-1][0]}-{PAIRS[-1][1]}-1100-7").exists():
        families = defaultdict(dict)
        for pair in PAIRS:
            for kernel in kernels_of(*pair):
                families[kernel.family][kernel] = None
        for kernels in families.values():
            jit.compile_host_together(list(kernels))
        for name, op in PAIRS:
            expect(folder, name, op, 1100)
    check(layout, folder, ("every_pair_has_the_bits_of_the_reference",))


@pytest.mark.parametrize("nshards", [1, 2, 3, 8])
def test_chunks_cover_an_array_and_their_shards_cover_them(nshards: int) -> None:
    for itemsize, count in itertools.product((1, 2, 8, 16), (0, 1, 31, 32, 33, 1000, 4096)):
        step = chunk_count(256, itemsize, nshards)
        owners = range(nshards + 1)
        by_owner = [chunks_of(count, itemsize, nshards, owner, step) for owner in owners]
        for turn, parts in enumerate(zip(*by_owner, strict=True)):
            assert len({(part.first, part.count) for part in parts}) == 1
            assert sum(part.owned for part in parts) == parts[0].count
            assert parts[-1].owned == 0  # that rank has no shard
            assert all(chunk.owned * itemsize <= 256 + 128 for chunk in parts)
            before = by_owner[0][turn - 1]
            assert parts[0].first == (before.first + before.count if turn else 0)
        assert sum(chunk.count for chunk in by_owner[0]) == count
        assert len(by_owner[0]) >= 1


def test_a_result_is_awaited_when_it_can_have_come_back() -> None:
    for nnodes in range(2, 9):
        lags = [lag_of(node, nnodes) for node in range(nnodes)]
        # One turn for each hop to the last node and back, and one more there.
        assert lags == [2 * (nnodes - 1 - node) + 1 for node in range(nnodes)]
        assert all(a - b == 2 for a, b in itertools.pairwise(lags))


# ---- what cannot succeed -------------------------------------------------------------------------

LAST = "rank 3 (node node1)"
# What every rank must raise, but the one that caused it: the kind and the texts of the message.
FAILURES: dict[str, tuple[str, list[str]]] = {
    "counts_that_differ_between_nodes": (
        "MismatchError",
        ["(node node0): call 2: allreduce(count=4,", "(node node1): call 2: allreduce(count=5,"],
    ),
    "dtypes_that_differ_between_nodes": (
        "MismatchError",
        ["(node node0)", "dtype=int32", "(node node1)", "dtype=float32"],
    ),
    "operators_that_differ_between_nodes": (
        "MismatchError",
        ["(node node0)", "op=sum", "(node node1)", "op=max"],
    ),
    "a_count_that_one_rank_has_otherwise": (
        "MismatchError",
        ["differ in count", "rank 2 (node node1): call", f"{LAST}: call", "=5"],
    ),
    "a_layout_that_one_rank_has_otherwise": (
        "MismatchError",
        ["differ in arrangement", "rank 2 (node node1): call", f"{LAST}: call"],
    ),
    "a_rank_that_does_not_come": ("Timeout", [f"{LAST} did not make this call"]),
    "a_node_that_does_not_come": ("Timeout", ["(node node0) to make the same call"]),
    "a_rank_that_aborts": ("Aborted", [LAST, "aborted the communicator"]),
    "a_rank_that_closes": ("Aborted", [f"{LAST} has closed its communicator"]),
    "a_rank_0_that_closes": ("Aborted", ["rank 0 (node node0) has closed its communicator"]),
    "a_rank_that_aborts_from_another_thread": ("Aborted", ["rank 0 (node node0)", "aborted"]),
    "a_rank_that_is_interrupted": ("Aborted", [LAST, "interrupted by KeyboardInterrupt"]),
}
CAUSES = {
    ("a_rank_that_aborts", 3): "ended",
    ("a_rank_that_closes", 3): "ended",
    ("a_rank_0_that_closes", 0): "ended",
    ("a_rank_that_is_interrupted", 3): "KeyboardInterrupt",
    ("a_rank_that_aborts_from_another_thread", 0): "Aborted",
}


@pytest.fixture(scope="module")
def failures(folder: Path) -> Found:
    """What each rank raised: one job of two nodes with two ranks, a communicator for each."""
    return check((2, 2), folder, tuple(FAILURES))


@pytest.mark.parametrize("name", FAILURES)
def test_every_rank_raises_in_time_and_says_who_and_where(name: str, failures: Found) -> None:
    kind, texts = FAILURES[name]
    for rank in range(4):
        raised, message = failures[rank][name]
        assert raised == CAUSES.get((name, rank), kind), message
        for text in () if (name, rank) in CAUSES else texts:
            assert text in message, f"rank {rank}"


@pytest.mark.parametrize(
    ("layout", "victim"),
    [((2, 2), 3), ((2, 1), 2), ((2, 1), 0), ((1, 1, 1), 0), ((1, 1, 1), 1)],
    ids=str,
)
def test_a_rank_that_is_killed_is_soon_named_by_every_other_one(
    layout: tuple[int, ...], victim: int, folder: Path
) -> None:
    mine = folder / secrets.token_hex(4)
    mine.mkdir()
    # Open MPI 4 ends the whole job when a process is killed, unless mpirun is told to go on.
    run(mpirun(layout, mine, (f"rank_{victim}_is_killed",), "--enable-recovery"))
    found = found_in(mine)
    assert sorted(found) == [rank for rank in range(sum(layout)) if rank != victim]
    node = next(node for node in range(len(layout)) if victim < sum(layout[: node + 1]))
    for of_rank in found.values():
        kind, message = of_rank[f"rank_{victim}_is_killed"]
        assert kind == "Aborted"
        assert f"rank {victim} (node node{node}) is gone" in message


# ---- real networks -------------------------------------------------------------------------------

AGENT = """#!/bin/sh
# Stands in for ssh: runs mpirun's daemon in the namespace that has the address.
while [ "${{1#-}}" != "$1" ]; do shift; done
shift
# Open MPI names its shared memory after the host.
exec ip netns exec {name} unshare --uts /bin/sh -c "hostname {name} && $*"
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20, capture_output=True, text=True)


def remove(namespace: str) -> None:
    """Deletes it, and ends what still runs there."""
    pids = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=20, check=True
    )
    for pid in pids.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    ip("netns", "delete", namespace)


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[tuple[list[str], Callable[[], None]]]:
    """How mpirun starts four ranks in two namespaces that a cable joins, and what cuts it."""
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    for tool in ("ip", "unshare", "mpirun"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    names = [f"gar-{os.getpid()}-{secrets.token_hex(3)}-{end}" for end in "ab"]
    first, second = names
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(remove, name)
        # Two cables: the ranks' one is cut, and mpirun goes on to hear of its processes.
        for cable, network in (("data", "10.97.0"), ("launch", "10.96.0")):
            ends = [f"{cable}0", f"{cable}1"]
            ip(
                "-n",
                first,
                "link",
                "add",
                ends[0],
                "type",
                "veth",
                "peer",
                ends[1],
                "netns",
                second,
            )
            for number, name in enumerate(names):
                ip("-n", name, "address", "add", f"{network}.{number + 1}/24", "dev", ends[number])
                ip("-n", name, "link", "set", ends[number], "up")
        for name in names:
            ip("-n", name, "link", "set", "lo", "up")
        agent = tmp_path / "agent"
        agent.write_text(AGENT.format(name=second))
        agent.chmod(0o755)
        settings = {
            "plm_rsh_agent": str(agent),
            "btl": "vader,tcp,self",
            "btl_tcp_if_include": "10.97.0.0/24",
            "oob_tcp_if_include": "10.96.0.0/24",
        }
        options = ["--host", "10.96.0.1:2,10.96.0.2:2", "--map-by", "slot", "--enable-recovery"]
        for name, value in settings.items():
            options += ["--mca", name, value]
        address, secret = "GPUALLREDUCE_ADDRESS=10.97.0.1:29411", "GPUALLREDUCE_SECRET=test"
        for variable in (address, secret, "REAL_NODES=1"):
            options += ["-x", variable]
        prefix = ["ip", "netns", "exec", first]
        yield [*prefix, *options], lambda: ip("-n", first, "link", "set", "data0", "down")


def test_a_cable_that_is_cut_in_a_call_is_told_by_every_rank(
    cable: tuple[list[str], Callable[[], None]], tmp_path: Path
) -> None:
    options, cut = cable
    prefix, more = options[:4], options[4:]
    command = [*prefix, *mpirun((2, 2), tmp_path, ("a_cable_that_is_cut",), *more)]
    output = tmp_path / "output"
    with open(output, "w") as file:
        process = subprocess.Popen(command, env=ENVIRON, stdout=file, stderr=file, cwd="/")
    try:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 4, process, output)
        cut()
        until(lambda: len(list(tmp_path.glob("rank*"))) == 4, process, output)
    finally:
        # Told to go on without ranks, it does so when the last one has ended.
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    found = found_in(tmp_path)
    for rank in range(4):
        kind, message = found[rank]["a_cable_that_is_cut"]
        far = (rank + 2) % 4
        assert kind == "Timeout", message
        assert f"rank {far} (node " in message or f"rank {rank ^ 1} (node " in message
        # Between two calls it is missed by those who wait for the next one: GRACE_S later.
        between = "waited 3 s for" in message and "to make the same call" in message
        assert "waited 2 s for" in message or between
        first = f"(node {socket.gethostname()})"
        assert (first in message) or "-b)" in message


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    """Waits for what ranks do."""
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.02)
