"""Tests that every kernel compiles by NVRTC, nvcc, g++ and clang++, without warnings.

Knows nothing of what kernels do. The kernels are those that the algorithms ask for.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpuallreduce.bench.inspect_kernels import ARCHS, SHAPES, ask

from gpuallreduce import jit, jit_cuda
from gpuallreduce.jit import Kernel

pytestmark = pytest.mark.slow

# Of the covering sample: all kernels for one architecture, half of them for each of the others.
SHARES = {"sm_80": slice(0, None, 2), "sm_90": slice(None), "sm_100": slice(1, None, 2)}
RANKS = (2, 8, 9)  # unrolled for few and many, and known at run time only
PAIRS = (
    *(("float32", "sum"), ("bfloat16", "avg"), ("float8_e4m3fn", "prod"), ("uint8", "max")),
    *(("float16", "min"), ("complex128", "prod"), ("int64", "bxor"), ("float8_e5m2", "sum")),
    *(("float64", "max"), ("bool", "sum"), ("complex64", "prod"), ("int16", "min")),
)
MOVED = (
    ("all_gather", "uint8"),
    ("all_gather", "complex128"),
    ("broadcast", "float16"),
    ("broadcast", "float64"),
    ("shard_gather", "bfloat16"),
    ("shard_gather", "complex128"),
)
HOST_COMPILERS = ("g++", "clang++")
# Included by the platform headers in the middle, after names that each target defines its own way.
FRAGMENTS = {"args.h", "lanes.cuh"}
DEVICE_ONLY = {"platform_cuda.cuh"}
EMULATED_ONLY = {"platform_emulated.cuh"}
HOST_ONLY = {*EMULATED_ONLY, "platform_host.cuh", "host.h", "host_calls.h", "python_abi.h"}
# The runtime's flags less optimisation: enough for every warning of the front end.
WARNINGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")


def covering_kernels() -> list[Kernel]:
    """Every shape for every kind of rank count, element types and operators dealt out over them."""
    pairs = itertools.cycle(PAIRS)
    kernels = [ask(shape, *next(pairs), nranks) for shape in SHAPES for nranks in RANKS]
    kernels += [
        ask(("one_shot", collective, "rank", "staged"), dtype, "sum", 2)
        for collective, dtype in MOVED
    ]
    return list({kernel.symbol: kernel for kernel in kernels}.values())


KERNELS = covering_kernels()


def on_all_cores(work: Callable[[Kernel], None], kernels: list[Kernel]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(work, kernels))


def headers() -> list[str]:
    folder = jit.kernels_folder()
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".cuh", ".h"))


def need(present: object, what: str) -> None:
    """Skips where a compiler is missing, except in CI: there it must not be."""
    if present:
        return
    assert not os.environ.get("CI"), f"{what} is missing, and CI must have it"
    pytest.skip(f"{what} is not installed")


def need_nvrtc() -> None:
    """Skips without cuda-core, which brings NVRTC to Python."""
    found = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core")
    need(found, "cuda-core")


def test_the_covering_sample_holds_every_template() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in jit.kernels_folder().glob("*.cuh"))
    collectives = set(re.findall(r"struct (\w+) : (?:Exchange|Shards)<T>", text))
    functions = set(
        re.findall(r"GAR_DEVICE bool (\w+)\(const Block& block, const GarArgs& args\)", text)
    )
    used = set(re.findall(r"\w+", " ".join(kernel.expression for kernel in KERNELS)))
    assert collectives
    assert functions
    assert collectives | functions <= used


@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_compiles_the_kernels(arch: str) -> None:
    need_nvrtc()

    def compile_one(kernel: Kernel) -> None:
        cubin = jit_cuda.compile_cubin(kernel, arch)
        assert cubin.startswith(b"\x7fELF")
        assert kernel.symbol.encode() in cubin

    on_all_cores(compile_one, KERNELS[SHARES[arch]])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("arch", ARCHS)
def test_nvcc_compiles_a_kernel_of_each_header(arch: str, tmp_path: Path) -> None:
    def compile_one(kernel: Kernel) -> None:
        source = tmp_path / f"{kernel.symbol}.cu"
        source.write_text(kernel.source, encoding="utf-8")
        command = ["nvcc", "-cubin", f"-arch={arch}", "-std=c++17", "-Werror=all-warnings"]
        command += [f"-I{jit.kernels_folder()}", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    on_all_cores(compile_one, list({kernel.header: kernel for kernel in KERNELS}.values()))


@pytest.mark.parametrize("compiler", HOST_COMPILERS)
@pytest.mark.parametrize("header", sorted({kernel.header for kernel in KERNELS}))
def test_host_compilers_have_no_warning(compiler: str, header: str, tmp_path: Path) -> None:
    need(shutil.which(compiler), compiler)
    source = tmp_path / "kernels.cpp"
    source.write_text("".join(kernel.source for kernel in KERNELS if kernel.header == header))
    command = [compiler, *WARNINGS, "-O1", *jit.KERNEL_FLAGS, f"-I{jit.kernels_folder()}"]
    done = subprocess.run(
        [*command, "-c", str(source), "-o", os.devnull], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("compiler", HOST_COMPILERS)
@pytest.mark.parametrize("header", sorted({*headers()} - FRAGMENTS - DEVICE_ONLY))
def test_header_compiles_alone_on_the_host(compiler: str, header: str, tmp_path: Path) -> None:
    need(shutil.which(compiler), compiler)
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{header}"\n')
    command = [compiler, *WARNINGS, "-fsyntax-only", f"-I{jit.kernels_folder()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("header", sorted({*headers()} - FRAGMENTS - HOST_ONLY))
def test_header_compiles_alone_for_gpus(header: str) -> None:
    need_nvrtc()
    nothing = "[](const Block&, const GarArgs&) { return true; }"
    assert jit_cuda.compile_cubin(Kernel("alone", header, nothing), "sm_90")


def test_fragments_are_included_by_platform_headers_only() -> None:
    for path in jit.kernels_folder().iterdir():
        if path.suffix not in (".cuh", ".h", ".cpp"):
            continue
        included = set(re.findall(r'#include "(.*)"', path.read_text(encoding="utf-8")))
        assert path.name.startswith("platform_") or not included & FRAGMENTS, path.name
