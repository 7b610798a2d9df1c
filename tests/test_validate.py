"""Validation: its cases cover what they claim, and each of its checks sees the fault it is for."""

from __future__ import annotations

import ctypes
import dataclasses
import json

import numpy as np
import pytest

from gpuallreduce import Communicator, Timeout, reference
from gpuallreduce.cli import main
from gpuallreduce.topology import host_topology
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation import report, runners, session
from gpuallreduce.validation.build import kernel_of
from gpuallreduce.validation.cases import LEVELS, ONE_NODE, Case, enumerate_cases, smaller
from gpuallreduce.validation.oracle import Oracle
from gpuallreduce.validation.run import Finding, Outcome, run_case
from gpuallreduce.validation.runners import ProcessRunner, ThreadRunner
from gpuallreduce.validation.summary import Summary, validate

PAIRS = {(d.name, o.name) for d in DTYPES.values() for o in OPS.values()}
DEFINED = {(d, o) for d, o in PAIRS if DTYPES[d].kind in OPS[o].kinds}
NUMBERS = {d.name for d in DTYPES.values() if d.kind not in ("bool", "complex")}


# ---- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("nranks", [1, 4, 9])
def test_each_level_has_each_pair_and_refuses_those_without_a_meaning(level, nranks):
    cases = enumerate_cases(nranks, level)
    assert len(set(cases)) == len(cases)
    for collective in ("allreduce", "reduce", "reduce_scatter"):
        pairs = {(c.dtype, c.op) for c in cases if c.collective == collective and c.refused}
        assert pairs == PAIRS - DEFINED
    reduced = [c for c in cases if c.collective == "allreduce" and not c.refused]
    assert {(c.dtype, c.op) for c in reduced} == DEFINED
    assert all(0 <= c.root < nranks and c.count >= 0 for c in cases)
    others = {"all_gather", "allreduce_many", "broadcast", "barrier"}
    assert {c.collective for c in cases} >= others
    assert {c.stride for c in cases} == {1, 2}


@pytest.mark.parametrize("level", ["default", "full"])
def test_each_variant_meets_each_pair_of_dtype_and_operator(level):
    cases = [c for c in enumerate_cases(4, level) if c.collective == "allreduce" and not c.refused]
    expected = {(*pair, v) for pair in DEFINED for v in ONE_NODE}
    assert {(c.dtype, c.op, c.variant) for c in cases} == expected


def test_levels_check_more_and_more_with_more_and_more_kernels():
    topology = host_topology(4, cores=2, one_process=True)
    kernels = [
        {kernel_of(case, topology) for case in enumerate_cases(4, level)} for level in LEVELS
    ]
    quick, default, full = map(len, kernels)
    assert quick < default <= full
    ncases = [len(enumerate_cases(4, level)) for level in LEVELS]
    assert ncases == sorted(set(ncases))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("nranks", [2, 4])
