// The small CUDA runtime's errors: their names and texts, and each thread's last one.
// Knows nothing of what failed.
#include "runtime_core.h"

namespace emulated_runtime {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

struct Description {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define DESCRIBED(error, text) {error, #error, text}
constexpr Description kDescriptions[] = {
    DESCRIBED(cudaSuccess, "no error"),
    DESCRIBED(cudaErrorInvalidValue, "invalid argument"),
    DESCRIBED(cudaErrorMemoryAllocation, "out of memory"),
    DESCRIBED(cudaErrorInitializationError, "the driver could not be started, or is not usable after a fork"),
    DESCRIBED(cudaErrorCudartUnloading, "the driver is shutting down"),
    DESCRIBED(cudaErrorInvalidConfiguration, "invalid launch configuration"),
    DESCRIBED(cudaErrorInvalidPitchValue, "invalid pitch"),
    DESCRIBED(cudaErrorInvalidMemcpyDirection, "invalid direction of a copy"),
    DESCRIBED(cudaErrorInsufficientDriver, "the driver is older than the runtime"),
    DESCRIBED(cudaErrorInvalidDeviceFunction, "invalid device function"),
    DESCRIBED(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    DESCRIBED(cudaErrorInvalidDevice, "invalid device ordinal"),
    DESCRIBED(cudaErrorInvalidKernelImage, "the kernel image is invalid"),
    DESCRIBED(cudaErrorDeviceUninitialized, "invalid device context"),
    DESCRIBED(cudaErrorNoKernelImageForDevice, "no kernel image can run on this device"),
    DESCRIBED(cudaErrorUnsupportedLimit, "the device does not support this limit"),
    DESCRIBED(cudaErrorPeerAccessUnsupported, "these two devices cannot access each other's memory"),
    DESCRIBED(cudaErrorInvalidPtx, "a PTX image could not be compiled"),
    DESCRIBED(cudaErrorFileNotFound, "file not found"),
    DESCRIBED(cudaErrorSharedObjectInitFailed, "a shared object could not be loaded"),
    DESCRIBED(cudaErrorOperatingSystem, "an operating system call failed"),
    DESCRIBED(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    DESCRIBED(cudaErrorIllegalState, "the operation is not allowed in the present state"),
    DESCRIBED(cudaErrorSymbolNotFound, "named symbol not found"),
    DESCRIBED(cudaErrorNotReady, "the device has not finished yet"),
    DESCRIBED(cudaErrorIllegalAddress, "an illegal memory access was met"),
    DESCRIBED(cudaErrorLaunchOutOfResources, "too many resources asked for a launch"),
    DESCRIBED(cudaErrorLaunchTimeout, "a kernel ran longer than allowed"),
    DESCRIBED(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    DESCRIBED(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    DESCRIBED(cudaErrorSetOnActiveProcess, "not possible once the device is in use"),
    DESCRIBED(cudaErrorContextIsDestroyed, "the context is destroyed"),
    DESCRIBED(cudaErrorAssert, "a device-side assertion failed"),
    DESCRIBED(cudaErrorHostMemoryAlreadyRegistered, "part of this host memory is already registered"),
    DESCRIBED(cudaErrorHostMemoryNotRegistered, "this host memory is not registered"),
    DESCRIBED(cudaErrorMisalignedAddress, "misaligned address"),
    DESCRIBED(cudaErrorLaunchFailure, "a kernel failed while running"),
    DESCRIBED(cudaErrorCooperativeLaunchTooLarge, "more blocks in a cooperative launch than can be resident"),
    DESCRIBED(cudaErrorNotPermitted, "operation not permitted"),
    DESCRIBED(cudaErrorNotSupported, "operation not supported"),
    DESCRIBED(cudaErrorStreamCaptureUnsupported, "not permitted while a stream is capturing"),
    DESCRIBED(cudaErrorStreamCaptureInvalidated, "an earlier error ended the capture"),
    DESCRIBED(cudaErrorStreamCaptureMerge, "two independent captures would be merged"),
    DESCRIBED(cudaErrorStreamCaptureUnmatched, "the capture was not begun on this stream"),
    DESCRIBED(cudaErrorStreamCaptureUnjoined, "the capture forked to a stream that did not join again"),
    DESCRIBED(cudaErrorStreamCaptureIsolation, "a captured operation depends on one outside the capture"),
    DESCRIBED(cudaErrorStreamCaptureImplicit, "a captured operation depends on the legacy stream"),
    DESCRIBED(cudaErrorCapturedEvent, "not permitted on an event recorded in a capturing stream"),
    DESCRIBED(cudaErrorStreamCaptureWrongThread, "the capture was begun by another thread"),
    DESCRIBED(cudaErrorTimeout, "the wait ended at its time limit"),
    DESCRIBED(cudaErrorGraphExecUpdateFailure, "the graph cannot be updated to this one"),
    DESCRIBED(cudaErrorUnknown, "unknown error"),
};
#undef DESCRIBED

const Description* find(cudaError_t error) {
  for (const Description& entry : kDescriptions) {
    if (entry.error == error) return &entry;
  }
  return nullptr;
}

}  // namespace

cudaError_t keep(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

}  // namespace emulated_runtime

using namespace emulated_runtime;

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  const Description* found = find(error);
  return found ? found->name : "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  const Description* found = find(error);
  return found ? found->text : "unrecognized error code";
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

}  // extern "C"
