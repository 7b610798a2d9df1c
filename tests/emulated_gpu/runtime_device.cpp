// The small CUDA runtime's devices: the thread's current one, properties, peer access, limits.
// Knows nothing of topologies: it asks the driver.
#include <map>
#include <mutex>

#include "runtime_core.h"

namespace emulated_runtime {
namespace {

// What cudaSetDevice chose; counts only while the thread has no context.
thread_local int chosen_device = 0;

struct IntegerProperty {
  int cudaDeviceProp::* field;
  CUdevice_attribute attribute;
};

struct BytesProperty {
  size_t cudaDeviceProp::* field;
  CUdevice_attribute attribute;
};

constexpr IntegerProperty kIntegers[] = {
    {&cudaDeviceProp::major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
    {&cudaDeviceProp::minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
    {&cudaDeviceProp::regsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK},
    {&cudaDeviceProp::warpSize, CU_DEVICE_ATTRIBUTE_WARP_SIZE},
    {&cudaDeviceProp::maxThreadsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
    {&cudaDeviceProp::multiProcessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
    {&cudaDeviceProp::integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED},
    {&cudaDeviceProp::canMapHostMemory, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY},
    {&cudaDeviceProp::concurrentKernels, CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS},
    {&cudaDeviceProp::ECCEnabled, CU_DEVICE_ATTRIBUTE_ECC_ENABLED},
    {&cudaDeviceProp::pciBusID, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID},
    {&cudaDeviceProp::pciDeviceID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID},
    {&cudaDeviceProp::pciDomainID, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID},
    {&cudaDeviceProp::asyncEngineCount, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT},
    {&cudaDeviceProp::unifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING},
    {&cudaDeviceProp::memoryBusWidth, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH},
    {&cudaDeviceProp::l2CacheSize, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE},
    {&cudaDeviceProp::maxThreadsPerMultiProcessor, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::streamPrioritiesSupported, CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED},
    {&cudaDeviceProp::regsPerMultiprocessor, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::managedMemory, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY},
    {&cudaDeviceProp::isMultiGpuBoard, CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD},
    {&cudaDeviceProp::hostNativeAtomicSupported, CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED},
    {&cudaDeviceProp::pageableMemoryAccess, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS},
    {&cudaDeviceProp::concurrentManagedAccess, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS},
    {&cudaDeviceProp::canUseHostPointerForRegisteredMem, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM},
    {&cudaDeviceProp::cooperativeLaunch, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH},
    {&cudaDeviceProp::maxBlocksPerMultiProcessor, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::hostRegisterSupported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED},
    {&cudaDeviceProp::memoryPoolsSupported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED},
    {&cudaDeviceProp::ipcEventSupported, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED},
#if CUDART_VERSION < 13000
    {&cudaDeviceProp::clockRate, CU_DEVICE_ATTRIBUTE_CLOCK_RATE},
    {&cudaDeviceProp::memoryClockRate, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE},
    {&cudaDeviceProp::computeMode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE},
#endif
};

constexpr BytesProperty kBytes[] = {
    {&cudaDeviceProp::sharedMemPerBlock, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK},
    {&cudaDeviceProp::sharedMemPerBlockOptin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN},
    {&cudaDeviceProp::sharedMemPerMultiprocessor, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::reservedSharedMemPerBlock, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK},
    {&cudaDeviceProp::totalConstMem, CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY},
    {&cudaDeviceProp::memPitch, CU_DEVICE_ATTRIBUTE_MAX_PITCH},
};

constexpr CUdevice_attribute kBlockDims[] = {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
                                             CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z};
constexpr CUdevice_attribute kGridDims[] = {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y,
                                            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z};

// A property that the driver does not know reads zero.
int attribute_or_zero(CUdevice_attribute attribute, int device) {
  int value = 0;
  return cuDeviceGetAttribute(&value, attribute, device) == CUDA_SUCCESS ? value : 0;
}

cudaError_t check_device(int device) {
  int count = 0;
  if (cudaError_t error = cudaGetDeviceCount(&count)) return error;
  return device >= 0 && device < count ? cudaSuccess : keep(cudaErrorInvalidDevice);
}

cudaError_t make_current(int device) {
  CUcontext context;
  if (cudaError_t error = primary_context(device, &context)) return error;
  return keep(cuCtxSetCurrent(context));
}

}  // namespace

cudaError_t start() {
  static const CUresult result = cuInit(0);
  return keep(result);
}

cudaError_t primary_context(int device, CUcontext* context) {
  static std::mutex mutex;
  static std::map<int, CUcontext> contexts;
  if (cudaError_t error = check_device(device)) return error;
  const std::lock_guard<std::mutex> guard(mutex);
  CUcontext& retained = contexts[device];
  if (!retained) {
    if (cudaError_t error = keep(cuDevicePrimaryCtxRetain(&retained, device))) return error;
  }
  *context = retained;
  return cudaSuccess;
}

cudaError_t enter() {
  if (cudaError_t error = start()) return error;
  CUcontext current = nullptr;
  if (cudaError_t error = keep(cuCtxGetCurrent(&current))) return error;
  return current ? cudaSuccess : make_current(chosen_device);
}

}  // namespace emulated_runtime

using namespace emulated_runtime;

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) { return keep(cuDriverGetVersion(version)); }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  return started([&] { return cuDeviceGetCount(count); });
}

cudaError_t cudaGetDevice(int* device) {
  CUcontext current = nullptr;
  if (cudaError_t error = started([&] { return cuCtxGetCurrent(&current); })) return error;
  if (current) return keep(cuCtxGetDevice(device));
  *device = chosen_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (cudaError_t error = make_current(device)) return error;
  chosen_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  return entered([] { return cuCtxSynchronize(); });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return started([&] { return cuDeviceGetAttribute(value, CUdevice_attribute(attribute), device); });
}

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* bus_id) {
  return started([&] { return cuDeviceGetByPCIBusId(device, bus_id); });
}

cudaError_t cudaDeviceGetPCIBusId(char* bus_id, int length, int device) {
  return started([&] { return cuDeviceGetPCIBusId(bus_id, length, device); });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  if (cudaError_t error = check_device(device)) return error;
  if (cudaError_t error = keep(cuDeviceGetName(properties->name, sizeof properties->name, device))) return error;
  if (cudaError_t error = keep(cuDeviceTotalMem(&properties->totalGlobalMem, device))) return error;
  if (cudaError_t error = keep(cuDeviceGetUuid(&properties->uuid, device))) return error;
  for (const IntegerProperty& known : kIntegers) properties->*known.field = attribute_or_zero(known.attribute, device);
  for (const BytesProperty& known : kBytes) {
    properties->*known.field = size_t(attribute_or_zero(known.attribute, device));
  }
  for (int axis = 0; axis < 3; ++axis) {
    properties->maxThreadsDim[axis] = attribute_or_zero(kBlockDims[axis], device);
    properties->maxGridSize[axis] = attribute_or_zero(kGridDims[axis], device);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return started([&] { return cuDeviceCanAccessPeer(can, device, peer); });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  CUcontext context;
  if (cudaError_t error = primary_context(peer, &context)) return error;
  return entered([&] { return cuCtxEnablePeerAccess(context, flags); });
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  CUcontext context;
  if (cudaError_t error = primary_context(peer, &context)) return error;
  return entered([&] { return cuCtxDisablePeerAccess(context); });
}

cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit limit) {
  return entered([&] { return cuCtxGetLimit(value, CUlimit(limit)); });
}

cudaError_t cudaDeviceSetLimit(cudaLimit limit, size_t value) {
  return entered([&] { return cuCtxSetLimit(CUlimit(limit), value); });
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }

cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"
