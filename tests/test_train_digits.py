"""The training example: equal parameters on all ranks, the same accuracy for any number."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import train_digits

import gpuallreduce as gar
from gpuallreduce.bootstrap.launch import launch


def test_one_two_and_four_ranks_reach_the_same_accuracy():
    reached = {}
    for nranks in (1, 2, 4):
        with gar.Communicator(["host"] * nranks) as comm:
            result = train_digits.train(comm, epochs=6)
        reached[nranks] = result.accuracy
        assert len(result.digests) == 6  # checked on all ranks after every epoch
        assert 0 < result.allreduce_seconds < result.seconds
    assert max(reached.values()) - min(reached.values()) <= 0.01
    assert min(reached.values()) > 0.85


def test_training_is_reproducible_bit_for_bit():
    digests = []
    for _ in range(2):
        with gar.Communicator(["host"] * 2) as comm:
            digests.append(train_digits.train(comm, epochs=2).digests)
    assert digests[0] == digests[1]


def test_it_runs_as_processes(capfd):
    script = Path(train_digits.__file__)
    assert launch(2, [sys.executable, str(script), "--epochs", "2"], timeout=60) == 0
    assert "all 2 ranks equal" in capfd.readouterr().out
