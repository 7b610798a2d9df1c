// Graphs, and the capture of streams into them.
// Knows nothing of what a node does. Who calls holds the state's lock.
#pragma once

#include "driver_streams.h"

namespace emulated {

struct GraphNode {
  Operation operation;
  std::vector<GraphNode*> after;
};

struct Graph {
  std::vector<std::unique_ptr<GraphNode>> nodes;
};

struct Capture {
  uint64_t id = 0;
  std::unique_ptr<Graph> graph;
  Stream* origin = nullptr;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  bool valid = true;
  std::set<Stream*> streams;
};

Capture* find_capture(uint64_t id);

// Fails calls that a capture in progress prohibits, and invalidates the capture.
CUresult refuse_unsafe_in_capture();
CUresult refuse_legacy_in_capture(const Context& context);
CUresult refuse_captured(Stream& stream);

CUresult capture_operation(Stream& stream, Operation operation);
CUresult join_capture(Stream& stream, uint64_t capture_id, const std::vector<GraphNode*>& frontier);
void leave_capture(Stream& stream);
// A handle for a graph; the graph is kept until it is destroyed.
CUgraph adopt_graph(std::unique_ptr<Graph> graph);

CUresult invalidate(Capture& capture, CUresult why);

}  // namespace emulated
