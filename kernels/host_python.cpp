// The call path from Python on host devices: finds a prepared launch for the arrays of a call and runs it.
// Knows nothing of algorithms; gpuallreduce/devices/host.py prepares launches and handles every call not found here.
#include "host_calls.h"

namespace gar {

static const char kCapsule[] = "gpuallreduce.host";
static PyObject *dtype_name, *struct_name, *array_type;

static PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}
static PyObject* type_of(PyObject* object) {  // borrowed: the object keeps it
  PyObject* type = PyObject_Type(object);
  Py_DecRef(type);
  return type;
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
  // Only numpy.ndarray itself: what subclasses and lookalikes mean is for the general path to say.
  explicit ArrayView(PyObject* array) {
    if (type_of(array) != array_type) return;
    capsule_ = PyObject_GetAttr(array, struct_name);
    dtype = capsule_ ? PyObject_GetAttr(array, dtype_name) : nullptr;
    const void* found = dtype ? PyCapsule_GetPointer(capsule_, nullptr) : nullptr;
    if (found == nullptr) {
      PyErr_Clear();
      return;
    }
    memory = static_cast<const PyArrayInterface*>(found);
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

static bool gave_up(const GarArgs& args) {
  const char* control = static_cast<const char*>(args.controls[args.rank]);
  return load_acquire(reinterpret_cast<const uint64_t*>(control + args.abort_offset)) != 0;
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
  const auto prepared = calls->find(operands.key);
  if (prepared == nullptr || gave_up(prepared->args[0])) return none();
  GarArgs args = prepared->args[0];
  args.input = operands.input;
  args.output = operands.output;
  const GarLaunch launch = {prepared->kernel, &args, 1};
  return outcome(calls->run(&launch, 1), target);
}

// The items of a list or tuple, kept alive. Empty for anything else.
class Items {
 public:
  explicit Items(PyObject* sequence) {
    PyObject* type = type_of(sequence);
    if (type != &PyList_Type && type != &PyTuple_Type) return;
    const bool list = type == &PyList_Type;
    const PySsize count = list ? PyList_Size(sequence) : PyTuple_Size(sequence);
    for (PySsize i = 0; i < count; ++i) {
      items_.push_back(list ? PyList_GetItem(sequence, i) : PyTuple_GetItem(sequence, i));
      Py_IncRef(items_.back());
    }
  }
  ~Items() {
    for (PyObject* item : items_) Py_DecRef(item);
  }
  Items(const Items&) = delete;
  size_t size() const { return items_.size(); }
  PyObject* operator[](size_t i) const { return items_[i]; }

 private:
  std::vector<PyObject*> items_;
};

// True if what one rank writes lies in what another reads or writes.
static bool ranks_share(const std::vector<Operands>& operands) {
  const auto meet = [](const void* a, const void* b, uint64_t nbytes) {
    const uint64_t x = reinterpret_cast<uint64_t>(a), y = reinterpret_cast<uint64_t>(b);
    return x < y + nbytes && y < x + nbytes;
  };
  for (size_t i = 0; i < operands.size(); ++i)
    for (size_t j = 0; j < operands.size(); ++j)
      if (i != j && (meet(operands[i].output, operands[j].input, operands[i].key.nbytes) ||
                     meet(operands[i].output, operands[j].output, operands[i].key.nbytes)))
        return true;
  return false;
}

// Lists with one array per local rank; all ranks live here, so their addresses are the peers' tables.
static PyObject* call_list(HostCalls* calls, PyObject* arrays, PyObject* targets, PyObject* op) {
  const size_t n = calls->nlocal;
  const Items sources(arrays), results(targets);
  if (sources.size() != n || results.size() != n) return none();
  std::vector<Operands> operands(n);
  for (size_t i = 0; i < n; ++i) {
    if (!operands[i].bind(*calls, sources[i], results[i], op)) return none();
    if (!(operands[i].key == operands[0].key)) return none();
  }
  const auto prepared = calls->find(operands[0].key);
  if (prepared == nullptr || gave_up(prepared->args[0]) || ranks_share(operands)) return none();
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
  if (calls->forked()) return;
  calls->forget();
  calls->drain();
  delete calls;
}

}  // namespace gar

// Called through ctypes.PyDLL, with the GIL held.
extern "C" {
// (calls, allreduce, launch): the state's address, and the two functions that keep it alive.
PyObject* gar_host_new(int spin, uint32_t nlocal, PyObject* ndarray) {
  using namespace gar;
  if (dtype_name == nullptr) {
    dtype_name = PyUnicode_InternFromString("dtype");
    struct_name = PyUnicode_InternFromString("__array_struct__");
    array_type = ndarray;
    Py_IncRef(ndarray);
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
  auto prepared = std::make_shared<gar::Prepared>();
  prepared->kernel = launches->kernel;
  for (size_t i = 0; i < calls->nlocal; ++i) prepared->args.push_back(*launches[i].args);
  GarArgs& first = prepared->args[0];
  if (calls->nlocal == 1 && first.peer_inputs != nullptr) {
    prepared->peer_inputs.assign(first.peer_inputs, first.peer_inputs + first.nranks);
    prepared->peer_outputs.assign(first.peer_outputs, first.peer_outputs + first.nranks);
    first.peer_inputs = prepared->peer_inputs.data();
    first.peer_outputs = prepared->peer_outputs.data();
  }
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
void gar_host_forget(PyObject* state) { calls_of(state)->forget(); }
void gar_host_watch(PyObject* state, const GarArgs* args, const int* fds, const uint32_t* ranks, uint32_t count) {
  gar::HostCalls* calls = calls_of(state);
  calls->marks = *args;
  for (uint32_t i = 0; i < count; ++i) calls->watched.push_back({fds[i], ranks[i]});
}
void* gar_host_poll_context(PyObject* state) { return calls_of(state); }
void gar_host_close(PyObject* state) { calls_of(state)->closed.store(true); }
void gar_host_drain(PyObject* state) { calls_of(state)->drain(); }
int gar_host_idle(PyObject* state) { return calls_of(state)->idle(); }
int gar_host_mine(PyObject* state) { return calls_of(state)->mine(); }
uint64_t gar_host_load_acquire(uint64_t address) {
  return gar::load_acquire(reinterpret_cast<const uint64_t*>(address));
}
int gar_host_claim(uint64_t address) { return gar::claim(reinterpret_cast<uint64_t*>(address)); }
void gar_host_store_release(uint64_t address, uint64_t value) {
  gar::store_release(reinterpret_cast<uint64_t*>(address), value);
}
// GarArgs::poll: looks for lost ranks, and lets Python's signal handlers run.
int gar_host_poll(void* context) {
  const int held = PyGILState_Ensure();  // held while marking, too: each block of a rank polls from its own thread
  const int lost = static_cast<gar::HostCalls*>(context)->mark_lost();
  const int raised = PyErr_CheckSignals();
  PyGILState_Release(held);
  return raised != 0 ? 1 : lost >= 0 ? 2 + lost : 0;
}
}
