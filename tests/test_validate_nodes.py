"""Validation by a launcher's ranks, on one node and on several: the same bits in every layout, and
one report whatever happens to a rank. Under a real mpirun, with nodes told apart by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuallreduce.cli import main
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.cases import ACROSS, ONE_NODE, Case, enumerate_cases
from gpuallreduce.validation.oracle import Oracle

RANKS = Path(__file__).parent / "validate_ranks.py"
LAYOUTS = ((4, 4), (2, 2, 2, 2), (3, 1), (1,) * 8)  # ranks of each node
QUICK = ("--quick", "-d", "bfloat16,int8", "-o", "sum")
FEW = ("-d", "float32", "-o", "sum", "--algorithm", "auto")
DEFINED = {(d.name, o.name) for d in DTYPES.values() for o in OPS.values() if d.kind in o.kinds}
ENVIRON = {
    **{n: text for n, text in os.environ.items() if not n.startswith("GPUALLREDUCE_NODE")},
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def start(command: list[str], **environ: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    variables = {**ENVIRON, **environ}
    return subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True, cwd="/")


def finish(process: subprocess.Popen[str], limit_s: float = 100) -> tuple[int, str, str]:
    """Exit status and both outputs; a process that does not end is killed, and its job with it."""
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            process.terminate()  # mpirun ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
    return process.returncode, out, err


def need_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun (Debian and Ubuntu: apt install openmpi-bin)")


def mpirun(layout: tuple[int, ...], folder: Path, fault: str, *options: str) -> list[str]:
    """The command of a job whose last rank has a fault."""
    need_mpirun()
    ranks = [sys.executable, str(RANKS), str(folder), ",".join(map(str, layout)), fault]
    return ["mpirun", "-n", str(sum(layout)), "--oversubscribe", *ranks, *options]


def as_torchrun(nranks: int, folder: Path, fault: str, *options: str) -> list[tuple[int, str, str]]:
    """Ranks of one node, without MPI: started as by torchrun."""
    job = {"WORLD_SIZE": str(nranks), "LOCAL_WORLD_SIZE": str(nranks), "MASTER_ADDR": "127.0.0.1"}
    job["TORCHELASTIC_RUN_ID"] = secrets.token_hex(8)
    command = [sys.executable, str(RANKS), str(folder), str(nranks), fault, *options]
    ranks = [start(command, RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(nranks)]
    return [finish(rank) for rank in ranks]


def statuses(folder: Path) -> dict[int, int]:
    """What each rank's command returned, if it did."""
    return {
        int(path.name.removeprefix("status")): int(path.read_text())
        for path in folder.glob("status*")
    }


