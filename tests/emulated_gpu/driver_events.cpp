// Events: marks in streams that other streams and the host wait for.
// Knows nothing of what comes before the mark.
#include "driver_capture.h"
#include "driver_streams.h"

namespace emulated {

struct Event {
  Context* context = nullptr;
  unsigned flags = 0;
  DonePtr record;           // nullptr: never recorded
  uint64_t capture_id = 0;  // not 0: the last record was captured
  std::vector<GraphNode*> frontier;
};
using EventPtr = std::shared_ptr<Event>;

static std::unordered_map<CUevent, EventPtr>& handles() {
  static auto& only = *new std::unordered_map<CUevent, EventPtr>;
  return only;
}

static CUresult find_event(CUevent handle, EventPtr* out) {
  const auto found = handles().find(handle);
  if (found == handles().end()) return CUDA_ERROR_INVALID_HANDLE;
  *out = found->second;
  return CUresult((*out)->context->error.load());
}

// Errors of asking for an event whose last record is part of a graph.
static CUresult refuse_captured_event(const Event& event) {
  if (event.capture_id == 0) return CUDA_SUCCESS;
  Capture* capture = find_capture(event.capture_id);
  return capture == nullptr ? CUDA_ERROR_CAPTURED_EVENT : invalidate(*capture, CUDA_ERROR_CAPTURED_EVENT);
}

// A node that records the event each time the graph runs.
static CUresult record_external(Stream& stream, const EventPtr& event) {
  Operation operation = {stream.context, [event] {
                           Lock lock(state().lock);
                           event->record = std::make_shared<Done>();
                           finish(event->record);
                           return CUDA_SUCCESS;
                         }};
  operation.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
  return submit(stream, std::move(operation));
}

// A node that waits for the record that is current each time the graph runs.
static CUresult wait_external(Stream& stream, const EventPtr& event) {
  Operation operation = {stream.context, [event] {
                           Lock lock(state().lock);
                           wait_for(lock, event->record);
                           return CUDA_SUCCESS;
                         }};
  operation.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT;
  return submit(stream, std::move(operation));
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuEventCreate(CUevent* out, unsigned int flags) {
  ENTER_CONTEXT(context);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CU_EVENT_INTERPROCESS) return CUDA_ERROR_NOT_SUPPORTED;
  if (flags & ~unsigned(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
  auto event = std::make_shared<Event>();
  event->context = context;
  event->flags = flags;
  *out = reinterpret_cast<CUevent>(event.get());
  Lock lock(state().lock);
  handles()[*out] = event;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuEventDestroy(CUevent handle) {
  ENTER();
  Lock lock(state().lock);
  return handles().erase(handle) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EMULATED_API CUresult cuEventRecordWithFlags(CUevent handle, CUstream stream_handle, unsigned int flags) {
  ENTER();
  EventPtr event;
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_event(handle, &event));
  RETURN_IF_ERROR(usable_stream(stream_handle, &stream));
  if ((flags & ~unsigned(CU_EVENT_RECORD_EXTERNAL)) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture != nullptr) {
    if (!stream->capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (flags == CU_EVENT_RECORD_EXTERNAL) return record_external(*stream, event);
    event->capture_id = stream->capture->id;
    event->frontier = stream->frontier;
    return CUDA_SUCCESS;
  }
  if (flags == CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  DonePtr done;
  RETURN_IF_ERROR(submit(*stream, {stream->context, nullptr}, &done));
  event->record = done;
  event->capture_id = 0;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuEventRecord(CUevent handle, CUstream stream) {
  return cuEventRecordWithFlags(handle, stream, CU_EVENT_RECORD_DEFAULT);
}

EMULATED_API CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned int flags) {
  ENTER();
  EventPtr event;
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_event(handle, &event));
  RETURN_IF_ERROR(usable_stream(stream_handle, &stream));
  if ((flags & ~unsigned(CU_EVENT_WAIT_EXTERNAL)) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (flags == CU_EVENT_WAIT_EXTERNAL) {
    if (stream->capture == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return wait_external(*stream, event);
  }
  if (event->capture_id != 0) return join_capture(*stream, event->capture_id, event->frontier);
  if (stream->capture != nullptr) {
    if (!stream->capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  }
  // The record as it is now: a later record of the same event does not move this wait.
  if (is_done(event->record)) return CUDA_SUCCESS;
  return submit(*stream, {stream->context, nullptr}, nullptr, {event->record});
}

EMULATED_API CUresult cuEventQuery(CUevent handle) {
  ENTER();
  EventPtr event;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_event(handle, &event));
  RETURN_IF_ERROR(refuse_captured_event(*event));
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  return is_done(event->record) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EMULATED_API CUresult cuEventSynchronize(CUevent handle) {
  ENTER();
  EventPtr event;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_event(handle, &event));
  RETURN_IF_ERROR(refuse_captured_event(*event));
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  wait_for(lock, event->record);
  return CUresult(event->context->error.load());
}

EMULATED_API CUresult cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  ENTER();
  EventPtr start, end;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_event(start_handle, &start));
  RETURN_IF_ERROR(find_event(end_handle, &end));
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (start->context != end->context || start->capture_id != 0 || end->capture_id != 0)
    return CUDA_ERROR_INVALID_HANDLE;
  if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  if (start->record == nullptr || end->record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!is_done(start->record) || !is_done(end->record)) return CUDA_ERROR_NOT_READY;
  *milliseconds = float(double(end->record->time_ns - start->record->time_ns) * 1e-6);
  return CUDA_SUCCESS;
}

#undef cuEventElapsedTime
EMULATED_API CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

EMULATED_API CUresult cuIpcGetEventHandle(CUipcEventHandle*, CUevent) {
  ENTER();
  return CUDA_ERROR_NOT_SUPPORTED;
}

EMULATED_API CUresult cuIpcOpenEventHandle(CUevent*, CUipcEventHandle) {
  ENTER();
  return CUDA_ERROR_NOT_SUPPORTED;
}
