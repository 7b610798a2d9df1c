// The part of NVML's public interface that the stand-in serves, and how its entry points begin.
// Knows nothing of the driver: both read the same topologies.
#pragma once

#include <cstdint>

#include "topologies.h"

#define NVML_API extern "C" __attribute__((visibility("default")))

enum nvmlReturn_t {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_DRIVER_NOT_LOADED = 9,
};

enum nvmlGpuTopologyLevel_t {
  NVML_TOPOLOGY_INTERNAL = 0,
  NVML_TOPOLOGY_SINGLE = 10,
  NVML_TOPOLOGY_HOSTBRIDGE = 30,
  NVML_TOPOLOGY_NODE = 40,
  NVML_TOPOLOGY_SYSTEM = 50,
};

enum nvmlGpuP2PStatus_t {
  NVML_P2P_STATUS_OK = 0,
  NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED = 1,
  NVML_P2P_STATUS_NOT_SUPPORTED = 5,
  NVML_P2P_STATUS_UNKNOWN = 6,
};

enum nvmlGpuP2PCapsIndex_t {
  NVML_P2P_CAPS_INDEX_READ = 0,
  NVML_P2P_CAPS_INDEX_WRITE = 1,
  NVML_P2P_CAPS_INDEX_NVLINK = 2,
  NVML_P2P_CAPS_INDEX_ATOMICS = 3,
  NVML_P2P_CAPS_INDEX_PCI = 4,
};

enum nvmlIntNvLinkDeviceType_t {
  NVML_NVLINK_DEVICE_TYPE_GPU = 0,
  NVML_NVLINK_DEVICE_TYPE_SWITCH = 2,
};

enum nvmlNvLinkCapability_t {
  NVML_NVLINK_CAP_P2P_SUPPORTED = 0,
  NVML_NVLINK_CAP_SYSMEM_ACCESS = 1,
  NVML_NVLINK_CAP_P2P_ATOMICS = 2,
  NVML_NVLINK_CAP_VALID = 5,
  NVML_NVLINK_CAP_COUNT = 6,
};

enum nvmlField {
  NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 = 84,
  NVML_FI_DEV_NVLINK_SPEED_MBPS_L5 = 89,
  NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90,
  NVML_FI_DEV_NVLINK_LINK_COUNT = 91,
  NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 = 132,
  NVML_FI_DEV_NVLINK_SPEED_MBPS_L11 = 137,
  NVML_FI_DEV_NVLINK_GET_SPEED = 164,
};

constexpr unsigned NVML_VALUE_TYPE_UNSIGNED_INT = 1;

struct nvmlPciInfo_t {
  char busIdLegacy[16];
  unsigned domain;
  unsigned bus;
  unsigned device;
  unsigned pciDeviceId;
  unsigned pciSubSystemId;
  char busId[32];
};

struct nvmlMemory_t {
  unsigned long long total, free, used;
};

struct nvmlMemory_v2_t {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

union nvmlValue_t {
  double dVal;
  unsigned uiVal;
  unsigned long long ullVal;
};

struct nvmlFieldValue_t {
  unsigned fieldId;
  unsigned scopeId;
  long long timestamp;
  long long latencyUsec;
  unsigned valueType;
  nvmlReturn_t nvmlReturn;
  nvmlValue_t value;
};

struct EmulatedGpu {
  int number;
};
using nvmlDevice_t = const EmulatedGpu*;

namespace emulated_nvml {

// The machine, as it was at nvmlInit; nullptr before it and after nvmlShutdown.
const emulated::Topology* topology();
int gpus();

inline nvmlReturn_t check(nvmlDevice_t device, const void* out) {
  if (topology() == nullptr) return NVML_ERROR_UNINITIALIZED;
  return device != nullptr && out != nullptr ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlDevice_t device_of(int gpu);

// What NVML tells of an address on the PCI bus.
nvmlPciInfo_t pci_info(unsigned bus, unsigned pci_device_id);

constexpr unsigned kGpuPciId = 0x000010de;  // NVIDIA's vendor number, and no product's

}  // namespace emulated_nvml

#define RETURN_UNLESS_VALID(device, out)                            \
  do {                                                              \
    const nvmlReturn_t result_ = emulated_nvml::check(device, out); \
    if (result_ != NVML_SUCCESS) return result_;                    \
  } while (0)
