/* The extension module: calls kernels with the arrays of Python objects, which it checks. */
#include "kernels.h"
#include "python_abi.h"

#include <stdlib.h>
#include <string.h>

/* Every kernel with the types of its arguments, one word each:
 *   f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 f2   an array that is read (u1 also takes bool)
 *   =f8 …                              an array that is written
 *   ?f8 …                              an array that is read, or None
 *   n x                                an integer, a float
 * A kernel is declared where it is listed; Python calls it by its name. */
#define KERNELS(kernel)                                                                             \
    kernel(total, "f8 =f8")

#define DECLARE(name, types) int64_t name(const argument *a);
KERNELS(DECLARE)

typedef struct {
    const char *name;
    const char *types;
    kernel_function function;
} kernel_entry;

#define ENTRY(name, types) {#name, types, name},
static const kernel_entry kernels[] = {KERNELS(ENTRY)};
enum { N_KERNELS = sizeof kernels / sizeof *kernels, MOST_ARGUMENTS = 64 };

/* Whether a buffer's format, as in Python's struct, is of this type. */
static int is_type(const char *type, const Py_buffer *view) {
    const char *format = view->format ? view->format : "B";
    const char *of_kind = type[0] == 'f' ? "efd" : type[0] == 'i' ? "bhilq" : "?BHILQ";
    if (*format == '<' || *format == '=' || *format == '@') format++;
    return format[0] && !format[1] && strchr(of_kind, format[0]) && view->itemsize == type[1] - '0';
}

static int take_array(const kernel_entry *kernel, const char *type, int at, PyObject *object,
                      Py_buffer *view, argument *into) {
    const int written = *type == '=';
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags)) return 0;
    type += *type == '=' || *type == '?';
    if (!is_type(type, view)) {
        PyErr_Format(PyExc_TypeError, "argument %d of %s has format %s of %d bytes; expected %c%c", at,
                     kernel->name, view->format ? view->format : "B", (int)view->itemsize, type[0],
                     type[1]);
        PyBuffer_Release(view);
        return 0;
    }
    into->data = view->buf;
    into->length = view->len / view->itemsize;
    into->width = 1;
    for (int dimension = 1; dimension < view->ndim; dimension++) into->width *= view->shape[dimension];
    return 1;
}

static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    const kernel_entry *kernel = PyCapsule_GetPointer(self, NULL);
    if (!kernel) return NULL;
    argument arguments[MOST_ARGUMENTS];
    Py_buffer views[MOST_ARGUMENTS];
    int n_views = 0, n = 0, taken = 1;
    const char *type = kernel->types;
    for (; *type && n < nargs && n < MOST_ARGUMENTS && taken; n++) {
        PyObject *object = args[n];
        arguments[n] = (argument){.length = 0};
        if (*type == 'n') {
            arguments[n].n = PyLong_AsLongLong(object);
            taken = arguments[n].n != -1 || !PyErr_Occurred();
        } else if (*type == 'x') {
            arguments[n].x = PyFloat_AsDouble(object);
            taken = arguments[n].x != -1.0 || !PyErr_Occurred();
        } else if (*type != '?' || object != Py_None) {
            taken = take_array(kernel, type, n, object, &views[n_views], &arguments[n]);
            n_views += taken;
        }
        type += strcspn(type, " ");
        type += *type == ' ';
    }
    int64_t result = 0;
    if (taken && (*type || n < nargs)) {
        PyErr_Format(PyExc_TypeError, "%s takes (%s), and was given %d arguments", kernel->name,
                     kernel->types, (int)nargs);
        taken = 0;
    }
    if (taken) {
        PyThreadState *state = PyEval_SaveThread();
        result = kernel->function(arguments);
        PyEval_RestoreThread(state);
    }
    while (n_views) PyBuffer_Release(&views[--n_views]);
    if (!taken) return NULL;
    if (result == NO_MEMORY) return PyErr_NoMemory();
    if (result < 0) return PyErr_Format(PyExc_ValueError, "arrays of %s do not fit", kernel->name);
    return PyLong_FromLongLong(result);
}

static int add(PyObject *module, const char *name, PyObject *value) {
    const int failed = !value || PyModule_AddObjectRef(module, name, value);
    if (value) Py_DecRef(value);
    return failed;
}

static int fill(PyObject *module) {
    static PyMethodDef methods[N_KERNELS];
    static const char *const levels[] = {"plain", "avx2", "avx512"};
    const char *wanted = getenv("CTXGUARD_PROCESSOR");
    if (wanted && !strcmp(wanted, "none")) {
        PyErr_Format(PyExc_ImportError, "switched off by CTXGUARD_PROCESSOR=none");
        return -1;
    }
    for (int i = 0; i < N_KERNELS; i++) {
        methods[i] = (PyMethodDef){kernels[i].name, call, METH_FASTCALL, kernels[i].types};
        PyObject *self = PyCapsule_New((void *)&kernels[i], NULL, NULL);
        if (!self) return -1;
        PyObject *function = PyCFunction_NewEx(&methods[i], self, NULL);
        Py_DecRef(self);
        if (add(module, kernels[i].name, function)) return -1;
    }
    return -(add(module, "processor", PyUnicode_FromString(levels[processor()])) ||
             add(module, "sources", PyUnicode_FromString(SOURCES)));
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, NULL, slots, NULL, NULL, NULL};

__attribute__((visibility("default"))) PyObject *PyInit__kernels(void) {
    return PyModuleDef_Init(&definition);
}
