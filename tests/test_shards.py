"""Tests that nodes that fold shards one after the other give the bits of one node with all ranks.

Knows nothing of how shards travel between nodes: here they are handed on by hand.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpus
import numpy as np
import pytest

import gpuallreduce as gar
from gpuallreduce import jit, reference
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.algorithms import ALGORITHMS, BY_NAME
from gpuallreduce.checks import first_difference
from gpuallreduce.inputs import random_inputs
from gpuallreduce.orchestrator import Addresses
from gpuallreduce.placement import Placement, local_ranks
from gpuallreduce.plan import Request, Shards, decode_header, shard_range
from gpuallreduce.topology import host_topology
from gpuallreduce.tuner import Forced, decide
from gpuallreduce.types import DTYPES, OPS, Dtype, Op

TIMEOUT_S = 30.0
LAYOUTS = ((8,), (4, 4), (2, 2, 2, 2), (3, 5), (1,) * 8, (3, 1))  # ranks of each node
PAIRS = [(d, op) for d, row in DTYPES.items() for op in OPS if row.kind in OPS[op].kinds]
GUARD_BYTES = 64
GUARD = 0x6B
ONE_SHOT = Forced(algorithm="one_shot")


class Held:
    """An array in a device's memory, with guards around it that must stay."""

    def __init__(self, array: np.ndarray[Any, Any], device: str, shift: int = 0) -> None:
        """Copies the array.

        Args:
            array: its content.
            device: ``host``, or a GPU.
            shift: elements from where whole packs may be touched.
        """
        self._first = GUARD_BYTES + shift * array.itemsize
        self._last = self._first + array.nbytes
        image = np.full(self._last + GUARD_BYTES, GUARD, np.uint8)
        image[self._first : self._last] = array.view(np.uint8)
        self._dtype = array.dtype
        self._memory = image if device == "host" else gpus.put(device, image)
        base = image.ctypes.data if device == "host" else self._memory.data.ptr
        self.address = base + self._first

    def get(self) -> np.ndarray[Any, Any]:
        """The content, if nothing around it was touched."""
        image = self._memory if isinstance(self._memory, np.ndarray) else self._memory.get()
        assert (image[: self._first] == GUARD).all()
        assert (image[self._last :] == GUARD).all()
        return image[self._first : self._last].copy().view(self._dtype)


def addresses(buffers: Sequence[Held | None]) -> list[int]:
    return [0 if buffer is None else buffer.address for buffer in buffers]


class Node:
    """The ranks of one node, and where they are."""

    def __init__(self, devices: list[str]) -> None:
        self.devices = devices
        self._placement = local_ranks(devices)
        self._shards = NodeShards(self._placement, timeout=TIMEOUT_S)

    def put(self, arrays: Sequence[np.ndarray[Any, Any]], shift: int) -> list[Held]:
        """One array on each of the first ranks."""
        devices = self.devices[: len(arrays)]
        return [Held(array, at, shift) for array, at in zip(arrays, devices, strict=True)]

    def padded(self, buffers: Sequence[Held]) -> list[Held | None]:
        """As many as there are ranks."""
        return [*buffers, *[None] * (len(self.devices) - len(buffers))]

    def run(self, collective: str, *args: Any, **keywords: Any) -> None:
        """``reduce`` or ``gather``, to its end."""
        device = self._placement.device
        device.begin(None)
        getattr(self._shards, collective)(*args, **keywords)
        device.end()
        device.synchronize(lambda: None)
        assert not self._shards.orchestrator.aborted

    def end(self) -> None:
        self._shards.end()


def nodes_of(layout: Sequence[int], kind: str = "host") -> list[Node]:
    total = sum(layout)
    devices = ["host"] * total if kind == "host" else gpus.devices(total)
    return [
        Node(devices[first - size : first])
        for first, size in zip(itertools.accumulate(layout), layout, strict=True)
    ]


