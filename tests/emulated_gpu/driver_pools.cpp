// Stream-ordered memory: pools, and allocations that begin and end where a stream reaches them.
// Knows nothing of where memory lies.
#include "driver_capture.h"
#include "driver_memory.h"
#include "driver_streams.h"

namespace emulated {

static std::map<Pool*, std::unique_ptr<Pool>>& made_pools() {
  static auto& only = *new std::map<Pool*, std::unique_ptr<Pool>>;
  return only;
}

static CUmemoryPool handle_of(Pool* pool) { return reinterpret_cast<CUmemoryPool>(pool); }

static CUresult find_pool(CUmemoryPool handle, Pool** out) {
  Pool* pool = reinterpret_cast<Pool*>(handle);
  bool known = made_pools().count(pool) != 0;
  for (const auto& device : state().devices) known = known || device->default_pool.get() == pool;
  if (!known) return CUDA_ERROR_INVALID_VALUE;
  *out = pool;
  return CUDA_SUCCESS;
}

// The allocation comes alive when the stream gets there: use elsewhere before that is a missing dependency.
static CUresult allocate_ordered(CUdeviceptr* out, size_t bytes, Pool* pool, Stream& stream) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (stream.capture != nullptr) return invalidate(*stream.capture, CUDA_ERROR_NOT_SUPPORTED);
  AllocationPtr made;
  RETURN_IF_ERROR(allocate(stream.context, Kind::kPooled, bytes, pool, &made));
  made->live = false;
  Operation operation = {stream.context, [made] {
                           Lock lock(state().lock);
                           made->live = true;
                           return CUDA_SUCCESS;
                         }};
  *out = made->base;
  const CUresult result = submit(stream, std::move(operation));
  if (result != CUDA_SUCCESS) release(made);
  return result;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* out, CUdevice device) {
  Device* found = nullptr;
  ENTER();
  RETURN_IF_ERROR(find_device(device, &found));
  *out = handle_of(found->default_pool.get());
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDeviceGetMemPool(CUmemoryPool* out, CUdevice device) {
  Device* found = nullptr;
  ENTER();
  RETURN_IF_ERROR(find_device(device, &found));
  *out = handle_of(found->pool);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
  Device* found = nullptr;
  Pool* pool = nullptr;
  ENTER();
  RETURN_IF_ERROR(find_device(device, &found));
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_pool(handle, &pool));
  if (pool->device != found) return CUDA_ERROR_INVALID_VALUE;
  found->pool = pool;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* what) {
  ENTER();
  if (out == nullptr || what == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (what->handleTypes != CU_MEM_HANDLE_TYPE_NONE || what->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_NOT_SUPPORTED;
  Device* device = nullptr;
  RETURN_IF_ERROR(find_device(what->location.id, &device));
  auto pool = std::make_unique<Pool>();
  pool->device = device;
  pool->ordinal = what->location.id;
  *out = handle_of(pool.get());
  Lock lock(state().lock);
  made_pools()[pool.get()] = std::move(pool);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  ENTER();
  Lock lock(state().lock);
  const auto found = made_pools().find(reinterpret_cast<Pool*>(handle));
  if (found == made_pools().end()) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& device : state().devices)
    if (device->pool == found->first) device->pool = device->default_pool.get();
  // Allocations may outlive their pool, as in CUDA.
  if (found->first->used_bytes == 0) made_pools().erase(found);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t) {
  ENTER();
  Pool* pool = nullptr;
  Lock lock(state().lock);
  return find_pool(handle, &pool);
}

EMULATED_API CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void* value) {
  ENTER();
  Pool* pool = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_pool(handle, &pool));
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      memcpy(&pool->release_threshold, value, 8);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      pool->high_bytes = pool->used_bytes;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

EMULATED_API CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void* value) {
  ENTER();
  Pool* pool = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_pool(handle, &pool));
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const int on = 1;
  switch (which) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      memcpy(value, &pool->release_threshold, 8);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      memcpy(value, &pool->used_bytes, 8);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      memcpy(value, &pool->high_bytes, 8);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      memcpy(value, &on, sizeof on);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

EMULATED_API CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* map, size_t count) {
  ENTER();
  Pool* pool = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_pool(handle, &pool));
  for (size_t i = 0; i < count; ++i) {
    Device* device = nullptr;
    if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    RETURN_IF_ERROR(find_device(map[i].location.id, &device));
    const bool grants = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (device == pool->device) {
      if (!grants) return CUDA_ERROR_INVALID_VALUE;
      continue;
    }
    if (!has_peer_access(*state().settings.topology, device->gpu, pool->device->gpu)) return CUDA_ERROR_INVALID_DEVICE;
    if (grants)
      pool->access.insert(map[i].location.id);
    else
      pool->access.erase(map[i].location.id);
  }
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuMemPoolGetAccess(CUmemAccess_flags* out, CUmemoryPool handle, CUmemLocation* where) {
  ENTER();
  Pool* pool = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_pool(handle, &pool));
  if (out == nullptr || where == nullptr || where->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  const bool granted = where->id == pool->ordinal || pool->access.count(where->id) != 0;
  *out = granted ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream handle) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  return allocate_ordered(out, bytes, device_of(*stream->context).pool, *stream);
}

EMULATED_API CUresult cuMemAllocFromPoolAsync(CUdeviceptr* out, size_t bytes, CUmemoryPool pool_handle,
                                              CUstream handle) {
  ENTER();
  StreamPtr stream;
  Pool* pool = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_pool(pool_handle, &pool));
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  return allocate_ordered(out, bytes, pool, *stream);
}

EMULATED_API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  if (address == 0) return CUDA_SUCCESS;
  if (stream->capture != nullptr) return invalidate(*stream->capture, CUDA_ERROR_NOT_SUPPORTED);
  const AllocationPtr found = find_base(address);
  const bool freeable = found != nullptr && (found->kind == Kind::kPooled || found->kind == Kind::kDevice);
  if (!freeable || found->freeing) return CUDA_ERROR_INVALID_VALUE;
  found->freeing = true;
  return submit(*stream, {stream->context, [found] {
                            Lock inner(state().lock);
                            release(found);
                            return CUDA_SUCCESS;
                          }});
}
