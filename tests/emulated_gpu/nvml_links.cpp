// The NVML stand-in: what joins GPUs to each other and to the host: NVLink, PCIe, common ancestors, peer access.
// Knows nothing of what a single GPU is.
#include "nvml_core.h"

using namespace emulated_nvml;

namespace {

constexpr unsigned kMaxLinks = 36;
constexpr unsigned kSwitches = 4;
constexpr unsigned kSwitchBus = 0xc0;
constexpr unsigned kSwitchPciId = 0x22a310de;

// One direction of one link, as NVML tells it.
unsigned link_mbps(int nvlink_version) { return nvlink_version >= 4 ? 26562 : 25000; }

// NVML counts NVLink's versions with their halves.
unsigned version_number(int nvlink_version) { return nvlink_version >= 4 ? 6 : 4; }

// The GPU at the other end of a direct link; -1 where the machine has no such GPU.
int partner(int gpu) { return (gpu ^ 1) < gpus() ? gpu ^ 1 : -1; }

nvmlReturn_t check_link(nvmlDevice_t device, unsigned link, const void* out) {
  RETURN_UNLESS_VALID(device, out);
  if (link >= kMaxLinks) return NVML_ERROR_INVALID_ARGUMENT;
  if (topology()->nvlink_version == 0) return NVML_ERROR_NOT_SUPPORTED;
  return link < unsigned(topology()->nvlink_links) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

bool is_active(nvmlDevice_t device) { return topology()->nvswitch || partner(device->number) >= 0; }

nvmlReturn_t check_active_link(nvmlDevice_t device, unsigned link, const void* out) {
  const nvmlReturn_t result = check_link(device, link, out);
  return result == NVML_SUCCESS && !is_active(device) ? NVML_ERROR_NOT_SUPPORTED : result;
}

nvmlGpuTopologyLevel_t common_ancestor(int a, int b) {
  if (a == b) return NVML_TOPOLOGY_INTERNAL;
  const emulated::Topology& machine = *topology();
  if (emulated::numa_node(machine, a) != emulated::numa_node(machine, b)) return NVML_TOPOLOGY_SYSTEM;
  if (std::strcmp(machine.name, "pcie4") == 0) return NVML_TOPOLOGY_SINGLE;
  return std::strcmp(machine.name, "partial") == 0 ? NVML_TOPOLOGY_HOSTBRIDGE : NVML_TOPOLOGY_NODE;
}

// The link that a field asks for: in its number, or beside it.
unsigned link_of(const nvmlFieldValue_t& field) {
  if (field.fieldId >= NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 && field.fieldId <= NVML_FI_DEV_NVLINK_SPEED_MBPS_L5) {
    return field.fieldId - NVML_FI_DEV_NVLINK_SPEED_MBPS_L0;
  }
  if (field.fieldId >= NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 && field.fieldId <= NVML_FI_DEV_NVLINK_SPEED_MBPS_L11) {
    return field.fieldId - NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 + 6;
  }
  return field.fieldId == NVML_FI_DEV_NVLINK_GET_SPEED ? field.scopeId : kMaxLinks;
}

nvmlReturn_t read_field(nvmlDevice_t device, const nvmlFieldValue_t& field, unsigned* value) {
  const emulated::Topology& machine = *topology();
  if (field.fieldId == NVML_FI_DEV_NVLINK_LINK_COUNT) {
    *value = unsigned(machine.nvlink_links);
    return NVML_SUCCESS;
  }
  const bool common = field.fieldId == NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON;
  const nvmlReturn_t result = check_active_link(device, common ? 0 : link_of(field), value);
  if (result != NVML_SUCCESS) return NVML_ERROR_NOT_SUPPORTED;
  *value = link_mbps(machine.nvlink_version);
  return NVML_SUCCESS;
}

}  // namespace

NVML_API nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned* generation) {
  RETURN_UNLESS_VALID(device, generation);
  *generation = unsigned(topology()->pcie_generation);
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuMaxPcieLinkGeneration(nvmlDevice_t device, unsigned* generation) {
  return nvmlDeviceGetMaxPcieLinkGeneration(device, generation);
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned* generation) {
  return nvmlDeviceGetMaxPcieLinkGeneration(device, generation);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned* width) {
  RETURN_UNLESS_VALID(device, width);
  *width = unsigned(topology()->pcie_width);
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned* width) {
  return nvmlDeviceGetMaxPcieLinkWidth(device, width);
}

// Mega-transfers a second of a lane: 2500 doubled a generation, but 8000 in the third.
NVML_API nvmlReturn_t nvmlDeviceGetPcieSpeed(nvmlDevice_t device, unsigned* speed) {
  RETURN_UNLESS_VALID(device, speed);
  const int generation = topology()->pcie_generation;
  *speed = generation < 3 ? 2500u << (generation - 1) : 8000u << (generation - 3);
  return NVML_SUCCESS;
}

// NVML's numbers of these speeds are the generations.
NVML_API nvmlReturn_t nvmlDeviceGetPcieLinkMaxSpeed(nvmlDevice_t device, unsigned* speed) {
  return nvmlDeviceGetMaxPcieLinkGeneration(device, speed);
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned* active) {
  const nvmlReturn_t result = check_link(device, link, active);
  if (result == NVML_SUCCESS) *active = is_active(device);
  return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned* version) {
  const nvmlReturn_t result = check_link(device, link, version);
  if (result == NVML_SUCCESS) *version = version_number(topology()->nvlink_version);
  return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link, nvmlNvLinkCapability_t asked,
                                                    unsigned* has) {
  const nvmlReturn_t result = check_link(device, link, has);
  if (result != NVML_SUCCESS) return result;
  if (unsigned(asked) >= NVML_NVLINK_CAP_COUNT) return NVML_ERROR_INVALID_ARGUMENT;
  *has = asked == NVML_NVLINK_CAP_P2P_SUPPORTED || asked == NVML_NVLINK_CAP_SYSMEM_ACCESS ||
         asked == NVML_NVLINK_CAP_P2P_ATOMICS || asked == NVML_NVLINK_CAP_VALID;
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link,
                                                          nvmlIntNvLinkDeviceType_t* type) {
  const nvmlReturn_t result = check_active_link(device, link, type);
  if (result != NVML_SUCCESS) return result;
  *type = topology()->nvswitch ? NVML_NVLINK_DEVICE_TYPE_SWITCH : NVML_NVLINK_DEVICE_TYPE_GPU;
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t* info) {
  const nvmlReturn_t result = check_active_link(device, link, info);
  if (result != NVML_SUCCESS) return result;
  *info = topology()->nvswitch ? pci_info(kSwitchBus + link % kSwitches, kSwitchPciId)
                               : pci_info(unsigned(emulated::pci_bus(partner(device->number))), kGpuPciId);
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b,
                                                          nvmlGpuTopologyLevel_t* level) {
  RETURN_UNLESS_VALID(a, level);
  RETURN_UNLESS_VALID(b, level);
  *level = common_ancestor(a->number, b->number);
  return NVML_SUCCESS;
}

// Without an array it only counts.
NVML_API nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level,
                                                       unsigned* count, nvmlDevice_t* nearest) {
  RETURN_UNLESS_VALID(device, count);
  const unsigned room = nearest == nullptr ? 0 : *count;
  unsigned found = 0;
  for (int gpu = 0; gpu < gpus(); ++gpu) {
    if (gpu == device->number || common_ancestor(device->number, gpu) != level) continue;
    if (found < room) nearest[found] = device_of(gpu);
    ++found;
  }
  *count = found;
  return nearest != nullptr && found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t asked,
                                             nvmlGpuP2PStatus_t* status) {
  RETURN_UNLESS_VALID(a, status);
  RETURN_UNLESS_VALID(b, status);
  if (a == b) return NVML_ERROR_INVALID_ARGUMENT;
  const emulated::Topology& machine = *topology();
  const bool linked = emulated::nvlinks_between(machine, a->number, b->number) > 0;
  if (!emulated::has_peer_access(machine, a->number, b->number)) {
    *status = NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
  } else if (asked == NVML_P2P_CAPS_INDEX_READ || asked == NVML_P2P_CAPS_INDEX_WRITE) {
    *status = NVML_P2P_STATUS_OK;
  } else if (asked == NVML_P2P_CAPS_INDEX_NVLINK || asked == NVML_P2P_CAPS_INDEX_ATOMICS) {
    *status = linked ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
  } else if (asked == NVML_P2P_CAPS_INDEX_PCI) {
    *status = linked ? NVML_P2P_STATUS_NOT_SUPPORTED : NVML_P2P_STATUS_OK;
  } else {
    return NVML_ERROR_INVALID_ARGUMENT;
  }
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t* fields) {
  RETURN_UNLESS_VALID(device, fields);
  for (int i = 0; i < count; ++i) {
    nvmlFieldValue_t& field = fields[i];
    field.timestamp = field.latencyUsec = 0;
    field.valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    field.value.ullVal = 0;
    field.nvmlReturn = read_field(device, field, &field.value.uiVal);
  }
  return NVML_SUCCESS;
}
