// A stand-in for NCCL on emulated GPUs: its public functions, for ranks that are threads or processes of one machine.
// Knows nothing of the stand-in driver's inside: it calls public driver functions, found by name.
//
// What it does as NCCL does, so that a program that uses it wrongly fails here too:
// - A call enqueues its work on the caller's stream (as a host function) and returns; work of one communicator runs in
//   the order of the calls. Captured calls run when the graph is replayed.
// - float16, bfloat16 and float8 are rounded to their type at every hop of the ring, and the order of the hops follows
//   the element's place in the array: in an all-reduce each megabyte is cut into nranks slices, and slice s is summed
//   from rank s + 1 round to rank s. avg of floats multiplies each rank's element by 1 / nranks, rounded to the type,
//   before the sum; avg of integers divides the wrapped sum. float8 saturates. max and min drop NaN.
// - Ranks that share a GPU are refused unless NCCL_MULTI_RANK_GPU_ENABLE=1. Counts, types or operators that differ
//   between ranks hang. A communicator that failed stays failed.
// What it does otherwise: every wait ends after EMULATED_NCCL_TIMEOUT_S (20) seconds with ncclInternalError; an abort,
// a failure or the end of a peer's process ends it at once with ncclRemoteError, and what is behind it on the stream
// then runs (with EMULATED_NCCL_FAILED_WORK_STAYS=1 only once the communicator is aborted, as with NCCL); memory that
// no GPU can reach, and arrays that reach beyond their allocation, are refused with ncclInvalidArgument where NCCL's
// kernels would break. All data go through shared memory, between threads too, so that tests of one say something of
// the other.
#include <set>

#include "nccl_group.h"

using namespace emulated_nccl;

namespace {

DataType data_type(int type) {
  if (type < 0 || type >= kDataTypes) throw invalid("there is no data type " + std::to_string(type));
  return DataType(type);
}

Op operator_of(const Communicator& comm, int op) {
  if (op >= 0 && op < kBuiltInOps) return Op{ReductionOp(op), false, 0};
  const auto own = comm.own_ops.find(op);
  if (own == comm.own_ops.end()) throw invalid("there is no operator " + std::to_string(op));
  return own->second;
}

// Every operation: `sends` and `receives` say how many times `count` elements this rank reads and writes.
int operation(Kind kind, const void* send, void* receive, size_t count, int type, int op, int peer, void* handle,
              Stream stream) {
  return guarded([&] {
    const Comm comm = find(handle);
    check_ready(*comm);
    Task task;
    task.kind = kind;
    task.send = send;
    task.receive = receive;
    task.count = count;
    task.type = data_type(type);
    task.op = operator_of(*comm, op);
    task.peer = peer;
    if (peer < 0 || peer >= comm->nranks)
      throw invalid("there is no rank " + std::to_string(peer) + " among " + std::to_string(comm->nranks));
    const bool is_root = peer == comm->rank;
    const size_t sends = kind == Kind::kReceive || (kind == Kind::kBroadcast && !is_root) ? 0
                         : kind == Kind::kReduceScatter                                   ? comm->nranks
                                                                                          : 1;
    const size_t receives = kind == Kind::kSend || (kind == Kind::kReduce && !is_root) ? 0
                            : kind == Kind::kAllGather                                 ? comm->nranks
                                                                                       : 1;
    if (count == 0) return;
    if (sends) Driver::get().check_reachable(send, sends * task.bytes(), "sendbuff");
    if (receives) Driver::get().check_reachable(receive, receives * task.bytes(), "recvbuff");
    add_task(comm, task, stream);
    if (group.depth == 0) end_group();
  });
}

}  // namespace

NCCL_API int ncclGetVersion(int* version) {
  return guarded([&] {
    need(version, "version");
    const char* pretended = getenv("EMULATED_NCCL_VERSION");  // for who must refuse an old one
    *version = pretended ? atoi(pretended) : kVersion;
  });
}

NCCL_API const char* ncclGetErrorString(int result) {
  static const char* const kTexts[] = {"no error",
                                       "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                                       "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                       "internal error - please report this issue to the NCCL developers",
                                       "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                       "invalid usage (run with NCCL_DEBUG=WARN for details)",
                                       "remote process exited or there was a network error",
                                       "NCCL operation in progress"};
  return result >= 0 && result <= kInProgress ? kTexts[result] : "unknown result code";
}

