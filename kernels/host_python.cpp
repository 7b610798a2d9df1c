// The call path from Python on host devices: finds a prepared launch for the arrays of a call and runs it.
// Knows nothing of algorithms; gpuallreduce/devices/host.py prepares launches and handles every call not found here.
//
// Uses only CPython's stable ABI (PEP 384), declared below, so no Python headers are needed to compile it, and the
// array interface's C struct (__array_struct__), so no NumPy headers either.
#include <poll.h>

#include <map>
#include <string>

#include "host.h"
#include "primitives.cuh"

extern "C" {
typedef struct PyObject PyObject;
typedef intptr_t PySsize;
typedef PyObject* (*PyFastCall)(PyObject* self, PyObject* const* values, PySsize count);
struct PyMethodDef {
  const char* name;
  PyFastCall call;
  int flags;
  const char* doc;
};
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
PyObject* PyCapsule_New(void*, const char* name, void (*)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char* name);
PyObject* PyObject_GetAttr(PyObject*, PyObject* name);
PyObject* PyUnicode_InternFromString(const char*);
PyObject* PyTuple_New(PySsize);
int PyTuple_SetItem(PyObject*, PySsize, PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);
int PyGILState_Ensure(void);
void PyGILState_Release(int);
int PyErr_CheckSignals(void);
PyObject* PyErr_Occurred(void);
void PyErr_Clear(void);
void PyErr_SetString(PyObject*, const char*);
extern PyObject* PyExc_OSError;
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PySsize PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, PySsize);
PyObject* PyObject_Type(PyObject*);
extern PyObject PyList_Type;
extern PyObject _Py_NoneStruct, _Py_FalseStruct, _Py_TrueStruct;
}
static constexpr int kFastCall = 0x0080;  // METH_FASTCALL

// The array interface's struct, https://numpy.org/doc/stable/reference/arrays.interface.html
struct PyArrayInterface {
  int two, nd;
  char typekind;
  int itemsize, flags;
  intptr_t *shape, *strides;
  void* data;
  PyObject* descr;
};
enum { kContiguous = 0x1, kNative = 0x200, kWriteable = 0x400 };

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
// What runs then: the same kernel on every local rank.
struct Prepared {
  GarKernel kernel;
  std::vector<GarArgs> args;
};

// A connection whose end means that a rank's process is gone.
struct Watched {
  int fd;
  uint32_t rank;
};

struct HostCalls {
  std::mutex running;  // one call at a time: the order of calls is part of what ranks must agree on
  std::map<CallKey, Prepared> prepared;
  std::map<uint64_t, uint64_t> symmetric;  // begin -> end of each symmetric buffer
  CallKey last_key = {};
  const Prepared* last = nullptr;
  const size_t nlocal;  // ranks of this process: a call brings one array, or a list with one for each of several
  Workers workers;
  std::atomic<bool> closed{false};
  std::vector<Watched> watched;
  GarArgs marks = {};  // segments and offsets of the reports
  HostCalls(bool spin, size_t local_ranks) : nlocal(local_ranks), workers(spin) {}

