"""What the machine's memory can do: copy and add of large arrays by all ranks at the same time.

Knows nothing of all-reduce: it is the limit that all-reduce is seen against.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuallreduce.errors import CompileError
from gpuallreduce.jit import host_compiler

from .ranks import Ranks

__all__ = ["MemoryLimits", "measure_memory"]

Array = np.ndarray[Any, Any]
ARRAY_BYTES = 64 << 20  # beyond the caches of any machine's core
ROUNDS = 5
CALLS = 3
FLAGS = ("-std=c++17", "-O2", "-march=native", "-fPIC", "-shared")
# Non-temporal stores write past the caches: without them each line written is read first. Where the
# compiler has none, plain stores are the machine's limit too.
SOURCE = """\
#include <cstddef>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
namespace {
#if defined(__AVX512F__)
using Vector = __m512;
Vector load(const float* p) { return _mm512_load_ps(p); }
Vector sum(Vector a, Vector b) { return _mm512_add_ps(a, b); }
void store(float* p, Vector a) { _mm512_stream_ps(p, a); }
#elif defined(__AVX__)
using Vector = __m256;
Vector load(const float* p) { return _mm256_load_ps(p); }
Vector sum(Vector a, Vector b) { return _mm256_add_ps(a, b); }
void store(float* p, Vector a) { _mm256_stream_ps(p, a); }
#elif defined(__SSE2__)
using Vector = __m128;
Vector load(const float* p) { return _mm_load_ps(p); }
Vector sum(Vector a, Vector b) { return _mm_add_ps(a, b); }
void store(float* p, Vector a) { _mm_stream_ps(p, a); }
#else
using Vector = float;
Vector load(const float* p) { return *p; }
Vector sum(Vector a, Vector b) { return a + b; }
void store(float* p, Vector a) { *p = a; }
#endif
constexpr std::size_t kLanes = sizeof(Vector) / sizeof(float);
void fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
}  // namespace
extern "C" void add(float* a, const float* b, const float* c, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) store(a + i, sum(load(b + i), load(c + i)));
  fence();
}
extern "C" void copy(float* a, const float* b, const float*, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) store(a + i, load(b + i));
  fence();
}
"""


@dataclass(frozen=True)
class MemoryLimits:
    """Useful bytes over time, of all ranks together: what is read and written, each byte once.

    Attributes:
        add_gbps: a = b + c with non-temporal stores, three arrays.
        copy_gbps: a = b with non-temporal stores, two arrays.
        array_bytes: of one array of one rank.
    """

    add_gbps: float
    copy_gbps: float
    array_bytes: int


def measure_memory(ranks: Ranks, *, array_bytes: int = ARRAY_BYTES) -> MemoryLimits:
    """Measures both. A collective.

    Args:
        ranks: all of them work at the same time, on arrays of their own.
        array_bytes: of one array, a multiple of 64.

    Raises:
        CompileError: there is no C++ compiler, or it refused.
    """
    library = _compiled()
    count = array_bytes // 4
    arrays = [[_aligned(count) for _ in range(3)] for _ in ranks.local]
    rates = []
    for function, moved in ((library.add, 3), (library.copy, 2)):
        function.restype = None
        function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
        work = [_repeated(function, own, count) for own in arrays]
        seconds = np.median([_all_at_once(work, ranks) for _ in range(ROUNDS)])
        rates.append(ranks.nranks * CALLS * moved * array_bytes / 1e9 / float(seconds))
    return MemoryLimits(rates[0], rates[1], array_bytes)


def _repeated(function: Any, arrays: Sequence[Array], count: int) -> Callable[[], None]:
    addresses = [array.ctypes.data for array in arrays]

    def run() -> None:
        for _ in range(CALLS):
            function(*addresses, count)

    return run


def _all_at_once(work: Sequence[Callable[[], None]], ranks: Ranks) -> float:
    """Seconds of the slowest rank. Ranks of one process run as threads; C code leaves them be."""
    seconds = np.zeros(len(work))
    meet = threading.Barrier(len(work))

    def run(i: int) -> None:
        meet.wait()
        start = time.perf_counter()
        work[i]()
        seconds[i] = time.perf_counter() - start

    ranks.barrier()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(1, len(work))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    return float(ranks.slowest(np.array([seconds.max()]))[0])


def _aligned(count: int) -> Array:
    memory = np.ones(count + 16, np.float32)
    shift = (-memory.ctypes.data % 64) // 4
    return memory[shift : shift + count]


def _compiled() -> ctypes.CDLL:
    """Compiled anew in each process: it takes a fraction of a second, and leaves nothing behind."""
    compiler = host_compiler()
    with tempfile.TemporaryDirectory(prefix="gpuallreduce-") as folder:
        source, result = Path(folder) / "membw.cpp", Path(folder) / "membw.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [*compiler.command, *FLAGS, str(source), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompileError(f"the memory benchmark did not compile:\n{done.stderr.strip()}")
        return ctypes.CDLL(str(result))
