"""The bandwidth tests: which copies a cell has, what is printed, that data are verified, that
nothing can hang. No rate is asserted.

Knows nothing of how kernels are written. What needs a GPU runs on emulated ones, in processes of
their own, with small buffers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulated_gpu.child import in_child
from gpuallreduce.bench import bandwidth, gpu_buffers, gpu_copies, gpu_latency, roofline
from gpuallreduce.bench.bandwidth_limits import Limits
from gpuallreduce.bench.bandwidth_report import Matrix, Outcome, document, lines_of, matrix_lines
from gpuallreduce.bench.bandwidth_run import Bench, Settings
from gpuallreduce.bench.bandwidth_tests import ROOFLINE, TESTS, Copy, chosen_tests, possible
from gpuallreduce.bench.gpu_gate import Gate
from gpuallreduce.bench.inspect_kernels import ARCHS, cuobjdump, inspect
from gpuallreduce.bench.machine_rules import resource_faults
from test_kernels_compile import HOST_COMPILERS, WARNINGS, need, need_nvrtc

from gpuallreduce import Communicator, jit
from gpuallreduce.errors import DeviceError, InvalidArgument
from gpuallreduce.links import GpuFacts, Machine

needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="cupy is not installed"
)
MIB = 1 << 20
QUICK = ["-b", "1", "-i", "2", "--loopCount", "1"]
# nvbandwidth 0.8, in its order.
NVBANDWIDTH = [
    "host_to_device_memcpy_ce",
    "device_to_host_memcpy_ce",
    "host_to_device_bidirectional_memcpy_ce",
    "device_to_host_bidirectional_memcpy_ce",
    "device_to_device_memcpy_read_ce",
    "device_to_device_memcpy_write_ce",
    "device_to_device_bidirectional_memcpy_read_ce",
    "device_to_device_bidirectional_memcpy_write_ce",
    "all_to_host_memcpy_ce",
    "all_to_host_bidirectional_memcpy_ce",
    "host_to_all_memcpy_ce",
    "host_to_all_bidirectional_memcpy_ce",
    "all_to_one_write_ce",
    "all_to_one_read_ce",
    "one_to_all_write_ce",
    "one_to_all_read_ce",
    "host_to_device_memcpy_sm",
    "device_to_host_memcpy_sm",
    "host_to_device_bidirectional_memcpy_sm",
    "device_to_host_bidirectional_memcpy_sm",
    "device_to_device_memcpy_read_sm",
    "device_to_device_memcpy_write_sm",
    "device_to_device_bidirectional_memcpy_read_sm",
    "device_to_device_bidirectional_memcpy_write_sm",
    "all_to_host_memcpy_sm",
    "all_to_host_bidirectional_memcpy_sm",
    "host_to_all_memcpy_sm",
    "host_to_all_bidirectional_memcpy_sm",
    "all_to_one_write_sm",
    "all_to_one_read_sm",
    "one_to_all_write_sm",
    "one_to_all_read_sm",
    "host_device_latency_sm",
    "device_to_device_latency_sm",
    "device_local_copy",
]
KERNELS = (
    gpu_copies.COPY,
    gpu_buffers.WRITE_PATTERN,
    gpu_buffers.CHECK_PATTERN,
    gpu_latency.CHASE,
    gpu_buffers.kernel_of("hold", "GarHoldArgs"),
)


def run(*argv: str) -> tuple[int, str]:
    """Exit status and standard output of the command in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = bandwidth.main([*QUICK, *argv])
    return status, out.getvalue()


def run_json(*argv: str) -> dict[str, Any]:
    """The tests of a successful run with -j, by name."""
    status, out = run("-j", *argv)
    assert status == 0, out
    return {test["name"]: test for test in json.loads(out)["nvbandwidth"]["testcases"]}


# ---- which copies there are -------------------------------------------------------------------