  bool run(const GarLaunch* launches, uint32_t count) {
    void* thread = PyEval_SaveThread();
    bool succeeded = false;
    std::string refused;
    try {
      std::lock_guard<std::mutex> lock(running);
      succeeded = workers.run(launches, count);
    } catch (const std::exception& error) {  // no thread or no memory, before any kernel ran
      refused = error.what();
    }
    PyEval_RestoreThread(thread);
    if (!refused.empty()) PyErr_SetString(PyExc_OSError, refused.c_str());
    return succeeded;
  }
  // Marks ranks whose connection has ended, in every rank's segment; see NOTE aborts in primitives.cuh.
  void mark_lost() {
    for (size_t i = 0; i < watched.size();) {
      pollfd one = {watched[i].fd, POLLRDHUP, 0};
      if (poll(&one, 1, 0) <= 0 || !(one.revents & (POLLRDHUP | POLLHUP | POLLERR))) {
        ++i;
        continue;
      }
      for (uint32_t owner = 0; owner < marks.nranks; ++owner) {
        char* report =
            static_cast<char*>(marks.segments[owner]) + marks.reports_offset + watched[i].rank * kReportBytes;
        uint64_t none = 0;
        __atomic_compare_exchange_n(reinterpret_cast<uint64_t*>(report), &none, uint64_t(kLost), false,
                                    __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
      }
      watched.erase(watched.begin() + long(i));
    }
  }
  uint64_t if_symmetric(const void* data) const {
    const uint64_t address = reinterpret_cast<uint64_t>(data);
    auto after = symmetric.upper_bound(address);
    return after != symmetric.begin() && address < std::prev(after)->second ? address : 0;
  }
};

static const char kCapsule[] = "gpuallreduce.host";
static PyObject *dtype_name, *struct_name;

static PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}
// A list itself, no subclass: whose items are what they seem.
static bool is_list(PyObject* object) {
  PyObject* type = PyObject_Type(object);
  Py_DecRef(type);
  return type == &PyList_Type;
}
static PyObject* boolean(bool value) {
  PyObject* object = value ? &_Py_TrueStruct : &_Py_FalseStruct;
  Py_IncRef(object);
  return object;
}

// One array of a call: its dtype object and memory, for as long as this lives.
class ArrayView {
 public:
  PyObject* dtype = nullptr;
  const PyArrayInterface* memory = nullptr;
  uint64_t nbytes = 0;
  explicit ArrayView(PyObject* array) {
    capsule_ = PyObject_GetAttr(array, struct_name);
    dtype = capsule_ ? PyObject_GetAttr(array, dtype_name) : nullptr;
    if (dtype == nullptr) {
      PyErr_Clear();  // not an array: the general path says so
      return;
    }
    memory = static_cast<const PyArrayInterface*>(PyCapsule_GetPointer(capsule_, nullptr));
    nbytes = uint64_t(memory->itemsize);
    for (int i = 0; i < memory->nd; ++i) nbytes *= uint64_t(memory->shape[i]);
  }
  ~ArrayView() {
    if (dtype) Py_DecRef(dtype);
    if (capsule_) Py_DecRef(capsule_);
  }
  ArrayView(const ArrayView&) = delete;
  bool usable(bool writeable) const {
    const int flags = kContiguous | kNative | (writeable ? kWriteable : 0);
    return memory && (memory->flags & flags) == flags;
  }
  bool same_shape(const ArrayView& o) const {
    if (dtype != o.dtype || memory->nd != o.memory->nd) return false;
    for (int i = 0; i < memory->nd; ++i)
      if (memory->shape[i] != o.memory->shape[i]) return false;
    return true;
  }
  bool overlaps(const ArrayView& o) const {
    const char *a = static_cast<char*>(memory->data), *b = static_cast<char*>(o.memory->data);
    return a < b + nbytes && b < a + nbytes;
  }

 private:
  PyObject* capsule_ = nullptr;
};

// The array of one rank and where its result goes. False: the general path must look at it.
struct Operands {
  CallKey key = {};
  const void* input = nullptr;
  void* output = nullptr;
  bool bind(const HostCalls& calls, PyObject* array, PyObject* target, PyObject* op) {
    const ArrayView from(array);
    const bool in_place = target == array;
    if (!from.usable(in_place)) return false;
    input = output = from.memory->data;
    key = {from.dtype, op, from.nbytes, calls.if_symmetric(input), 0, in_place};
    key.symmetric_output = key.symmetric_input;
    if (in_place) return true;
    const ArrayView to(target);
    if (!to.usable(true) || !from.same_shape(to) || from.overlaps(to)) return false;
    output = to.memory->data;
    key.symmetric_output = calls.if_symmetric(output);
    return true;
  }
};

static const Prepared* find(HostCalls* calls, const CallKey& key) {
  if (calls->last != nullptr && key == calls->last_key) return calls->last;
  const auto found = calls->prepared.find(key);
  if (found == calls->prepared.end()) return nullptr;
  calls->last_key = key;
  return calls->last = &found->second;
}
static bool gave_up(const GarArgs& args) {
  const char* segment = static_cast<const char*>(args.segments[args.rank]);
  return load_acquire(reinterpret_cast<const uint64_t*>(segment + args.abort_offset)) != 0;
}
static PyObject* outcome(bool succeeded, PyObject* result) {
  if (succeeded) {
    Py_IncRef(result);
    return result;
  }
  return PyErr_Occurred() ? nullptr : boolean(false);
}

