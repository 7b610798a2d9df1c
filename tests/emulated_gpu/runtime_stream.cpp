// The small CUDA runtime's streams, events, host functions and graphs.
// Knows nothing of how work is queued: the two APIs share their handles, so the driver gets them as they are.
#include "runtime_core.h"

using namespace emulated_runtime;

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return entered([&] { return cuStreamCreate(stream, CU_STREAM_DEFAULT); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return entered([&] { return cuStreamCreate(stream, flags); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return entered([&] { return cuStreamCreateWithPriority(stream, flags, priority); });
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  return entered([&] { return cuStreamGetFlags(stream, flags); });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return entered([&] { return cuStreamGetPriority(stream, priority); });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return entered([&] { return cuStreamDestroy(stream); });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return entered([&] { return cuStreamSynchronize(stream); });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return entered([&] { return cuStreamQuery(stream); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return entered([&] { return cuStreamWaitEvent(stream, event, flags); });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return entered([&] { return cuLaunchHostFunc(stream, function, data); });
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned flags) {
  // The two callback types differ in the error's enumeration alone, whose numbers are the same.
  return entered(
      [&] { return cuStreamAddCallback(stream, reinterpret_cast<CUstreamCallback>(callback), data, flags); });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return entered([&] { return cuStreamBeginCapture(stream, CUstreamCaptureMode(mode)); });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return entered([&] { return cuStreamEndCapture(stream, graph); });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return entered([&] { return cuStreamIsCapturing(stream, reinterpret_cast<CUstreamCaptureStatus*>(status)); });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return entered([&] { return cuEventCreate(event, CU_EVENT_DEFAULT); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return entered([&] { return cuEventCreate(event, flags); });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return entered([&] { return cuEventDestroy(event); });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  return entered([&] { return cuEventElapsedTime(milliseconds, begin, end); });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return entered([&] { return cuEventQuery(event); });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return entered([&] { return cuEventRecord(event, stream); });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return entered([&] { return cuEventSynchronize(event); });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return entered([&] { return cuGraphInstantiateWithFlags(executable, graph, flags); });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return entered([&] { return cuGraphLaunch(executable, stream); });
}

cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
  return entered([&] { return cuGraphUpload(executable, stream); });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return entered([&] { return cuGraphDestroy(graph); });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return entered([&] { return cuGraphExecDestroy(executable); });
}

}  // extern "C"
