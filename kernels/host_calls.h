// One communicator's calls on host devices: what has been prepared, what runs, and which ranks are gone.
// Knows nothing of Python objects but their addresses.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <map>
#include <string>
#include <tuple>

#include "host.h"
#include "primitives.cuh"
#include "python_abi.h"

namespace gar {

// A call as far as it decides what to launch. Addresses count where peers use them too (symmetric buffers), else 0.
struct CallKey {
  PyObject *dtype, *op;
  uint64_t nbytes;
  uint64_t symmetric_input, symmetric_output;
  bool in_place;
  bool operator<(const CallKey& o) const {
    const auto tie = [](const CallKey& k) {
      return std::tie(k.dtype, k.nbytes, k.op, k.in_place, k.symmetric_input, k.symmetric_output);
    };
    return tie(*this) < tie(o);
  }
  bool operator==(const CallKey& o) const { return !(*this < o) && !(o < *this); }
};
// What runs then: the same kernel on every local rank. Owns the tables of peers' addresses that its arguments point to.
struct Prepared {
  GarKernel kernel;
  std::vector<GarArgs> args;
  std::vector<void*> peer_inputs, peer_outputs;
};

// A descriptor that becomes readable when a rank's process ends.
struct Watched {
  int fd;
  uint32_t rank;
};

class HostCalls {
 public:
  // A running call shares ownership, so that another thread may forget what was prepared meanwhile.
  std::map<CallKey, std::shared_ptr<const Prepared>> prepared;
  std::map<uint64_t, uint64_t> symmetric;  // begin -> end of each symmetric buffer
  CallKey last_key = {};
  std::shared_ptr<const Prepared> last;
  const size_t nlocal;  // ranks of this process: a call brings one array, or a list with one for each of several
  std::atomic<bool> closed{false};
  std::vector<Watched> watched;
  GarArgs marks = {};  // control blocks and offsets of the reports

  HostCalls(bool spin, size_t local_ranks) : nlocal(local_ranks), workers_(spin) {}

  // Runs with the interpreter's lock released. One call at a time: the order of calls is part of what ranks agree on.
  // False: a rank gave up, or a Python exception is set.
  bool run(const GarLaunch* launches, uint32_t count) {
    if (mine()) {  // a signal handler that runs inside a call's wait
      PyErr_SetString(PyExc_RuntimeError, "a call cannot be made from a signal handler that runs inside another call");
      return false;
    }
    void* thread = PyEval_SaveThread();
    bool succeeded = false;
    std::string refused;
    try {
      const Running running(*this);
      succeeded = workers_.run(launches, count);
    } catch (const std::exception& error) {  // no thread or no memory, before any kernel ran
      refused = error.what();
    }
    PyEval_RestoreThread(thread);
    if (!refused.empty()) PyErr_SetString(PyExc_OSError, refused.c_str());
    return succeeded;
  }
  // True inside a call of this very thread: in a signal handler.
  bool mine() const { return owner_.load() == std::this_thread::get_id(); }
  bool idle() {
    if (!running_.try_lock()) return false;
    running_.unlock();
    return true;
  }
  // Waits until no call runs, which calls do within their limits, and ends the threads.
  void drain() {
    void* thread = PyEval_SaveThread();
    {
      std::lock_guard<std::mutex> lock(running_);
      workers_.stop();
    }
    PyEval_RestoreThread(thread);
  }
  // In a forked child the threads do not exist, and nothing of this can be taken apart.
  bool forked() const { return process_ != getpid(); }

  // Marks ranks whose process has ended, in every rank's control block; see NOTE aborts in primitives.cuh. Returns one
  // of them that had not closed its communicator before, or -1.
  int mark_lost() {
    int lost = -1;
    for (size_t i = 0; i < watched.size();) {
      pollfd one = {watched[i].fd, POLLIN, 0};
      if (poll(&one, 1, 0) <= 0) {
        ++i;
        continue;
      }
      for (uint32_t owner = 0; owner < marks.nranks; ++owner) {
        char* control = static_cast<char*>(marks.controls[owner]);
        auto* code = reinterpret_cast<uint64_t*>(control + marks.reports_offset + watched[i].rank * kReportBytes);
        uint64_t code_before = 0;
        __atomic_compare_exchange_n(code, &code_before, uint64_t(kLost), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        if (code_before != kClosed) lost = int(watched[i].rank);
      }
      watched.erase(watched.begin() + long(i));
    }
    return lost;
  }
  uint64_t if_symmetric(const void* data) const {
    const uint64_t address = reinterpret_cast<uint64_t>(data);
    auto after = symmetric.upper_bound(address);
    return after != symmetric.begin() && address < std::prev(after)->second ? address : 0;
  }
  std::shared_ptr<const Prepared> find(const CallKey& key) {
    if (last && key == last_key) return last;
    const auto found = prepared.find(key);
    if (found == prepared.end()) return nullptr;
    last_key = key;
    return last = found->second;
  }
  void forget() {
    last = nullptr;
    for (auto& entry : prepared) {
      Py_DecRef(entry.first.dtype);
      Py_DecRef(entry.first.op);
    }
    prepared.clear();
  }

 private:
  struct Running {
    HostCalls& calls;
    explicit Running(HostCalls& the_calls) : calls(the_calls) {
      calls.running_.lock();
      calls.owner_.store(std::this_thread::get_id());
    }
    ~Running() {
      calls.owner_.store(std::thread::id());
      calls.running_.unlock();
    }
  };

  const pid_t process_ = getpid();
  std::mutex running_;
  std::atomic<std::thread::id> owner_{std::thread::id()};
  Workers workers_;
};

}  // namespace gar
