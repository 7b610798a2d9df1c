"""Handmade kernels for the emulated GPUs, and short ways to call the driver through cuda.bindings.

Knows nothing of gpuallreduce: what the stand-in promises is tested without it.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from typing import Any

from gpuallreduce.jit import host_compiler

__all__ = ["Image", "call", "compile_image", "current", "read", "status", "write"]

LIMIT_NS = 2_000_000_000

SOURCE = r"""
// Kernels of one block a call, as images for emulated GPUs export them.
#include <sched.h>
#include <time.h>

#include <cstdint>

#define KERNEL(name, ...)                                                      \
  struct name##_params { __VA_ARGS__; };                                       \
  static void name##_block(const name##_params& p, uint32_t b, uint32_t n);    \
  extern "C" const uint32_t name##_params_bytes = sizeof(name##_params);       \
  extern "C" int name(const void* p, uint32_t b, uint32_t n) {                 \
    name##_block(*static_cast<const name##_params*>(p), b, n);                 \
    return 0;                                                                  \
  }                                                                            \
  static void name##_block(const name##_params& p, uint32_t b, uint32_t n)

static uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

static bool reaches(volatile uint64_t* word, uint64_t value, uint64_t limit_ns) {
  for (const uint64_t end = now_ns() + limit_ns; now_ns() < end; sched_yield())
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) >= value) return true;
  return false;
}

KERNEL(count_blocks, uint64_t* counts) { __atomic_fetch_add(&p.counts[b], n, __ATOMIC_RELAXED); }

// The offset hides the address from whoever looks at the parameters only.
KERNEL(store, uint64_t* base; int64_t offset; uint64_t value) {
  volatile char* const address = reinterpret_cast<char*>(p.base) + p.offset;
  if (b == 0) *reinterpret_cast<volatile uint64_t*>(address) = p.value;
}

KERNEL(store_through, uint64_t** table; uint64_t value) { **p.table = p.value; }

KERNEL(copy_words, uint64_t* to; const uint64_t* from; uint64_t count) {
  for (uint64_t i = b; i < p.count; i += n) p.to[i] = p.from[i];
}

KERNEL(add, uint64_t* words; uint64_t count; uint64_t value) {
  for (uint64_t i = b; i < p.count; i += n) p.words[i] += p.value;
}

// All blocks that are to meet at the counter: those that do not are counted.
KERNEL(meet, uint64_t* counter; uint64_t expected; uint64_t limit_ns; uint64_t* missed) {
  __atomic_fetch_add(p.counter, 1, __ATOMIC_ACQ_REL);
  if (reaches(p.counter, p.expected, p.limit_ns)) return;
  __atomic_fetch_add(p.missed, 1, __ATOMIC_RELAXED);
}

KERNEL(wait_for, uint64_t* word; uint64_t value; uint64_t limit_ns) {
  reaches(p.word, p.value, p.limit_ns);
}
"""


def compile_image(folder: Path, text: str = SOURCE) -> str:
    """Compiles the kernels, or others; the path of the image."""
    source, image = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(text, encoding="utf-8")
    command = [*host_compiler().command, "-std=c++17", "-O1", "-fPIC", "-shared", str(source)]
    subprocess.run([*command, "-o", str(image)], check=True)
    return str(image)


def call(name: str, *arguments: Any) -> Any:
    """Calls a driver function that must succeed; what it gives back, if anything."""
    from cuda.bindings import driver

    code, *values = getattr(driver, name)(*arguments)
    assert code == driver.CUresult.CUDA_SUCCESS, f"{name} ended with {code.name}"
    return values[0] if len(values) == 1 else tuple(values)


def status(name: str, *arguments: Any) -> str:
    """Calls a driver function; the name of what it ended with, without ``CUDA_`` and ``ERROR_``."""
    from cuda.bindings import driver

    code = getattr(driver, name)(*arguments)[0]
    return str(code.name).removeprefix("CUDA_").removeprefix("ERROR_")


def current(device: int) -> Any:
    """Makes the primary context of a device current."""
    call("cuInit", 0)
    context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))
    call("cuCtxSetCurrent", context)
    return context


def write(address: Any, *words: int) -> None:
    """Puts 64-bit words into device memory, and waits until they are there."""
    content = struct.pack(f"{len(words)}Q", *words)
    call("cuMemcpyHtoD", address, content, len(content))
    call("cuStreamSynchronize", 0)


def read(address: Any, count: int = 1) -> list[int]:
    """64-bit words of device memory."""
    content = bytearray(8 * count)
    call("cuMemcpyDtoH", content, address, len(content))
    return list(struct.unpack(f"{count}Q", content))


class Image:
    """The kernels, loaded into the current context."""

    def __init__(self, path: str) -> None:
        self.module = call("cuModuleLoadData", Path(path).read_bytes())

    def launch(
        self, name: str, *arguments: Any, grid: int = 1, block: int = 128, stream: Any = 0
    ) -> str:
        """Launches a kernel whose parameters are 64-bit words; what the launch ended with."""
        words = [int(argument) & (1 << 64) - 1 for argument in arguments]
        params = ctypes.create_string_buffer(struct.pack(f"{len(words)}Q", *words))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        function = call("cuModuleGetFunction", self.module, name.encode())
        shape = (grid, 1, 1, block, 1, 1, 0)
        return status("cuLaunchKernel", function, *shape, stream, ctypes.addressof(pointers), 0)
