"""The pace of calls between nodes: near the best of the simulation, cheap, alike on all ranks."""

from __future__ import annotations

import itertools
import timeit
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gpuallreduce.across import rates
from gpuallreduce.across.chunks import chunks_of, depth_of, lag_of, turns_of
from gpuallreduce.across.pace import SHARD_CHUNK_BYTES, Ways, pace
from gpuallreduce.across.rates import NET_GBPS, Network, network, slowest, ways_of
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.simulation import PRESETS, Machine, estimate, playing
from gpuallreduce.simulation import model as models
from gpuallreduce.simulation.geometry import Geometry
from gpuallreduce.topology import cuda_topology, host_topology
from gpuallreduce.types import DTYPES

KIB, MIB = 1 << 10, 1 << 20
H100, A100 = PRESETS["dgx-h100"], PRESETS["dgx-a100"]
PCIE = PRESETS["pcie-one-switch"]
# Two host ranks a node, as rates.ways_of has them where each has a core, and a link of 1 Gbit/s.
HOSTS = Machine(
    "hosts",
    nodes=2,
    gpus=2,
    nics=1,
    link_gbps=12.0,
    memory_gbps=12.0,
    hop_us=2.3,
    launch_us=100.0,
    net_gbps=0.12,
    net_us=150.0,
    engine_us=50.0,
    messages=True,
    least_turns=1,
)
MACHINES = [
    replace(H100, nodes=2),
    replace(H100, nodes=4),
    replace(H100, nodes=3, nics=1),
    replace(A100, nodes=3, gpus=1, nics=1),
    replace(PCIE, nodes=2),
    HOSTS,
    replace(HOSTS, net_gbps=1.2),
    replace(HOSTS, nodes=4, gpus=4, net_gbps=12.0),
]
ORDERS = ("any", "rank")


def ways_on(machine: Machine) -> Ways:
    ways = models.ways_of(machine)
    return replace(ways, buffer_bytes=16 << 20) if machine.messages else ways


def played_us(machine: Machine, order: str, nbytes: int, chunk_bytes: int, depth: int) -> float:
    cut = Geometry(float(nbytes), float(min(nbytes, chunk_bytes)), depth=depth)
    return playing.play_hierarchical(machine, order, cut, False)[0]["time"]


def best_us(machine: Machine, order: str, nbytes: int) -> float:
    """Of chunks that are powers of two, each as deep as the product would have it."""
    ways = ways_on(machine)
    found = []
    for shift in range(16, 24):
        chunk_bytes = min(nbytes, (1 << shift) * machine.gpus)
        try:
            chosen = pace(order, nbytes, 4, 4, ways, chunk_bytes=chunk_bytes)
        except InvalidArgument:  # no room
            break
        found.append(played_us(machine, order, nbytes, chunk_bytes, chosen.depth))
        if chunk_bytes == nbytes:
            break
    return min(found)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("machine", MACHINES, ids=Machine.describe)
def test_the_chosen_chunk_is_nearly_as_good_as_the_best(machine: Machine, order: str) -> None:
    for nbytes in (16 * KIB, 256 * KIB, MIB, 4 * MIB, 12_345_676, 32 * MIB):
        chosen = pace(order, nbytes, 4, 4, ways_on(machine))
        time_us = played_us(machine, order, nbytes, chosen.chunk_count * 4, chosen.depth)
        assert time_us <= 1.1 * best_us(machine, order, nbytes), nbytes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("machine", MACHINES, ids=Machine.describe)
def test_the_plans_estimate_is_what_is_simulated(machine: Machine, order: str) -> None:
    for nbytes, name in itertools.product((MIB, 8 * MIB, 64 * MIB), ("float32", "bfloat16")):
        dtype = DTYPES[name]
        chosen = models.pace_of(machine, order, nbytes, dtype)
        found = estimate(machine, "hierarchical", order, nbytes, dtype=dtype)
        assert found.chunk_bytes == min(nbytes, chosen.chunk_count * dtype.itemsize)
        assert 0.8 < chosen.cost_us / found.time_us < 1.3, (nbytes, name)


