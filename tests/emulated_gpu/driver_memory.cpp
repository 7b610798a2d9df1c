// Lays allocations out between guard pages in ranges that are never reused, and knows which are alive.
// Knows nothing of entry points or streams.
#include "driver_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace emulated {

// Addresses are cheap: an arena lasts for as long as a test process lives.
static constexpr uint64_t kArenaBytes = 2ull << 40;
static constexpr uint64_t kPoisonBytes = 1 << 20;
static constexpr int kPoison = 0xCB;

struct Memory {
  std::vector<std::unique_ptr<Arena>> arenas;  // one a device, then host, managed, imports
  std::map<uintptr_t, AllocationPtr> live;
  std::map<uintptr_t, uint64_t> unregistered;  // host ranges that were registered once
};

static Memory& memory() {
  static Memory& only = *new Memory;
  return only;
}

static uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

static Arena* arena_at(size_t index) {
  auto& arenas = memory().arenas;
  if (arenas.size() < state().devices.size() + 3) arenas.resize(state().devices.size() + 3);
  auto& arena = arenas[index];
  if (arena != nullptr) return arena.get();
  void* base = mmap(nullptr, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  const int file = memfd_create("emulated-gpu", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, off_t(kArenaBytes)) != 0) return nullptr;
  arena = std::make_unique<Arena>();
  *arena = {reinterpret_cast<uintptr_t>(base), kArenaBytes, kPageBytes, file};
  return arena.get();
}

static Arena* arena_for(Kind kind, int device) {
  const size_t devices = state().devices.size();
  switch (kind) {
    case Kind::kHost:
      return arena_at(devices);
    case Kind::kManaged:
      return arena_at(devices + 1);
    case Kind::kImported:
      return arena_at(devices + 2);
    default:
      return arena_at(size_t(device));
  }
}

// Takes pages with an unmapped page before and after them.
static bool take_pages(Arena& arena, uint64_t bytes, int file, uint64_t file_offset, uintptr_t* out) {
  if (bytes + 2 * kPageBytes > arena.bytes - arena.next) return false;
  const uint64_t offset = arena.next + kPageBytes;
  if (file < 0) file_offset = offset;
  void* address = reinterpret_cast<void*>(arena.base + offset);
  const int flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
  if (mmap(address, bytes, PROT_READ | PROT_WRITE, flags, file < 0 ? arena.file : file, off_t(file_offset)) ==
      MAP_FAILED)
    return false;
  // A child of fork() has no device memory; without this it would write to ours.
  madvise(address, bytes, MADV_DONTFORK);
  arena.next = offset + bytes + kPageBytes;
  *out = arena.base + offset;
  return true;
}

static bool counts(Kind kind) { return kind == Kind::kDevice || kind == Kind::kPooled || kind == Kind::kManaged; }

AllocationPtr find_allocation(uintptr_t address, uint64_t bytes) {
  auto& live = memory().live;
  auto after = live.upper_bound(address);
  if (after == live.begin()) return nullptr;
  const AllocationPtr& found = std::prev(after)->second;
  const uint64_t offset = address - found->base;
  if (offset > found->bytes || bytes > found->bytes - offset) return nullptr;
  return found;
}

AllocationPtr find_base(uintptr_t address) {
  const auto found = memory().live.find(address);
  return found == memory().live.end() ? nullptr : found->second;
}

bool in_arena(uintptr_t address) {
  for (const auto& arena : memory().arenas)
    if (arena != nullptr && arena->contains(address)) return true;
  return false;
}

static bool was_registered(uintptr_t address) {
  auto& gone = memory().unregistered;
  auto after = gone.upper_bound(address);
  return after != gone.begin() && address - std::prev(after)->first < std::prev(after)->second;
}

