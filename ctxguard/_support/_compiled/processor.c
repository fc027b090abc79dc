/* Which instructions this processor has, and memory that a thread keeps. */
#include "kernels.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if HAS_AVX
#include <cpuid.h>

static int found(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return PLAIN;
    const unsigned fma = 1u << 12, osxsave = 1u << 27, f16c = 1u << 29;
    if ((c & (fma | osxsave | f16c)) != (fma | osxsave | f16c)) return PLAIN;
    /* Whether the system saves the wide registers when it changes threads. */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return PLAIN;
    const unsigned bmi = 1u << 3, avx2 = 1u << 5, bmi2 = 1u << 8;
    if ((b & (bmi | avx2 | bmi2)) != (bmi | avx2 | bmi2)) return PLAIN;
    const unsigned f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11;
    const int wide = (low & 0xe6) == 0xe6 && (b & (f | dq | bw | vl)) == (f | dq | bw | vl);
    return wide && (c & vnni) ? AVX512 : AVX2;
}
#else
static int found(void) { return PLAIN; }
#endif

int processor(void) {
    static int level = -1; /* equal in every thread that finds it */
    if (level < 0) {
        const char *wanted = getenv("CTXGUARD_PROCESSOR");
        int most = AVX512;
        if (wanted && !strcmp(wanted, "plain")) most = PLAIN;
        if (wanted && !strcmp(wanted, "avx2")) most = AVX2;
        const int here = found();
        level = here < most ? here : most;
    }
    return level;
}

/* A block of each thread; more than is kept is given back at the thread's next call. */
enum { KEPT_BYTES = 1 << 23, ALIGNMENT = 64 };

typedef struct block {
    struct block *before;
    size_t size, used;
    char *bytes;
} block;

static pthread_key_t key, table_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void release(void *kept) {
    for (block *each = kept, *before; each; each = before) {
        before = each->before;
        free(each->bytes);
        free(each);
    }
}

/* Tables of each thread, by use; as large as the largest that was asked for. */
typedef struct {
    size_t size;
    void *bytes;
} zero_table;

static void release_tables(void *kept) {
    for (int i = 0; i < N_TABLES; i++) free(((zero_table *)kept)[i].bytes);
    free(kept);
}

static void make_key(void) {
    pthread_key_create(&key, release);
    pthread_key_create(&table_key, release_tables);
}

void scratch_begin(void) {
    pthread_once(&once, make_key);
    block *last = pthread_getspecific(key);
    if (!last) return;
    if (last->before || last->size > KEPT_BYTES) {
        /* One block of the whole size next time, where that is not too much to keep. */
        size_t size = 0;
        for (block *each = last; each; each = each->before) size += each->size;
        pthread_setspecific(key, NULL);
        release(last);
        if (size <= KEPT_BYTES) scratch(size);
        last = pthread_getspecific(key);
    }
    if (last) last->used = 0;
}

void *scratch(size_t bytes) {
    block *last = pthread_getspecific(key);
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!last || last->size - last->used < bytes) {
        block *next = malloc(sizeof *next);
        const size_t least = 1 << 16;
        const size_t size = bytes > least ? bytes : least;
        void *memory = NULL;
        if (!next || posix_memalign(&memory, ALIGNMENT, size)) {
            free(next);
            return NULL;
        }
        *next = (block){last, size, 0, memory};
        pthread_setspecific(key, next);
        last = next;
    }
    void *piece = last->bytes + last->used;
    last->used += bytes;
    return piece;
}

void *zeros(int which, size_t bytes) {
    pthread_once(&once, make_key);
    zero_table *tables = pthread_getspecific(table_key);
    if (!tables) {
        tables = calloc(N_TABLES, sizeof *tables);
        if (!tables || pthread_setspecific(table_key, tables)) {
            free(tables);
            return NULL;
        }
    }
    zero_table *one = &tables[which];
    if (one->size < bytes || !one->bytes) {
        free(one->bytes);
        one->bytes = calloc(bytes + 1, 1);
        one->size = one->bytes ? bytes : 0;
    }
    return one->bytes;
}
