// Streams: operations in order, each after the operations it depends on, on a thread of its own.
// Knows nothing of what an operation does.
#pragma once

#include <deque>
#include <functional>
#include <random>

#include "driver_state.h"

namespace emulated {

struct GraphNode;

// The end of one operation; others wait for it. Guarded by the state's lock.
struct Done {
  bool done = false;
  int64_t time_ns = 0;
  std::condition_variable changed;
};
using DonePtr = std::shared_ptr<Done>;

struct Operation {
  Context* context = nullptr;
  std::function<CUresult()> run;  // without the lock; an error is sticky
  bool even_after_error = false;  // callbacks that learn of it
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
};

struct Stream : std::enable_shared_from_this<Stream> {
  struct Entry {
    Operation operation;
    std::vector<DonePtr> after;
    DonePtr done;
  };
  uint64_t id = 0;
  Context* context = nullptr;
  unsigned flags = 0;
  int priority = 0;
  bool legacy = false;
  bool running = false;
  bool destroyed = false;
  std::deque<Entry> queue;
  std::condition_variable wake;
  DonePtr last;
  std::mt19937_64 random;
  Capture* capture = nullptr;
  std::vector<GraphNode*> frontier;

  bool blocking() const { return !legacy && (flags & CU_STREAM_NON_BLOCKING) == 0; }
};

// A stream by its handle; NULL, legacy and per-thread handles belong to the current context. Under the lock.
CUresult find_stream(CUstream handle, StreamPtr* out);

// As find_stream, and the stream's context has no sticky error.
CUresult usable_stream(CUstream handle, StreamPtr* out);

StreamPtr make_stream(Context& context, unsigned flags, int priority, bool legacy);

// Puts an operation at the end of a stream, or into the graph that the stream captures. Under the lock.
CUresult submit(Stream& stream, Operation operation, DonePtr* done = nullptr, std::vector<DonePtr> after = {});

// What the end of a stream's work means: for the legacy stream, that of all blocking streams as well.
std::vector<DonePtr> pending(const Stream& stream);

// Ends a stream; its work outlives it, and whoever waits for the context waits for that work too.
void leave_orphan(Stream& stream);

// Waits under the lock.
void wait_for(Lock& lock, const DonePtr& done);
void finish(const DonePtr& done);
bool is_done(const DonePtr& done);

// Waits for all work of a context; false if the context is in error afterwards.
CUresult synchronize(Lock& lock, Context& context);

// Sleeps a seeded random time when delays are asked for.
void delay(std::mt19937_64& random);

// Runs an operation; its error becomes the context's.
void execute(const Operation& operation);

int64_t clock_ns();

}  // namespace emulated