NCCL_API const char* ncclGetLastError(void*) { return last_error; }

NCCL_API int ncclGetUniqueId(UniqueId* id) {
  return guarded([&] {
    need(id, "uniqueId");
    *id = make_unique_id();
  });
}

NCCL_API int ncclCommInitRank(void** comm, int nranks, UniqueId id, int rank) {
  return guarded([&] { init_rank(comm, nranks, id, rank, Driver::get().current_device()); });
}

NCCL_API int ncclCommInitRankConfig(void** comm, int nranks, UniqueId id, int rank, Config* config) {
  return guarded([&] {
    if (config && config->magic != kConfigMagic) throw invalid("the config was not initialised");
    if (config && config->blocking == 0) throw invalid("non-blocking communicators: not served by this stand-in");
    init_rank(comm, nranks, id, rank, Driver::get().current_device());
  });
}

NCCL_API int ncclCommInitAll(void** comms, int ndev, const int* devices) {
  return guarded([&] {
    need(comms, "comms");
    if (ndev < 1) throw invalid("ndev is " + std::to_string(ndev));
    std::set<int> seen;
    for (int r = 0; devices && r < ndev; ++r) {
      if (!seen.insert(devices[r]).second)
        throw Failure{kInvalidUsage,
                      "Duplicate GPU detected : CUDA device " + std::to_string(devices[r]) + " is named twice"};
    }
    const UniqueId id = make_unique_id();
    ++group.depth;
    try {
      for (int r = 0; r < ndev; ++r) init_rank(&comms[r], ndev, id, r, devices ? devices[r] : r);
    } catch (...) {
      --group.depth;
      throw;
    }
    if (--group.depth == 0) end_group();
  });
}

NCCL_API int ncclCommSplit(void* handle, int color, int key, void** out, Config* config) {
  return guarded([&] {
    need(out, "newcomm");
    *out = nullptr;
    const Comm parent = find(handle);
    check_ready(*parent);
    if (color < kNoColor) throw invalid("color is " + std::to_string(color));
    if (config && config->magic != kConfigMagic) throw invalid("the config was not initialised");
    const Comm child = std::make_shared<Communicator>();
    child->device = parent->device;
    set_up(out, child, [=] { split(*parent, *child, color, key); }, color != kNoColor);
  });
}

NCCL_API int ncclCommFinalize(void* handle) {
  return guarded([&] {
    const Comm comm = find(handle);
    check_ready(*comm);
    {
      const std::lock_guard<std::mutex> guard(comm->lock);
      comm->finalizing = true;
    }
    comm->drain();
    const std::lock_guard<std::mutex> guard(comm->lock);
    comm->finalizing = false;
    comm->closed = true;
  });
}

NCCL_API int ncclCommDestroy(void* handle) {
  return guarded([&] {
    const Comm comm = remove_handle(handle);
    comm->drain();
    const std::lock_guard<std::mutex> guard(comm->lock);
    comm->closed = true;
  });
}

// Tells at once, and waits for the streams then; within a group once it ends.
NCCL_API int ncclCommAbort(void* handle) {
  return guarded([&] {
    const Comm comm = remove_handle(handle);
    {
      const std::lock_guard<std::mutex> guard(comm->lock);
      comm->failure = kInternalError;
      comm->failure_text = "the communicator was aborted";
      comm->aborted = true;
    }
    comm->changed.notify_all();
    if (comm->shared) comm->shared->set_health(comm->rank, Health::kAborted);
    if (group.depth > 0) {
      group.aborted.push_back(comm);
    } else {
      comm->let_go();
    }
  });
}

NCCL_API int ncclCommGetAsyncError(void* handle, int* error) {
  return guarded([&] {
    need(error, "asyncError");
    const Comm comm = find(handle);
    *error = kSuccess;
    if (!comm->shared) return;
    Failure failure{kSuccess, ""};
    {
      const std::lock_guard<std::mutex> guard(comm->lock);
      failure = {comm->failure, comm->failure_text};
      if (failure.result == kSuccess && comm->finalizing) *error = kInProgress;
    }
    for (int r = 0; failure.result == kSuccess && r < comm->nranks; ++r) {
      const Health health = comm->shared->rank(r).health.load();
      if (health == Health::kFine) continue;
      failure = {kRemoteError, "rank " + std::to_string(r) + (health == Health::kAborted ? " aborted" : " failed")};
    }
    if (failure.result == kSuccess) return;
    remember(failure.text);
    *error = failure.result;
  });
}

