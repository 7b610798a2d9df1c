// The target of emulated GPUs, for tests without one: the host's code behind the entry points and arguments of a GPU.
// Knows nothing of protocols or collectives.
#pragma once

#define GAR_TABLES_BY_VALUE 1
#include "platform_host.cuh"

// Called once for every block, each on a thread of its own; whoever launches copies `params_bytes` at the time of the
// call, as a GPU's driver does.
#undef GAR_KERNEL
#define GAR_KERNEL(name, Args, body)                                                                           \
  extern "C" __attribute__((visibility("default"))) const uint32_t name##_params_bytes = sizeof(Args);         \
  extern "C" __attribute__((visibility("default"))) int name(const void* params, uint32_t b, uint32_t total) { \
    const gar::DefaultRounding rounding;                                                                       \
    return body(gar::Block{b, total, 0, nullptr}, *static_cast<const Args*>(params));                          \
  }
