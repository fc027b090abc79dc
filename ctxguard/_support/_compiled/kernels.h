/* What a kernel is: a function over arrays, called without the interpreter lock unless it is short.
 *
 * A kernel reads and writes the arrays that it is given and keeps nothing between calls. It takes
 * sizes from its arguments, and an array's row or a position in another array as untrusted: an index
 * file may have been altered. `module.c` lists the kernels with the types of their arguments.
 */
#ifndef CTXGUARD_KERNELS_H
#define CTXGUARD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* An argument: an array (C contiguous), a tuple of arrays, an integer `n`, or a float `x`. */
typedef struct argument {
    union {
        void *data; /* NULL where an optional array is None */
        const struct argument *arguments;
        int64_t n;
        double x;
    };
    int64_t length; /* elements of the array, or arrays of the tuple */
    int64_t width;  /* elements of a row of an array of two dimensions; 1 of one dimension */
} argument;

/* What a kernel returns instead of its result, which is not negative: a MemoryError, a ValueError,
 * None. */
enum { NO_MEMORY = -1, BAD_LENGTHS = -2, UNDEFINED = -3 };

typedef int64_t (*kernel_function)(const argument *a);

/* Instructions of this processor, or fewer where CTXGUARD_PROCESSOR says so. Every kernel gives equal
 * results on each, to the bit. */
enum { PLAIN, AVX2, AVX512 };
int processor(void);

#if defined(__x86_64__)
#define HAS_AVX 1
#define FOR_AVX2 __attribute__((target("avx2,fma,f16c,bmi,bmi2,popcnt")))
#define FOR_AVX512                                                                                  \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#else
#define HAS_AVX 0
#endif

/* Memory for one call, aligned to 64 bytes, from a block that the thread keeps for its next call:
 * begin with scratch_begin(), take pieces with scratch(), which returns NULL where memory is short.
 * The pieces are not cleared, and hold until the thread's next scratch_begin(). */
void scratch_begin(void);
void *scratch(size_t bytes);

/* A table that the thread keeps for its next call, all zeros: whoever writes into it clears what it
 * wrote before it returns. NULL where memory is short. */
enum { COUNTS, POSITIONS, N_TABLES };
void *zeros(int which, size_t bytes);

#define ARRAY(type, i) ((type *)a[i].data)
#define CONST_ARRAY(type, i) ((const type *)a[i].data)

#endif
