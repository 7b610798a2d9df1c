"""The compiler at first use: cache, races, damage, edited sources; no fused multiply-add."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gpuallreduce as gar
from gpuallreduce import jit
from gpuallreduce.algorithms import ALGORITHMS
from gpuallreduce.plan import Request
from gpuallreduce.types import DTYPES, OPS

KERNEL = jit.Kernel("one_shot_float_Sum_2", "one_shot.cuh", "exchange<OneShot<float, Sum, 2>>")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the test's own."""
    monkeypatch.setenv("GPUALLREDUCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.exists() else []


def test_a_second_compilation_loads_the_first(cache, monkeypatch):
    first = jit.compile_host(KERNEL)
    monkeypatch.setattr(jit, "_run", lambda *_: pytest.fail("compiled again"))
    assert jit.compile_host(KERNEL) == first
    assert entries(cache) == [first]
    assert ctypes.CDLL(str(first)).one_shot_float_Sum_2


def damaged():
    yield "empty", lambda content: b""
    yield "cut short", lambda content: content[:-100]
    yield "a flipped bit", lambda content: bytes([content[0] ^ 1]) + content[1:]
    yield "something else", lambda content: b"not an object" * 100


@pytest.mark.parametrize(("name", "damage"), list(damaged()))
def test_a_damaged_entry_is_rebuilt(cache, name, damage):
    path = jit.compile_host(KERNEL)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert jit.compile_host(KERNEL) == path
    assert path.read_bytes()[: len(whole) - jit.DIGEST_BYTES]
    assert jit._is_whole(path)


def test_processes_that_race_for_an_entry_all_succeed(cache):
    code = (
        "from gpuallreduce import jit\n"
        "import ctypes, test_jit\n"
        "ctypes.CDLL(str(jit.compile_host(test_jit.KERNEL))).one_shot_float_Sum_2"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    racers = [subprocess.Popen([sys.executable, "-c", code], env=environ) for _ in range(4)]
    assert [racer.wait(timeout=60) for racer in racers] == [0] * 4
    assert len(entries(cache)) == 1  # and no temporary file is left


def test_threads_that_race_for_an_entry_all_succeed(cache):
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(jit.compile_host, [KERNEL] * 4))
    assert entries(cache) == sorted(paths)


def test_an_edited_header_is_noticed(cache, tmp_path, monkeypatch):
    copy = tmp_path / "kernels"
    shutil.copytree(jit.kernels_folder(), copy)
    monkeypatch.setattr(jit, "kernels_folder", lambda: copy)
    before = jit.compile_host(KERNEL)
    with (copy / "lanes.cuh").open("a") as file:
        file.write("// edited\n")
    assert jit.compile_host(KERNEL) != before


def test_other_flags_or_processors_do_not_share_entries(cache, monkeypatch):
    before = jit.compile_host(KERNEL)
    monkeypatch.setattr(jit, "cpu_identity", lambda: "another processor")
    assert jit.compile_host(KERNEL) != before


def test_no_compiler_names_what_to_install(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(gar.CompileError, match=r"looked for g\+\+ clang\+\+.*apt install g\+\+"):
        jit.compile_host(KERNEL)


def test_cxx_chooses_the_compiler(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O9")
    with pytest.raises(gar.CompileError, match="looked for no-such-compiler -O9"):
        jit.compile_host(KERNEL)
    real = shutil.which("g++") or shutil.which("clang++")
    monkeypatch.setenv("CXX", f"{real} -DSOME_FLAG")
    assert jit.host_compiler().command == (real, "-DSOME_FLAG")


def test_a_compiler_error_carries_the_compilers_words(cache):
    broken = jit.Kernel("broken", "one_shot.cuh", "exchange<NoSuchTemplate<float>>")
    with pytest.raises(gar.CompileError, match="NoSuchTemplate"):
        jit.compile_host(broken)
    assert entries(cache) == []


def test_an_unwritable_cache_is_a_clear_error(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("GPUALLREDUCE_CACHE", str(file / "below"))
    with pytest.raises(gar.CompileError, match="GPUALLREDUCE_CACHE"):
        jit.compile_host(KERNEL)


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128", "bfloat16"])
def test_no_kernel_fuses_multiply_and_add(name):
    """One rounding fewer would break the contract; g++ 12's vectoriser fuses all the same."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is not installed")
    for algorithm in ALGORITHMS.values():
        request = Request("allreduce", DTYPES[name], OPS["prod"], 1000, 3)
        path = jit.compile_host(algorithm.kernel(request, "staged"))
        command = [objdump, "-d", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "mul" in text  # it is the code that multiplies
        assert re.findall(r"\tvfn?m(?:add|sub)\w*", text) == []


def test_kernels_compiled_together_are_found_one_by_one(cache, monkeypatch):
    other = jit.Kernel("ring_float_Sum", "ring.cuh", "ring<float, Sum>")
    paths = jit.compile_host_together([KERNEL, other])
    assert entries(cache) == sorted(paths)
    assert jit.compile_host_together([KERNEL, other]) == paths
    monkeypatch.setattr(jit, "_run", lambda *_: pytest.fail("compiled again"))
    for kernel, path in zip((KERNEL, other), paths, strict=True):
        assert jit.compile_host(kernel) == path
        assert getattr(ctypes.CDLL(str(path)), kernel.symbol)


def test_one_faulty_kernel_leaves_no_entry_for_those_compiled_with_it(cache):
    broken = jit.Kernel("broken", "one_shot.cuh", "exchange<NoSuchTemplate<float>>")
    with pytest.raises(gar.CompileError, match="NoSuchTemplate"):
        jit.compile_host_together([KERNEL, broken])
    assert entries(cache) == []
