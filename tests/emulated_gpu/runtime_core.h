// What the parts of the small CUDA runtime share: the thread's current device and its last error.
// Knows nothing of the stand-in driver's inside: it is written against the public driver API alone.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace emulated_runtime {

// The two enumerations give equal failures equal numbers, so a driver error needs no table.
static_assert(int(CUDA_ERROR_INVALID_VALUE) == cudaErrorInvalidValue);
static_assert(int(CUDA_ERROR_OUT_OF_MEMORY) == cudaErrorMemoryAllocation);
static_assert(int(CUDA_ERROR_NOT_INITIALIZED) == cudaErrorInitializationError);
static_assert(int(CUDA_ERROR_NO_DEVICE) == cudaErrorNoDevice);
static_assert(int(CUDA_ERROR_INVALID_DEVICE) == cudaErrorInvalidDevice);
static_assert(int(CUDA_ERROR_NO_BINARY_FOR_GPU) == cudaErrorNoKernelImageForDevice);
static_assert(int(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED) == cudaErrorPeerAccessUnsupported);
static_assert(int(CUDA_ERROR_INVALID_HANDLE) == cudaErrorInvalidResourceHandle);
static_assert(int(CUDA_ERROR_NOT_FOUND) == cudaErrorSymbolNotFound);
static_assert(int(CUDA_ERROR_NOT_READY) == cudaErrorNotReady);
static_assert(int(CUDA_ERROR_ILLEGAL_ADDRESS) == cudaErrorIllegalAddress);
static_assert(int(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) == cudaErrorPeerAccessAlreadyEnabled);
static_assert(int(CUDA_ERROR_LAUNCH_FAILED) == cudaErrorLaunchFailure);
static_assert(int(CUDA_ERROR_NOT_SUPPORTED) == cudaErrorNotSupported);
static_assert(int(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) == cudaErrorStreamCaptureUnsupported);
static_assert(int(CUDA_ERROR_UNKNOWN) == cudaErrorUnknown);

// Keeps a failure for cudaGetLastError and hands it on. "Not ready" is an answer, not a failure.
cudaError_t keep(cudaError_t error);
inline cudaError_t keep(CUresult result) { return keep(cudaError_t(int(result))); }

// Starts the driver, once.
cudaError_t start();

// The primary context of a device, retained once for the whole process.
cudaError_t primary_context(int device, CUcontext* context);

// Makes sure that this thread has a context: the one that is current, whoever set it, else its device's primary one.
cudaError_t enter();

// Calls the driver once it runs.
template <class Call>
cudaError_t started(Call call) {
  if (cudaError_t error = start()) return error;
  return keep(call());
}

// Calls the driver in this thread's context.
template <class Call>
cudaError_t entered(Call call) {
  if (cudaError_t error = enter()) return error;
  return keep(call());
}

inline CUdeviceptr address(const void* pointer) { return CUdeviceptr(pointer); }
inline CUdeviceptr* address(void** pointer) { return reinterpret_cast<CUdeviceptr*>(pointer); }

}  // namespace emulated_runtime