def test_counts_have_the_edges_of_chunks_and_more_chunks_than_slots(dtype, nranks):
    cases = enumerate_cases(nranks, "full", dtypes=[dtype.name], ops=["sum"], variants=["ring"])
    forced = [(c.count, c.chunk_bytes // dtype.itemsize) for c in cases if c.chunk_bytes]
    assert {count - chunk for count, chunk in forced} >= {-1, 0, 1}
    assert {count - nranks * chunk for count, chunk in forced} >= {-1, 1}
    assert any(count > 32 * chunk for count, chunk in forced)
    assert any(chunk == 1 for _, chunk in forced)
    assert {0, 1, 13, 127} <= {c.count for c in cases}
    assert {c.in_place for c in cases} == {True, False}
    assert {c.nchannels for c in cases} == {None, 3}
    assert max(c.count for c in cases) * dtype.itemsize > 3 * 64 * 1024


def test_filters_keep_what_they_name():
    cases = enumerate_cases(4, dtypes=["int8"], ops=["sum", "avg"], variants=["ring"])
    assert {(c.dtype, c.op) for c in cases} == {("int8", "sum"), ("int8", "avg")}
    assert {c.variant for c in cases if not c.refused} == {"ring"}
    assert {c.collective for c in cases if not c.refused} == {"allreduce"}
    moved = {c.dtype for c in enumerate_cases(4, dtypes=["int8"]) if c.collective == "broadcast"}
    assert moved == {"int8"}


def test_smaller_cases_come_from_the_fewest_elements_on():
    case = Case("allreduce", "int16", "sum", 4001, "ring", chunk_bytes=48)
    found = list(smaller(case))
    counts = [each.count for each in found]
    assert counts == sorted(set(counts))
    assert {0, 1, 2, 23, 24, 25, 48, 49, 2000} <= set(counts)
    assert max(counts) < case.count
    assert {dataclasses.replace(each, count=4001) for each in found} == {case}
    assert list(smaller(dataclasses.replace(case, count=0))) == []


# ---- checks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def communicator():
    with Communicator(["host"] * 3, timeout=20) as communicator:
        yield communicator


@pytest.fixture(scope="module")
def oracle():
    return Oracle(3, seed=1)


class Faulty:
    """A communicator whose calls are right but for one thing that ``fault`` does afterwards."""

    def __init__(self, communicator, fault):
        self.inner, self.fault, self.calls = communicator, fault, 0

    def __getattr__(self, name):
        if name not in ("allreduce", "reduce", "reduce_scatter", "all_gather", "broadcast"):
            return getattr(self.inner, name)

        def call(arrays, out=None, **keywords):
            before = [x.copy() for x in arrays]
            outs = arrays if out is None else out
            stale = [x.copy() for x in outs]
            options = (out,) if name != "broadcast" else ()
            getattr(self.inner, name)(arrays, *options, **keywords)
            self.calls += 1
            self.fault(self, arrays=arrays, outs=outs, before=before, stale=stale)
            return outs

        return call


def flip(x, index=-1):
    x[index:][:1].view(np.uint8)[0] ^= 1


def one_rank_differs(self, *, outs, **_):
    flip(outs[1])


def tail_is_dropped(self, *, outs, stale, **_):
    for x, old in zip(outs, stale, strict=True):
        x[-2:] = old[-2:]


def written_past_the_end(self, *, outs, **_):
    ctypes.memset(outs[2].ctypes.data + outs[2].nbytes, 0x5A, 8)


def written_before_the_start(self, *, arrays, **_):
    ctypes.memset(arrays[0].ctypes.data - 1, 0x5A, 1)


def input_is_modified(self, *, arrays, **_):
    flip(arrays[2], 0)


def repeats_differ(self, *, outs, **_):
    if self.calls % 2:
        for x in outs:
            flip(x)


def order_is_reversed(self, *, outs, before, **_):
    for x in outs:
        x[:] = reference.allreduce(before[::-1], "sum")


def partials_are_rounded(self, *, outs, before, **_):
    partial = reference.allreduce(before[:2], "sum")
    for x in outs:
        x[:] = reference.allreduce([partial, before[2]], "sum")


def last_rank_is_lost(self, *, outs, before, **_):
    for x in outs:
        x[:] = reference.allreduce(before[:2], "sum")


def a_gap_is_written(self, *, outs, **_):
    ctypes.memset(outs[1].ctypes.data + outs[1].itemsize, 0x5A, 1)


CASE = Case("allreduce", "float32", "sum", 61, "one_shot", in_place=False, offset=1)
SPREAD = Case("allreduce", "float32", "sum", 61, in_place=False, offset=1, stride=2)
ANY = dataclasses.replace(CASE, variant="ring_any")
BFLOAT = dataclasses.replace(CASE, dtype="bfloat16", count=500)


@pytest.mark.parametrize(
    ("case", "fault", "checks"),
    [
        (CASE, one_rank_differs, {"exact", "reference", "ranks"}),
        (ANY, one_rank_differs, {"exact", "ranks"}),
        (CASE, tail_is_dropped, {"exact", "reference", "error"}),
        (ANY, tail_is_dropped, {"exact", "error"}),
        (CASE, written_past_the_end, {"guard"}),
        (dataclasses.replace(CASE, in_place=True), written_past_the_end, {"guard"}),
        (CASE, written_before_the_start, {"guard"}),
        (SPREAD, a_gap_is_written, {"guard"}),
        (dataclasses.replace(SPREAD, in_place=True, stride=3), a_gap_is_written, {"guard"}),
        (SPREAD, one_rank_differs, {"exact", "reference", "ranks"}),
        (CASE, input_is_modified, {"input"}),
        (ANY, repeats_differ, {"exact", "repeat"}),
        (CASE, order_is_reversed, {"reference"}),
        (ANY, order_is_reversed, set()),
        (BFLOAT, partials_are_rounded, {"reference", "error"}),
        (dataclasses.replace(BFLOAT, variant="ring_any"), partials_are_rounded, set()),
        (ANY, last_rank_is_lost, {"exact", "error"}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "variant", None),
)
def test_each_fault_is_seen_by_the_checks_that_are_for_it(
    communicator, oracle, case, fault, checks
):
    assert run_case(communicator, case, oracle).findings == []
    outcome = run_case(Faulty(communicator, fault), case, oracle)
    found = {finding.check for finding in outcome.findings}
    # Whether one flipped bit also exceeds the bound depends on the values.
    assert found - {"error"} == checks - {"error"}
    assert found >= checks
    assert not outcome.broken


@pytest.mark.parametrize("collective", ["reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_faults_of_the_other_collectives_are_seen(communicator, oracle, collective):
    case = Case(collective, "int16", "sum", 20, in_place=collective in ("reduce", "broadcast"))
    case = dataclasses.replace(case, root=1 if case.in_place else 0)
    assert run_case(communicator, case, oracle).findings == []
    outcome = run_case(Faulty(communicator, one_rank_differs), case, oracle)
    assert "reference" in {finding.check for finding in outcome.findings}
    outcome = run_case(Faulty(communicator, written_past_the_end), case, oracle)
    assert {finding.check for finding in outcome.findings} == {"guard"}


@pytest.mark.parametrize("count", [0, 1, 5, 7, 61])
def test_faults_in_one_of_many_arrays_are_seen(communicator, oracle, count):
    class Mixed:
        def __getattr__(self, name):
            return getattr(communicator, name)

        def allreduce_many(self, arrays, **keywords):
            assert {len(each) for each in arrays} == {5}
            assert sum(x.size for x in arrays[0]) == count
            communicator.allreduce_many(arrays, **keywords)
            flip(next(x for x in arrays[2] if x.size))

    case = Case("allreduce_many", "float32", "sum", count, offset=1)
    right = run_case(communicator, case, oracle)
    assert right.findings == []
    assert right.digest == run_case(communicator, _alone(case), oracle).digest
    if count:
        found = {finding.check for finding in run_case(Mixed(), case, oracle).findings}
        assert found >= {"exact", "reference", "ranks"}


def _alone(case):
    return dataclasses.replace(case, collective="allreduce")


@pytest.mark.parametrize("in_place", [True, False])
def test_reduce_must_leave_the_arrays_of_the_other_ranks_alone(communicator, oracle, in_place):
    def other_out_is_written(self, *, outs, **_):
        flip(outs[0])

    case = Case("reduce", "int16", "sum", 20, in_place=in_place, root=2)
    outcome = run_case(Faulty(communicator, other_out_is_written), case, oracle)
    assert [finding.check for finding in outcome.findings] == ["input"]


def test_messages_name_the_rank_and_the_place(communicator, oracle):
    outcome = run_case(Faulty(communicator, one_rank_differs), CASE, oracle)
    by_check = {finding.check: finding.message for finding in outcome.findings}
    assert by_check["ranks"].startswith("rank 1: element 60: ")
    outcome = run_case(Faulty(communicator, written_past_the_end), CASE, oracle)
    assert outcome.findings[0].message.startswith("rank 2: output: 8 guard bytes overwritten at +0")


def test_a_call_that_should_be_refused_and_one_that_raises_are_findings(communicator, oracle):
    class Permissive(Faulty):
        def allreduce(self, arrays, out=None, **_):
            return arrays

    class Late(Faulty):
        def allreduce(self, arrays, out=None, **_):
            raise Timeout("rank 1 did not come")

    refused = Case("allreduce", "int8", "avg", 3, refused=True)
    assert run_case(communicator, refused, oracle).findings == []
    outcome = run_case(Permissive(communicator, None), refused, oracle)
    assert [finding.check for finding in outcome.findings] == ["refusal"]
    outcome = run_case(Late(communicator, None), CASE, oracle)
    assert outcome.findings == [Finding("raised", "Timeout: rank 1 did not come")]
    assert outcome.broken


# ---- sessions and runners ------------------------------------------------------------------------


class Breaking:
    """A communicator that is lost in every call; counts those that were opened and closed."""

    nranks, ranks = 2, (0, 1)
    opened = closed = 0

    def __init__(self):
        type(self).opened += 1

    def allreduce(self, *_, **__):
        raise Timeout("late")

    def close(self):
        type(self).closed += 1


def test_a_broken_communicator_is_replaced_and_too_many_end_the_run():
    cases = [dataclasses.replace(CASE, count=count) for count in range(20)]
    outcomes = list(session.run_cases(cases, Breaking, seed=0))
    assert [outcome.broken for outcome in outcomes] == [True] * 5
    assert Breaking.opened == 5
    assert Breaking.closed >= 5


class Pretending:
    """A runner whose cases fail from a count on."""

    def __init__(self, first_bad, *, ends_after=None):
        self.first_bad, self.ends_after, self.runs = first_bad, ends_after, 0

    def describe(self):
        return "no ranks"

    def run(self, cases):
        self.runs += 1
        for case in cases[: self.ends_after]:
            bad = case.count >= self.first_bad and not case.refused
            yield Outcome([Finding("exact", f"at {case.count}\nmore")] if bad else [])


def test_failures_are_grouped_and_shrunk_to_the_smallest_count():
    cases = enumerate_cases(4, dtypes=["float32"], ops=["sum", "band"], variants=["ring"])
    summary = validate(Pretending(5), cases, level="default", seed=0)
    (failure,) = summary.failures
    assert failure.case.count == 5
    assert failure.ncases == sum(case.count >= 5 for case in cases)
    assert not summary.succeeded
    text = report.as_text(summary, "1.0")
    assert "FAIL allreduce sum float32 ring" in text
    assert "count=5" in text
    assert "exact: at 5 [and 1 lines]" in text
    assert text.endswith("FAILED")


def test_cases_that_were_not_run_are_no_success():
    cases = enumerate_cases(4, dtypes=["float32"], ops=["sum"])
    summary = validate(Pretending(10**9, ends_after=3), cases, level="default", seed=0)
    assert (summary.not_run, summary.failures) == (len(cases) - 3, [])
    assert not summary.succeeded
    assert f"3 cases, 0 failed, {len(cases) - 3} not run" in report.as_text(summary, "1.0")


def test_only_some_failures_are_shrunk():
    runner = Pretending(1)
    cases = enumerate_cases(4, variants=["ring"])
    summary = validate(runner, cases, level="default", seed=0)
    assert len(summary.failures) == len(DEFINED)
    assert runner.runs < 12


def test_threads_run_cases_while_kernels_compile():
    cases = enumerate_cases(2, "quick", dtypes=["int16"], ops=["sum", "avg"])
    ticked = []
    runner = ThreadRunner(2, seed=3)
    summary = validate(runner, cases, level="quick", seed=3, tick=ticked.append)
    assert summary.succeeded
    assert ticked == cases
    assert runner.kernels > 1


def test_a_kernel_that_does_not_compile_fails_its_cases_only(monkeypatch, tmp_path):
    build = "gpuallreduce.validation.build"
    monkeypatch.setattr(f"{build}.compile_host", fail_for_max)
    monkeypatch.setattr(f"{build}.compile_host_together", lambda all: [*map(fail_for_max, all)])
    cases = [Case("allreduce", "int16", op, 5, "one_shot") for op in ("sum", "max")]
    first, second = ThreadRunner(2, seed=0).run(cases)
    assert first.findings == []
    assert second.findings == [Finding("raised", "CompileError: no max today")]


def fail_for_max(kernel):
    from gpuallreduce import CompileError, jit

    if "Max" in kernel.symbol:
        raise CompileError("no max today")
    return jit.compile_host(kernel)


def test_processes_make_the_same_checks():
    cases = [
        Case("allreduce", "float32", "sum", 100, variant, offset=1, in_place=False)
        for variant in ONE_NODE
    ]
    cases += [
        Case("reduce_scatter", "float32", "sum", 9, in_place=False),
        Case("barrier", "int8", "sum", 0),
    ]
    cases += [Case("allreduce", "float32", "band", 3, refused=True)]
    summary = validate(ProcessRunner(2, seed=5), cases, level="quick", seed=5)
    assert summary.succeeded, report.as_text(summary, "")
    assert len(summary.results) == len(cases)
    digests = [outcome.digest for _, outcome in summary.results]
    assert digests[0] is not None
    assert digests[6:] == [None] * 3


def test_outcomes_of_processes_are_compared_and_a_job_that_ends_early_is_told(monkeypatch):
    fine, other = Outcome(digest="aa"), Outcome([Finding("guard", "x")], digest="bb")

    def launch(nranks, command, **_):
        folder = command[-1]
        for rank, outcomes in enumerate([[fine, fine, fine], [fine, other]]):
            with open(f"{folder}/rank-{rank}.jsonl", "w") as file:
                file.writelines(runners.encode(outcome) + "\n" for outcome in outcomes)
                file.write('{"findings')
        return 139

    monkeypatch.setattr(runners, "launch", launch)
    cases = [dataclasses.replace(CASE, count=count) for count in range(6)]
    first, second, third = ProcessRunner(2, seed=0).run(cases)
    assert first.findings == []
    assert [f.check for f in second.findings] == ["guard", "ranks"]
    assert all(f.message.startswith("rank 1: ") for f in second.findings)
    assert "exit status 139; ranks [1] had not" in third.findings[0].message


def test_an_outcome_survives_its_line():
    outcome = Outcome([Finding("exact", "a\nb")], digest="cc", broken=True)
    outcome.deviation = outcome.deviation._replace(fraction=float("inf"))
    assert runners.decode(runners.encode(outcome)) == outcome


# ---- command -------------------------------------------------------------------------------------


def test_command_prints_a_table_and_succeeds(capsys):
    assert main(["validate", "-g", "2", "--quick", "-d", "int16,float32", "-o", "sum,avg,bor"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("# gpuallreduce ")
    assert lines[1].split()[:5] == ["#", "dtype", "sum", "avg", "bor"]
    assert lines[2].split() == ["int16", "ok", "refused", "ok", "exact"]
    assert lines[3].split()[:4] == ["float32", "ok", "ok", "refused"]
    assert lines[-1].endswith("OK")
    assert err == ""


@pytest.mark.parametrize("to_file", [True, False])
def test_command_writes_json(capsys, tmp_path, to_file):
    target = str(tmp_path / "result.json") if to_file else "-"
    options = ["-d", "int16", "-o", "sum,avg", "--algorithm", "one_shot,one_shot"]
    options += ["--json", target]
    assert main(["validate", "-g", "2", "--seed", "7", *options]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "result.json").read_text() if to_file else out)
    assert found["succeeded"] is True
    assert found["seed"] == 7
    assert found["allreduce"] == {"int16": {"sum": "ok", "avg": "refused"}}
    assert found["worst_error"]["int16"] == {"fraction": 0, "error": 0, "bound": 0}
    assert found["variants"]["one_shot"]["failed"] == 0
    assert found["failures"] == []
    counts = {int(each.split()[3]) for each in found["digests"]}
    assert counts >= {0, 1, 13, 127}
    assert len(set(found["digests"].values())) == len(counts)
    assert to_file == out.startswith("# gpuallreduce")


def test_command_fails_when_a_case_does(capsys, monkeypatch):
    monkeypatch.setattr(runners, "ThreadRunner", lambda nranks, seed: Pretending(3))
    assert main(["validate", "-d", "int8", "-o", "sum", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["succeeded"] is False
    assert found["allreduce"] == {"int8": {"sum": "FAIL"}}
    smallest = {failure["smallest"]["count"] for failure in found["failures"]}
    assert smallest == {3}
    assert found["failures"][0]["findings"][0]["check"] == "exact"


def test_json_of_an_unbounded_error_is_strict():
    outcome = Outcome([Finding("error", "x")])
    outcome.deviation = outcome.deviation._replace(fraction=float("inf"), error=float("nan"))
    summary = Summary("", "quick", 0, [(CASE, outcome)], 0, [], 0.0)
    text = json.dumps(report.as_json(summary, "1"), allow_nan=False)
    assert json.loads(text)["worst_error"]["float32"]["fraction"] == "inf"


@pytest.mark.parametrize(
    "options",
    [["-d", "float99"], ["-o", "plus"], ["--algorithm", "tree"], ["-g", "0"], ["--seed", "-1"]],
)
def test_command_refuses_what_does_not_exist(capsys, options):
    with pytest.raises(SystemExit) as caught:
        main(["validate", *options])
    assert caught.value.code == 2
    assert "error: argument" in capsys.readouterr().err
