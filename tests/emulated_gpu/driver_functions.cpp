// What can be asked of kernels: attributes, parameters, occupancy.
// Knows nothing of where they come from or how they are launched.
#include <algorithm>

#include "driver_modules.h"

namespace emulated {

int blocks_per_multiprocessor(unsigned block_threads, size_t shared_bytes) {
  const int by_threads = std::max(1, kThreadsPerMultiprocessor / int(std::max(1u, block_threads)));
  const int by_shared = int(kSharedBytesPerMultiprocessor / (shared_bytes + kReservedSharedBytes));
  return std::max(1, std::min({by_threads, by_shared, kBlocksPerMultiprocessor}));
}

static CUresult attribute(int* out, CUfunction_attribute which, const Function& function) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *out = kThreadsPerBlock;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *out = 32;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *out = 90;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *out = function.shared_bytes_limit;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *out = -1;
      return CUDA_SUCCESS;
    default:
      if (which < 0 || which >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
      *out = 0;
      return CUDA_SUCCESS;
  }
}

static CUresult set_attribute(Function& function, CUfunction_attribute which, int value) {
  if (which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS;
  if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_NOT_SUPPORTED;
  if (value < 0 || value > kSharedBytesPerBlockOptin) return CUDA_ERROR_INVALID_VALUE;
  function.shared_bytes_limit = value;
  return CUDA_SUCCESS;
}

static CUresult param_info(const Function& function, size_t index, size_t* offset, size_t* bytes) {
  if (index != 0 || offset == nullptr || function.params_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  if (bytes != nullptr) *bytes = function.params_bytes;
  return CUDA_SUCCESS;
}

}  // namespace emulated

using namespace emulated;

#define WITH_FUNCTION(name, handle) \
  ENTER();                          \
  Function* name = nullptr;         \
  Lock lock(state().lock);          \
  RETURN_IF_ERROR(find_function(reinterpret_cast<CUfunction>(handle), &name))

EMULATED_API CUresult cuKernelGetFunction(CUfunction* out, CUkernel kernel) {
  WITH_FUNCTION(function, kernel);
  *out = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuKernelGetLibrary(CUlibrary* out, CUkernel kernel) {
  WITH_FUNCTION(function, kernel);
  *out = reinterpret_cast<CUlibrary>(function->module);
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuKernelGetName(const char** out, CUkernel kernel) {
  WITH_FUNCTION(function, kernel);
  *out = function->name.c_str();
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuKernelGetAttribute(int* out, CUfunction_attribute which, CUkernel kernel, CUdevice) {
  WITH_FUNCTION(function, kernel);
  return attribute(out, which, *function);
}
EMULATED_API CUresult cuKernelSetAttribute(CUfunction_attribute which, int value, CUkernel kernel, CUdevice) {
  WITH_FUNCTION(function, kernel);
  return set_attribute(*function, which, value);
}
EMULATED_API CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* bytes) {
  WITH_FUNCTION(function, kernel);
  return param_info(*function, index, offset, bytes);
}
EMULATED_API CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* bytes) {
  WITH_FUNCTION(function, handle);
  return param_info(*function, index, offset, bytes);
}
EMULATED_API CUresult cuFuncGetName(const char** out, CUfunction handle) {
  WITH_FUNCTION(function, handle);
  *out = function->name.c_str();
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuFuncGetModule(CUmodule* out, CUfunction handle) {
  WITH_FUNCTION(function, handle);
  *out = reinterpret_cast<CUmodule>(function->module);
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuFuncGetAttribute(int* out, CUfunction_attribute which, CUfunction handle) {
  WITH_FUNCTION(function, handle);
  return attribute(out, which, *function);
}
EMULATED_API CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute which, int value) {
  WITH_FUNCTION(function, handle);
  return set_attribute(*function, which, value);
}
EMULATED_API CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache) {
  WITH_FUNCTION(function, handle);
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuFuncIsLoaded(CUfunctionLoadingState* out, CUfunction handle) {
  WITH_FUNCTION(function, handle);
  *out = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuFuncLoad(CUfunction handle) {
  WITH_FUNCTION(function, handle);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, CUfunction handle, int threads,
                                                                           size_t shared_bytes, unsigned int) {
  WITH_FUNCTION(function, handle);
  if (out == nullptr || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
  const bool fits = threads <= kThreadsPerBlock && shared_bytes <= size_t(kSharedBytesPerBlockOptin);
  *out = fits ? blocks_per_multiprocessor(unsigned(threads), shared_bytes) : 0;
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction handle, int threads,
                                                                  size_t shared_bytes) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, handle, threads, shared_bytes, 0);
}
EMULATED_API CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction handle, CUoccupancyB2DSize,
                                                       size_t, int limit) {
  WITH_FUNCTION(function, handle);
  if (grid == nullptr || block == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *block = limit > 0 ? std::min(limit, kThreadsPerBlock) : kThreadsPerBlock;
  *grid = state().settings.multiprocessors * blocks_per_multiprocessor(unsigned(*block), 0);
  return CUDA_SUCCESS;
}
