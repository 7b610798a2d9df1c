// Handles, the last error, and groups: what the calls between ncclGroupStart and ncclGroupEnd lead to.
// Knows nothing of what single public functions take; nccl.cpp checks that.
#pragma once

#include <functional>
#include <unordered_map>
#include <utility>

#include "nccl_rendezvous.h"
#include "nccl_work.h"

namespace emulated_nccl {

using Comm = std::shared_ptr<Communicator>;

inline std::mutex handles_lock;
inline std::unordered_map<void*, Comm> handles;
inline std::mutex error_lock;
inline char last_error[1024];

inline void remember(const std::string& text) {
  const std::lock_guard<std::mutex> guard(error_lock);
  snprintf(last_error, sizeof last_error, "%s", text.c_str());
}

inline Failure invalid(const std::string& text) { return Failure{kInvalidArgument, text}; }

template <class Pointer>
void need(Pointer pointer, const char* name) {
  if (!pointer) throw invalid(std::string(name) + " is NULL");
}

inline Comm find(void* handle) {
  const std::lock_guard<std::mutex> guard(handles_lock);
  const auto found = handles.find(handle);
  if (found == handles.end()) throw invalid(handle ? "no such communicator" : "the communicator is NULL");
  return found->second;
}

inline void* add_handle(const Comm& comm) {
  const std::lock_guard<std::mutex> guard(handles_lock);
  handles[comm.get()] = comm;
  return comm.get();
}

inline Comm remove_handle(void* handle) {
  const Comm comm = find(handle);
  const std::lock_guard<std::mutex> guard(handles_lock);
  handles.erase(handle);
  return comm;
}

// What a thread has called between ncclGroupStart and ncclGroupEnd.
struct Group {
  struct Setup {
    void** out;
    Comm comm;
    std::function<void()> run;
  };
  struct Enqueued {
    Comm comm;
    Stream stream;
    std::vector<Task> tasks;
  };
  int depth = 0;
  Result result = kSuccess;
  std::vector<Setup> setups;
  std::vector<Enqueued> works;
  std::vector<Comm> aborted;
};

inline thread_local Group group;

// Runs a public function's body: its failure becomes the result, the last error, and the group's.
template <class Body>
int guarded(Body body) {
  Failure failure{kSuccess, ""};
  try {
    body();
    return kSuccess;
  } catch (const Failure& caught) {
    failure = caught;
  } catch (const std::exception& caught) {
    failure = {kSystemError, caught.what()};
  }
  remember(failure.text);
  if (group.depth > 0 && group.result == kSuccess) group.result = failure.result;
  return failure.result;
}

inline void refuse_shared_gpu(Shared& shared) {
  const char* allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (allowed && strcmp(allowed, "1") == 0) return;
  for (int a = 0; a < shared.nranks(); ++a) {
    for (int b = 0; b < a; ++b) {
      const Identity &first = shared.rank(b).identity, &second = shared.rank(a).identity;
      if (first.host == second.host && strcmp(first.bus_id, second.bus_id) == 0)
        throw Failure{kInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(b) + " and rank " +
                                         std::to_string(a) + " both on CUDA device " + std::to_string(first.device) +
                                         ". Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration."};
    }
  }
}

inline void join_as(Communicator& comm, const UniqueId& id) {
  Identity identity;
  identity.rank = comm.rank;
  identity.nranks = comm.nranks;
  identity.device = comm.device;
  identity.pid = getpid();
  identity.host = host_hash();
  Driver::get().pci_bus_id(comm.device, identity.bus_id, sizeof identity.bus_id);
  comm.shared = join(id, identity);
  refuse_shared_gpu(*comm.shared);
}

// Collective over a communicator: who wants which colour; then each colour's first rank makes an id for its own.
inline void split(Communicator& parent, Communicator& child, int color, int key) {
  Shared& shared = *parent.shared;
  const auto assemble = [&] {
    const uint64_t step = ++parent.assemblies;
    shared.rank(parent.rank).assembled.store(step, std::memory_order_release);
    shared.ring();
    Wait(shared, "a split").until_none([&](int r) {
      return shared.rank(r).assembled.load(std::memory_order_acquire) < step;
    });
  };
  shared.rank(parent.rank).color = color;
  shared.rank(parent.rank).key = key;
  assemble();
  std::vector<std::pair<int, int>> members;  // key, then rank of the parent
  for (int r = 0; r < parent.nranks; ++r) {
    if (shared.rank(r).color == color) members.push_back({shared.rank(r).key, r});
  }
  std::sort(members.begin(), members.end());
  const bool leads = color != kNoColor && members[0].second == parent.rank;
  if (leads) shared.rank(parent.rank).split_id = make_unique_id();
  assemble();
  if (color == kNoColor) return;
  child.nranks = int(members.size());
  for (int r = 0; r < child.nranks; ++r) {
    if (members[r].second == parent.rank) child.rank = r;
  }
  join_as(child, shared.rank(members[0].second).split_id);
}

// Runs the set-ups of a group all at once: they wait for each other.
inline void run_setups(std::vector<Group::Setup> setups) {
  std::vector<Failure> failures(setups.size(), Failure{kSuccess, ""});
  const auto run = [&](size_t i) {
    try {
      setups[i].run();
    } catch (const Failure& failure) {
      failures[i] = failure;
    }
  };
  if (setups.size() == 1) {
    run(0);
  } else {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < setups.size(); ++i) threads.emplace_back(run, i);
    for (std::thread& thread : threads) thread.join();
  }
  const Failure* first = nullptr;
  for (size_t i = 0; i < setups.size(); ++i) {
    if (failures[i].result != kSuccess && !first) first = &failures[i];
  }
  if (!first) return;
  for (const Group::Setup& setup : setups) {
    if (setup.comm->shared) setup.comm->shared->set_health(setup.comm->rank, Health::kFailed);
    if (setup.out && *setup.out) remove_handle(*setup.out), *setup.out = nullptr;
  }
  throw *first;
}

