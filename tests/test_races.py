"""Tests that no kernel has a data race or hangs: ranks and block threads under ThreadSanitizer.

Knows nothing of the schedule: the driver shakes it from a seed.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from races.harness import ENDINGS, KERNELS, Build, Result, Scenario, build, run

pytestmark = pytest.mark.slow

BLOCK_THREADS = (1, 4)
RANKS = (2, 3, 4, 8)
CALLS = {1: 400, 4: 100}
WRAPS = (2**31, 2**32, 2**63, 2**64)
FAILING_KERNELS = ("two_shot", "ring", "ring_in_rank_order")  # each takes more than its call line


def expect_clean(how: Build, scenarios: list[Scenario]) -> None:
    """Runs scenarios on all cores; none may race, give up, or have a wrong element."""
    driver = build(how)

    def one(scenario: Scenario) -> Result:
        return run(driver, scenario)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for scenario, result in zip(scenarios, pool.map(one, scenarios), strict=True):
            assert result.outcome == "ok", f"{how}\n{scenario}\n{result.text}"


@pytest.mark.parametrize("block_threads", BLOCK_THREADS)
@pytest.mark.parametrize("nranks", RANKS)
def test_alternating_kernels_on_one_segment_have_no_race(block_threads: int, nranks: int) -> None:
    ncalls = CALLS[block_threads]
    expect_clean(
        Build(block_threads=block_threads),
        [Scenario(nranks=nranks, ncalls=ncalls, seed=seed) for seed in (1, 2)]
        + [Scenario(nranks=nranks, ncalls=ncalls, fewest_slots=False, shake=2)],
    )


@pytest.mark.parametrize("block_threads", BLOCK_THREADS)
@pytest.mark.parametrize("push", [0, 1], ids=["slots with the sender", "slots with the receiver"])
def test_each_kernel_alone_has_no_race(block_threads: int, push: int) -> None:
    expect_clean(
        Build(block_threads=block_threads),
        [
            Scenario(nranks=4, ncalls=60, kernels=(kernel,), counts=(63, 1001), push=push)
            for kernel in KERNELS
        ],
    )


def test_many_chunks_through_the_fewest_slots_have_no_race() -> None:
    many = Scenario(ncalls=6, counts=(9001,), max_channels=1)
    each = [replace(many, kernels=(kernel,)) for kernel in KERNELS]
    expect_clean(Build(), [replace(one, nranks=nranks) for one in each for nranks in (2, 5)])


def test_kernels_unrolled_for_their_ranks_have_no_race() -> None:
    expect_clean(Build(ranks=3), [Scenario(nranks=3, ncalls=CALLS[1])])


@pytest.mark.skipif(shutil.which("clang++") is None, reason="clang++ is not installed")
def test_clang_sees_no_race_either() -> None:
    expect_clean(Build(compiler="clang++", block_threads=4), [Scenario(nranks=4, ncalls=CALLS[4])])


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: f"2**{wrap.bit_length() - 1}")
def test_counters_wrap_unnoticed(wrap: int) -> None:
    expect_clean(
        Build(),
        [
            Scenario(nranks=nranks, ncalls=60, preset=wrap - before)
            for nranks in (2, 4)
            for before in (1, 2, 20, 41)
        ],
    )


@pytest.mark.parametrize("block_threads", BLOCK_THREADS)
@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_ranks_that_give_up_leave_whole_reports(block_threads: int, ending: str) -> None:
    last = Scenario(ncalls=3, ending=ending, kernels=FAILING_KERNELS, counts=(1001,))
    expect_clean(
        Build(block_threads=block_threads),
        [replace(last, nranks=nranks, seed=seed) for nranks in RANKS for seed in (1, 2, 3)],
    )


def test_workers_of_one_process_have_no_race() -> None:
    expect_clean(Build(), [Scenario(nranks=nranks, ncalls=300, workers=True) for nranks in RANKS])
