/* The part of CPython's stable ABI (abi3, since 3.11) that the module uses.
 *
 * Declared here instead of taken from Python.h, which many machines that have Python lack and which
 * a compiler for another platform does not find: one file then serves every Python from 3.11 on.
 * Source: https://docs.python.org/3.11/c-api/stable.html
 */
#ifndef CTXGUARD_PYTHON_ABI_H
#define CTXGUARD_PYTHON_ABI_H

#include <stdint.h>

#if INTPTR_MAX != INT64_MAX
#error "64-bit processors only; others use the numpy reference"
#endif

typedef int64_t Py_ssize_t;
typedef struct PyObject {
    Py_ssize_t refcount;
    void *type;
} PyObject;
typedef struct PyThreadState PyThreadState;

typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len;
    Py_ssize_t itemsize;
    int readonly;
    int ndim;
    char *format;
    Py_ssize_t *shape;
    Py_ssize_t *strides;
    Py_ssize_t *suboffsets;
    void *internal;
} Py_buffer;

enum { PyBUF_WRITABLE = 0x1, PyBUF_FORMAT = 0x4, PyBUF_C_CONTIGUOUS = 0x38 };

typedef PyObject *(*PyCFunctionFast)(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

typedef struct {
    const char *name;
    PyCFunctionFast function;
    int flags;
    const char *doc;
} PyMethodDef;

enum { METH_FASTCALL = 0x80 };

typedef struct {
    int slot;
    void *value;
} PyModuleDef_Slot;

enum { Py_mod_exec = 2 };

typedef struct {
    struct {
        PyObject base;
        PyObject *(*init)(void);
        Py_ssize_t index;
        PyObject *copy;
    } base;
    const char *name;
    const char *doc;
    Py_ssize_t size;
    PyMethodDef *methods;
    PyModuleDef_Slot *slots;
    void *traverse;
    void *clear;
    void *free;
} PyModuleDef;

#define PyModuleDef_HEAD_INIT {{1, 0}, 0, 0, 0}

extern PyObject _Py_NoneStruct;
#define Py_None (&_Py_NoneStruct)

extern PyObject *PyExc_ImportError;
extern PyObject *PyExc_TypeError;
extern PyObject *PyExc_ValueError;

void Py_IncRef(PyObject *object);
void Py_DecRef(PyObject *object);

int PyObject_GetBuffer(PyObject *object, Py_buffer *view, int flags);
void PyBuffer_Release(Py_buffer *view);

Py_ssize_t PyTuple_Size(PyObject *tuple);
PyObject *PyTuple_GetItem(PyObject *tuple, Py_ssize_t at);

int64_t PyLong_AsLongLong(PyObject *object);
PyObject *PyLong_FromLongLong(long long value);
double PyFloat_AsDouble(PyObject *object);
PyObject *PyFloat_FromDouble(double value);
PyObject *PyUnicode_FromString(const char *text);
const char *PyUnicode_AsUTF8AndSize(PyObject *object, Py_ssize_t *size);

PyObject *PyErr_Occurred(void);
void PyErr_Clear(void);
PyObject *PyErr_NoMemory(void);
PyObject *PyErr_Format(PyObject *exception, const char *format, ...);

PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *state);

PyObject *PyCFunction_NewEx(PyMethodDef *method, PyObject *self, PyObject *module);
PyObject *PyCapsule_New(void *pointer, const char *name, void (*destructor)(PyObject *));
void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
PyObject *PyModuleDef_Init(PyModuleDef *definition);
int PyModule_AddObjectRef(PyObject *module, const char *name, PyObject *value);

#endif
