// The small CUDA runtime's memory: allocation, registration, copies, fills, pointer attributes, handles for processes.
// Knows nothing of devices' links: the driver copies.
#include <cstring>

#include "runtime_core.h"

using namespace emulated_runtime;

namespace {

CUDA_MEMCPY2D rectangle(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width_bytes,
                        size_t height, cudaMemcpyKind kind) {
  CUDA_MEMCPY2D copy = {};
  const bool from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
  const bool to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost;
  copy.srcMemoryType = from_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_UNIFIED;
  copy.dstMemoryType = to_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_UNIFIED;
  copy.srcHost = from;
  copy.srcDevice = address(from);
  copy.srcPitch = from_pitch;
  copy.dstHost = to;
  copy.dstDevice = address(to);
  copy.dstPitch = to_pitch;
  copy.WidthInBytes = width_bytes;
  copy.Height = height;
  return copy;
}

cudaError_t peer_contexts(int to_device, int from_device, CUcontext* to, CUcontext* from) {
  if (cudaError_t error = primary_context(to_device, to)) return error;
  return primary_context(from_device, from);
}

template <class Value>
Value pointer_attribute(CUpointer_attribute attribute, const void* pointer) {
  Value value = {};
  return cuPointerGetAttribute(&value, attribute, address(pointer)) == CUDA_SUCCESS ? value : Value{};
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return enter();
  return entered([&] { return cuMemAlloc(address(pointer), bytes); });
}

cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned flags) {
  return entered([&] { return cuMemAllocManaged(address(pointer), bytes, flags); });
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  *pointer = nullptr;
  if (bytes == 0) return enter();
  return entered([&] { return cuMemHostAlloc(pointer, bytes, flags); });
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned flags) {
  return entered([&] { return cuMemHostRegister(pointer, bytes, flags); });
}

cudaError_t cudaHostUnregister(void* pointer) {
  return entered([&] { return cuMemHostUnregister(pointer); });
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return enter();
  return entered([&] { return cuMemFree(address(pointer)); });
}

cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return enter();
  return entered([&] { return cuMemFreeHost(pointer); });
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return entered([&] { return cuMemGetInfo(free_bytes, total_bytes); });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return entered([&] {
    if (kind == cudaMemcpyHostToDevice) return cuMemcpyHtoD(address(to), from, bytes);
    if (kind == cudaMemcpyDeviceToHost) return cuMemcpyDtoH(to, address(from), bytes);
    return cuMemcpy(address(to), address(from), bytes);
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return entered([&] {
    if (kind == cudaMemcpyHostToDevice) return cuMemcpyHtoDAsync(address(to), from, bytes, stream);
    if (kind == cudaMemcpyDeviceToHost) return cuMemcpyDtoHAsync(to, address(from), bytes, stream);
    return cuMemcpyAsync(address(to), address(from), bytes, stream);
  });
}

cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device, size_t bytes) {
  CUcontext target, source;
  if (cudaError_t error = peer_contexts(to_device, from_device, &target, &source)) return error;
  return entered([&] { return cuMemcpyPeer(address(to), target, address(from), source, bytes); });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                cudaStream_t stream) {
  CUcontext target, source;
  if (cudaError_t error = peer_contexts(to_device, from_device, &target, &source)) return error;
  return entered([&] { return cuMemcpyPeerAsync(address(to), target, address(from), source, bytes, stream); });
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width_bytes,
                         size_t height, cudaMemcpyKind kind) {
  const CUDA_MEMCPY2D copy = rectangle(to, to_pitch, from, from_pitch, width_bytes, height, kind);
  return entered([&] { return cuMemcpy2D(&copy); });
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width_bytes,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  const CUDA_MEMCPY2D copy = rectangle(to, to_pitch, from, from_pitch, width_bytes, height, kind);
  return entered([&] { return cuMemcpy2DAsync(&copy, stream); });
}

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  return entered([&] { return cuMemsetD8(address(pointer), static_cast<unsigned char>(value), bytes); });
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  return entered([&] { return cuMemsetD8Async(address(pointer), static_cast<unsigned char>(value), bytes, stream); });
}

// Memory that CUDA does not know is not an error: its type says so.
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->device = cudaInvalidDeviceId;
  attributes->hostPointer = const_cast<void*>(pointer);
  if (cudaError_t error = enter()) return error;
  unsigned type = 0;
  if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address(pointer)) != CUDA_SUCCESS) {
    return cudaSuccess;
  }
  const bool managed = pointer_attribute<unsigned>(CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer) & 1;
  attributes->type = managed                        ? cudaMemoryTypeManaged
                     : type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice
                                                    : cudaMemoryTypeHost;
  attributes->device = pointer_attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
  attributes->devicePointer =
      reinterpret_cast<void*>(pointer_attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, pointer));
  attributes->hostPointer = pointer_attribute<void*>(CU_POINTER_ATTRIBUTE_HOST_POINTER, pointer);
  return cudaSuccess;
}

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(CUipcMemHandle));
static_assert(sizeof(cudaIpcEventHandle_t) == sizeof(CUipcEventHandle));

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  return entered([&] { return cuIpcGetMemHandle(reinterpret_cast<CUipcMemHandle*>(handle), address(pointer)); });
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  CUipcMemHandle same;
  std::memcpy(&same, &handle, sizeof same);
  return entered([&] { return cuIpcOpenMemHandle(address(pointer), same, flags); });
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  return entered([&] { return cuIpcCloseMemHandle(address(pointer)); });
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  return entered([&] { return cuIpcGetEventHandle(reinterpret_cast<CUipcEventHandle*>(handle), event); });
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  CUipcEventHandle same;
  std::memcpy(&same, &handle, sizeof same);
  return entered([&] { return cuIpcOpenEventHandle(event, same); });
}

}  // extern "C"