def test_names_and_numbers_are_those_of_nvbandwidth() -> None:
    assert list(TESTS) == NVBANDWIDTH
    numbers = [str(number) for number in range(len(NVBANDWIDTH))]
    assert chosen_tests(numbers) == NVBANDWIDTH
    assert chosen_tests([]) == NVBANDWIDTH
    assert chosen_tests([str(len(NVBANDWIDTH))]) == [ROOFLINE]


@pytest.mark.parametrize("asked", ["device_to_device", "36", "-1", ""])
def test_a_test_that_does_not_exist_is_refused(asked: str) -> None:
    with pytest.raises(InvalidArgument, match="there is no such test; -l lists"):
        chosen_tests([asked])


def copies(name: str, row: int, column: int, gpus: int = 4) -> list[Copy]:
    return list(TESTS[name].cell(row, column, gpus))


@pytest.mark.parametrize("engine", ["ce", "sm"])
def test_a_read_is_run_by_the_target_and_a_write_by_the_source(engine: str) -> None:
    for row, column in itertools.permutations(range(4), 2):
        (read,) = copies(f"device_to_device_memcpy_read_{engine}", row, column)
        assert read == Copy(source=column, target=row, runner=row)
        (write,) = copies(f"device_to_device_memcpy_write_{engine}", row, column)
        assert write == Copy(source=row, target=column, runner=row)
        for verb in ("read", "write"):
            both = copies(f"device_to_device_bidirectional_memcpy_{verb}_{engine}", row, column)
            assert {copy.between for copy in both} == {(row, column), (column, row)}
            for copy in both:
                assert copy.runner == (copy.target if verb == "read" else copy.source)
    assert not copies(f"device_to_device_memcpy_read_{engine}", 2, 2)


@pytest.mark.parametrize(
    ("name", "inbound", "peers_run"),
    [
        ("all_to_one_write", True, True),
        ("all_to_one_read", False, True),
        ("one_to_all_write", False, False),
        ("one_to_all_read", True, False),
    ],
)
def test_stars_join_one_gpu_with_all_others(name: str, inbound: bool, peers_run: bool) -> None:
    found = copies(f"{name}_sm", 0, 2)
    assert {copy.target if inbound else copy.source for copy in found} == {2}
    assert {copy.source if inbound else copy.target for copy in found} == {0, 1, 3}
    for copy in found:
        reads, runs = "read" in name, copy.runner
        assert runs == (copy.target if reads else copy.source)
        assert (runs != 2) == peers_run


@pytest.mark.parametrize("name", [name for name in TESTS if "host_to" in name or "to_host" in name])
def test_the_copy_that_counts_comes_first_and_ends_before_those_that_disturb(name: str) -> None:
    first, *others = copies(name, 0, 1)
    to_gpu = name.startswith("host_to")
    assert first == Copy(None if to_gpu else 1, 1 if to_gpu else None, runner=1)
    assert all(other.share == 2 for other in others)
    opposite = [other for other in others if (other.source is None) != to_gpu]
    assert bool(opposite) == ("bidirectional" in name)
    assert {other.runner for other in others} - {1} == ({0, 2, 3} if "all" in name else set())


def test_kernels_need_peer_access_and_copy_engines_do_not() -> None:
    peers = {(0, 1), (1, 0)}
    for name, test in TESTS.items():
        found = possible(test, 0, 2, 3, peers)
        if not name.startswith("device_to_device"):
            continue
        assert bool(found) == (test.engine == "ce"), name
        assert possible(test, 0, 1, 3, peers)
    star = possible(TESTS["all_to_one_write_sm"], 0, 0, 3, peers)
    assert [copy.source for copy in star] == [1]


# ---- what is printed --------------------------------------------------------------------------

PAIR = Matrix(
    key="device_to_device_memcpy_write_ce",
    title="memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)",
    columns=("0", "1"),
    rows=("0", "1"),
    cells=((None, 276.07), (276.36, None)),
)
PRINTED = """\
memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    276.07
 1    276.36       N/A

SUM device_to_device_memcpy_write_ce 552.43
"""


