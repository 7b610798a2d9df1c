// Says no to what the stand-in does not model, where callers ask without finding out first whether they can.
// Knows nothing else. What is not here and not elsewhere is not exported, and cuGetProcAddress says so.
#include "driver_state.h"

#define REFUSE(name, ...)                   \
  EMULATED_API CUresult name(__VA_ARGS__) { \
    ENTER();                                \
    return CUDA_ERROR_NOT_SUPPORTED;        \
  }

REFUSE(cuLinkCreate, unsigned int, CUjit_option*, void**, CUlinkState*)
REFUSE(cuLinkAddData, CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned int, CUjit_option*, void**)
REFUSE(cuLinkAddFile, CUlinkState, CUjitInputType, const char*, unsigned int, CUjit_option*, void**)
REFUSE(cuLinkComplete, CUlinkState, void**, size_t*)
REFUSE(cuLinkDestroy, CUlinkState)

// Memory by virtual address; the device's attribute says that there is none.
REFUSE(cuMemAddressReserve, CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long)
REFUSE(cuMemCreate, CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long)
REFUSE(cuMemGetAllocationGranularity, size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags)

// Tables of undocumented functions: the stand-in has the public interface alone. NVRTC asks for one without checking
// that it can ask.
EMULATED_API CUresult cuGetExportTable(const void** table, const CUuuid*) {
  if (table == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}
