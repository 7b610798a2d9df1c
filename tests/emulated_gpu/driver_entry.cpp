// Finds entry points by name, and names errors.
// Knows nothing of what the entry points do.
#include <dlfcn.h>

#include "driver_state.h"

namespace emulated {

// Functions whose signature changed under one name: since which version of CUDA which export is meant.
struct Versioned {
  const char* name;
  int since;
  const char* exported;
};

static constexpr Versioned kVersioned[] = {
    {"cuCtxCreate", 3020, "cuCtxCreate_v2"},
    {"cuCtxCreate", 11040, "cuCtxCreate_v3"},
    {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuStreamGetCaptureInfo", 10010, "cuStreamGetCaptureInfo_v1"},
    {"cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"},
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    {"cuStreamBeginCapture", 10000, "cuStreamBeginCapture_v1"},
    {"cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"},
    {"cuGraphInstantiate", 11000, "cuGraphInstantiate_v2"},
    {"cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"},
    {"cuGetProcAddress", 11030, "cuGetProcAddress"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuCtxGetDevice", 2000, "cuCtxGetDevice"},
    {"cuCtxGetDevice", 13000, "cuCtxGetDevice_v2"},
    {"cuStreamGetCtx", 9020, "cuStreamGetCtx"},
    {"cuStreamGetCtx", 12050, "cuStreamGetCtx_v2"},
};

// Functions that take a stream, or use one: under the per-thread default stream they are others.
static bool uses_streams(const std::string& name) {
  for (const char* part :
       {"Async", "cuStream", "cuLaunch", "cuGraphLaunch", "cuGraphUpload", "cuEventRecord", "cuMemcpy", "cuMemset"})
    if (name.find(part) != std::string::npos) return name.rfind("cuStreamCreate", 0) != 0 && name != "cuStreamDestroy";
  return false;
}

static void* exported(const std::string& name) {
  // Only what this library itself exports.
  static void* self = [] {
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(&state), &info) == 0) return static_cast<void*>(nullptr);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return self == nullptr ? nullptr : dlsym(self, name.c_str());
}

static void* resolve(const std::string& name, int version, bool* too_old) {
  *too_old = false;
  const char* chosen = nullptr;
  bool listed = false;
  for (const Versioned& entry : kVersioned) {
    if (name != entry.name) continue;
    listed = true;
    if (entry.since <= version) chosen = entry.exported;
  }
  if (listed) {
    *too_old = chosen == nullptr;
    return chosen == nullptr ? nullptr : exported(chosen);
  }
  for (const char* suffix : {"_v3", "_v2", ""})
    if (void* found = exported(name + suffix)) return found;
  return nullptr;
}

struct ErrorName {
  CUresult code;
  const char* name;
  const char* text;
};

#define NAMED(code, text) {CUDA_##code, "CUDA_" #code, text}

static constexpr ErrorName kErrors[] = {
    NAMED(SUCCESS, "no error"),
    NAMED(ERROR_INVALID_VALUE, "invalid argument"),
    NAMED(ERROR_OUT_OF_MEMORY, "out of memory"),
    NAMED(ERROR_NOT_INITIALIZED, "initialization error"),
    NAMED(ERROR_DEINITIALIZED, "driver shutting down"),
    NAMED(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    NAMED(ERROR_INVALID_DEVICE, "invalid device ordinal"),
    NAMED(ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    NAMED(ERROR_INVALID_CONTEXT, "invalid device context"),
    NAMED(ERROR_MAP_FAILED, "mapping of buffer object failed"),
    NAMED(ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    NAMED(ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    NAMED(ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    NAMED(ERROR_FILE_NOT_FOUND, "file not found"),
    NAMED(ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    NAMED(ERROR_INVALID_HANDLE, "invalid resource handle"),
    NAMED(ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    NAMED(ERROR_NOT_FOUND, "named symbol not found"),
    NAMED(ERROR_NOT_READY, "device not ready"),
    NAMED(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    NAMED(ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    NAMED(ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    NAMED(ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    NAMED(ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process"),
    NAMED(ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    NAMED(ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    NAMED(ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    NAMED(ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    NAMED(ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch"),
    NAMED(ERROR_NOT_PERMITTED, "operation not permitted"),
    NAMED(ERROR_NOT_SUPPORTED, "operation not supported"),
    NAMED(ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    NAMED(ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    NAMED(ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    NAMED(ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    NAMED(ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    NAMED(ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    NAMED(ERROR_STREAM_CAPTURE_IMPLICIT,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    NAMED(ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    NAMED(ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "attempt to terminate a thread-local capture sequence from another thread"),
    NAMED(ERROR_UNKNOWN, "unknown error"),
};

static const ErrorName* find_error(CUresult code) {
  for (const ErrorName& error : kErrors)
    if (error.code == code) return &error;
  return nullptr;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuGetErrorName(CUresult code, const char** out) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorName* found = find_error(code);
  *out = found == nullptr ? nullptr : found->name;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EMULATED_API CUresult cuGetErrorString(CUresult code, const char** out) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorName* found = find_error(code);
  *out = found == nullptr ? nullptr : found->text;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EMULATED_API CUresult cuGetProcAddress(const char* name, void** out, int version, cuuint64_t flags,
                                       CUdriverProcAddressQueryResult* status) {
  if (name == nullptr || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = nullptr;
  bool too_old = false;
  if ((flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0 && uses_streams(name)) {
    // Not modelled: a caller gets none rather than the wrong one.
  } else if (version > kDriverVersion) {
    too_old = true;
  } else {
    *out = resolve(name, version, &too_old);
  }
  if (status != nullptr)
    *status = *out != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
              : too_old       ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                              : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress
EMULATED_API CUresult cuGetProcAddress(const char* name, void** out, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}