static PyObject* call_one(HostCalls* calls, PyObject* array, PyObject* target, PyObject* op) {
  Operands operands;
  if (!operands.bind(*calls, array, target, op)) return none();
  const Prepared* prepared = find(calls, operands.key);
  if (prepared == nullptr || gave_up(prepared->args[0])) return none();
  GarArgs args = prepared->args[0];  // a copy: another thread may prepare while this one runs
  args.input = operands.input;
  args.output = operands.output;
  const GarLaunch launch = {prepared->kernel, &args, 1};
  return outcome(calls->run(&launch, 1), target);
}

// Lists with one array per local rank; all ranks live here, so their addresses are the peers' tables.
static PyObject* call_list(HostCalls* calls, PyObject* arrays, PyObject* targets, PyObject* op) {
  const size_t n = calls->nlocal;
  for (PyObject* list : {arrays, targets})
    if (!is_list(list) || size_t(PyList_Size(list)) != n) return none();
  std::vector<Operands> operands(n);
  for (size_t i = 0; i < n; ++i) {
    if (!operands[i].bind(*calls, PyList_GetItem(arrays, PySsize(i)), PyList_GetItem(targets, PySsize(i)), op))
      return none();
    if (!(operands[i].key == operands[0].key)) return none();
  }
  const Prepared* prepared = find(calls, operands[0].key);
  if (prepared == nullptr || gave_up(prepared->args[0])) return none();
  std::vector<GarArgs> args = prepared->args;
  std::vector<GarLaunch> launches(n);
  std::vector<void*> inputs(n), outputs(n);
  for (size_t i = 0; i < n; ++i) {
    inputs[i] = const_cast<void*>(args[i].input = operands[i].input);
    outputs[i] = args[i].output = operands[i].output;
    args[i].peer_inputs = inputs.data();
    args[i].peer_outputs = outputs.data();
    launches[i] = {prepared->kernel, &args[i], 1};
  }
  return outcome(calls->run(launches.data(), uint32_t(n)), targets);
}

// allreduce(arrays, out, op): out, or arrays, when a prepared launch ran; None when there is none; False when a rank
// gave up.
static PyObject* call(PyObject* self, PyObject* const* values, PySsize count) {
  HostCalls* calls = static_cast<HostCalls*>(PyCapsule_GetPointer(self, kCapsule));
  if (count != 3 || calls->closed.load(std::memory_order_relaxed)) return none();
  PyObject* target = values[1] == &_Py_NoneStruct ? values[0] : values[1];
  return (calls->nlocal == 1 ? call_one : call_list)(calls, values[0], target, values[2]);
}

// launch(address of GarLaunch[], count): True, or False when a rank gave up.
static PyObject* launch(PyObject* self, PyObject* const* values, PySsize count) {
  HostCalls* calls = static_cast<HostCalls*>(PyCapsule_GetPointer(self, kCapsule));
  if (count != 2) return none();
  const GarLaunch* launches = static_cast<const GarLaunch*>(PyLong_AsVoidPtr(values[0]));
  const bool succeeded = calls->run(launches, uint32_t(reinterpret_cast<uintptr_t>(PyLong_AsVoidPtr(values[1]))));
  return PyErr_Occurred() ? nullptr : boolean(succeeded);
}

static PyMethodDef call_method = {"allreduce", call, kFastCall, nullptr};
static PyMethodDef launch_method = {"launch", launch, kFastCall, nullptr};

static void free_calls(PyObject* capsule) {
  HostCalls* calls = static_cast<HostCalls*>(PyCapsule_GetPointer(capsule, kCapsule));
  for (auto& entry : calls->prepared) {
    Py_DecRef(entry.first.dtype);
    Py_DecRef(entry.first.op);
  }
  delete calls;
}

}  // namespace gar