def chained(
    nodes: Sequence[Node],
    arrays: Sequence[np.ndarray[Any, Any]],
    op: str,
    *,
    shift: int = 0,
    forced: Forced = ONE_SHOT,
    in_place: bool = True,
    seeds_stay: bool = True,
) -> list[np.ndarray[Any, Any]]:
    """An all-reduce over several nodes, step by step; the result of every rank."""
    dtype, count = gar.types.dtype_of(arrays[0].dtype), arrays[0].size
    nshards = min(len(node.devices) for node in nodes)
    ranges = [shard_range(count, owner, nshards, dtype.itemsize) for owner in range(nshards)]
    common = {"dtype": dtype, "count": count, "forced": forced}
    arriving, held, waiting = None, [], list(arrays)
    for number, node in enumerate(nodes):
        size = len(node.devices)
        mine, waiting = node.put(waiting[:size], shift), waiting[size:]
        rounded = number + 1 == len(nodes)
        shards = Shards(nshards, number > 0, rounded, len(arrays))
        of_shard = dtype.numpy if rounded else DTYPES[dtype.accumulator].numpy
        seeds = None if arriving is None else node.put(arriving, shift)
        buffers = node.put([np.full(n, 1, of_shard) for _, n in ranges], shift)
        if seeds is not None and not rounded and not seeds_stay:
            buffers = seeds
        node.run(
            "reduce",
            addresses(mine),
            addresses(node.padded(buffers)),
            op=OPS[op],
            shards=shards,
            seeds=None if seeds is None else addresses(node.padded(seeds)),
            **common,
        )
        if seeds is not None and buffers is not seeds:
            for seed, before in zip(seeds, arriving, strict=True):
                assert first_difference(seed.get(), before) is None
        arriving = [buffer.get() for buffer in buffers]
        held.append(mine)
    results = []
    for node, mine in zip(nodes, held, strict=True):
        buffers = node.put(arriving, shift)
        outputs = mine if in_place else node.put([np.ones_like(arrays[0])] * len(mine), shift)
        shards, to = Shards(nshards), addresses(outputs)
        inputs = addresses(node.padded(buffers))
        node.run("gather", inputs, to, shards=shards, in_place=in_place, **common)
        results += [output.get() for output in outputs]
    return results


def assert_chained(nodes: Sequence[Node], name: str, op: str, count: int, **how: Any) -> None:
    nranks = sum(len(node.devices) for node in nodes)
    arrays = random_inputs(DTYPES[name], OPS[op], count, nranks, 7, special=True)
    want = reference.allreduce(arrays, op)
    for rank, result in enumerate(chained(nodes, arrays, op, **how)):
        assert first_difference(result, want) is None, f"{count} x {name} {op} {how} rank {rank}"


# ---- bits ------------------------------------------------------------------------------------


def kernels_of(dtype: Dtype, op: Op) -> list[jit.Kernel]:
    found = set()
    for layout in LAYOUTS:
        for number, size in enumerate(layout):
            shards = Shards(1, number > 0, number + 1 == len(layout))
            asked = Request("shard_reduce", dtype, op, 1, size, shards=shards)
            found.add(ALGORITHMS["one_shot"].kernel(asked, "staged"))
    return sorted(found, key=lambda kernel: kernel.symbol)


@pytest.fixture(scope="module")
def built() -> Iterator[dict[str, Future[Any]]]:
    """The kernels of every pair, compiled on all cores, by what they reduce."""
    families = defaultdict(dict)
    for name, op in PAIRS:
        for kernel in kernels_of(DTYPES[name], OPS[op]):
            families[kernel.family][kernel] = None
    pool = ThreadPoolExecutor(os.cpu_count())
    compile_all = jit.compile_host_together
    yield {name: pool.submit(compile_all, list(all)) for name, all in families.items()}
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[list[Node]]]:
    made = [nodes_of(layout) for layout in LAYOUTS]
    yield made
    for node in itertools.chain(*made):
        node.end()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_a_chain_of_nodes_gives_the_bits_of_one_node(
    name: str, op: str, hosts: list[list[Node]], built: dict[str, Future[Any]]
) -> None:
    built[kernels_of(DTYPES[name], OPS[op])[0].family].result()
    for nodes in hosts:
        for count in (0, 3, 1100):
            assert_chained(nodes, name, op, count)


NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize(
    "layout", range(len(LAYOUTS)), ids=lambda i: "+".join(map(str, LAYOUTS[i]))
)
@pytest.mark.parametrize("name", NARROW)
def test_long_arrays_anywhere_in_memory_give_the_bits_of_one_node(
    name: str, layout: int, hosts: list[list[Node]]
) -> None:
    nodes = hosts[layout]
    itemsize = DTYPES[name].itemsize
    for shift, chunk_bytes, nchannels in ((0, 4096, 1), (1, 513 * itemsize, 2), (3, 256, 4)):
        forced = replace(ONE_SHOT, chunk_bytes=chunk_bytes, nchannels=nchannels)
        assert_chained(nodes, name, "sum", 40_009, shift=shift, forced=forced)
    assert_chained(nodes, name, "avg", 100_003, in_place=False, seeds_stay=False)


