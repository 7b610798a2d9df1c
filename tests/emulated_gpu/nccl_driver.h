// The driver functions that the NCCL stand-in calls, found by name in whatever libcuda.so.1 the process has.
// Knows nothing of communicators.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "nccl_abi.h"

namespace emulated_nccl {

// What a call of the public interface ends with when it cannot do its work.
struct Failure {
  Result result;
  std::string text;
};

using Stream = void*;
using Context = void*;
using HostFunction = void (*)(void*);

class Driver {
 public:
  static Driver& get() {
    static Driver driver;
    return driver;
  }

  // The calling thread's device; 0 if it has none yet, as in the CUDA runtime.
  int current_device() {
    int device = 0;
    return call<int*>("cuCtxGetDevice", &device) == 0 ? device : 0;
  }

  // What NCCL tells GPUs of one machine apart by.
  void pci_bus_id(int device, char* text, int bytes) {
    check(call<char*, int, int>("cuDeviceGetPCIBusId", text, bytes, device), "cuDeviceGetPCIBusId");
  }

  Context primary_context(int device) {
    Context context = nullptr;
    check(call<Context*, int>("cuDevicePrimaryCtxRetain", &context, device), "cuDevicePrimaryCtxRetain");
    return context;
  }

  bool capturing(Stream stream) {
    int status = 0;
    check(call<Stream, int*>("cuStreamIsCapturing", stream, &status), "cuStreamIsCapturing");
    return status != 0;
  }

  // The device of a stream that was made; the NULL stream and its kin are of whatever device is current.
  bool belongs_to(Stream stream, int device) {
    if (reinterpret_cast<uintptr_t>(stream) <= 2) return true;
    Context context = nullptr, green = nullptr;  // the second version of the function takes one pointer more
    check(call<Stream, Context*, Context*>("cuStreamGetCtx", stream, &context, &green), "cuStreamGetCtx");
    return context == primary_context(device);
  }

  void launch(Stream stream, HostFunction function, void* data) {
    check(call<Stream, HostFunction, void*>("cuLaunchHostFunc", stream, function, data), "cuLaunchHostFunc");
  }

  // Refuses memory that a GPU could not reach: there NCCL's kernels would die of an illegal address.
  void check_reachable(const void* pointer, uint64_t bytes, const char* what) {
    constexpr int kMemoryType = 2, kRangeStart = 11, kRangeBytes = 12;  // CUpointer_attribute
    int type = 0;
    uint64_t start = 0, range = 0;
    const uint64_t address = reinterpret_cast<uint64_t>(pointer);
    if (call<void*, int, uint64_t>("cuPointerGetAttribute", &type, kMemoryType, address) != 0)
      throw Failure{kInvalidArgument, std::string(what) + " is not memory that a GPU can reach"};
    if (call<void*, int, uint64_t>("cuPointerGetAttribute", &start, kRangeStart, address) != 0 ||
        call<void*, int, uint64_t>("cuPointerGetAttribute", &range, kRangeBytes, address) != 0)
      return;
    if (range != 0 && address + bytes > start + range)
      throw Failure{kInvalidArgument, std::string(what) + " ends " + std::to_string(address + bytes - start - range) +
                                          " bytes after the allocation that it lies in"};
  }

  void* allocate(size_t bytes) {
    uint64_t address = 0;
    check(call<uint64_t*, size_t>("cuMemAlloc", &address, bytes), "cuMemAlloc");
    return reinterpret_cast<void*>(address);
  }

  void free(void* pointer) { check(call<uint64_t>("cuMemFree", reinterpret_cast<uint64_t>(pointer)), "cuMemFree"); }

  void copy_to_host(void* to, const void* from, size_t bytes) {
    check(call<void*, uint64_t, size_t>("cuMemcpyDtoH", to, reinterpret_cast<uint64_t>(from), bytes), "cuMemcpyDtoH");
  }

  // Makes a device's context current for the scope, and then the one that was: the NULL stream is the context's own.
  class Current {
   public:
    explicit Current(int device) {
      Driver& driver = Driver::get();
      const Context context = driver.primary_context(device);
      driver.check(driver.call<Context>("cuCtxPushCurrent", context), "cuCtxPushCurrent");
    }
    ~Current() {
      Context context;
      Driver::get().call<Context*>("cuCtxPopCurrent", &context);
    }
  };

 private:
  Driver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library_) throw Failure{kUnhandledCudaError, std::string("no CUDA driver: ") + dlerror()};
    check(call<unsigned>("cuInit", 0), "cuInit");
  }

  template <class... Arguments>
  int call(const char* name, Arguments... arguments) {
    char versioned[64];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void* symbol = dlsym(library_, versioned);
    if (!symbol) symbol = dlsym(library_, name);
    if (!symbol) throw Failure{kUnhandledCudaError, std::string("the CUDA driver lacks ") + name};
    return reinterpret_cast<int (*)(Arguments...)>(symbol)(arguments...);
  }

  void check(int result, const char* name) {
    if (result != 0)
      throw Failure{kUnhandledCudaError, std::string(name) + " failed with CUDA error " + std::to_string(result)};
  }

  void* library_;
};

}  // namespace emulated_nccl
