// Stream capture: what would run becomes nodes of a graph, and what CUDA prohibits meanwhile fails.
// Knows nothing of how graphs run.
#include "driver_capture.h"

#include <algorithm>

namespace emulated {

static thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

Capture* find_capture(uint64_t id) {
  for (Capture* capture : state().captures)
    if (capture->id == id) return capture;
  return nullptr;
}

CUresult invalidate(Capture& capture, CUresult why) {
  capture.valid = false;
  return why;
}

// NOTE unsafe calls. A call that may wait for a device, or be waited for by one, fails while this thread captures in
// any mode but relaxed, or any thread captures in global mode; cuThreadExchangeStreamCaptureMode loosens it.
CUresult refuse_unsafe_in_capture() {
  CUresult result = CUDA_SUCCESS;
  for (Capture* capture : state().captures) {
    const bool ours = capture->thread == std::this_thread::get_id();
    const bool strict = capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool everywhere = capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    bool prohibited = ours && strict && thread_mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    if (everywhere && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL) prohibited = true;
    if (prohibited) result = invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  return result;
}

CUresult refuse_legacy_in_capture(const Context& context) {
  CUresult result = CUDA_SUCCESS;
  for (Capture* capture : state().captures)
    for (const Stream* stream : capture->streams)
      if (stream->context == &context && stream->blocking())
        result = invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  return result;
}

CUresult refuse_captured(Stream& stream) {
  if (stream.capture != nullptr) return invalidate(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  return stream.legacy ? refuse_legacy_in_capture(*stream.context) : CUDA_SUCCESS;
}

CUresult capture_operation(Stream& stream, Operation operation) {
  Capture& capture = *stream.capture;
  if (!capture.valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (operation.type == CU_GRAPH_NODE_TYPE_EMPTY && operation.run)
    return invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  auto node = std::make_unique<GraphNode>();
  node->operation = std::move(operation);
  node->after = stream.frontier;
  stream.frontier = {node.get()};
  capture.graph->nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}

CUresult join_capture(Stream& stream, uint64_t capture_id, const std::vector<GraphNode*>& frontier) {
  Capture* capture = find_capture(capture_id);
  if (capture == nullptr) {
    if (stream.capture != nullptr) return invalidate(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  if (stream.capture != nullptr && stream.capture != capture) {
    invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    return invalidate(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  }
  if (!capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream.legacy) return invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  stream.capture = capture;
  capture->streams.insert(&stream);
  for (GraphNode* node : frontier)
    if (std::find(stream.frontier.begin(), stream.frontier.end(), node) == stream.frontier.end())
      stream.frontier.push_back(node);
  return CUDA_SUCCESS;
}

// All streams go on as before the capture; its nodes stay with the graph.
static std::unique_ptr<Graph> end(Capture* capture) {
  for (Stream* stream : capture->streams) {
    stream->capture = nullptr;
    stream->frontier.clear();
  }
  auto& captures = state().captures;
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  std::unique_ptr<Graph> graph = std::move(capture->graph);
  delete capture;
  return graph;
}

void leave_capture(Stream& stream) {
  Capture* capture = stream.capture;
  if (capture == nullptr) return;
  if (capture->origin == &stream) {
    end(capture);
    return;
  }
  invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  capture->streams.erase(&stream);
  stream.capture = nullptr;
  stream.frontier.clear();
}

// Whether everything captured on other streams comes before what the origin captured last.
static bool is_joined(const Capture& capture) {
  std::set<const GraphNode*> before;
  std::vector<const GraphNode*> visit(capture.origin->frontier.begin(), capture.origin->frontier.end());
  while (!visit.empty()) {
    const GraphNode* node = visit.back();
    visit.pop_back();
    if (!before.insert(node).second) continue;
    visit.insert(visit.end(), node->after.begin(), node->after.end());
  }
  for (const Stream* stream : capture.streams)
    for (const GraphNode* node : stream->frontier)
      if (before.count(node) == 0) return false;
  return true;
}

static CUresult capture_status(CUstream handle, CUstreamCaptureStatus* status, Capture** out, StreamPtr* stream) {
  ENTER();
  RETURN_IF_ERROR(find_stream(handle, stream));
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if ((*stream)->legacy) RETURN_IF_ERROR(refuse_legacy_in_capture(*(*stream)->context));
  *out = (*stream)->capture;
  *status = *out == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
            : (*out)->valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                            : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  return CUDA_SUCCESS;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  ENTER();
  if (mode == nullptr || *mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, thread_mode);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  if (mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  Capture* capture = new Capture;
  capture->id = state().next_id++;
  capture->graph = std::make_unique<Graph>();
  capture->origin = stream.get();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->streams.insert(stream.get());
  stream->capture = capture;
  stream->frontier.clear();
  state().captures.push_back(capture);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuStreamEndCapture(CUstream handle, CUgraph* out) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_stream(handle, &stream));
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = nullptr;
  Capture* capture = stream->capture;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream.get()) return invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  const bool valid = capture->valid;
  const bool joined = is_joined(*capture);
  std::unique_ptr<Graph> graph = end(capture);
  if (!valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  *out = adopt_graph(std::move(graph));
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  Capture* capture = nullptr;
  StreamPtr stream;
  Lock lock(state().lock);
  return capture_status(handle, status, &capture, &stream);
}

EMULATED_API CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id,
                                                CUgraph* graph, const CUgraphNode** nodes, size_t* count) {
  Capture* capture = nullptr;
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(capture_status(handle, status, &capture, &stream));
  if (capture == nullptr) return CUDA_SUCCESS;
  if (id != nullptr) *id = capture->id;
  if (graph != nullptr) *graph = reinterpret_cast<CUgraph>(capture->graph.get());
  if (nodes != nullptr) *nodes = reinterpret_cast<const CUgraphNode*>(stream->frontier.data());
  if (count != nullptr) *count = stream->frontier.size();
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id,
                                             CUgraph* graph, const CUgraphNode** nodes, const CUgraphEdgeData** edges,
                                             size_t* count) {
  if (edges != nullptr) *edges = nullptr;  // all are plain
  return cuStreamGetCaptureInfo_v2(handle, status, id, graph, nodes, count);
}