CUresult allocate(Context* context, Kind kind, uint64_t bytes, Pool* pool, AllocationPtr* out) {
  Device& device = pool != nullptr ? *pool->device : device_of(*context);
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t rounded = round_up(bytes, kAlignment);
  if (counts(kind) && (bytes > kMemoryBytes || rounded > kMemoryBytes - device.used_bytes))
    return CUDA_ERROR_OUT_OF_MEMORY;
  const int ordinal = pool != nullptr ? pool->ordinal : context->device;
  Arena* arena = arena_for(kind, ordinal);
  auto made = std::make_shared<Allocation>();
  made->pages_bytes = round_up(rounded, kPageBytes);
  if (arena == nullptr || !take_pages(*arena, made->pages_bytes, -1, 0, &made->pages)) return CUDA_ERROR_OUT_OF_MEMORY;
  made->base = made->pages + made->pages_bytes - rounded;
  made->bytes = bytes;
  made->kind = kind;
  made->context = context;
  made->device = ordinal;
  made->pool = pool;
  made->id = state().next_id++;
  made->arena = arena;
  memset(reinterpret_cast<void*>(made->pages), kPoison, std::min(made->pages_bytes, kPoisonBytes));
  if (counts(kind)) device.used_bytes += rounded;
  if (pool != nullptr) pool->used_bytes += bytes;
  if (pool != nullptr) pool->high_bytes = std::max(pool->high_bytes, pool->used_bytes);
  memory().live[made->base] = made;
  *out = made;
  return CUDA_SUCCESS;
}

void release(const AllocationPtr& allocation) {
  const AllocationPtr kept = allocation;
  memory().live.erase(kept->base);
  if (kept->kind == Kind::kRegistered) {
    memory().unregistered[kept->base] = kept->bytes;
    return;
  }
  void* pages = reinterpret_cast<void*>(kept->pages);
  mmap(pages, kept->pages_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  if (kept->kind != Kind::kImported) {
    // The page before holds the mark of an exported handle; without it the handle is void.
    const uint64_t offset = kept->pages - kept->arena->base;
    fallocate(kept->arena->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset - kPageBytes),
              off_t(kept->pages_bytes + kPageBytes));
  }
  if (counts(kept->kind)) state().devices[size_t(kept->device)]->used_bytes -= round_up(kept->bytes, kAlignment);
  if (kept->pool != nullptr) kept->pool->used_bytes -= kept->bytes;
}

std::vector<AllocationPtr> allocations_of(const Context& context) {
  std::vector<AllocationPtr> found;
  for (const auto& [base, allocation] : memory().live)
    if (allocation->context == &context) found.push_back(allocation);
  return found;
}

void release_all(Context& context) {
  for (const AllocationPtr& allocation : allocations_of(context)) release(allocation);
}

CUresult map_import(int file, uint64_t offset, uint64_t pages_bytes, AllocationPtr* out) {
  Arena* arena = arena_for(Kind::kImported, 0);
  auto made = std::make_shared<Allocation>();
  made->pages_bytes = pages_bytes;
  if (arena == nullptr || !take_pages(*arena, pages_bytes, file, offset, &made->pages)) return CUDA_ERROR_MAP_FAILED;
  made->kind = Kind::kImported;
  made->id = state().next_id++;
  made->arena = arena;
  *out = made;
  return CUDA_SUCCESS;
}

CUresult register_allocation(const AllocationPtr& allocation) {
  auto& live = memory().live;
  const uintptr_t end = allocation->base + allocation->bytes;
  auto next = live.lower_bound(allocation->base);
  if (next != live.end() && next->first < end) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (find_allocation(allocation->base) != nullptr) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  auto& gone = memory().unregistered;
  for (auto old = gone.begin(); old != gone.end();)
    old = old->first < end && allocation->base < old->first + old->second ? gone.erase(old) : std::next(old);
  live[allocation->base] = allocation;
  return CUDA_SUCCESS;
}

bool can_reach(const Context& context, const Allocation& allocation) {
  switch (allocation.kind) {
    case Kind::kDevice:
      return allocation.context == &context || context.peers.count(allocation.context) != 0 ||
             allocation.device == context.device;
    case Kind::kPooled:
      return allocation.device == context.device || allocation.pool->access.count(context.device);
    case Kind::kImported:
      return allocation.context == &context;
    default:
      return true;
  }
}

CUresult check_params(const Context& context, const void* params, size_t bytes) {
  const char* words = static_cast<const char*>(params);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    uintptr_t word;
    memcpy(&word, words + i, 8);
    AllocationPtr found = find_allocation(word);
    if (found == nullptr && !in_arena(word) && !was_registered(word)) continue;
    // One past the end is a pointer that may be made, though not followed.
    if (found == nullptr) found = find_allocation(word, 0);
    if (found == nullptr || !found->live || !can_reach(context, *found)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  return CUDA_SUCCESS;
}

}  // namespace emulated