def test_counts_around_every_edge_of_shard_channel_and_chunk(hosts: list[list[Node]]) -> None:
    forced = replace(ONE_SHOT, chunk_bytes=256, nchannels=3)
    edges = (1, 2, 3, 9, 12, 27, 36)
    for nodes in (hosts[1], hosts[3]):
        for edge, off in itertools.product(edges, (-1, 0, 1)):
            assert_chained(nodes, "float32", "sum", 32 * edge + off, forced=forced)


def test_complex_arrays_are_cut_alike_by_kernels_that_count_parts(hosts: list[list[Node]]) -> None:
    forced = replace(ONE_SHOT, chunk_bytes=512, nchannels=2)
    for name, op in itertools.product(("complex64", "complex128"), ("avg", "prod")):
        for count in (1, 63, 64, 65, 1025):
            assert_chained(hosts[3], name, op, count, forced=forced)


def test_shards_take_turns_with_other_calls_of_the_same_ranks(ranks: Any) -> None:
    comm = ranks(3)
    calls = comm._calls
    placement = Placement(calls.transport, calls.device, calls.topology)
    node = NodeShards(placement, timeout=TIMEOUT_S, orchestrator=calls.orchestrator)
    arrays = random_inputs(DTYPES["float16"], OPS["sum"], 5003, 3, 5)
    want = reference.allreduce(arrays, "sum")
    for _ in range(3):
        mine = [Held(array, "host") for array in arrays]
        ranges = [shard_range(5003, owner, 2, 2) for owner in range(2)]
        shards = [Held(np.zeros(n, np.float16), "host") for _, n in ranges]
        asked = {"dtype": DTYPES["float16"], "count": 5003, "shards": Shards(2, fold_ranks=3)}
        node.reduce(addresses(mine), addresses([*shards, None]), op=OPS["sum"], **asked)
        copies = [array.copy() for array in arrays]
        comm.allreduce(copies, algorithm="one_shot")
        node.gather(addresses([*shards, None]), addresses(mine), **asked)
        for result in (*copies, *(array.get() for array in mine)):
            assert first_difference(result, want) is None


# ---- GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(map(str, layout)))
def test_a_chain_of_nodes_of_gpus_gives_the_bits_of_one_node(layout: Sequence[int]) -> None:
    gpus.start()
    nodes = nodes_of(layout, "cuda")
    forced = replace(ONE_SHOT, chunk_bytes=1040, nchannels=3)
    for name, op in (("bfloat16", "avg"), ("float32", "sum"), ("complex64", "prod")):
        for count in (0, 5, 6007):
            assert_chained(nodes, name, op, count)
        assert_chained(nodes, name, op, 6007, shift=1, forced=forced, in_place=False)
        assert_chained(nodes, name, op, 6007, forced=forced, seeds_stay=False)
    for node in nodes:
        node.end()


# ---- geometry --------------------------------------------------------------------------------

TYPES = {1: "uint8_t", 2: "uint16_t", 4: "float", 8: "double", 16: "Complex<double>"}
COUNTS = (*range(0, 300, 7), 1023, 1024, 1025, 4096, 99_991, 2**33 + 5)