def test_a_matrix_is_printed_as_nvbandwidth_prints_it() -> None:
    assert "\n".join(matrix_lines(PAIR)) == PRINTED


def test_limits_and_fractions_stand_below_in_lines_of_their_own() -> None:
    limits = ((None, 300.0), (None, None))
    with_limits = Matrix(**{**vars(PAIR), "limits": limits, "limits_of": "rate of the link"})
    lines = matrix_lines(with_limits)
    assert "\n".join(line for line in lines if not line.startswith("#")).strip() == PRINTED.strip()
    assert [line for line in lines if line.startswith("#")] == [
        "# rate of the link (GB/s)",
        "#            0         1",
        "#  0       N/A    300.00",
        "#  1   unknown       N/A",
        "# fraction reached",
        "#            0         1",
        "#  0       N/A      0.92",
        "#  1   unknown       N/A",
    ]


def test_json_has_nvbandwidths_keys_and_rows_of_several_matrices_below_each_other() -> None:
    second = Matrix(**{**vars(PAIR), "key": "x_total", "cells": ((None, 1.5), (2.0, None))})
    found = document(
        [Outcome("x", "Passed", matrices=(PAIR, second)), Outcome("y", "Waived", "no peer")],
        {"version": "0.8"},
        {},
    )["nvbandwidth"]
    assert found["version"] == "0.8"
    x, y = found["testcases"]
    assert x["name"] == "x"
    assert x["status"] == "Passed"
    assert x["bandwidth_description"] == second.title
    expected = [["N/A", "276.07"], ["276.36", "N/A"], ["N/A", "1.5"], ["2", "N/A"]]
    assert x["bandwidth_matrix"] == expected
    assert x["sum"] == 3.5
    assert y["status"] == "Waived"
    assert "bandwidth_matrix" not in y


def test_a_failed_test_says_why() -> None:
    outcome = Outcome("x", "Error", "8 bytes differ")
    assert lines_of(outcome) == ["Error: x: 8 bytes differ", ""]
    assert document([outcome], {}, {})["nvbandwidth"]["testcases"][0]["error"] == "8 bytes differ"


def limits_of_switch(gpus: int) -> Limits:
    facts = [
        GpuFacts(f"GPU-{i}", nvlink_version=4, nvlinks=18, switch_links=18, pcie_generation=5)
        for i in range(gpus)
    ]
    nothing = tuple((None,) * gpus for _ in range(gpus))
    return Limits(Machine(tuple(facts), nothing, nothing), [3000.0] * gpus)


@pytest.mark.parametrize(
    ("name", "part", "limit"),
    [
        ("device_to_device_memcpy_read_sm", "", 450.0),
        ("device_to_device_bidirectional_memcpy_read_sm", "read1", 450.0),
        ("device_to_device_bidirectional_memcpy_read_sm", "total", 900.0),
        ("all_to_one_write_ce", "", 450.0),  # three peers, and no more links than to one
        ("device_local_copy", "", 1500.0),
        ("host_to_device_memcpy_ce", "", None),  # the width is not known
        ("device_to_device_latency_sm", "", None),
    ],
)
def test_limits_are_those_of_what_the_copies_share(
    name: str, part: str, limit: float | None
) -> None:
    limits = limits_of_switch(4)
    assert limits.of(TESTS[name], part, copies(name, 0, 1)) == limit
    unknown = Limits(None, [None] * 4)
    assert unknown.of(TESTS[name], part, copies(name, 0, 1)) is None


