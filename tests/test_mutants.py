"""Tests that the race tests have teeth: each protocol mutant must be noticed.

Knows nothing of the faults; the tables are in races/. The kernels as they are must pass every hunt.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from races import algorithm_mutants, primitive_mutants, shard_mutants
from races.harness import Build, Result, build, run
from races.mutant import Mutant

from gpuallreduce import jit

MUTANTS = primitive_mutants.MUTANTS + algorithm_mutants.MUTANTS + shard_mutants.MUTANTS
SEEDS = range(1, 9)  # a mutant that needs luck with the schedule gets so many tries
CONTROL_SEEDS = (1, 2)
LIMIT_S = 30


def mutated(mutant: Mutant, folder: Path) -> Path:
    """A copy of the kernels with one fault."""
    copy = folder / re.sub(r"\W+", "_", mutant.name)
    shutil.copytree(jit.kernels_folder(), copy)
    source = copy / mutant.file
    text = source.read_text(encoding="utf-8")
    found = text.count(mutant.old)
    assert found == mutant.occurrences, (
        f"{mutant.file} holds the text of '{mutant.name}' {found} times"
    )
    source.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return copy


def hunt(mutant: Mutant, folder: Path) -> Result:
    """The first run that notices the mutant, or the last of all tries."""
    driver = build(mutant.build(kernels=mutated(mutant, folder)))
    result = Result("ok", "")
    for seed in SEEDS:
        result = run(driver, replace(mutant.scenario, seed=seed), limit_s=LIMIT_S)
        if result.outcome != "ok":
            break
    return result


@pytest.fixture(scope="module")
def hunts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Result]]]:
    """All mutants at once, as many at a time as there are cores."""
    folder = tmp_path_factory.mktemp("mutants")
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {mutant.name: pool.submit(hunt, mutant, folder) for mutant in MUTANTS}
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_noticed(mutant: Mutant, hunts: dict[str, Future[Result]]) -> None:
    assert hunts[mutant.name].result().outcome != "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    sorted({mutant.build() for mutant in MUTANTS}, key=str),
    ids=lambda how: f"{how.element}-{how.operator}",
)
def test_kernels_as_they_are_pass_every_hunt(how: Build) -> None:
    scenarios = {mutant.scenario for mutant in MUTANTS if mutant.build() == how}
    for scenario in sorted(scenarios, key=str):
        for seed in CONTROL_SEEDS:
            patient = replace(scenario, seed=seed, timeout_ms=20000)
            result = run(build(how), patient, limit_s=LIMIT_S)
            assert result.outcome == "ok", f"{patient}: {result.text}"


def test_every_note_of_the_kernels_has_a_mutant() -> None:
    notes = set()
    for path in jit.kernels_folder().iterdir():
        if path.suffix in (".cuh", ".h", ".cpp"):
            notes |= set(re.findall(r"// NOTE ([^.:]+)[.:]", path.read_text(encoding="utf-8")))
    elsewhere = {"probe", "halts"}  # broken in test_probe.py and test_across_cuda.py
    assert notes == {mutant.note for mutant in MUTANTS} | elsewhere


def test_mutants_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
