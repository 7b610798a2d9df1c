// Graphs: instantiated from what was captured, and run with all branches at once.
// Knows nothing of capture.
#include "driver_capture.h"
#include "driver_workers.h"

namespace emulated {

// An executable copy of a graph: operations by index, and who comes after whom.
struct Executable {
  struct Node {
    Operation operation;
    unsigned awaits = 0;
    std::vector<size_t> next;
  };
  std::vector<Node> nodes;
  DonePtr last;  // launches of one executable come one after the other
};
using ExecutablePtr = std::shared_ptr<Executable>;

struct Handles {
  std::map<CUgraph, std::unique_ptr<Graph>> graphs;
  std::map<CUgraphExec, ExecutablePtr> executables;
};

static Handles& handles() {
  static Handles& only = *new Handles;
  return only;
}

CUgraph adopt_graph(std::unique_ptr<Graph> graph) {
  const CUgraph handle = reinterpret_cast<CUgraph>(graph.get());
  handles().graphs[handle] = std::move(graph);
  return handle;
}

static CUresult find_graph(CUgraph handle, Graph** out) {
  const auto found = handles().graphs.find(handle);
  if (found == handles().graphs.end()) return CUDA_ERROR_INVALID_VALUE;
  *out = found->second.get();
  return CUDA_SUCCESS;
}

static ExecutablePtr compile(const Graph& graph) {
  auto made = std::make_shared<Executable>();
  std::map<const GraphNode*, size_t> index;
  for (const auto& node : graph.nodes) {
    index[node.get()] = made->nodes.size();
    made->nodes.push_back({node->operation, unsigned(node->after.size()), {}});
    for (const GraphNode* before : node->after) made->nodes[index[before]].next.push_back(index[node.get()]);
  }
  return made;
}

// One run of an executable graph.
struct Run {
  ExecutablePtr executable;
  std::mutex lock;
  std::condition_variable ended;
  std::vector<unsigned> awaits;
  size_t pending = 0;
  std::mt19937_64 random;
};

// Runs a node and then one that it made ready; others that it made ready run on threads of their own.
static void run_from(const std::shared_ptr<Run>& run, size_t index) {
  for (bool more = true; more;) {
    const Executable::Node& node = run->executable->nodes[index];
    std::mt19937_64 random;
    {
      std::lock_guard<std::mutex> lock(run->lock);
      random.seed(run->random());
    }
    delay(random);
    execute(node.operation);
    std::vector<size_t> ready;
    {
      std::lock_guard<std::mutex> lock(run->lock);
      for (const size_t next : node.next)
        if (--run->awaits[next] == 0) ready.push_back(next);
      if (--run->pending == 0) run->ended.notify_all();
    }
    for (size_t i = 1; i < ready.size(); ++i) run_at_once([run, next = ready[i]] { run_from(run, next); });
    more = !ready.empty();
    if (more) index = ready[0];
  }
}

static CUresult run_graph(const ExecutablePtr& executable, uint64_t seed) {
  auto run = std::make_shared<Run>();
  run->executable = executable;
  run->pending = executable->nodes.size();
  run->random.seed(seed);
  std::vector<size_t> roots;
  for (size_t i = 0; i < executable->nodes.size(); ++i) {
    run->awaits.push_back(executable->nodes[i].awaits);
    if (executable->nodes[i].awaits == 0) roots.push_back(i);
  }
  for (const size_t root : roots) run_at_once([run, root] { run_from(run, root); });
  std::unique_lock<std::mutex> lock(run->lock);
  run->ended.wait(lock, [&] { return run->pending == 0; });
  return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec* out, CUgraph handle, unsigned long long flags) {
  ENTER_CONTEXT(context);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  constexpr unsigned long long kAccepted = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                                           CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
                                           CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  if (flags & ~kAccepted) return CUDA_ERROR_NOT_SUPPORTED;
  Lock lock(state().lock);
  Graph* graph = nullptr;
  RETURN_IF_ERROR(find_graph(handle, &graph));
  const ExecutablePtr made = compile(*graph);
  *out = reinterpret_cast<CUgraphExec>(made.get());
  handles().executables[*out] = made;
  return CUDA_SUCCESS;
}

static CUresult find_executable(CUgraphExec handle, ExecutablePtr* out) {
  const auto found = handles().executables.find(handle);
  if (found == handles().executables.end()) return CUDA_ERROR_INVALID_VALUE;
  *out = found->second;
  return CUDA_SUCCESS;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuGraphCreate(CUgraph* out, unsigned int flags) {
  ENTER();
  if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  *out = adopt_graph(std::make_unique<Graph>());
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuGraphDestroy(CUgraph graph) {
  ENTER();
  Lock lock(state().lock);
  return handles().graphs.erase(graph) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EMULATED_API CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long flags) {
  return instantiate(out, graph, flags);
}

EMULATED_API CUresult cuGraphInstantiate_v2(CUgraphExec* out, CUgraph graph, CUgraphNode*, char*, size_t) {
  return instantiate(out, graph, 0);
}

EMULATED_API CUresult cuGraphInstantiateWithParams(CUgraphExec* out, CUgraph graph,
                                                   CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = instantiate(out, graph, params->flags);
  params->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
  params->hErrNode_out = nullptr;
  return result;
}

EMULATED_API CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
  ENTER();
  ExecutablePtr executable;
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_executable(handle, &executable));
  return usable_stream(stream_handle, &stream);
}

EMULATED_API CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  ENTER();
  ExecutablePtr executable;
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_executable(handle, &executable));
  RETURN_IF_ERROR(usable_stream(stream_handle, &stream));
  RETURN_IF_ERROR(refuse_captured(*stream));
  const uint64_t seed = state().settings.seed * 1000003 + state().next_id++;
  Operation operation = {stream->context, [executable, seed] { return run_graph(executable, seed); }};
  operation.type = CU_GRAPH_NODE_TYPE_GRAPH;
  std::vector<DonePtr> after;
  if (!is_done(executable->last)) after.push_back(executable->last);
  return submit(*stream, std::move(operation), &executable->last, std::move(after));
}

EMULATED_API CUresult cuGraphExecDestroy(CUgraphExec handle) {
  ENTER();
  // A launch in flight keeps what it runs.
  Lock lock(state().lock);
  return handles().executables.erase(handle) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EMULATED_API CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  ENTER();
  Graph* graph = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_graph(handle, &graph));
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const size_t room = nodes == nullptr ? 0 : *count;
  for (size_t i = 0; i < room; ++i)
    nodes[i] = i < graph->nodes.size() ? reinterpret_cast<CUgraphNode>(graph->nodes[i].get()) : nullptr;
  if (nodes == nullptr || room > graph->nodes.size()) *count = graph->nodes.size();
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  ENTER();
  Lock lock(state().lock);
  for (const auto& [handle, graph] : handles().graphs)
    for (const auto& known : graph->nodes) {
      if (reinterpret_cast<CUgraphNode>(known.get()) != node) continue;
      *type = known->operation.type;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_VALUE;
}
