// What can be asked of devices: names, attributes, addresses.
// Knows nothing of contexts or how devices are made.
#include <cstdio>

#include "driver_state.h"

namespace emulated {

static int attribute(const Device& device, CUdevice_attribute which) {
  const Settings& settings = state().settings;
  const int gpu = device.gpu;
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return kThreadsPerBlock;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return kSharedBytesPerBlock;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return kSharedBytesPerBlockOptin;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return kSharedBytesPerMultiprocessor;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      return kReservedSharedBytes;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
      return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return 5120;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
    case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT:
      return 512;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return settings.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return kThreadsPerMultiprocessor;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      return kBlocksPerMultiprocessor;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 3;
    case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO:
      return 2;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return 0;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return pci_bus(gpu);
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
      return 0;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
      return numa_node(*settings.topology, gpu);
    case CU_DEVICE_ATTRIBUTE_NUMA_ID:
      return -1;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      return 1;
    default:
      return 0;
  }
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuDeviceGetCount(int* count) {
  ENTER();
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = int(state().devices.size());
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER();
  Device* found = nullptr;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_ERROR(find_device(ordinal, &found));
  *device = ordinal;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  ENTER();
  Device* found = nullptr;
  RETURN_IF_ERROR(find_device(device, &found));
  if (name == nullptr || bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(name, size_t(bytes), "%s", state().settings.topology->device_name);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  ENTER();
  Device* found = nullptr;
  RETURN_IF_ERROR(find_device(device, &found));
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  uuid_bytes(found->gpu, reinterpret_cast<unsigned char*>(uuid->bytes));
  return CUDA_SUCCESS;
}

#undef cuDeviceGetUuid
EMULATED_API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

EMULATED_API CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  ENTER();
  Device* found = nullptr;
  RETURN_IF_ERROR(find_device(device, &found));
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *bytes = kMemoryBytes;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  ENTER();
  Device* found = nullptr;
  RETURN_IF_ERROR(find_device(device, &found));
  if (value == nullptr || which <= 0 || which >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  *value = attribute(*found, which);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
  RETURN_IF_ERROR(cuDeviceGetAttribute(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
  return cuDeviceGetAttribute(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
}

EMULATED_API CUresult cuDeviceGetPCIBusId(char* text, int bytes, CUdevice device) {
  ENTER();
  Device* found = nullptr;
  RETURN_IF_ERROR(find_device(device, &found));
  if (text == nullptr || bytes < 13) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(text, size_t(bytes), "%s", pci_bus_id(found->gpu).c_str());
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* text) {
  ENTER();
  if (device == nullptr || text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  unsigned domain = 0, bus = 0, slot = 0, function = 0;
  if (std::sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) {
    domain = function = 0;
    if (std::sscanf(text, "%x:%x.%x", &bus, &slot, &function) != 3) return CUDA_ERROR_INVALID_VALUE;
  }
  State& all = state();
  for (size_t i = 0; i < all.devices.size(); ++i) {
    if (domain != 0 || slot != 0 || function != 0 || int(bus) != pci_bus(all.devices[i]->gpu)) continue;
    *device = CUdevice(i);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;
}
