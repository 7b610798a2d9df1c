"""Tests that kernels stay in their memory, do nothing undefined, and convert alike everywhere.

Knows nothing of protocols. Element types run under the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from races.harness import FOLDER, Build, Scenario, build, run

from gpuallreduce import jit
from gpuallreduce.types import DTYPES

pytestmark = pytest.mark.slow

SANITIZERS = "address,undefined"
# Empty, and round the edges of packs of every width, of cache lines and of chunks.
COUNTS = (
    *range(6),
    *(7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 1023, 1025),
)
X86 = platform.machine() == "x86_64"
MARCHES = ("x86-64", "x86-64-v3", "native") if X86 else ("native",)
BUILDS = (
    ("Float16", "Avg", "x86-64"),
    ("BFloat16", "Sum", "native"),
    ("Float8E4M3FN", "Prod", "x86-64-v3"),
    ("Float8E5M2", "Min", "native"),
    ("uint8_t", "BitXor", "native"),
    ("int16_t", "Min", "x86-64"),
    ("uint64_t", "Prod", "x86-64-v3"),
    ("float", "Sum", "native"),
    ("Complex<double>", "Prod", "native"),
)
SMALL_FLOATS = [row for row in DTYPES.values() if row.accumulator == "float32" != row.name]


def runs_here(march: str) -> bool:
    """Whether this machine executes code for an instruction set."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = file.read().split()
    return march != "x86-64-v3" or {"avx2", "f16c", "bmi2", "fma"} <= set(flags)


def driver_build(row: tuple[str, str, str]) -> Build:
    element, operator, march = row
    march = march if march in MARCHES and runs_here(march) else "native"
    return Build(sanitizer=SANITIZERS, element=element, operator=operator, march=march)


@pytest.fixture(scope="module")
def drivers() -> Any:
    """All drivers, compiled on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {row: pool.submit(build, driver_build(row)) for row in BUILDS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("row", BUILDS, ids="-".join)
def test_kernels_stay_in_bounds_and_defined(
    row: tuple[str, str, str], drivers: dict[tuple[str, str, str], Future[Path]]
) -> None:
    driver = drivers[row].result()
    for nranks in (2, 3, 8):
        scenario = Scenario(nranks=nranks, ncalls=250, counts=COUNTS, shake=0)
        result = run(driver, scenario)
        assert result.outcome == "ok", f"{row}\n{scenario}\n{result.text}"


def test_blocks_of_several_threads_stay_in_bounds() -> None:
    how = Build(sanitizer=SANITIZERS, block_threads=3, ranks=2)
    result = run(build(how), Scenario(ncalls=60, counts=COUNTS, shake=0))
    assert result.outcome == "ok", result.text


def test_ranks_that_give_up_stay_in_bounds() -> None:
    driver = build(driver_build(("float", "Sum", "native")))
    for ending in ("absent", "differs", "closes", "aborts"):
        result = run(driver, Scenario(nranks=3, ncalls=3, counts=(1001,), ending=ending))
        assert result.outcome == "ok", result.text


def float32_sample() -> np.ndarray[Any, Any]:
    """Every upper half of a float32, with lower halves round the roundings and random ones."""
    edges = [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001]
    edges += [0x7FFF, 0x8000, 0x8001, 0xFFFF]
    random = np.random.default_rng(1).integers(0, 1 << 16, 18)
    lower = np.concatenate([np.array(edges), random]).astype(np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return (upper[:, None] | lower[None, :]).reshape(-1).view(np.float32)


def compilers() -> list[str]:
    return [name for name in ("g++", "clang++") if shutil.which(name)]


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The conversions by every compiler for every instruction set that runs here."""
    folder = tmp_path_factory.mktemp("conversions")

    def compile_one(name: tuple[str, str]) -> tuple[str, ctypes.CDLL]:
        compiler, march = name
        output = folder / f"{compiler}-{march}.so"
        command = [compiler, *jit.COMMON_FLAGS, *jit.KERNEL_FLAGS, f"-march={march}"]
        command += [f"-I{jit.kernels_folder()}", str(FOLDER / "conversions.cpp"), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return output.stem, ctypes.CDLL(str(output))

    names = [(compiler, march) for compiler in compilers() for march in MARCHES if runs_here(march)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(compile_one, names))


def convert(function: Any, source: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    result = np.empty(source.shape, dtype)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (source, result)]
    function(*pointers, ctypes.c_uint64(source.size))
    return result


@pytest.mark.parametrize("row", SMALL_FLOATS, ids=lambda row: row.name)
def test_widening_is_exact_on_every_instruction_set(
    row: Any, conversions: dict[str, ctypes.CDLL]
) -> None:
    bits = np.arange(1 << 8 * row.itemsize, dtype=f"u{row.itemsize}")
    expected = bits.view(row.numpy).astype(np.float32)
    for name, library in conversions.items():
        for kind in ("packs", "single"):
            got = convert(getattr(library, f"widen_{kind}_{row.element}"), bits, np.float32)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), name)
            numbers = ~np.isnan(expected)
            np.testing.assert_array_equal(
                got[numbers].view(np.uint32), expected[numbers].view(np.uint32), name
            )


@pytest.mark.parametrize("row", SMALL_FLOATS, ids=lambda row: row.name)
def test_rounding_is_to_nearest_even_with_canonical_nan_on_every_instruction_set(
    row: Any, conversions: dict[str, ctypes.CDLL]
) -> None:
    source = float32_sample()
    bits = f"u{row.itemsize}"
    with np.errstate(all="ignore"):
        expected = source.astype(row.numpy).view(bits)
    # The positive quiet NaN of the type, whatever NaN came or came to be (e4m3fn has no infinity).
    quiet = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}
    is_nan = np.isnan(expected.view(row.numpy).astype(np.float32))
    expected = np.where(is_nan, np.array(quiet[row.name], bits), expected)
    for name, library in conversions.items():
        for kind in ("packs", "single"):
            got = convert(getattr(library, f"round_{kind}_{row.element}"), source, bits)
            np.testing.assert_array_equal(got, expected, f"{name} {kind}")
