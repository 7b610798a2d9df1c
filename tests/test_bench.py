"""The benchmark: what it accepts, how it counts, what it prints and writes. No time is asserted."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpuallreduce.bench import (
    allreduce_perf,
    document,
    measure,
    membw,
    places,
    plot,
    preamble,
    report,
)
from gpuallreduce.bench.arguments import add_arguments, options_of, to_argv
from gpuallreduce.bench.buffers import PERIOD, Buffers, Pattern, expected
from gpuallreduce.bench.measure import Settings, Timing
from gpuallreduce.bench.membw import MemoryLimits
from gpuallreduce.bench.options import Options, parse_bytes, sizes
from gpuallreduce.bench.ranks import Ranks
from gpuallreduce.bench.report import Device, Mode, Row, float_text
from gpuallreduce.bench.start import mpirun_command, must_start
from gpuallreduce.bench.sweep import defined_pairs

from gpuallreduce import Communicator
from gpuallreduce.bootstrap.python import module_command
from gpuallreduce.cli import bench
from gpuallreduce.errors import InvalidArgument, NotSupported
from gpuallreduce.inputs import exact_inputs
from gpuallreduce.types import DTYPES, OPS, Dtype

ROOT = Path(__file__).parents[1]
LIMIT = 60.0  # no run here comes near it
QUICK = ["-n", "2", "-w", "1", "--rounds", "2", "--round-ms", "0.01"]


def parse(*argv: str) -> Options:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return options_of(parser.parse_args(argv))


def timing(time_us: float, latency_us: float | None = None) -> Timing:
    return Timing(time_us, (time_us,), 20, latency_us, latency_us, latency_us)


def mode(time_us: float, nwrong: int | None = 0, **peers: Timing | None) -> Mode:
    wrong = dict.fromkeys(peers, 0)
    return Mode(timing(time_us, 2 * time_us), nwrong, "ring", "staged", "rank", dict(peers), wrong)


def row(nbytes: int, out: Mode, into: Mode, **changed: Any) -> Row:
    fields = {"dtype": "float", "op": "sum", "nranks": 4, **changed}
    return Row(nbytes=nbytes, count=nbytes // 4, out_of_place=out, in_place=into, **fields)


ROWS = [
    row(1024, mode(0.7), mode(12.345)),
    row(128 << 20, mode(123456.7, 3), mode(99999999.0, None)),
]


def data_lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


# ---- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0.0, 7, "   0.00"),
        (0.004, 7, "   0.00"),
        (9.999, 6, " 10.00"),
        (123.456, 6, "123.46"),
        (999.994, 6, "999.99"),
        (999.996, 6, "1000.0"),
        (9999.94, 6, "9999.9"),
        (9999.96, 6, " 10000"),
        (123456.4, 6, "123456"),
        (1234567.0, 6, " 1e+06"),
        (9999.99, 7, "9999.99"),
        (9999.996, 7, "10000.0"),
        (123456.7, 7, " 123457"),
        (1234567.4, 7, "1234567"),
        (12345678.0, 7, "1.2e+07"),
    ],
)
def test_numbers_keep_their_width_with_fewer_decimals_then_an_exponent(
    value: float, width: int, text: str
) -> None:
    assert float_text(value, width) == text
    assert len(text) == width


@pytest.mark.parametrize(
    ("collective", "nranks", "factor"),
    [
        ("all_reduce", 1, 0.0),
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("reduce_scatter", 4, 0.75),
        ("all_gather", 4, 0.75),
        ("broadcast", 5, 1.0),
        ("reduce", 5, 1.0),
    ],
)
def test_busbw_factors_are_those_of_nccl_tests(collective: str, nranks: int, factor: float) -> None:
    assert measure.busbw_factor(collective, nranks) == factor


def test_rates_count_bytes_of_one_rank_in_units_of_1e9() -> None:
    one = row(1 << 20, mode(1000.0), mode(500.0))
    assert one.algbw_gbps(1000.0) == pytest.approx(1.048576)
    assert one.busbw_gbps(1000.0) == pytest.approx(1.048576 * 1.5)
    assert report.useful_gbps(one, 1000.0) == pytest.approx(2 * 4 * 1.048576)
    assert report.average_busbw_gbps([one]) == pytest.approx(1.048576 * 1.5 * 1.5)
    assert report.average_busbw_gbps([]) == 0.0


def test_the_slowest_rank_and_the_median_count() -> None:
    found = measure.summary([3e-6, 1e-6, 2e-6], 40, [5e-6, 1e-6, 9e-6])
    assert found.time_us == pytest.approx(2.0)
    assert found.rounds_us == pytest.approx((3.0, 1.0, 2.0))
    assert (found.latency_us, found.latency_min_us) == pytest.approx((5.0, 1.0))
    assert found.latency_p99_us == pytest.approx(9.0, rel=0.02)
    assert measure.summary([1e-6], 20, []).latency_us is None


def test_a_round_is_a_multiple_of_the_iterations_that_lasts_long_enough() -> None:
    settings = Settings(warmup=0, iterations=20, rounds=1, round_s=0.005, latency=False)
    assert measure.calls_per_round(1.0, settings) == 20
    assert measure.calls_per_round(1e-4, settings) == 60
    assert measure.calls_per_round(0.0, settings) % 20 == 0
    assert measure.latency_calls(1.0, settings) == measure.LATENCY_CALLS[0]
    assert measure.latency_calls(1e-9, settings) == measure.LATENCY_CALLS[1]


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("8", 8), ("4k", 4096), ("128M", 128 << 20), ("1G", 1 << 30), ("1.5K", 1536)],
)
def test_sizes_are_binary(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "1KB", "1KiB", "1e6", "0x10", "1.3K", " 8"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(repr(text))):
        parse_bytes(text)


def test_sizes_grow_by_a_factor_or_by_a_step_and_end_within_the_range() -> None:
    assert sizes(parse("-b", "8", "-e", "100", "-f", "3")) == [8, 24, 72]
    assert sizes(parse("-b", "1M", "-e", "2.5M", "-i", "512K")) == [
        1 << 20,
        3 << 19,
        2 << 20,
        5 << 19,
    ]
    assert sizes(parse("-b", "31M")) == [31 << 20, 32 << 20]
    assert sizes(parse("-b", "0", "-e", "0")) == [0]
    assert sizes(Options()) == [32 << 20]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("-b 64M", "larger than -e"),
        ("-f 2 -i 8", "-f and -i"),
        ("-b 0 -e 8 -f 2", "never grows"),
        ("-G 1", "no CUDA graphs"),
        ("--peer nccl", "use it with --device cuda"),
        ("--device cuda --peer mpi", "GPUs have --peer nccl"),
        ("--device cuda --devices host,host", "leave --device out"),
        ("--devices cuda:0,cuda:1 -g 2", "leave -g out"),
        ("--devices cuda:0,cuda:1 --processes 3", "one for each process"),
        ("-g 2 --processes 2", "--processes N alone"),
        ("-g 2 --peer mpi", "each rank a process"),
        ("-g 2 --nodes 2,2", "--nodes 2,2 says how many"),
        ("--processes 2 --nodes 2,2", "has 4 ranks"),
        ("--devices cuda:0,cuda:0 --nodes 2,1", "2 devices, and --nodes 2,1 has 3"),
        ("--plot picture.svg", "must end in .png"),
    ],
)
def test_options_that_contradict_each_other_are_refused(argv: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse(*argv.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("-b 1X", "powers of 1024"),
        ("-f 1", "at least 2"),
        ("-i 0", "never ends"),
        ("-n 0", "at least 1"),
        ("-c -1", "at least 0"),
        ("-T 0", "above 0"),
        ("-T nan", "above 0"),
        ("-o mulsum", "bxor, all"),
        ("-d quad", "bfloat16"),
        ("--algorithm tree", "two_shot"),
        ("--order none", "rank"),
        ("--peer gloo", "mpi"),
        ("--device tpu", "cuda"),
        ("--devices cuda:0,host", "same kind"),
        ("--nodes 4,0", "such as 4,4"),
        ("--nodes 4,", "such as 4,4"),
        ("--proc 2", "unrecognized"),
    ],
)
def test_an_option_that_makes_no_sense_says_what_does(
    argv: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*argv.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "-b 8 -e 1G -f 2 -n 5 -w 0 -c 2 -o all -d all -T 2.5",
        "-i 4K --processes 3 --algorithm ring --order any --symmetric --latency --rounds 7",
        "-d half -o max --peer mpi --round-ms 0.5 -J a.json --plot b.png",
        "-g 4 -d float8_e4m3fn -G 0",
        "--device cuda --processes 2 --peer nccl -G 3",
        "--devices cuda:1,cuda:1",
        "--nodes 3,5 --peer mpi",
    ],
)
def test_a_launched_process_gets_the_same_options(argv: str) -> None:
    options = parse(*argv.split())
    assert parse(*to_argv(options)) == options


def test_types_have_the_names_of_nccl_tests_and_ours() -> None:
    assert parse("-d", "half").dtypes == parse("-d", "float16").dtypes == ("float16",)
    assert parse("-d", "f8e4m3").dtypes == parse("-d", "float8_e4m3fn").dtypes
    assert parse("-d", "all").dtypes == tuple(DTYPES)
    assert parse("-o", "all").ops == tuple(OPS)


def test_undefined_pairs_are_skipped_by_name_and_refused_if_nothing_is_left() -> None:
    pairs, skipped = defined_pairs(parse("-d", "int32", "-o", "all"))
    assert len(pairs) == len(OPS) - 1
    assert skipped == ["int32 avg"]
    with pytest.raises(NotSupported, match="avg of int32 is not defined"):
        defined_pairs(parse("-d", "int32", "-o", "avg"))


# ---- table and JSON ---------------------------------------------------------------------------

GOLDEN = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong     algorithm
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1     0.70    1.46    2.19       0    12.35    0.08    0.12       0          ring
   134217728      33554432     float     sum      -1   123457    1.09    1.63       3  1.0e+08    0.00    0.00     N/A          ring
# Out of bounds values : 1 FAILED
# Avg bus bandwidth    : 0.987867
#
# Collective test concluded: all_reduce_perf
"""  # noqa: E501