def test_direct_links_to_several_peers_add_up() -> None:
    buses = [f"00000000:{i:02X}:00.0" for i in range(3)]
    facts = [
        GpuFacts(
            f"GPU-{i}",
            bus_id=bus,
            nvlink_version=3,
            nvlinks=8,
            direct_links=tuple((other, 4) for other in buses if other != bus),
        )
        for i, bus in enumerate(buses)
    ]
    nothing = ((None,) * 3,) * 3
    limits = Limits(Machine(tuple(facts), nothing, nothing), [None] * 3)
    name = "one_to_all_write_ce"
    assert limits.of(TESTS[name], "", copies(name, 0, 1, gpus=3)) == 8 * 25.0
    assert limits.of(TESTS[name], "", copies(name, 0, 1, gpus=2)) == 4 * 25.0


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set())]
)
def test_lists_of_processors_are_read_as_the_kernel_writes_them(text: str, cpus: set[int]) -> None:
    assert gpu_buffers.parse_cpus(text) == cpus


@pytest.mark.parametrize(
    "arguments", [["-i", "0"], ["-b", "x"], ["--instrument", "none"], ["--plot"]]
)
def test_options_without_a_meaning_end_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bandwidth.main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@needs_cupy
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "gpuallreduce", "bandwidth"],
        [str(Path(__file__).parents[1] / "bench" / "p2p_bandwidth.py")],
    ],
)
def test_without_gpus_there_is_one_clear_error(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        cwd="/",
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("gpuallreduce bandwidth: CUDA devices need")
    assert done.stderr.count("\n") == 1


def test_the_list_names_every_test_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert bandwidth.main(["-l"]) == 0
    listed = re.findall(r"^(\d+), (\w+):\n\t\S", capsys.readouterr().out, flags=re.MULTILINE)
    expected = [*NVBANDWIDTH, ROOFLINE]
    assert listed == [(str(number), name) for number, name in enumerate(expected)]


# ---- kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_gpus_without_local_memory(arch: str) -> None:
    need_nvrtc()
    need(cuobjdump(), "cuobjdump")
    for kernel in KERNELS:
        found = inspect(kernel, arch)
        assert not resource_faults(found)
        if kernel is gpu_copies.COPY:
            loops = {(loop.loads, loop.stores) for loop in found.vector_loops()}
            assert any(loads == stores == 8 for loads, stores in loops), loops


@pytest.mark.parametrize("compiler", HOST_COMPILERS)
def test_kernels_compile_for_emulated_gpus_without_warnings(compiler: str, tmp_path: Path) -> None:
    need(shutil.which(compiler), compiler)
    source = tmp_path / "kernels.cpp"
    source.write_text("".join(kernel.source for kernel in KERNELS))
    command = [compiler, *WARNINGS, "-DGAR_EMULATED", f"-I{jit.kernels_folder()}", "-c"]
    done = subprocess.run(
        [*command, str(source), "-o", os.devnull],
        capture_output=True,
        cwd="/",
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_numbas_kernel_compiles_to_16_byte_accesses() -> None:
    pytest.importorskip("numba_cuda")
    from gpuallreduce.bench.numba_copy import compiled_ptx

    ptx = compiled_ptx(9, 0)
    assert ".target sm_90" in ptx
    widths = re.findall(r"(ld|st)\.global\.(\S+)", ptx)
    assert {width for _, width in widths} == {"v2.u64"}
    # Eight loads come before the first store.
    kinds = "".join("l" if kind == "ld" else "s" for kind, _ in widths)
    assert "l" * 8 + "s" * 8 in kinds
    assert "f64" not in ptx  # indices stay whole numbers


# ---- on emulated GPUs -------------------------------------------------------------------------


@needs_cupy
@in_child(gpus=2, sms=4)
def test_every_test_runs_and_verifies_and_its_sum_is_that_of_its_cells() -> None:
    found = run_json("-i", "1")
    assert list(found) == NVBANDWIDTH
    for name, test in found.items():
        assert test["status"] == "Passed", test
        parts = TESTS[name].parts
        rows = test["bandwidth_matrix"][-(2 if TESTS[name].rows == "gpus" else 1) :]
        assert len(test["bandwidth_matrix"]) == len(rows) * len(parts)
        cells = [float(text) for row in rows for text in row if text != "N/A"]
        assert len(cells) == 2
        assert all(cell > 0 for cell in cells)
        assert test["sum"] == pytest.approx(sum(cells), rel=1e-4)
        assert test["gpuallreduce"]["buffer_bytes"] == (None if "latency" in name else MIB)


@needs_cupy
@in_child(gpus=3, sms=4)
def test_text_holds_the_matrix_of_the_gpus_asked_for() -> None:
    name = "device_to_device_memcpy_write_sm"
    status, out = run("--devices", "2,0", "-t", name)
    assert status == 0
    pattern = (
        rf"Running {name}\.\n"
        r"memcpy SM GPU\(row\) <- GPU\(column\) bandwidth \(GB/s\)\n"
        r" {11}2 {9}0\n"
        r" 2 {7}N/A( +\d+\.\d\d)\n"
        r" 0( +\d+\.\d\d) {7}N/A\n\n"
        rf"SUM {name} \d+\.\d\d\n"
    )
    found = re.search(pattern, out)
    assert found, out
    assert [len(text) for text in found.groups()] == [10, 10]
    assert "# rate of the link, one direction (GB/s)\n" in out
    assert "    450.00" in out


@needs_cupy
@in_child(gpus=2, sms=4)
@pytest.mark.parametrize("devices", ["0,0", "0;1", "5", ""])
def test_gpus_that_are_not_there_or_named_twice_are_refused(devices: str) -> None:
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert run("--devices", devices) == (2, "")
    assert err.getvalue().count("\n") == 1


@needs_cupy
@in_child(topology="islands2", sms=4)
def test_kernels_keep_to_peers_and_copy_engines_go_everywhere() -> None:
    pairs = ["device_to_device_memcpy_read_sm", "device_to_device_memcpy_read_ce"]
    more = ["all_to_one_read_sm", "device_to_device_latency_sm"]
    found = run_json("-t", *pairs, *more)
    for name in (pairs[0], more[1]):
        there = [[text != "N/A" for text in row] for row in found[name]["bandwidth_matrix"]]
        assert there == [[i != j and i // 2 == j // 2 for j in range(4)] for i in range(4)]
    everywhere = [[text != "N/A" for text in row] for row in found[pairs[1]]["bandwidth_matrix"]]
    assert everywhere == [[i != j for j in range(4)] for i in range(4)]
    status, out = run("--devices", "0,2", "-t", *pairs)
    assert status == 0
    assert f"Waived: {pairs[0]}: no two of these GPUs have peer access" in out
    assert f"SUM {pairs[1]} " in out


@needs_cupy
@in_child(gpus=2, sms=4, delay_us=3000)  # so long that what was not waited for comes too late
@pytest.mark.parametrize("engine", ["CopyEngine", "Kernels"])
def test_a_copy_that_is_short_or_swapped_or_stale_is_noticed(engine: str) -> None:
    from dataclasses import replace

    cls = getattr(gpu_copies, engine)
    whole = cls.copy
    name = f"device_to_device_memcpy_write_{'ce' if engine == 'CopyEngine' else 'sm'}"

    def short(self: Any, transfer: Any, stream: Any) -> None:
        whole(self, replace(transfer, nbytes=transfer.nbytes - 16), stream)

    def swapped(self: Any, transfer: Any, stream: Any) -> None:
        half = transfer.nbytes // 2
        for to, origin in ((0, half), (half, 0)):
            target, source = transfer.target + to, transfer.source + origin
            whole(self, replace(transfer, target=target, source=source, nbytes=half), stream)

    done: set[int] = set()

    def stale(self: Any, transfer: Any, stream: Any) -> None:
        if len(done) < 2:  # the untimed copy and the timed one of the first sample
            done.add(len(done))
            whole(self, transfer, stream)

    last = rf"offset ({MIB - 16}|{MIB - 8}) of {MIB}"
    for broken, where in ((short, last), (swapped, "offset"), (stale, "offset")):
        cls.copy = broken
        status, out = run("-t", name, "device_local_copy")
        assert status == 1
        assert re.search(rf"Error: {name}: .* from GPU 0 to GPU 1, run by GPU 0: .*{where}", out)
        assert ("SUM device_local_copy" in out) == (engine == "Kernels")
        assert run("-t", name, "--skip-verification")[0] == 0


@needs_cupy
@in_child(gpus=2, sms=4)
def test_each_pair_and_sample_has_data_of_its_own() -> None:
    seeds: list[int] = []
    write = gpu_buffers.Pattern.write

    def noted(self: Any, gpu: Any, address: int, nbytes: int, seed: int) -> None:
        seeds.append(seed)
        write(self, gpu, address, nbytes, seed)

    gpu_buffers.Pattern.write = noted  # type: ignore[method-assign]
    names = ["device_to_device_bidirectional_memcpy_read_ce", "all_to_one_write_sm"]
    assert run("-t", *names)[0] == 0
    assert len(seeds) == 2 * (2 * 2) + 2 * 2
    assert len(set(seeds)) == len(seeds)


@needs_cupy
@in_child(gpus=1, sms=4)
def test_the_copy_kernel_copies_every_byte_and_no_other() -> None:
    import numpy as np

    from gpuallreduce.args import GarCopyArgs
    from gpuallreduce.devices.cuda import argument, load
    from gpuallreduce.devices.cuda_runtime import cupy_module

    cupy = cupy_module()
    function, guard = load(gpu_copies.COPY, 0), 256
    data = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)
    source = cupy.asarray(data)
    edges = [unit * count for unit in (16, 64, 512, 4096) for count in (1, 3, 8)]
    sizes = sorted({0, 1, 7, *edges, *(size + extra for size in edges for extra in (-1, 16, 17))})
    for nbytes, blocks in itertools.product(sizes, (1, 3)):
        target = cupy.asarray(np.full(guard + nbytes + guard, 0xAA, np.uint8))
        args = GarCopyArgs(target.data.ptr + guard, source.data.ptr, nbytes)
        function((blocks,), (512,), (argument(args),))
        found = target.get()
        assert np.array_equal(found[guard : guard + nbytes], data[:nbytes]), nbytes
        assert (found[:guard] == 0xAA).all()
        assert (found[guard + nbytes :] == 0xAA).all()


@needs_cupy
@in_child(gpus=1, sms=4)
def test_a_held_stream_goes_on_when_the_gate_opens_and_not_before() -> None:
    from gpuallreduce.devices.cuda_runtime import cupy_module

    cupy = cupy_module()
    gate, stream, event = Gate([0], limit_s=60.0), cupy.cuda.Stream(non_blocking=True), None
    gate.shut()
    gate.hold(0, stream)
    event = stream.record()
    other = cupy.cuda.Stream(non_blocking=True)
    other.record().synchronize()  # other streams go on
    assert not event.done
    gate.open()
    event.synchronize()
    gate.check()
    gate.close()


@needs_cupy
@in_child(gpus=1, sms=4)
def test_a_stream_is_held_no_longer_than_the_limit_and_no_time_is_taken_then() -> None:
    whole = gpu_copies.CopyEngine.copy

    def waiting(self: Any, transfer: Any, stream: Any) -> None:
        whole(self, transfer, stream)
        stream.synchronize()  # as under CUDA_LAUNCH_BLOCKING=1

    gpu_copies.CopyEngine.copy = waiting  # type: ignore[method-assign]
    bench = Bench(bandwidth._gpus(None), Settings(nbytes=MIB, copies=1, hold_limit_s=0.05))
    with pytest.raises(DeviceError, match=r"within 0\.05 s while a kernel held the stream"):
        bench.run("device_local_copy", MIB)
    gpu_copies.CopyEngine.copy = whole  # type: ignore[method-assign]
    assert bench.run("device_local_copy", MIB).status == "Passed"
    bench.close()


@needs_cupy
@in_child(gpus=2, sms=4)
def test_buffers_shrink_to_the_free_memory_and_it_is_said() -> None:
    free = {0: 40 * MIB, 1: 10 * MIB}
    gpu_buffers.gpu_free_bytes = free.__getitem__  # type: ignore[assignment]
    name = "device_to_device_memcpy_read_ce"
    status, out = run("-b", "16", "-t", name, "device_local_copy")
    assert status == 0
    note = "# NOTE: buffers of {} MiB instead of 16: {} of them must fit the free memory of GPU 1"
    assert note.format(9, 1) in out
    assert note.format(4, 2) in out
    free[1] = MIB
    status, out = run("-b", "16", "-t", name)
    assert status == 1
    assert "not even buffers of 1 MiB" in out


@needs_cupy
@in_child(gpus=2, sms=4)
def test_a_chain_that_leads_elsewhere_is_noticed() -> None:
    honest = gpu_latency.ring

    def swapped(address: int, nbytes: int) -> Any:
        words = honest(address, nbytes)
        words[0] += 2 * gpu_latency.LINE_BYTES
        return words

    gpu_latency.ring = swapped
    status, out = run("-t", "host_device_latency_sm", "device_to_device_latency_sm")
    assert status == 1
    assert len(re.findall(r"a chain of 131072 loads by cuda:0 led to 0x", out)) == 2


@needs_cupy
@in_child(gpus=2, sms=4)
def test_matrices_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    import tempfile

    names = ["device_to_device_memcpy_read_sm", "device_local_copy"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bandwidth.png"
        status, out = run("-t", *names, "--plot", str(path))
        assert status == 0
        assert f"# Plot written to {path}" in out
        assert path.read_bytes().startswith(b"\x89PNG")
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            assert run("-t", *names, "--plot", str(path.with_suffix(".svg"))) == (2, "")
        assert "must end in .png" in err.getvalue()


@needs_cupy
@in_child(gpus=1, sms=4)
def test_the_roofline_counts_what_is_read_and_written_and_checks_the_result() -> None:
    (gpu,) = bandwidth._gpus(None)
    gate = Gate([0], limit_s=10.0)
    sizes = {"nranks": [2, 4], "sizes": [1 << 16], "samples": 1, "calls": 2}
    rows = list(roofline.measure(gpu, 100.0, gate=gate, **sizes))
    assert [row.nranks for row in rows] == [2, 4]
    for row in rows:
        assert row.moved_gbps == pytest.approx(2 * row.nranks * row.nbytes / row.time_us / 1e3)
        assert row.fraction == pytest.approx(row.moved_gbps / 100)
    honest = Communicator.allreduce

    def wrong(*arguments: Any, **options: Any) -> Any:
        return honest(*arguments, **options, op="max")

    Communicator.allreduce = wrong  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="2 ranks on cuda:0 with 65536 bytes gave rank 0 a wrong"):
        list(roofline.measure(gpu, 100.0, gate=gate, **sizes))
    gate.close()


@needs_cupy
@in_child(gpus=1, sms=4)
def test_the_roofline_runs_when_asked_for() -> None:
    status, out = run("-t", ROOFLINE)
    assert status == 0
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d", line)]
    assert [row[:2] for row in rows] == [["2", str(MIB)], ["4", str(MIB)]]
    found = run_json("-t", ROOFLINE)[ROOFLINE]["gpuallreduce"]["gpus"]["0"]
    assert [row["nranks"] for row in found["rows"]] == [2, 4]
    assert found["device_local_copy_gbps"] > 0