// Called through ctypes.PyDLL, with the GIL held.
extern "C" {
// (calls, allreduce, launch): the state's address, and the two functions that keep it alive.
PyObject* gar_host_new(int spin, uint32_t nlocal) {
  using namespace gar;
  if (dtype_name == nullptr) {
    dtype_name = PyUnicode_InternFromString("dtype");
    struct_name = PyUnicode_InternFromString("__array_struct__");
  }
  PyObject* state = PyCapsule_New(new HostCalls(spin != 0, nlocal), kCapsule, free_calls);
  PyObject* result = PyTuple_New(3);
  PyTuple_SetItem(result, 1, PyCFunction_NewEx(&gar::call_method, state, nullptr));
  PyTuple_SetItem(result, 2, PyCFunction_NewEx(&gar::launch_method, state, nullptr));
  PyTuple_SetItem(result, 0, state);
  return result;
}
static gar::HostCalls* calls_of(PyObject* state) {
  return static_cast<gar::HostCalls*>(PyCapsule_GetPointer(state, gar::kCapsule));
}
void gar_host_prepare(PyObject* state, PyObject* dtype, PyObject* op, uint64_t nbytes, int in_place,
                      uint64_t symmetric_input, uint64_t symmetric_output, const GarLaunch* launches) {
  gar::HostCalls* calls = calls_of(state);
  gar::Prepared prepared = {launches->kernel, {}};
  for (size_t i = 0; i < calls->nlocal; ++i) prepared.args.push_back(*launches[i].args);
  const gar::CallKey key = {dtype, op, nbytes, symmetric_input, symmetric_output, in_place != 0};
  calls->last = nullptr;
  if (calls->prepared.count(key) == 0) {
    Py_IncRef(dtype);
    Py_IncRef(op);
  }
  calls->prepared[key] = prepared;
}
void gar_host_add_symmetric(PyObject* state, uint64_t begin, uint64_t end) { calls_of(state)->symmetric[begin] = end; }
void gar_host_remove_symmetric(PyObject* state, uint64_t begin) { calls_of(state)->symmetric.erase(begin); }
void gar_host_forget(PyObject* state) {
  gar::HostCalls* calls = calls_of(state);
  calls->last = nullptr;
  for (auto& entry : calls->prepared) {
    Py_DecRef(entry.first.dtype);
    Py_DecRef(entry.first.op);
  }
  calls->prepared.clear();
}
void gar_host_watch(PyObject* state, const GarArgs* args, const int* fds, const uint32_t* ranks, uint32_t count) {
  gar::HostCalls* calls = calls_of(state);
  calls->marks = *args;
  for (uint32_t i = 0; i < count; ++i) calls->watched.push_back({fds[i], ranks[i]});
}
void* gar_host_poll_context(PyObject* state) { return calls_of(state); }
void gar_host_close(PyObject* state) { calls_of(state)->closed.store(true); }
// Waits until no call runs; the calls end by themselves, within their limits.
void gar_host_drain(PyObject* state) {
  gar::HostCalls* calls = calls_of(state);
  void* thread = PyEval_SaveThread();
  calls->running.lock();
  calls->running.unlock();
  PyEval_RestoreThread(thread);
}
int gar_host_idle(PyObject* state) {
  gar::HostCalls* calls = calls_of(state);
  if (!calls->running.try_lock()) return 0;
  calls->running.unlock();
  return 1;
}
uint64_t gar_host_load_acquire(uint64_t address) {
  return gar::load_acquire(reinterpret_cast<const uint64_t*>(address));
}
int gar_host_claim(uint64_t address) { return gar::claim(reinterpret_cast<uint64_t*>(address)); }
void gar_host_store_release(uint64_t address, uint64_t value) {
  gar::store_release(reinterpret_cast<uint64_t*>(address), value);
}
// GarArgs::poll: looks for lost ranks and lets Python's signal handlers run; true if one raised.
int gar_host_poll(void* context) {
  const int held = PyGILState_Ensure();  // held while marking, too: each block of a rank polls from its own thread
  static_cast<gar::HostCalls*>(context)->mark_lost();
  const int raised = PyErr_CheckSignals();
  PyGILState_Release(held);
  return raised != 0;
}
}
