"""Decisions as pure functions: what is chosen, what is refused, what is sent."""

from __future__ import annotations

from itertools import pairwise

import pytest

import gpuallreduce as gar
from gpuallreduce.algorithms import ALGORITHMS
from gpuallreduce.memory import layout_segment
from gpuallreduce.plan import Request, decode_header
from gpuallreduce.topology import host_topology
from gpuallreduce.tuner import Forced, decide
from gpuallreduce.types import DTYPES, OPS


def request(count=1000, nranks=4, **keywords):
    keywords = {"dtype": DTYPES["float32"], "op": OPS["sum"], **keywords}
    return Request(
        "allreduce", keywords.pop("dtype"), keywords.pop("op"), count, nranks, **keywords
    )


def plan(asked, forced=None, *, cores=64, one_process=False):
    topology = host_topology(asked.nranks, cores=cores, one_process=one_process)
    return decide(asked, topology, forced or Forced(), transport="test")


def test_small_arrays_go_in_one_shot_and_large_ones_on_many_ranks_in_two():
    assert plan(request(256)).config.algorithm == "one_shot"
    assert plan(request(1 << 24, 8)).config.algorithm == "two_shot"


def test_direct_access_is_used_for_large_arrays_that_allow_it():
    assert plan(request(1 << 22, direct=True)).config.access == "direct"
    assert plan(request(1 << 22)).config.access == "staged"


@pytest.mark.parametrize("nranks", [2, 3, 8, 16])
def test_bytes_sent_are_those_of_the_formulas(nranks):
    n = 4 * 16 * 3 * 1000
    asked = request(n // 4, nranks)
    sent = {name: algorithm.bytes_sent(asked) for name, algorithm in ALGORITHMS.items()}
    assert sent["one_shot"] == (nranks - 1) * n
    assert sent["two_shot"] == 2 * n * (nranks - 1) // nranks
    assert sent["ring"] == (2 * n if nranks > 2 else n)
    any_order = request(n // 4, nranks, order="any")
    assert ALGORITHMS["ring"].bytes_sent(any_order) == 2 * n * (nranks - 1) // nranks
    narrow = request(n // 2, nranks, dtype=DTYPES["bfloat16"])
    assert ALGORITHMS["ring"].bytes_sent(narrow) == (3 * n if nranks > 2 else 2 * n)


def test_streaming_stores_only_out_of_place_and_large():
    big = 64 << 20
    assert plan(request(big // 4, in_place=False)).config.streaming
    assert not plan(request(big // 4, in_place=True)).config.streaming
    assert not plan(request(big // 4 - 1, in_place=False)).config.streaming


def test_every_field_can_be_forced():
    forced = plan(request(), Forced("two_shot", "staged", 4096, 3)).config
    assert (forced.algorithm, forced.access, forced.chunk_count, forced.nchannels) == (
        "two_shot",
        "staged",
        1024,
        3,
    )


@pytest.mark.parametrize(
    ("forced", "kind", "text"),
    [
        (Forced(algorithm="tree"), gar.InvalidArgument, "one_shot, two_shot, ring"),
        (Forced(access="remote"), gar.InvalidArgument, "staged, direct"),
        (Forced(access="direct"), gar.NotSupported, "comm.empty"),
        (Forced(algorithm="ring", access="direct"), gar.NotSupported, "no direct access"),
        (Forced(chunk_bytes=1), gar.InvalidArgument, "4 to"),
        (Forced(algorithm="one_shot", chunk_bytes=1 << 22), gar.InvalidArgument, "262144 bytes"),
        (Forced(nchannels=0), gar.InvalidArgument, r"1\.\.4"),
    ],
)
def test_what_cannot_be_forced_is_refused_with_what_can(forced, kind, text):
    with pytest.raises(kind, match=text):
        plan(request(), forced)


def test_collectives_that_an_algorithm_lacks_are_refused():
    asked = Request("broadcast", DTYPES["float32"], OPS["sum"], 10, 4)
    with pytest.raises(gar.NotSupported, match="ring serves allreduce only"):
        plan(asked, Forced(algorithm="ring"))


@pytest.mark.parametrize("name", DTYPES)
def test_a_chunk_of_the_chain_fits_its_slot_in_the_accumulator(name):
    asked = request(1 << 22, dtype=DTYPES[name])
    found = plan(asked, Forced(algorithm="ring"))
    widest = DTYPES[DTYPES[name].accumulator].itemsize
    assert found.config.chunk_count * widest <= found.region.slot_bytes


def test_headers_say_everything_that_must_agree():
    found = plan(request(123, 4, root=2, dtype=DTYPES["bfloat16"], op=OPS["avg"], order="any"))
    fields = decode_header(found.header(0), tuple(ALGORITHMS))
    assert fields == {
        "sequence": 0,
        "collective": "allreduce",
        "count": 123,
        "dtype": "bfloat16",
        "op": "avg",
        "order": "any",
        "algorithm": "one_shot",
        "access": "staged",
        "root": 2,
        "chunk_count": found.config.chunk_count,
        "nchannels": 1,
        "arrangement": "0x0",
    }


@pytest.mark.parametrize("nranks", [1, 2, 16])
def test_nothing_in_a_segment_overlaps(nranks):
    regions = [region for algorithm in ALGORITHMS.values() for region in algorithm.regions()]
    layout = layout_segment(nranks, 4, regions)
    spans = [
        (layout.abort, 128),
        (layout.reports, 256 * nranks),
        (layout.sequence, 4 * 128),
        (layout.calls, 4 * 2 * nranks * 128),
    ]
    for region in layout.regions.values():
        pairs = 4 * region.region.nsets * nranks * 128
        nslots = 4 * region.region.nsets * region.region.nslots * region.nlinks
        spans += [
            (region.steps, 4 * 128),
            (region.ready, pairs),
            (region.credit, pairs),
            (region.slots, nslots * region.region.slot_bytes),
        ]
    spans.sort()
    for (start, size), (after, _) in pairwise(spans):
        assert start + size <= after
    assert spans[-1][0] + spans[-1][1] <= layout.nbytes
    assert all(start % 128 == 0 for start, _ in spans)
    slots = [region.slots for region in layout.regions.values()]
    assert layout.pad_bytes == min(slots)


def test_slot_counts_are_powers_of_two():
    for algorithm in ALGORITHMS.values():
        for region in algorithm.regions():
            assert region.nslots & (region.nslots - 1) == 0


def test_memory_beyond_the_arrays_does_not_depend_on_the_count():
    assert plan(request(10)).region == plan(request(10)).region
    for name in ALGORITHMS:
        small, large = (
            plan(request(10), Forced(algorithm=name)),
            plan(request(1 << 30), Forced(algorithm=name)),
        )
        assert small.region == large.region