GOLDEN_PREAMBLE = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid     12 on       node device  0 [0000:00:00] host cpu
#  Rank  1 Group  0 Pid     12 on       node device  1 [0000:00:00] host cpu
"""  # noqa: E501
DEVICES = [Device(rank, 12, "node", rank, "host cpu") for rank in range(2)]


def test_the_table_is_that_of_nccl_tests_with_the_algorithm_at_the_end() -> None:
    columns = report.columns(latency=False, peers=(), memory_limit_gbps=None)
    lines = report.heading(columns) + [report.row_text(one, columns) for one in ROWS]
    assert lines + report.footer(ROWS) == GOLDEN.splitlines()


def test_the_preamble_is_that_of_nccl_tests() -> None:
    version, *lines = preamble.preamble(parse("-b", "8", "-e", "1K", "-f", "2"), DEVICES)
    assert version.startswith("# gpuallreduce version ")
    assert lines == GOLDEN_PREAMBLE.splitlines()
    by_step = preamble.preamble(parse("-i", "4K"), DEVICES)
    assert "step: 4096(bytes)" in by_step[2]


def test_further_columns_come_after_the_algorithm_and_line_up() -> None:
    rows = [
        row(4096, mode(2.0, mpi=timing(3.0, 10.0)), mode(4.0, mpi=timing(2.0, 4.0))),
        row(8192, mode(2.0, mpi=None), mode(4.0, mpi=None), dtype="bfloat16"),
    ]
    columns = report.columns(latency=True, peers=["mpi"], memory_limit_gbps=32.768)
    heading = report.heading(columns)
    texts = [report.row_text(one, columns) for one in rows]
    text = "ring 4.00 8.00 50.0 25.0 3.00 1.50 2.00 0.50 10.00 2.50 4.00 0.50"
    assert texts[0].split()[13:] == text.split()
    assert texts[1].split()[18:] == ["N/A"] * 8
    plain = report.columns(latency=False, peers=(), memory_limit_gbps=None)
    assert texts[0].startswith(report.row_text(rows[0], plain))
    assert len(texts[0]) == len(texts[1]) == len(heading[2])


def test_several_nodes_have_what_is_sent_in_and_between_them_after_the_algorithm() -> None:
    sent = {"bytes_within": 6000, "bytes_between": 3000}
    one = row(4096, replace(mode(2.0), **sent), replace(mode(4.0), **sent))
    columns = report.columns(latency=False, peers=(), memory_limit_gbps=None, nodes=2)
    text, heading = report.row_text(one, columns), report.heading(columns)
    assert text.split()[14:] == ["6000", "3000", "3.00", "1.50", "1.50", "0.75"]
    assert heading[2].split()[-6:] == ["within", "between"] * 3
    assert len(text) == len(heading[2])


def test_json_has_the_keys_of_nccl_tests() -> None:
    options = parse("-b", "8", "-e", "1K", "-f", "2")
    limits = MemoryLimits(10.0, 9.0, 64 << 20)
    facts = document.Facts({"OMP_X": "1", "TOKEN": "secret"}, "then", {"nranks": 2}, limits)
    rows = [row(64, mode(1.0, mpi=timing(3.0, 6.0)), mode(2.0, None, mpi=None))]
    result = document.document(options, rows, DEVICES, facts)
    keys = "version start_time args env nccl_version config devices results out_of_bounds"
    more = "average_bus_bandwidth errors gpuallreduce end_time"
    assert list(result) == [*keys.split(), *more.split()]
    assert result["env"] == ["OMP_X=1"]
    keys = "nthreads ngpus minimum_bytes maximum_bytes step_factor warmup_iters iterations"
    more = "aggregated_iterations validation graph blocking_collectives parallel_init devices"
    assert list(result["config"]) == [*keys.split(), *more.split()]
    keys = "rank group pid hostname device device_hex device_info"
    assert list(result["devices"][0]) == keys.split()
    (only,) = result["results"]
    assert " ".join(only) == "size count type redop root out_of_place in_place"
    assert list(only["out_of_place"])[:3] == ["time", "alg_bw", "bus_bw"]
    assert only["out_of_place"]["nwrong"] == 0
    assert only["in_place"]["nwrong"] is None
    assert only["out_of_place"]["fraction_of_add_limit"] == pytest.approx(0.0512)
    assert only["out_of_place"]["peers"]["mpi"]["time_ratio"] == pytest.approx(3.0)
    assert only["in_place"]["peers"] == {"mpi": None}
    assert result["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert result["average_bus_bandwidth"]["okay"] == "unchecked"
    assert result["gpuallreduce"]["memory_limits"]["add_gbps"] == 10.0
    assert json.loads(json.dumps(result)) == result
    assert "step_bytes" in document.document(Options(), rows, DEVICES, facts)["config"]


def test_json_never_replaces_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "x.json")
    names = [document.write(path, {"number": number}) for number in range(3)]
    assert names == [path, f"{path}.0", f"{path}.1"]
    assert [json.loads(Path(name).read_text())["number"] for name in names] == [0, 1, 2]
    with pytest.raises(InvalidArgument, match="not a folder"):
        document.check_folder(str(tmp_path / "none" / "x.json"), "-J")


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row(1 << k, mode(1.0 * k, mpi=timing(2.0, 3.0)), mode(k + 0.5, mpi=None))
        for k in range(3, 20)
    ]
    rows += [row(0, mode(1.0), mode(1.0)), row(64, mode(1.0), mode(1.0), op="max")]
    path = tmp_path / "x.png"
    plot.draw(str(path), rows, subtitle="here", limits=MemoryLimits(10.0, 9.0, 64 << 20))
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    plot.draw(str(path), [], subtitle="nothing")
    assert [plot.byte_text(n) for n in (8, 1536, 1 << 20)] == ["8 B", "1.5 KiB", "1 MiB"]


# ---- inputs and checks --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_the_expected_result_does_not_depend_on_the_order(dtype: Dtype) -> None:
    for op in OPS.values():
        if dtype.kind in op.kinds:
            inputs = exact_inputs(dtype, op, 1000, 5, seed=5)
            kept = [x.copy() for x in inputs]
            wanted = expected(inputs, dtype, op)
            assert wanted.dtype == dtype.numpy
            assert expected(inputs[::-1], dtype, op).tobytes() == wanted.tobytes(), op.name
            assert all(x.tobytes() == y.tobytes() for x, y in zip(inputs, kept, strict=True))


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("bool", "sum"), ("int8", "prod"), ("float16", "avg"), ("complex64", "prod")],
)
def test_the_expected_result_is_what_the_kernels_give(dtype: str, op: str) -> None:
    inputs = exact_inputs(DTYPES[dtype], OPS[op], 100, 2, seed=5)
    wanted = expected(inputs, DTYPES[dtype], OPS[op])
    with Communicator(["host"] * 2) as comm:
        results = comm.allreduce([x.copy() for x in inputs], op=op)
    assert all(x.tobytes() == wanted.tobytes() for x in results)


def test_a_pattern_sees_one_wrong_element_in_any_period_and_a_changed_input() -> None:
    with Communicator(["host"] * 2) as comm:
        place = places.place_of(comm)
    pattern = Pattern(DTYPES["int8"], OPS["sum"], 2 * PERIOD + 10, 2, 1, place)
    arrays = [np.empty(2 * PERIOD + 10, np.int8) for _ in range(2)]
    for rank, array in enumerate(arrays):
        pattern.fill(array, rank)
    result = arrays[0] + arrays[1]
    assert pattern.wrong_result(result) == 0
    result[[0, PERIOD, -1]] += 1
    assert pattern.wrong_result(result) == 3
    assert pattern.wrong_input(arrays[1], 1) == 0
    arrays[1][PERIOD + 5] ^= 1
    assert pattern.wrong_input(arrays[1], 1) == 1


def test_arrays_that_the_machine_cannot_hold_are_refused() -> None:
    with (
        Communicator(["host"] * 2) as comm,
        pytest.raises(NotSupported, match=r"lower -e or the number"),
    ):
        Buffers(Ranks(comm), 1 << 50, symmetric=False)


def test_notes_say_what_was_skipped_and_how_to_read_the_figures() -> None:
    with Communicator(["host"] * 2) as comm:
        lines = preamble.notes(
            parse("--symmetric", "--latency"),
            Ranks(comm),
            peers={"mpi": "Some MPI"},
            limits=MemoryLimits(10.0, 9.0, 64 << 20),
            skipped=["int8 avg"],
        )
    assert all(line.startswith("#") for line in lines)
    for part in (
        "HOST DEVICES: memory copies, not NVLink",
        "median of 5 rounds",
        "mpi: Some MPI",
        "add a=b+c 10.0 GB/s",
        "2*p*n over time (p=2",
        "Skipped, not defined: int8 avg",
    ):
        assert part in "\n".join(lines)


def test_memory_limits_are_measured_by_threads_and_are_plausible() -> None:
    with Communicator(["host"] * 2) as comm:
        limits = membw.measure_memory(Ranks(comm), array_bytes=1 << 16)
    assert all(math.isfinite(x) and x > 0 for x in (limits.add_gbps, limits.copy_gbps))
    assert limits.array_bytes == 1 << 16


# ---- starting -----------------------------------------------------------------------------------


def test_mpirun_binds_where_there_are_enough_cores() -> None:
    bound = ["mpirun", "-n", "4", "--bind-to", "core"]
    assert mpirun_command("mpirun", 4, 4, open_mpi=True) == bound
    crowded = mpirun_command("mpirun", 5, 4, open_mpi=True)
    assert crowded[3:] == ["--oversubscribe", "--bind-to", "none"]
    assert mpirun_command("mpirun", 4, 4, open_mpi=False)[3:] == ["-bind-to", "core"]
    assert mpirun_command("mpirun", 5, 4, open_mpi=False)[3:] == []


OURS = {
    "GPUALLREDUCE_RANK": "0",
    "GPUALLREDUCE_NRANKS": "2",
    "GPUALLREDUCE_ADDRESS": "unix:x",
    "GPUALLREDUCE_SECRET": "y",
}


def test_processes_are_started_once() -> None:
    assert must_start(parse("--processes", "2"), {})
    assert must_start(parse("--peer", "mpi"), {})
    assert must_start(parse("--nodes", "2,2"), {})
    assert not must_start(parse("--nodes", "1,1"), OURS)
    assert not must_start(parse(), {})
    assert not must_start(parse("--processes", "2"), OURS)
    for argv, message in (
        ("--processes 3", "started 2"),
        ("--nodes 2,1", "has 3 ranks, but gpuallreduce run started 2"),
        ("-g 2", "leave -g out"),
        ("--peer mpi", "leave the launcher out"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            must_start(parse(*argv.split()), OURS)


@pytest.mark.parametrize("argv", ["--peer mpi", "--nodes 2,2"])
@pytest.mark.parametrize("missing", ["mpirun", "mpi4py"])
def test_a_missing_peer_says_what_to_install(
    argv: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = None if missing == "mpirun" else "/somewhere/mpirun"
    spec = None if missing == "mpi4py" else object()
    monkeypatch.setattr("shutil.which", lambda name: found)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    for name in list(os.environ):
        if name.startswith("OMPI_COMM"):
            monkeypatch.delenv(name)
    assert allreduce_perf.main(argv.split()) == 2
    error = capsys.readouterr().err
    assert missing in error
    assert "pip install mpi4py" in error


# ---- from end to end ----------------------------------------------------------------------------


class Faulty(Communicator):
    """Gives one wrong element on the last rank, out of place."""

    def allreduce(self, arrays: Any, out: Any = None, **options: Any) -> Any:
        result = super().allreduce(arrays, out, **options)
        if out is not None and out[-1].size:
            out[-1][out[-1].size // 2] += 1
        return result


def test_a_wrong_value_is_counted_and_makes_the_status_1(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    options = parse("-b", "64", "-e", "256", "-f", "4", "-J", str(path), *QUICK)
    text = io.StringIO()
    assert allreduce_perf.run(options, connect=lambda _: Faulty(["host"] * 2), out=text) == 1
    assert [(line[8], line[12]) for line in data_lines(text.getvalue())] == [("1", "0")] * 2
    assert "# Out of bounds values : 2 FAILED" in text.getvalue()
    result = json.loads(path.read_text())
    assert result["out_of_bounds"] == {"count": 2, "okay": "false"}
    assert result["results"][0]["out_of_place"]["nwrong"] == 1


def test_without_checks_nothing_is_claimed() -> None:
    text = io.StringIO()
    options = parse("-b", "64", "-e", "64", "-c", "0", *QUICK)
    assert allreduce_perf.run(options, connect=lambda _: Faulty(["host"] * 2), out=text) == 0
    assert data_lines(text.getvalue())[0][8] == "N/A"


def test_the_command_measures_threads_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    path = tmp_path / "x.json"
    line = "bench -g 2 -b 4 -e 64K -f 128 -d bfloat16 --symmetric --latency -c 2"
    argv = line.split()
    args = parser.parse_args([*argv, "-J", str(path), *QUICK])
    assert args.main(args) == 0
    captured = capsys.readouterr()
    lines = data_lines(captured.out)
    assert [int(line[0]) for line in lines] == [4, 512, 65536]
    assert {tuple(line[2:5]) for line in lines} == {("bfloat16", "sum", "-1")}
    assert "# HOST DEVICES: memory copies, not NVLink" in captured.out
    assert "# Out of bounds values : 0 OK" in captured.out
    assert captured.err == ""  # no progress where nobody watches
    results = json.loads(path.read_text())["results"]
    assert len(results) == 3
    assert results[-1]["in_place"]["latency_us"] > 0


def test_sizes_that_hold_no_element_are_rows_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert allreduce_perf.main(["-g", "2", "-b", "2", "-e", "6", "-i", "2", *QUICK]) == 0
    assert [line[:2] for line in data_lines(capsys.readouterr().out)] == [
        ["0", "0"],
        ["4", "1"],
        ["4", "1"],
    ]


def run_module(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if "RANK" not in name}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        module_command("gpuallreduce.bench.allreduce_perf", *argv, *QUICK),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=environ,
    )


def test_processes_of_our_launcher_measure_and_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "x.json", tmp_path / "x.png"
    argv = ["-b", "1K", "-e", "256K", "-f", "16", "--processes", "2", "--order", "rank"]
    done = run_module([*argv, "-J", str(path), "--plot", str(picture)])
    assert done.returncode == 0, done.stderr
    assert [int(line[0]) for line in data_lines(done.stdout)] == [1024, 16384, 262144]
    assert done.stderr == ""
    result = json.loads(path.read_text())
    assert len({device["pid"] for device in result["devices"]}) == 2
    assert result["gpuallreduce"]["processes"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nodes_of_one_machine_are_measured_with_what_is_sent_in_and_between_them(
    tmp_path: Path,
) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    path = tmp_path / "x.json"
    argv = ["-b", "256K", "-e", "256K", "--nodes", "2,2", "--peer", "mpi"]
    done = run_module([*argv, "-J", str(path)])
    assert done.returncode == 0, done.stderr
    assert "\n# nodes 2 x 2: node0 2 ranks, node1 2 ranks\n" in done.stdout
    assert "\n# transport: MPI between 2 nodes" in done.stdout
    lines = data_lines(done.stdout)
    assert [int(line[0]) for line in lines] == [262144]
    result = json.loads(path.read_text())
    assert [node["nranks"] for node in result["gpuallreduce"]["nodes"]] == [2, 2]
    for line, each in zip(lines, result["results"], strict=True):
        nbytes = each["size"]
        # Half of the array to the other rank, half of the result to it; half to the other node.
        assert [int(word) for word in line[14:16]] == [nbytes, nbytes // 2]
        assert len(line) == 13 + 1 + 6 + 4
        for side in ("out_of_place", "in_place"):
            found = each[side]
            assert found["nwrong"] == found["peers"]["mpi"]["nwrong"] == 0
            assert (found["bytes_within"], found["bytes_between"]) == (nbytes, nbytes // 2)
            assert found["within_gbps"] == pytest.approx(nbytes / 1e3 / found["time"])
            assert found["between_gbps"] == pytest.approx(nbytes / 2e3 / found["time"])


def test_mpi_is_measured_in_the_same_processes(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    path = tmp_path / "x.json"
    argv = ["-b", "64", "-e", "64K", "-f", "1024", "--processes", "2", "--peer", "mpi"]
    done = run_module([*argv, "--latency", "-J", str(path)])
    assert done.returncode == 0, done.stderr
    lines = data_lines(done.stdout)
    assert [int(line[0]) for line in lines] == [64, 65536]
    assert {len(line) for line in lines} == {13 + 3 + 8}
    result = json.loads(path.read_text())
    assert "MPI" in result["gpuallreduce"]["peers"]["mpi"]
    for each in result["results"]:
        for side in ("out_of_place", "in_place"):
            peer = each[side]["peers"]["mpi"]
            assert peer["nwrong"] == each[side]["nwrong"] == 0
            assert peer["time_ratio"] == pytest.approx(peer["time"] / each[side]["time"])
    assert "# Memory limits, all ranks at once, 64 MiB arrays" in done.stdout
