// Memory: where allocations lie, which are alive, and which device may reach them.
// Knows nothing of streams; who calls holds the state's lock.
#pragma once

#include "driver_state.h"

namespace emulated {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kPageBytes = 4096;

enum class Kind { kDevice, kPooled, kManaged, kHost, kRegistered, kImported };

struct Pool {
  Device* device = nullptr;
  int ordinal = 0;
  bool is_default = false;
  uint64_t release_threshold = 0;
  uint64_t used_bytes = 0;
  uint64_t high_bytes = 0;
  std::set<int> access;  // other devices, by ordinal
};

// A range of addresses backed by one file, from which allocations are cut and to which they never return.
struct Arena {
  uintptr_t base = 0;
  uint64_t bytes = 0;
  uint64_t next = 0;
  int file = -1;
  bool contains(uintptr_t address) const { return address - base < bytes; }
};

struct Allocation {
  uintptr_t base = 0;
  uint64_t bytes = 0;
  Kind kind = Kind::kDevice;
  Context* context = nullptr;
  int device = 0;  // ordinal; of an import, the exporter's if it is visible here
  Pool* pool = nullptr;
  uint64_t id = 0;
  Arena* arena = nullptr;
  uintptr_t pages = 0;  // what is mapped
  uint64_t pages_bytes = 0;
  unsigned host_flags = 0;
  bool live = true;      // false until a stream-ordered allocation has been reached
  bool freeing = false;  // a stream-ordered free is queued
  bool sync_memops = false;
  uint64_t nonce = 0;  // of the exported handle
  unsigned references = 1;
  std::string handle;  // of an import
};
using AllocationPtr = std::shared_ptr<Allocation>;

// The live allocation that holds [address, address + bytes); nullptr if there is none. The end of an allocation counts
// as inside for no bytes.
AllocationPtr find_allocation(uintptr_t address, uint64_t bytes = 1);
AllocationPtr find_base(uintptr_t address);

// Whether an address lies where the driver allocates, alive or not.
bool in_arena(uintptr_t address);

CUresult allocate(Context* context, Kind kind, uint64_t bytes, Pool* pool, AllocationPtr* out);
void release(const AllocationPtr& allocation);
void release_all(Context& context);
std::vector<AllocationPtr> allocations_of(const Context& context);

// Maps pages of another process's file between guards.
CUresult map_import(int file, uint64_t offset, uint64_t pages_bytes, AllocationPtr* out);

// Whether kernels of the context may address the allocation.
bool can_reach(const Context& context, const Allocation& allocation);

// Checks every aligned word of a kernel's parameters that the driver gave out.
CUresult check_params(const Context& context, const void* params, size_t bytes);

// Adds an import or a registered range to what is alive.
CUresult register_allocation(const AllocationPtr& allocation);

}  // namespace emulated
