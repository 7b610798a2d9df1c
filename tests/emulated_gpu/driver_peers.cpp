// Which device may address whose memory: what the topology allows, and what contexts have enabled.
// Knows nothing of memory.
#include "driver_state.h"

using namespace emulated;

EMULATED_API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  ENTER();
  Device *from = nullptr, *to = nullptr;
  RETURN_IF_ERROR(find_device(device, &from));
  RETURN_IF_ERROR(find_device(peer, &to));
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *can = has_peer_access(*state().settings.topology, from->gpu, to->gpu);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute which, CUdevice device, CUdevice peer) {
  ENTER();
  Device *from = nullptr, *to = nullptr;
  RETURN_IF_ERROR(find_device(device, &from));
  RETURN_IF_ERROR(find_device(peer, &to));
  if (from == to) return CUDA_ERROR_INVALID_DEVICE;
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Topology& topology = *state().settings.topology;
  const bool reaches = has_peer_access(topology, from->gpu, to->gpu);
  const bool nvlink = nvlinks_between(topology, from->gpu, to->gpu) > 0;
  switch (which) {
    case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK:
      *value = nvlink ? 0 : 1;
      return CUDA_SUCCESS;
    case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
      *value = reaches;
      return CUDA_SUCCESS;
    case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED:
      *value = reaches;
      return CUDA_SUCCESS;
    case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
      *value = reaches && nvlink;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

EMULATED_API CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags) {
  ENTER_CONTEXT(context);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Context* peer = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_context(handle, &peer));
  if (peer == context) return CUDA_ERROR_INVALID_DEVICE;
  const bool reaches = has_peer_access(*state().settings.topology, device_of(*context).gpu, device_of(*peer).gpu);
  if (!reaches) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  return context->peers.insert(peer).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

EMULATED_API CUresult cuCtxDisablePeerAccess(CUcontext handle) {
  ENTER_CONTEXT(context);
  Context* peer = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_context(handle, &peer));
  return context->peers.erase(peer) != 0 ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}