def test_shards_are_those_of_the_kernels(tmp_path: Path) -> None:
    calls = "".join(f"  all<gar::{name}>();\n" for name in TYPES.values()).replace("gar::u", "u")
    calls = calls.replace("gar::float", "float").replace("gar::double", "double")
    text = f"""#include <cstdio>
#include "shard.cuh"
template <class T>
void all() {{
  const uint64_t counts[] = {{{", ".join(f"{count}ull" for count in COUNTS)}}};
  for (uint64_t count : counts)
    for (uint32_t nshards = 1; nshards <= 9; ++nshards)
      for (uint32_t owner = 0; owner < nshards; ++owner) {{
        const gar::Range r = gar::part<T>({{0, count}}, owner, nshards);
        std::printf("%llu %llu\\n", (unsigned long long)r.lo, (unsigned long long)r.n);
      }}
}}
int main() {{
{calls}}}
"""
    source, program = tmp_path / "shards.cpp", tmp_path / "shards"
    source.write_text(
        text.replace("Complex<double>", "gar::Complex<double>").replace("gar::gar::", "gar::")
    )
    command = [*jit.host_compiler().command, "-std=c++17", "-Wno-psabi"]
    command += [f"-I{jit.kernels_folder()}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    lines = iter(printed.splitlines())
    for itemsize, count in itertools.product(TYPES, COUNTS):
        for nshards in range(1, 10):
            ranges = [shard_range(count, owner, nshards, itemsize) for owner in range(nshards)]
            assert [f"{first} {n}" for first, n in ranges] == [next(lines) for _ in ranges]
            assert sum(n for _, n in ranges) == count
            assert max(ranges, key=lambda one: one[1])[1] == ranges[0][1]
            if itemsize > 4:  # complex elements, counted as two parts
                parts = [
                    shard_range(2 * count, owner, nshards, itemsize // 2)
                    for owner in range(nshards)
                ]
                assert parts == [(2 * first, 2 * n) for first, n in ranges]
    assert next(lines, None) is None


def request(collective: str, count: int, nranks: int, shards: Shards | None) -> Request:
    return Request(collective, DTYPES["float32"], OPS["sum"], count, nranks, shards=shards)


def plan_of(asked: Request) -> Any:
    topology = host_topology(asked.nranks, cores=64, one_process=True)
    return decide(asked, topology, Forced(), transport="test")


def test_bytes_are_those_of_the_rank_that_sends_most() -> None:
    n = 4 * 32 * 12
    for nshards, sent in ((4, n * 3 // 4), (3, n), (1, n)):
        assert plan_of(request("shard_reduce", n // 4, 4, Shards(nshards))).bytes_sent == sent
        found = plan_of(request("shard_gather", n // 4, 4, Shards(nshards)))
        assert found.bytes_sent == n // nshards * 3
    short = plan_of(request("shard_reduce", 40, 4, Shards(4)))  # two of the shards are empty
    assert short.bytes_sent == 160


@pytest.mark.parametrize("shards", [None, Shards(0), Shards(5)])
@pytest.mark.parametrize("collective", ["shard_reduce", "shard_gather"])
def test_shards_need_ranks_that_own_them(collective: str, shards: Shards | None) -> None:
    with pytest.raises(gar.NotSupported, match=r"1 to 4 shards, one a rank, not in [05]"):
        plan_of(request(collective, 100, 4, shards))


DIFFERENT = (Shards(3, True, False, 12), Shards(2, True, False, 12), Shards(3, False, False, 12))
DIFFERENT += (Shards(3, True, True, 12), Shards(3, True, False, 13))
DIFFERS_IN = ("nshards", "seeded", "rounded", "fold_ranks")


def test_headers_say_how_an_array_is_cut() -> None:
    fields = decode_header(
        plan_of(request("shard_reduce", 100, 3, DIFFERENT[0])).header(0), tuple(BY_NAME)
    )
    expected = {"nshards": 3, "seeded": True, "rounded": False, "fold_ranks": 12}
    assert expected.items() <= fields.items()
    assert fields["collective"] == "shard_reduce"
    assert "root" not in fields


@pytest.mark.parametrize(("other", "word"), [*zip(DIFFERENT[1:], DIFFERS_IN, strict=True)])
def test_ranks_that_disagree_about_shards_raise(other: Shards, word: str) -> None:
    placement = local_ranks(["host"] * 3)
    node = NodeShards(placement, timeout=TIMEOUT_S)
    plans = [node.plan(request("shard_reduce", 100, 3, each)) for each in (DIFFERENT[0], other)]
    launches = [
        node.orchestrator.arguments(plans[rank == 2], rank, timeout_s=TIMEOUT_S)
        for rank in range(3)
    ]
    memory = [Held(np.zeros(100, np.float32), "host") for _ in range(9)]
    where = addresses(memory)
    assert "shard_reduce sum in 3 shards of 100 x float32 on 3 ranks" in plans[0].describe()
    with pytest.raises(gar.MismatchError, match=f"differ in {word}:"):
        node.orchestrator.run(plans[0], launches, Addresses(where[:3], where[3:6], seeds=where[6:]))
    node.end()
