// One rank's communicator, and what its work does when a stream gets to it.
// Knows nothing of groups, handles or the driver: it runs in a stream's thread, where no driver call is allowed.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "nccl_elements.h"
#include "nccl_shared.h"

namespace emulated_nccl {

enum class Kind : int { kAllReduce, kReduce, kBroadcast, kReduceScatter, kAllGather, kSend, kReceive };

struct Task {
  Kind kind;
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  DataType type = kInt8;
  Op op;
  int peer = 0;  // of a send or a receive; else the root

  bool is_message() const { return kind == Kind::kSend || kind == Kind::kReceive; }
  size_t bytes() const { return count * bytes_of(type); }
};

struct Communicator {
  int rank = 0, nranks = 0, device = 0;
  std::shared_ptr<Shared> shared;
  std::map<int, Op> own_ops;
  int next_op = kBuiltInOps;

  // Work of one communicator runs in the order of the calls, on whatever streams; captured work when it is replayed.
  std::mutex lock;
  std::condition_variable changed;
  uint64_t issued = 0, turn = 0;
  bool busy = false, closed = false, finalizing = false, aborted = false;
  Result failure = kSuccess;
  std::string failure_text;

  uint64_t steps = 0;       // of `arrived`
  uint64_t assemblies = 0;  // of `assembled`

  void fail(const Failure& why) {
    {
      const std::lock_guard<std::mutex> guard(lock);
      if (failure == kSuccess) {
        failure = why.result;
        failure_text = why.text;
      }
    }
    changed.notify_all();
    shared->set_health(rank, Health::kFailed);
  }

  // What failed holds its stream up until it is aborted, if it is to be as on a GPU: else what comes behind runs.
  void stay() {
    if (!failed_work_stays()) return;
    std::unique_lock<std::mutex> guard(lock);
    changed.wait_for(guard, std::chrono::duration<double>(limit_s()), [&] { return aborted || closed; });
  }

  // Streams have come past everything that was enqueued, or the limit is over: what an abort waits for.
  void let_go() {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait_for(guard, std::chrono::duration<double>(limit_s()), [&] { return !busy && turn == issued; });
  }

  // Everything enqueued has run, or the limit is over.
  bool drain() {
    std::unique_lock<std::mutex> guard(lock);
    return changed.wait_for(guard, std::chrono::duration<double>(limit_s()),
                            [&] { return !busy && (turn == issued || failure != kSuccess); });
  }
};

// Runs the tasks of one rank.
class Runner {
 public:
  explicit Runner(Communicator& comm) : comm_(comm), shared_(*comm.shared), rank_(comm.rank), nranks_(comm.nranks) {}

  // Collectives one after another; then all messages at once, as within an NCCL group.
  void run(const std::vector<Task>& tasks) {
    std::vector<Message> messages;
    for (const Task& task : tasks) {
      if (task.is_message())
        messages.push_back({&task});
      else
        collective(task);
    }
    exchange(messages);
  }

 private:
  struct Message {
    const Task* task;
    size_t done_bytes = 0;
    bool done = false;
  };

  // Returns once every rank has come here. What ranks wrote before is seen by all.
  void meet(const char* what) {
    const uint64_t step = ++comm_.steps;
    shared_.rank(rank_).arrived.store(step, std::memory_order_release);
    shared_.ring();
    Wait(shared_, what).until_none([&](int r) {
      return shared_.rank(r).arrived.load(std::memory_order_acquire) < step;
    });
  }

  static const uint8_t* offset(const void* base, size_t bytes) { return static_cast<const uint8_t*>(base) + bytes; }
  static uint8_t* offset(void* base, size_t bytes) { return static_cast<uint8_t*>(base) + bytes; }

  // Folds elements [first, first + count) of all stages in ring order: from the rank after `last` round to `last`.
  void fold_stages(size_t first, size_t count, int last, void* output, const Task& task) {
    std::vector<const void*> inputs;
    for (int i = 1; i <= nranks_; ++i)
      inputs.push_back(offset(shared_.stage((last + i) % nranks_), first * bytes_of(task.type)));
    fold(inputs, output, count, task.type, task.op);
  }

  // A mismatch hangs, as it does in NCCL, until the limit.
  void check_same_call(const Header& mine) {
    for (int r = 0; r < nranks_; ++r) {
      if (!(shared_.rank(r).header == mine))
        Wait(shared_, "a collective whose ranks differ in count, type or operator").until_none([&](int other) {
          return other == r;
        });
    }
  }

  // NOTE (two meetings) Stages are read between the two meetings of a chunk, results after the second. So nobody
  // writes a stage (before a first meeting) or a result (after it) that someone may still read.
  void collective(const Task& task) {
    const size_t element = bytes_of(task.type);
    const bool blocks = task.kind == Kind::kReduceScatter;  // a chunk of every rank's block is staged at once
    const size_t most = kStageBytes / element / (blocks ? nranks_ : 1);
    const Header mine = {int(task.kind), task.type,      task.op.base, task.op.scaled,
                         task.peer,      task.op.scalar, task.count};
    for (size_t done = 0; done < task.count; done += most) {
      const size_t count = std::min(most, task.count - done);
      stage(task, done, count);
      shared_.rank(rank_).header = mine;
      meet("a collective");
      if (done == 0) check_same_call(mine);
      reduce_or_take(task, done, count);
      meet("a collective");
      take_results(task, done, count);
    }
  }

