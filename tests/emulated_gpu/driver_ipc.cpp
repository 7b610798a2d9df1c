// Memory shared between processes by handle: pages of the exporter's file, opened through /proc.
// Knows nothing of events, which are not shared.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <random>

#include "driver_capture.h"
#include "driver_memory.h"
#include "driver_streams.h"

namespace emulated {

static constexpr uint32_t kMagic = 0x43504945;

// What a handle holds: where the allocation lies in which process, and a mark that says that it still does.
struct Handle {
  uint32_t magic;
  int32_t pid;
  int32_t file;
  uint32_t pages_to_base;
  unsigned char uuid[16];
  uint64_t offset;
  uint64_t bytes;
  uint64_t nonce;
  uint64_t check;
};
static_assert(sizeof(Handle) == sizeof(CUipcMemHandle), "a handle has 64 bytes");

static uint64_t checksum(const Handle& handle) {
  uint64_t sum = 0xcbf29ce484222325;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&handle);
  for (size_t i = 0; i < offsetof(Handle, check); ++i) sum = (sum ^ bytes[i]) * 0x100000001b3;
  return sum;
}

// NOTE mark of an export. The page before an allocation, which no address maps, holds the nonce of its handle in the
// exporter's file. Freeing punches it out, so a handle whose nonce is there names memory that is alive.
static off_t mark_offset(uint64_t offset) { return off_t(offset - sizeof(uint64_t)); }

static CUresult export_allocation(Allocation& allocation, Handle* handle) {
  const Arena& arena = *allocation.arena;
  *handle = {};
  handle->magic = kMagic;
  handle->pid = getpid();
  handle->file = arena.file;
  handle->pages_to_base = uint32_t(allocation.base - allocation.pages);
  uuid_bytes(state().devices[size_t(allocation.device)]->gpu, handle->uuid);
  handle->offset = allocation.pages - arena.base;
  handle->bytes = allocation.bytes;
  if (allocation.nonce == 0) {
    std::random_device random;
    allocation.nonce = (uint64_t(random()) << 32 | random()) | 1;
  }
  handle->nonce = allocation.nonce;
  handle->check = checksum(*handle);
  const bool marked = pwrite(arena.file, &handle->nonce, sizeof handle->nonce, mark_offset(handle->offset)) ==
                      ssize_t(sizeof handle->nonce);
  return marked ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

// The GPU of a UUID, visible in this process or not.
static int gpu_of(const unsigned char uuid[16]) {
  for (int gpu = 0; gpu < state().settings.gpus; ++gpu) {
    unsigned char candidate[16];
    uuid_bytes(gpu, candidate);
    if (memcmp(candidate, uuid, 16) == 0) return gpu;
  }
  return -1;
}

static CUresult check_handle(const Handle& handle, const Context& context, int* gpu) {
  if (handle.magic != kMagic || handle.check != checksum(handle)) return CUDA_ERROR_INVALID_VALUE;
  // A process reaches its own memory by address; CUDA refuses its own handles.
  if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  *gpu = gpu_of(handle.uuid);
  if (*gpu < 0) return CUDA_ERROR_INVALID_VALUE;
  const int ours = device_of(context).gpu;
  if (*gpu != ours && !has_peer_access(*state().settings.topology, ours, *gpu))
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  return CUDA_SUCCESS;
}

static AllocationPtr find_open(const std::string& key, const Context& context) {
  for (const AllocationPtr& allocation : allocations_of(context))
    if (allocation->kind == Kind::kImported && allocation->handle == key) return allocation;
  return nullptr;
}

static CUresult open_allocation(const Handle& handle, AllocationPtr* out) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return CUDA_ERROR_INVALID_VALUE;
  uint64_t nonce = 0;
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (pread(file, &nonce, sizeof nonce, mark_offset(handle.offset)) == ssize_t(sizeof nonce) && nonce == handle.nonce) {
    const uint64_t span = handle.pages_to_base + handle.bytes;
    result = map_import(file, handle.offset, (span + kPageBytes - 1) / kPageBytes * kPageBytes, out);
  }
  close(file);
  return result;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
  ENTER_CONTEXT(context);
  Lock lock(state().lock);
  if (!state().settings.ipc) return CUDA_ERROR_NOT_SUPPORTED;
  const AllocationPtr found = find_allocation(address);
  if (out == nullptr || found == nullptr || found->kind != Kind::kDevice) return CUDA_ERROR_INVALID_VALUE;
  Handle handle;
  RETURN_IF_ERROR(export_allocation(*found, &handle));
  memcpy(out, &handle, sizeof handle);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuIpcOpenMemHandle(CUdeviceptr* out, CUipcMemHandle opaque, unsigned int flags) {
  ENTER_CONTEXT(context);
  Lock lock(state().lock);
  if (!state().settings.ipc) return CUDA_ERROR_NOT_SUPPORTED;
  if (out == nullptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  Handle handle;
  memcpy(&handle, &opaque, sizeof handle);
  int gpu = -1;
  RETURN_IF_ERROR(check_handle(handle, *context, &gpu));
  const std::string key(opaque.reserved, sizeof opaque.reserved);
  AllocationPtr opened = find_open(key, *context);
  if (opened != nullptr) {
    ++opened->references;
  } else {
    RETURN_IF_ERROR(open_allocation(handle, &opened));
    opened->base = opened->pages + handle.pages_to_base;
    opened->bytes = handle.bytes;
    opened->context = context;
    opened->handle = key;
    // The exporter's device, if it can be seen from here.
    opened->device = context->device;
    for (size_t i = 0; i < state().devices.size(); ++i)
      if (state().devices[i]->gpu == gpu) opened->device = int(i);
    RETURN_IF_ERROR(register_allocation(opened));
  }
  *out = opened->base;
  return CUDA_SUCCESS;
}

#undef cuIpcOpenMemHandle
EMULATED_API CUresult cuIpcOpenMemHandle(CUdeviceptr* out, CUipcMemHandle handle, unsigned int flags) {
  return cuIpcOpenMemHandle_v2(out, handle, flags);
}

EMULATED_API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  ENTER_CONTEXT(context);
  Lock lock(state().lock);
  if (!state().settings.ipc) return CUDA_ERROR_NOT_SUPPORTED;
  AllocationPtr found = find_base(address);
  if (found == nullptr || found->kind != Kind::kImported) return CUDA_ERROR_INVALID_VALUE;
  if (found->context != context) return CUDA_ERROR_INVALID_VALUE;
  if (--found->references == 0) release(found);
  return CUDA_SUCCESS;
}
