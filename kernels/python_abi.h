// CPython's stable ABI (PEP 384) as far as the call path uses it, and NumPy's array interface struct.
// Declared here so that neither Python's nor NumPy's headers are needed to compile the runtime.
#pragma once

#include <stdint.h>

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
extern PyObject *PyExc_OSError, *PyExc_RuntimeError;
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PySsize PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, PySsize);
PySsize PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, PySsize);
PyObject* PyObject_Type(PyObject*);
extern PyObject PyList_Type, PyTuple_Type;
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