@pytest.mark.parametrize("order", ORDERS)
def test_chunks_grow_with_the_array_and_with_the_rate(order: str) -> None:
    def chunk(nbytes: int, net_gbps: float) -> int:
        machine = replace(HOSTS, net_gbps=net_gbps)
        return pace(order, nbytes, 4, 4, ways_on(machine)).chunk_count

    sizes = [1 << shift for shift in range(10, 28)]
    for net_gbps in (0.12, 1.2, 12.0):
        found = [chunk(nbytes, net_gbps) for nbytes in sizes]
        assert found[-1] >= 4 * found[4]
        assert all(b > 0.5 * a for a, b in itertools.pairwise(found))  # they are evened out
    assert chunk(32 * MIB, 12.0) > chunk(32 * MIB, 0.12)


def test_a_long_way_is_filled_with_chunks() -> None:
    near, far = (
        pace("rank", 64 * MIB, 4, 4, replace(ways_on(HOSTS), net_gbps=5.0, net_us=net_us))
        for net_us in (10.0, 5000.0)
    )
    assert near.depth == depth_of(2)
    assert far.depth > 2 * near.depth


@pytest.mark.parametrize("nnodes", [2, 3, 16, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_chunks_under_way_fit_the_buffers(order: str, nnodes: int) -> None:
    for name, nbytes in itertools.product(("float32", "bfloat16", "int8"), (MIB, 1 << 34)):
        dtype = DTYPES[name]
        wide = DTYPES[dtype.accumulator].itemsize
        ways = models.ways_of(replace(H100, nodes=nnodes))
        chosen = pace(order, nbytes, dtype.itemsize, wide, ways)
        (_, owned) = max((each.count, each.owned) for each in first_chunks(chosen, dtype, ways))
        held = dtype.itemsize + 2 * wide if order == "rank" else dtype.itemsize
        least = SHARD_CHUNK_BYTES[0] // dtype.itemsize
        slot = -(-owned // 128) * 128
        assert (chosen.depth + 2) * slot * held <= ways.buffer_bytes or owned <= least


def first_chunks(chosen, dtype, ways):
    return chunks_of(3 * chosen.chunk_count, dtype.itemsize, ways.nshards, 0, chosen.chunk_count)


def test_all_nodes_take_their_lag_from_the_depth() -> None:
    for nnodes, turns in itertools.product(range(2, 9), (1, 3, 16)):
        depth = depth_of(nnodes, turns)
        assert turns_of(depth, nnodes) == turns
        lags = [lag_of(node, nnodes, turns) for node in range(nnodes)]
        assert lags[0] == depth
        assert all(a - b == 2 * turns for a, b in itertools.pairwise(lags))


@pytest.mark.parametrize("nbytes", [0, 1, 2, 127, 100_001])
def test_every_array_has_a_pace(nbytes: int) -> None:
    for order, machine in itertools.product(ORDERS, MACHINES):
        chosen = pace(order, nbytes, 1, 4, ways_on(machine))
        assert chosen.chunk_count >= (1 if nbytes > KIB else max(1, nbytes))
        assert chosen.depth >= 2
        assert chosen.cost_us > 0


def test_a_chunk_that_was_asked_for_is_taken_or_refused() -> None:
    for machine in MACHINES:
        chosen = pace("rank", MIB, 4, 4, ways_on(machine), chunk_bytes=4096)
        assert chosen.chunk_count == 1024
    with pytest.raises(InvalidArgument, match="chunk_bytes=3 holds no element: give 4"):
        pace("rank", MIB, 4, 4, ways_on(HOSTS), chunk_bytes=3)
    with pytest.raises(InvalidArgument, match="no room"):
        pace("rank", 1 << 32, 4, 4, ways_on(MACHINES[0]), chunk_bytes=1 << 32)
    # Without a buffer of a fixed size more memory is taken.
    assert pace("rank", 1 << 32, 4, 4, ways_on(HOSTS), chunk_bytes=1 << 32).chunk_count == 1 << 30


def test_a_pace_costs_less_than_a_chunk() -> None:
    ways = ways_on(MACHINES[1])
    runs = 50
    took_s = min(timeit.repeat(lambda: pace("rank", 1 << 30, 4, 4, ways), number=runs, repeat=5))
    assert took_s / runs < 1e-3


# ---- rates --------------------------------------------------------------------------------------


def port(system: Path, name: str, rate: str, state: str = "4: ACTIVE") -> None:
    folder = system / "infiniband" / name / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "rate").write_text(rate + "\n")
    (folder / "state").write_text(state + "\n")


def test_the_variable_decides(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "100 Gb/sec (4X EDR)")
    assert network({NET_GBPS: "0.12"}, system=tmp_path) == Network(0.12, NET_GBPS)


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan", "inf", "12,5"])
def test_a_variable_that_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{NET_GBPS}='{text}'.*GB/s"):
        network({NET_GBPS: text})


def test_rdma_ports_that_are_up_are_summed(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "100 Gb/sec (4X EDR)")
    port(tmp_path, "mlx5_1", "400 Gb/sec (4X NDR)")
    port(tmp_path, "mlx5_2", "400 Gb/sec (4X NDR)", "1: DOWN")
    port(tmp_path, "mlx5_3", "nonsense")
    found = network({}, system=tmp_path)
    assert found == Network(pytest.approx(500 / 8 * rates.USABLE), "2 RDMA ports", 2)


def test_else_the_interface_that_leads_to_the_others_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [rates.Interface("lo", "127.0.0.1"), rates.Interface("eth7", "127.0.0.2")]
    monkeypatch.setattr(rates, "interfaces", lambda: there)
    (tmp_path / "net" / "eth7").mkdir(parents=True)
    speed = tmp_path / "net" / "eth7" / "speed"
    speed.write_text("1000\n")
    found = network({"GPUALLREDUCE_INTERFACE": "eth7"}, system=tmp_path)
    assert found == Network(pytest.approx(0.125 * rates.USABLE), "eth7's speed")
    speed.write_text("-1\n")
    found = network({"GPUALLREDUCE_INTERFACE": "eth7"}, system=tmp_path)
    assert found == Network(None, "eth7, whose speed is unknown")
    # The loopback says nothing of other nodes.
    found = network({"GPUALLREDUCE_ADDRESS": "127.0.0.1:4477"}, system=tmp_path)
    assert found.gbps is None
    assert network({}, system=tmp_path).gbps is None


def part(gbps: float | None, source: str, **changed: object) -> dict[str, object]:
    topology = host_topology(2, cores=2, one_process=False)
    ways = ways_of(topology, nnodes=2, nshards=2, nlocal=2, net=Network(gbps, source))
    return {"gbps": gbps, "source": source, "ways": {**asdict(ways), **changed}}


def test_all_ranks_count_with_the_slowest() -> None:
    ways, text = slowest([part(1.2, "eth0's speed", hop_us=9.0), part(0.12, "eth1's speed")])
    assert (ways.net_gbps, ways.card_gbps, ways.hop_us) == (0.06, 0.12, 9.0)
    assert text == "0.12 GB/s a node, from eth1's speed"
    # Who does not know its rate goes by the others, and all by a default if none does.
    ways, text = slowest([part(None, "no interface"), part(5.0, "an RDMA port")])
    assert (ways.net_gbps, text) == (2.5, "5 GB/s a node, from an RDMA port")
    ways, text = slowest([part(None, "no interface"), part(None, "no interface")])
    assert ways.card_gbps == rates.DEFAULT_GBPS
    assert f"assumed: no interface; set {NET_GBPS}" in text


def test_gpus_count_with_the_machine_that_is_simulated() -> None:
    topology = cuda_topology(8, one_process=False, path="nvlink", max_channels=32, link_gbps=370.0)
    found = ways_of(topology, nnodes=2, nshards=8, nlocal=8, net=Network(8 * 48.0, "", cards=8))
    machine = models.ways_of(replace(H100, nodes=2, memory_gbps=rates.GPU_MEMORY_GBPS))
    assert asdict(found) == pytest.approx(asdict(machine))