  void stage(const Task& task, size_t done, size_t count) {
    const size_t element = bytes_of(task.type);
    if (task.kind == Kind::kReduceScatter) {
      for (int r = 0; r < nranks_; ++r)
        memcpy(shared_.stage(rank_) + r * count * element, offset(task.send, (r * task.count + done) * element),
               count * element);
    } else if (task.kind != Kind::kBroadcast || task.peer == rank_) {
      memcpy(shared_.stage(rank_), offset(task.send, done * element), count * element);
    }
  }

  void reduce_or_take(const Task& task, size_t done, size_t count) {
    const size_t element = bytes_of(task.type);
    switch (task.kind) {
      case Kind::kAllReduce:
      case Kind::kReduce: {
        // Each rank folds one slice. In an all-reduce the ring ends a slice where it will start to be passed on;
        // a reduce is a chain that ends at the root.
        const size_t slice = (count + nranks_ - 1) / nranks_, first = std::min(count, rank_ * slice);
        const int last = task.kind == Kind::kReduce ? task.peer : rank_;
        fold_stages(first, std::min(slice, count - first), last, shared_.results() + first * element, task);
        break;
      }
      case Kind::kReduceScatter:
        fold_stages(rank_ * count, count, rank_, offset(task.receive, done * element), task);
        break;
      case Kind::kBroadcast:
        memmove(offset(task.receive, done * element), shared_.stage(task.peer), count * element);
        break;
      case Kind::kAllGather:
        for (int r = 0; r < nranks_; ++r)
          memcpy(offset(task.receive, (r * task.count + done) * element), shared_.stage(r), count * element);
        break;
      default:
        break;
    }
  }

  void take_results(const Task& task, size_t done, size_t count) {
    const size_t element = bytes_of(task.type);
    if (task.kind == Kind::kAllReduce || (task.kind == Kind::kReduce && task.peer == rank_))
      memcpy(offset(task.receive, done * element), shared_.results(), count * element);
  }

  // Moves one piece if it can be moved now. A message whose length the receiver does not expect never moves.
  bool progress(Message& message) {
    const Task& task = *message.task;
    const bool sends = task.kind == Kind::kSend;
    const int from = sends ? rank_ : task.peer, to = sends ? task.peer : rank_;
    Mailbox& box = shared_.mailbox(from, to);
    const uint64_t put = box.put.load(std::memory_order_acquire), taken = box.taken.load(std::memory_order_acquire);
    const size_t left = task.bytes() - message.done_bytes;
    if (sends) {
      if (put != taken) return false;
      if (left == 0) return message.done = true;
      const size_t piece = std::min(left, kMailBytes);
      box.message_bytes = task.bytes();
      box.piece_bytes = piece;
      memcpy(shared_.mail(from, to), offset(task.send, message.done_bytes), piece);
      box.put.store(put + 1, std::memory_order_release);
      message.done_bytes += piece;
    } else {
      if (put == taken || box.message_bytes != task.bytes()) return false;
      memcpy(offset(task.receive, message.done_bytes), shared_.mail(from, to), box.piece_bytes);
      message.done_bytes += box.piece_bytes;
      message.done = message.done_bytes == task.bytes();
      box.taken.store(taken + 1, std::memory_order_release);
    }
    shared_.ring();
    return true;
  }

  void exchange(std::vector<Message>& messages) {
    const auto behind = [&](int r) {
      for (const Message& message : messages) {
        if (!message.done && message.task->peer == r) return true;
      }
      return false;
    };
    Wait wait(shared_, "a send or receive");
    for (bool any = true; any;) {
      any = false;
      bool moved = false;
      wait.look();
      std::map<std::pair<Kind, int>, bool> earlier;  // messages of one pair go in the order of the calls
      for (Message& message : messages) {
        if (message.done) continue;
        any = true;
        bool& waits = earlier[{message.task->kind, message.task->peer}];
        if (!waits) moved = progress(message) || moved;
        waits = waits || !message.done;
      }
      if (any && !moved) wait.pause(behind);
    }
  }

  Communicator& comm_;
  Shared& shared_;
  const int rank_, nranks_;
};

// What a stream is given: tasks of one rank that were grouped.
struct Work {
  std::shared_ptr<Communicator> comm;
  std::vector<Task> tasks;
  bool captured = false;  // in a graph: may run often, is kept
  uint64_t ticket = 0;

  void run() {
    Communicator& c = *comm;
    {
      std::unique_lock<std::mutex> guard(c.lock);
      const bool came = c.changed.wait_for(guard, std::chrono::duration<double>(limit_s()), [&] {
        return c.failure != kSuccess || (!c.busy && (captured || c.turn == ticket));
      });
      if (!came) c.failure = kInternalError, c.failure_text = "an earlier call of this communicator never ran";
      if (c.failure != kSuccess || c.closed) {
        if (!captured) c.turn = std::max(c.turn, ticket + 1);
        guard.unlock();
        c.changed.notify_all();
        c.stay();
        return;
      }
      c.busy = true;
    }
    try {
      Runner(c).run(tasks);
    } catch (const Failure& why) {
      c.fail(why);
      c.stay();
    }
    {
      const std::lock_guard<std::mutex> guard(c.lock);
      c.busy = false;
      if (!captured) ++c.turn;
    }
    c.changed.notify_all();
  }
};

}  // namespace emulated_nccl