inline void set_up(void** out, const Comm& comm, std::function<void()> run, bool has_handle = true) {
  *out = has_handle ? add_handle(comm) : nullptr;
  group.setups.push_back({out, comm, std::move(run)});
  if (group.depth == 0) run_setups(std::exchange(group.setups, {}));
}

inline void init_rank(void** out, int nranks, const UniqueId& id, int rank, int device) {
  need(out, "comm");
  *out = nullptr;
  if (nranks < 1 || nranks > kMaxRanks) throw invalid("nranks is " + std::to_string(nranks));
  if (rank < 0 || rank >= nranks)
    throw invalid("rank " + std::to_string(rank) + " of " + std::to_string(nranks) + " does not exist");
  const Comm comm = std::make_shared<Communicator>();
  comm->rank = rank;
  comm->nranks = nranks;
  comm->device = device;
  set_up(out, comm, [comm, id] { join_as(*comm, id); });
}

inline void host_function(void* data) {
  Work* work = static_cast<Work*>(data);
  work->run();
  if (!work->captured) delete work;
}

inline void enqueue(const Group::Enqueued& enqueued) {
  Driver& driver = Driver::get();
  const Driver::Current current(enqueued.comm->device);
  if (!driver.belongs_to(enqueued.stream, enqueued.comm->device))
    throw Failure{kUnhandledCudaError, "the stream is not of the communicator's GPU"};
  auto work = std::make_unique<Work>();
  work->comm = enqueued.comm;
  work->tasks = enqueued.tasks;
  work->captured = driver.capturing(enqueued.stream);
  if (!work->captured) {
    const std::lock_guard<std::mutex> guard(enqueued.comm->lock);
    work->ticket = enqueued.comm->issued++;
  }
  try {
    driver.launch(enqueued.stream, host_function, work.get());
  } catch (const Failure& failure) {
    enqueued.comm->fail(failure);
    throw;
  }
  work.release();  // a captured one lives as long as its graph, of which nothing here hears
}

inline void check_ready(Communicator& comm) {
  if (!comm.shared) throw Failure{kInvalidUsage, "the communicator is not ready: its group has not ended"};
  const std::lock_guard<std::mutex> guard(comm.lock);
  if (comm.failure != kSuccess) throw Failure{comm.failure, comm.failure_text};
  if (comm.closed) throw Failure{kInvalidUsage, "the communicator is finalised"};
}

inline void add_task(const Comm& comm, const Task& task, Stream stream) {
  if (task.count == 0) return;
  for (Group::Enqueued& each : group.works) {
    if (each.comm != comm) continue;
    if (each.stream != stream)
      throw Failure{kInvalidUsage, "one communicator on two streams in a group: not served by this stand-in"};
    each.tasks.push_back(task);
    return;
  }
  group.works.push_back({comm, stream, {task}});
}

inline void end_group() {
  const std::vector<Group::Setup> setups = std::exchange(group.setups, {});
  const std::vector<Group::Enqueued> works = std::exchange(group.works, {});
  for (const Comm& comm : std::exchange(group.aborted, {})) comm->let_go();
  const Result result = std::exchange(group.result, kSuccess);
  if (result != kSuccess) {
    for (const Group::Setup& setup : setups) {
      if (*setup.out) remove_handle(*setup.out), *setup.out = nullptr;
    }
    throw Failure{result, std::string(last_error)};
  }
  if (!setups.empty()) run_setups(setups);
  for (const Group::Enqueued& each : works) enqueue(each);
}

}  // namespace emulated_nccl
