// Entry points that make, free and describe memory.
// Knows nothing of copies.
#include "driver_capture.h"
#include "driver_memory.h"
#include "driver_streams.h"

namespace emulated {

// Calls that CUDA may make wait for the device's work do so here when asked to: work that never ends then shows.
static CUresult before_allocation(Lock& lock, Context& context) {
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  return state().settings.strict_sync ? synchronize(lock, context) : CUDA_SUCCESS;
}

static CUresult make(Kind kind, size_t bytes, unsigned flags, uintptr_t* out) {
  ENTER_CONTEXT(context);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  RETURN_IF_ERROR(before_allocation(lock, *context));
  AllocationPtr made;
  RETURN_IF_ERROR(allocate(context, kind, bytes, nullptr, &made));
  made->host_flags = flags;
  *out = made->base;
  return CUDA_SUCCESS;
}

static CUresult free_kind(uintptr_t address, bool host) {
  ENTER_CONTEXT(context);
  if (address == 0) return CUDA_SUCCESS;
  Lock lock(state().lock);
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  AllocationPtr found = find_base(address);
  if (found == nullptr || found->freeing || found->kind == Kind::kRegistered || found->kind == Kind::kImported ||
      (found->kind == Kind::kHost) != host)
    return CUDA_ERROR_INVALID_VALUE;
  found->freeing = true;
  // Freeing waits for the work of the context, as CUDA documents for all but stream-ordered memory.
  if (found->kind != Kind::kPooled) {
    synchronize(lock, *found->context);
    if (found->context != context) synchronize(lock, *context);
  }
  release(found);
  return CUDA_SUCCESS;
}

template <class Value>
static CUresult store(void* out, Value value) {
  memcpy(out, &value, sizeof value);
  return CUDA_SUCCESS;
}

static bool is_host(const Allocation& allocation) {
  return allocation.kind == Kind::kHost || allocation.kind == Kind::kRegistered;
}

static CUresult attribute_of_known(void* out, CUpointer_attribute which, uintptr_t address, const Allocation& found) {
  const bool host = is_host(found);
  const bool managed = found.kind == Kind::kManaged;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return store(out, found.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return store(out, unsigned(host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return store(out, address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return host || managed ? store(out, address) : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return store(out, unsigned(found.sync_memops));
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return store(out, uint64_t(found.id));
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return store(out, uint64_t(found.id));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return store(out, unsigned(managed));
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return store(out, found.device);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return store(out, unsigned(found.kind == Kind::kDevice));
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      return store(out, found.base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      return store(out, size_t(found.bytes));
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return store(out, 1u);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return store(out, uint64_t(0));
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return store(out, 0u);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return store(out, found.pool);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: {
      Context* context = nullptr;
      if (context_stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
      RETURN_IF_ERROR(find_context(context_stack().back(), &context));
      return store(out, unsigned(can_reach(*context, found) ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE
                                                            : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE));
    }
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

// What cuPointerGetAttributes tells of memory that the driver does not know.
static void attribute_of_unknown(void* out, CUpointer_attribute which) {
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      store(out, int(-2));
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      store(out, 0u);
      break;
    default:
      store(out, uint64_t(0));
  }
}

static constexpr unsigned kHostAllocFlags =
    CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
static constexpr unsigned kHostRegisterFlags =
    CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuMemGetInfo(size_t* free_bytes, size_t* total) {
  ENTER_CONTEXT(context);
  Lock lock(state().lock);
  if (free_bytes != nullptr) *free_bytes = kMemoryBytes - device_of(*context).used_bytes;
  if (total != nullptr) *total = kMemoryBytes;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuMemAlloc(CUdeviceptr* out, size_t bytes) {
  return make(Kind::kDevice, bytes, 0, reinterpret_cast<uintptr_t*>(out));
}

EMULATED_API CUresult cuMemAllocPitch(CUdeviceptr* out, size_t* pitch, size_t width, size_t height, unsigned int) {
  if (pitch == nullptr || width == 0 || height == 0) return CUDA_ERROR_INVALID_VALUE;
  *pitch = (width + 511) / 512 * 512;
  return cuMemAlloc(out, *pitch * height);
}

EMULATED_API CUresult cuMemFree(CUdeviceptr address) { return free_kind(address, false); }

EMULATED_API CUresult cuMemAllocManaged(CUdeviceptr* out, size_t bytes, unsigned int flags) {
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  return make(Kind::kManaged, bytes, 0, reinterpret_cast<uintptr_t*>(out));
}

EMULATED_API CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned int flags) {
  if (flags & ~kHostAllocFlags) return CUDA_ERROR_INVALID_VALUE;
  return make(Kind::kHost, bytes, flags, reinterpret_cast<uintptr_t*>(out));
}

EMULATED_API CUresult cuMemAllocHost(void** out, size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

EMULATED_API CUresult cuMemFreeHost(void* address) { return free_kind(reinterpret_cast<uintptr_t>(address), true); }

EMULATED_API CUresult cuMemHostRegister(void* address, size_t bytes, unsigned int flags) {
  ENTER_CONTEXT(context);
  if (flags & CU_MEMHOSTREGISTER_IOMEMORY) return CUDA_ERROR_NOT_SUPPORTED;
  if (address == nullptr || bytes == 0 || (flags & ~kHostRegisterFlags)) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  RETURN_IF_ERROR(before_allocation(lock, *context));
  auto made = std::make_shared<Allocation>();
  made->base = reinterpret_cast<uintptr_t>(address);
  made->bytes = bytes;
  made->kind = Kind::kRegistered;
  made->context = context;
  made->device = context->device;
  made->host_flags = flags;
  made->id = state().next_id++;
  return register_allocation(made);
}

EMULATED_API CUresult cuMemHostUnregister(void* address) {
  ENTER_CONTEXT(context);
  Lock lock(state().lock);
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  AllocationPtr found = find_base(reinterpret_cast<uintptr_t>(address));
  if (found == nullptr || found->kind != Kind::kRegistered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  synchronize(lock, *found->context);
  release(found);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuMemHostGetDevicePointer(CUdeviceptr* out, void* address, unsigned int flags) {
  ENTER_CONTEXT(context);
  if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  const AllocationPtr found = find_allocation(reinterpret_cast<uintptr_t>(address));
  if (found == nullptr || !is_host(*found)) return CUDA_ERROR_INVALID_VALUE;
  *out = reinterpret_cast<CUdeviceptr>(address);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuMemHostGetFlags(unsigned int* flags, void* address) {
  ENTER_CONTEXT(context);
  Lock lock(state().lock);
  const AllocationPtr found = find_allocation(reinterpret_cast<uintptr_t>(address));
  if (flags == nullptr || found == nullptr || !is_host(*found)) return CUDA_ERROR_INVALID_VALUE;
  *flags = found->host_flags | CU_MEMHOSTALLOC_DEVICEMAP;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  ENTER_CONTEXT(context);
  Lock lock(state().lock);
  const AllocationPtr found = find_allocation(address);
  if (found == nullptr || is_host(*found)) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = found->base;
  if (bytes != nullptr) *bytes = found->bytes;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr address) {
  ENTER();
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  const AllocationPtr found = find_allocation(address);
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : attribute_of_known(out, which, address, *found);
}

EMULATED_API CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* which, void** out,
                                             CUdeviceptr address) {
  ENTER();
  if (which == nullptr || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  const AllocationPtr found = find_allocation(address);
  for (unsigned i = 0; i < count; ++i)
    if (found == nullptr || attribute_of_known(out[i], which[i], address, *found) != CUDA_SUCCESS)
      attribute_of_unknown(out[i], which[i]);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute which, CUdeviceptr address) {
  ENTER();
  Lock lock(state().lock);
  const AllocationPtr found = find_allocation(address);
  if (value == nullptr || found == nullptr || which != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
    return CUDA_ERROR_INVALID_VALUE;
  unsigned on = 0;
  memcpy(&on, value, sizeof on);
  found->sync_memops = on != 0;
  return CUDA_SUCCESS;
}