static int ask(void* handle, int* out, int Communicator::* field) {
  return guarded([&] {
    need(out, "the result");
    *out = (*find(handle)).*field;
  });
}

NCCL_API int ncclCommCount(void* handle, int* count) { return ask(handle, count, &Communicator::nranks); }
NCCL_API int ncclCommCuDevice(void* handle, int* device) { return ask(handle, device, &Communicator::device); }
NCCL_API int ncclCommUserRank(void* handle, int* rank) { return ask(handle, rank, &Communicator::rank); }

NCCL_API int ncclGroupStart() {
  ++group.depth;
  return kSuccess;
}

NCCL_API int ncclGroupEnd() {
  return guarded([&] {
    if (group.depth == 0) throw Failure{kInvalidUsage, "ncclGroupEnd without ncclGroupStart"};
    if (--group.depth == 0) end_group();
  });
}

NCCL_API int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, void* comm, Stream stream) {
  return operation(Kind::kAllReduce, send, receive, count, type, op, 0, comm, stream);
}

NCCL_API int ncclReduce(const void* send, void* receive, size_t count, int type, int op, int root, void* comm,
                        Stream stream) {
  return operation(Kind::kReduce, send, receive, count, type, op, root, comm, stream);
}

NCCL_API int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, void* comm,
                           Stream stream) {
  return operation(Kind::kBroadcast, send, receive, count, type, kSum, root, comm, stream);
}

NCCL_API int ncclBcast(void* buffer, size_t count, int type, int root, void* comm, Stream stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

NCCL_API int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op, void* comm,
                               Stream stream) {
  return operation(Kind::kReduceScatter, send, receive, count, type, op, 0, comm, stream);
}

NCCL_API int ncclAllGather(const void* send, void* receive, size_t count, int type, void* comm, Stream stream) {
  return operation(Kind::kAllGather, send, receive, count, type, kSum, 0, comm, stream);
}

NCCL_API int ncclSend(const void* send, size_t count, int type, int peer, void* comm, Stream stream) {
  return operation(Kind::kSend, send, nullptr, count, type, kSum, peer, comm, stream);
}

NCCL_API int ncclRecv(void* receive, size_t count, int type, int peer, void* comm, Stream stream) {
  return operation(Kind::kReceive, nullptr, receive, count, type, kSum, peer, comm, stream);
}

NCCL_API int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, void* handle) {
  return guarded([&] {
    need(op, "op");
    need(scalar, "scalar");
    const Comm comm = find(handle);
    Op made{kSum, true, 0};
    if (residence == kScalarHostImmediate)
      memcpy(&made.scalar, scalar, bytes_of(data_type(type)));
    else if (residence == kScalarDevice)
      Driver::get().copy_to_host(&made.scalar, scalar, bytes_of(data_type(type)));
    else
      throw invalid("there is no scalar residence " + std::to_string(residence));
    *op = comm->next_op++;
    comm->own_ops[*op] = made;
  });
}

NCCL_API int ncclRedOpDestroy(int op, void* handle) {
  return guarded([&] {
    if (find(handle)->own_ops.erase(op) == 0) throw invalid("there is no own operator " + std::to_string(op));
  });
}

NCCL_API int ncclMemAlloc(void** pointer, size_t bytes) {
  return guarded([&] {
    need(pointer, "ptr");
    *pointer = Driver::get().allocate(bytes);
  });
}

NCCL_API int ncclMemFree(void* pointer) {
  return guarded([&] { Driver::get().free(pointer); });
}

NCCL_API int ncclCommRegister(void* handle, void* buffer, size_t bytes, void** registration) {
  return guarded([&] {
    need(registration, "handle");
    find(handle);
    Driver::get().check_reachable(buffer, bytes, "buff");
    *registration = buffer;
  });
}

NCCL_API int ncclCommDeregister(void* handle, void*) {
  return guarded([&] { find(handle); });
}