# ---- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["default", "full"])
def test_between_nodes_each_pair_meets_each_variant_that_there_is_there(level: str) -> None:
    cases = enumerate_cases(8, level, nodes=(4, 4))
    assert len(set(cases)) == len(cases)
    reduced = [c for c in cases if c.collective == "allreduce" and not c.refused]
    assert {(c.dtype, c.op, c.variant) for c in reduced} == {
        (*pair, v) for pair in DEFINED for v in ACROSS
    }
    assert {c.nchannels for c in cases} == {None}
    for dtype, row in DTYPES.items():
        sums = [c for c in reduced if (c.dtype, c.op) == (dtype, "sum")]
        assert {c.in_place for c in sums} == {True, False}
        assert {c.offset for c in sums} == {0, 1, 2}
        assert max(c.stride for c in sums) > 1
        forced = [(c.count, c.chunk_bytes // row.itemsize) for c in sums if c.chunk_bytes]
        assert {count - chunk for count, chunk in forced} >= {-1, 0, 1}
        assert any(count > 100 * chunk for count, chunk in forced)


def test_layouts_of_as_many_ranks_have_the_same_cases() -> None:
    assert enumerate_cases(8, nodes=(4, 4)) == enumerate_cases(8, nodes=(1,) * 8)


@pytest.mark.parametrize(("nodes", "offered"), [((), ONE_NODE), ((8,), ONE_NODE), ((4, 4), ACROSS)])
def test_what_there_is_not_on_so_many_nodes_cannot_be_asked_for(
    nodes: tuple[int, ...], offered: tuple[str, ...]
) -> None:
    for variant in {*ONE_NODE, *ACROSS}:
        if variant in offered:
            assert enumerate_cases(8, variants=[variant], nodes=nodes)
        else:
            with pytest.raises(InvalidArgument, match=f"no algorithm '{variant}'.*{offered[1]}"):
                enumerate_cases(8, variants=[variant], nodes=nodes)


def test_a_mean_of_nodes_that_rounds_has_no_bits_to_expect() -> None:
    mean = Case("allreduce", "float32", "avg", 50, "hierarchical_any")
    assert Oracle(8, seed=0).exact(mean).result is not None
    assert Oracle(6, seed=0).exact(mean).result is None


# ---- jobs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Reports of ranks that are threads, by their number."""
    folder, found = tmp_path_factory.mktemp("one"), {}
    for nranks in {sum(layout) for layout in LAYOUTS}:
        file = folder / str(nranks)
        assert main(["validate", "-g", str(nranks), "--json", str(file), *QUICK]) == 0
        found[nranks] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "+".join(map(str, layout)))
def test_nodes_validate_and_have_the_digests_of_one_node(
    layout: tuple[int, ...], on_one_node: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    need_mpirun()
    file = tmp_path / "report"
    nodes = ",".join(map(str, layout))
    command = [sys.executable, "-m", "gpuallreduce", "validate", "--nodes", nodes, *QUICK]
    status, out, err = finish(start([*command, "--json", str(file)]))
    assert status == 0, out + err
    assert out.count("# gpuallreduce") == 1
    assert f"on {len(layout)} nodes ({' + '.join(map(str, layout))})" in out
    found, alone = json.loads(file.read_text()), on_one_node[sum(layout)]
    assert (found["succeeded"], found["not_run"]) == (True, 0)
    assert found["allreduce"] == alone["allreduce"]
    assert set(found["variants"]) <= set(ACROSS)
    both = {each.split()[0] for each in found["digests"].keys() & alone["digests"].keys()}
    assert both >= {"allreduce", "allreduce_many"}
    expected = {
        each: alone["digests"].get(each, digest) for each, digest in found["digests"].items()
    }
    assert found["digests"] == expected


def test_a_flipped_bit_of_one_rank_fails_the_run_on_all_ranks(tmp_path: Path) -> None:
    status, out, err = finish(start(mpirun((2, 1), tmp_path, "one_bit_is_flipped", *FEW)))
    assert status == 1, err
    assert statuses(tmp_path) == {0: 1, 1: 1, 2: 1}
    assert out.count("FAILED") == out.count("# gpuallreduce") == 1
    assert "FAIL allreduce sum float32 auto" in out
    assert "count=21" in out  # the smallest that shows it
    assert "exact: rank 2: element 7: " in out
    assert "ranks: rank 2: its result has other bits than rank 0's" in out


@pytest.mark.parametrize("fault", ["it_dies", "it_fails"])
def test_a_job_that_loses_a_rank_ends_and_says_so(fault: str, tmp_path: Path) -> None:
    status, out, err = finish(start(mpirun((2, 1), tmp_path, fault, *FEW)), limit_s=60)
    assert status not in (0, None)
    assert "OK" not in out
    assert ("rank 2" if fault == "it_dies" else "ZeroDivisionError: of a test") in out + err


def test_on_one_node_the_others_report_which_rank_was_lost(tmp_path: Path) -> None:
    *others, lost = as_torchrun(3, tmp_path, "it_dies", *FEW)
    assert lost[0] == -9
    assert [status for status, _, _ in others] == [1, 1]
    (_, out, _), (_, nothing, _) = others
    assert "raised: the job ended here: " in out
    assert "rank 2" in out
    assert "FAILED" in out.splitlines()[-1]
    assert nothing == ""


def test_cases_after_one_that_a_rank_refused_are_checked_on_all_ranks(tmp_path: Path) -> None:
    ranks = as_torchrun(2, tmp_path, "it_refuses", *FEW)
    assert [status for status, _, _ in ranks] == [1, 1]
    out = ranks[0][1]
    assert "raised: rank 1: NotSupported: of a test" in out
    assert " cases, 2 failed; " in out  # that one, and the next, which the others came to alone
    assert "not run" not in out


def test_on_one_node_all_collectives_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "report"
    ranks = as_torchrun(2, tmp_path, "nothing", "--quick", "-d", "int16", "--json", str(file))
    assert [status for status, _, _ in ranks] == [0, 0], ranks
    found = json.loads(file.read_text())
    assert found["ranks"] == "2 host ranks, a process each"
    assert found["left_out"] == 0
    assert {"reduce", "reduce_scatter", "all_gather", "broadcast"} < set(found["collectives"])


def test_ranks_that_were_asked_for_different_things_say_what(tmp_path: Path) -> None:
    for status, _, err in as_torchrun(2, tmp_path, "other_options", *FEW):
        assert status == 2
        assert "rank 0 has seed 0, rank 1 has seed 5; start all with the same options" in err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["-g", "2"], "-g"),
        (["--processes", "2"], "--processes"),
        (["--devices", "host,host"], "--devices"),
        (["--nodes", "2,2"], "--nodes"),
        (["--against", "nccl"], "--against"),
    ],
)
def test_a_rank_of_a_job_takes_no_other_ranks(
    options: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["validate", *options]) == 2
    message = capsys.readouterr().err
    assert f"this process is rank 1 of 4 (torchrun), and {named} asks for other ranks" in message


def test_nodes_need_mpirun_and_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["validate", "--nodes", "2,2"]) == 2
    assert "mpirun" in capsys.readouterr().err
