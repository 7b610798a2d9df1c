// The call path from Python on host devices: finds a prepared launch for the arrays of a call and runs it.
// Knows nothing of algorithms; gpuallreduce/devices/host.py prepares launches and handles every call not found here.
//
// Uses only CPython's stable ABI (PEP 384), declared below, so no Python headers are needed to compile it, and the
// array interface's C struct (__array_struct__), so no NumPy headers either.
#include <poll.h>

#include <map>

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
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
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
enum { kContiguous = 0x1, kAligned = 0x100, kNative = 0x200, kWriteable = 0x400 };

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
struct Prepared {
  GarLaunch launch;
  GarArgs args;
};

// A connection whose end means that a rank's process is gone.
struct Watched {
  int fd;
  uint32_t rank;
};

struct HostCalls {
  Workers workers;
  std::mutex running;  // one call at a time: the order of calls is part of what ranks must agree on
  std::map<CallKey, Prepared> prepared;
  std::map<uint64_t, uint64_t> symmetric;  // begin -> end of each symmetric buffer
  CallKey last_key = {};
  Prepared* last = nullptr;
  std::atomic<bool> closed{false};
  std::vector<Watched> watched;
  GarArgs marks = {};  // segments and offsets of the reports
  explicit HostCalls(bool spin) : workers(spin) {}

  bool run(const GarLaunch* launches, uint32_t count) {
    void* thread = PyEval_SaveThread();
    bool succeeded;
    {
      std::lock_guard<std::mutex> lock(running);
      succeeded = workers.run(launches, count);
    }
    PyEval_RestoreThread(thread);
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
  bool has(int flags) const { return memory && (memory->flags & flags) == flags; }
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

// allreduce(array, out, op): out or array when a prepared launch ran, None when there is none, False when it gave up.
static PyObject* call(PyObject* self, PyObject* const* values, PySsize count) {
  HostCalls* calls = static_cast<HostCalls*>(PyCapsule_GetPointer(self, kCapsule));
  if (count != 3 || calls->closed.load(std::memory_order_relaxed)) return none();
  PyObject* target = values[1] == &_Py_NoneStruct ? values[0] : values[1];
  const ArrayView input(values[0]);
  if (!input.has(kContiguous | kAligned | kNative)) return none();
  CallKey key = {input.dtype, values[2], input.nbytes, calls->if_symmetric(input.memory->data), 0, true};
  void* output = input.memory->data;
  if (target == values[0]) {
    if (!input.has(kWriteable)) return none();
    key.symmetric_output = key.symmetric_input;
  } else {
    const ArrayView out(target);
    if (!out.has(kContiguous | kAligned | kNative | kWriteable) || !input.same_shape(out) || input.overlaps(out))
      return none();
    output = out.memory->data;
    key.in_place = false;
    key.symmetric_output = calls->if_symmetric(output);
  }
  if (calls->last == nullptr || !(key == calls->last_key)) {
    const auto found = calls->prepared.find(key);
    if (found == calls->prepared.end()) return none();
    calls->last_key = key;
    calls->last = &found->second;
  }
  Prepared launched = *calls->last;  // a copy: another thread may prepare while this one runs
  const GarArgs& prepared = launched.args;
  const char* segment = static_cast<const char*>(prepared.segments[prepared.rank]);
  if (load_acquire(reinterpret_cast<const uint64_t*>(segment + prepared.abort_offset)) != 0) return none();
  launched.args.input = input.memory->data;
  launched.args.output = output;
  launched.launch.args = &launched.args;
  if (calls->run(&launched.launch, 1)) {
    Py_IncRef(target);
    return target;
  }
  return PyErr_Occurred() ? nullptr : boolean(false);
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
PyObject* gar_host_new(int spin) {
  using namespace gar;
  if (dtype_name == nullptr) {
    dtype_name = PyUnicode_InternFromString("dtype");
    struct_name = PyUnicode_InternFromString("__array_struct__");
  }
  PyObject* state = PyCapsule_New(new HostCalls(spin != 0), kCapsule, free_calls);
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
                      uint64_t symmetric_input, uint64_t symmetric_output, const GarLaunch* launch) {
  gar::HostCalls* calls = calls_of(state);
  const gar::Prepared prepared = {*launch, *launch->args};
  const gar::CallKey key = {dtype, op, nbytes, symmetric_input, symmetric_output, in_place != 0};
  if (calls->prepared.insert({key, prepared}).second) {
    Py_IncRef(dtype);
    Py_IncRef(op);
  } else {
    calls->prepared[key] = prepared;
  }
}
void gar_host_add_symmetric(PyObject* state, uint64_t begin, uint64_t end) { calls_of(state)->symmetric[begin] = end; }
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
void gar_host_store_release(uint64_t address, uint64_t value) {
  gar::store_release(reinterpret_cast<uint64_t*>(address), value);
}
// GarArgs::poll: looks for lost ranks and lets Python's signal handlers run; true if one raised.
int gar_host_poll(void* context) {
  static_cast<gar::HostCalls*>(context)->mark_lost();
  const int held = PyGILState_Ensure();
  const int raised = PyErr_CheckSignals();
  PyGILState_Release(held);
  return raised != 0;
}
}
