// The small CUDA runtime's pools: memory that is allocated and freed in the order of a stream.
// Knows nothing of how a pool keeps memory.
#include "runtime_core.h"

using namespace emulated_runtime;

static_assert(int(cudaMemPoolAttrReleaseThreshold) == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
static_assert(int(cudaMemPoolAttrUsedMemHigh) == CU_MEMPOOL_ATTR_USED_MEM_HIGH);

extern "C" {

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  return entered([&] { return cuMemAllocAsync(address(pointer), bytes, stream); });
}

cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  return entered([&] { return cuMemAllocFromPoolAsync(address(pointer), bytes, pool, stream); });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return entered([&] { return cuMemFreeAsync(address(pointer), stream); });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return started([&] { return cuDeviceGetDefaultMemPool(pool, device); });
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return started([&] { return cuDeviceGetMemPool(pool, device); });
}

cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool) {
  return started([&] { return cuDeviceSetMemPool(device, pool); });
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* asked) {
  CUmemPoolProps properties = {};
  properties.allocType = CUmemAllocationType(asked->allocType);
  properties.handleTypes = CUmemAllocationHandleType(asked->handleTypes);
  properties.location.type = CUmemLocationType(asked->location.type);
  properties.location.id = asked->location.id;
  properties.maxSize = asked->maxSize;
  return entered([&] { return cuMemPoolCreate(pool, &properties); });
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  return entered([&] { return cuMemPoolDestroy(pool); });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes_kept) {
  return entered([&] { return cuMemPoolTrimTo(pool, bytes_kept); });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return entered([&] { return cuMemPoolGetAttribute(pool, CUmemPool_attribute(attribute), value); });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return entered([&] { return cuMemPoolSetAttribute(pool, CUmemPool_attribute(attribute), value); });
}

}  // extern "C"
