/* The extension module: calls kernels with the arrays of Python objects, which it checks. */
#include "kernels.h"
#include "python_abi.h"

#include <stdlib.h>
#include <string.h>

/* Every kernel with the types of its arguments, one word each:
 *   f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8   an array that is read (u1 also takes bool)
 *   =f8 …                              an array that is written
 *   ?f8 …                              an array that is read, or None
 *   *f8 …                              a tuple of arrays that are read
 *   n x                                an integer, a float
 * A kernel of microseconds, for which giving up and taking the interpreter lock would take longer than
 * the work, begins with `held`. Kernels are declared here, and Python calls them by their names. */
#define WORDS "i4 i8 i4 n x x"
#define QUERY "i8 f8 i8 i8 f8 f8"
#define SENTENCES "?i2 ?i4 ?u1 ?u1 ?u1 ?u2 ?i4 ?i8"
#define KERNELS(kernel)                                                                             \
    kernel(rank_by_probability, "held i8 f8 x ?f8 i8 f8 u1 f8 x u1 *f8 ?i8 x =f8 =i8")              \
    kernel(ends_differ, "held u1 n")                                                                \
    kernel(best_scores, "f4 x =i8")                                                                 \
    kernel(search_postings, "i8 f4 i4 i8 =f4 =i8 =f8")                                              \
    kernel(add_scores, "=f4 i8 f8 u2 i4 i8 i8 f8")                                                  \
    kernel(unit_vector, "held f4 =f4")                                                              \
    kernel(nearest, "f4 f4 ?i8 =i8 =f8")                                                            \
    kernel(fuse_candidates, "i8 f4 i8 f4 f4 n x n =i8 =f8")                                         \
    kernel(search_both, "i8 f4 i4 i8 f4 f4 ?i8 n x n =i8 =f8")                                      \
    kernel(rows_with, "?i4 ?u2 i8 i8 i4 =i8")                                                       \
    kernel(renumbered, "i8 =i4")                                                                    \
    kernel(text_signals, "i8 " WORDS " " QUERY " =f8")                                              \
    kernel(term_cosines, "i8 " WORDS " f8 =f8")                                                     \
    kernel(weighted_pieces, "held f4 f8 =i2 =i4")                                                   \
    kernel(sentence_signals, "i8 " SENTENCES " =f8")                                                \
    kernel(ranked_signals, "i8 ?i8 f8 f8 " WORDS " " QUERY " f8 f4 " SENTENCES " f8 =i8 =f8")

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
    type += !!strchr("=?*", *type);
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

static const char *next_type(const char *type) {
    type += strcspn(type, " ");
    return type + (*type == ' ');
}

/* Room for the arrays of tuples; -1 with an error set where a tuple is none or there are too many. */
static int64_t in_tuples(const char *type, PyObject *const *args, Py_ssize_t nargs) {
    int64_t total = 0;
    for (Py_ssize_t n = 0; *type && n < nargs; n++, type = next_type(type)) {
        if (*type != '*') continue;
        const Py_ssize_t size = PyTuple_Size(args[n]);
        if (size < 0) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "argument %d must be a tuple of arrays", (int)n);
            return -1;
        }
        total += size;
    }
    return total;
}

static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    const kernel_entry *kernel = PyCapsule_GetPointer(self, NULL);
    if (!kernel) return NULL;
    const int held = !strncmp(kernel->types, "held ", 5);
    const char *type = kernel->types + 5 * held;
    const int64_t room = in_tuples(type, args, nargs);
    if (room < 0) return NULL;
    argument arguments[MOST_ARGUMENTS];
    Py_buffer *views = malloc((size_t)(MOST_ARGUMENTS + room) * sizeof *views);
    argument *inner = malloc((size_t)(room + 1) * sizeof *inner), *next = inner;
    int taken = views && inner;
    int64_t n_views = 0, n = 0;
    if (!taken) PyErr_NoMemory();
    for (; taken && *type && n < nargs && n < MOST_ARGUMENTS; n++, type = next_type(type)) {
        PyObject *object = args[n];
        argument *into = &arguments[n];
        *into = (argument){.length = 0};
        if (*type == 'n') {
            into->n = PyLong_AsLongLong(object);
            taken = into->n != -1 || !PyErr_Occurred();
        } else if (*type == 'x') {
            into->x = PyFloat_AsDouble(object);
            taken = into->x != -1.0 || !PyErr_Occurred();
        } else if (*type == '*') {
            into->arguments = next;
            into->length = PyTuple_Size(object);
            for (int64_t i = 0; i < into->length && taken; i++, next++) {
                taken = take_array(kernel, type, (int)n, PyTuple_GetItem(object, i), &views[n_views], next);
                n_views += taken;
            }
        } else if (*type != '?' || object != Py_None) {
            taken = take_array(kernel, type, (int)n, object, &views[n_views], into);
            n_views += taken;
        }
    }
    if (taken && (*type || n < nargs)) {
        PyErr_Format(PyExc_TypeError, "%s takes (%s), and was given %d arguments", kernel->name,
                     kernel->types, (int)nargs);
        taken = 0;
    }
    int64_t result = 0;
    if (taken && held) {
        result = kernel->function(arguments);
    } else if (taken) {
        PyThreadState *state = PyEval_SaveThread();
        result = kernel->function(arguments);
        PyEval_RestoreThread(state);
    }
    while (n_views) PyBuffer_Release(&views[--n_views]);
    free(views);
    free(inner);
    if (!taken) return NULL;
    if (result == UNDEFINED) {
        Py_IncRef(Py_None);
        return Py_None;
    }
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
