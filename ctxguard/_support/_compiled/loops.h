/* What the loops over vectors share: registers of a fixed width, one body for every processor, and
 * orders. Sums run in the order of the lanes, so that results are equal on every processor. */
#ifndef CTXGUARD_LOOPS_H
#define CTXGUARD_LOOPS_H

#include "kernels.h"

#include <math.h>
#include <string.h>

/* Registers wider than those of the plainest processor are passed to inlined functions alone. */
#pragma GCC diagnostic ignored "-Wpsabi"

/* Before a loop whose arrays do not overlap. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float float4 __attribute__((vector_size(16), aligned(4)));
typedef float float8 __attribute__((vector_size(32), aligned(4)));
typedef float float16 __attribute__((vector_size(64), aligned(4)));

/* A function NAME that calls the inlined NAME_body, compiled for each processor; `level` is a constant
 * in the body. */
#if HAS_AVX
#define BY_PROCESSOR(name, parameters, ...)                                                         \
    FOR_AVX512 static void name##_avx512 parameters { name##_body(__VA_ARGS__, AVX512); }           \
    FOR_AVX2 static void name##_avx2 parameters { name##_body(__VA_ARGS__, AVX2); }                 \
    static void name##_plain parameters { name##_body(__VA_ARGS__, PLAIN); }                        \
    static void name parameters {                                                                   \
        const int level = processor();                                                              \
        if (level == AVX512) name##_avx512(__VA_ARGS__);                                            \
        else if (level == AVX2) name##_avx2(__VA_ARGS__);                                           \
        else name##_plain(__VA_ARGS__);                                                             \
    }
#else
#define BY_PROCESSOR(name, parameters, ...)                                                         \
    static void name parameters { name##_body(__VA_ARGS__, PLAIN); }
#endif

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* N inner products, left[r] · right[r]: 16 sums each, in registers of one type one after the other;
 * equal for every type. */
#define DOTS_OF(register, N, left, right, d, products)                                              \
    do {                                                                                            \
        enum { WIDTH = sizeof(register) / sizeof(float) };                                          \
        float4 lanes[N][4];                                                                         \
        for (int part = 0; part < 16; part += WIDTH) {                                              \
            register sums[N];                                                                       \
            for (int r = 0; r < N; r++) sums[r] = (register){0};                                    \
            for (int64_t k = part; k + WIDTH <= d; k += 16)                                         \
                for (int r = 0; r < N; r++)                                                         \
                    sums[r] += *(const register *)(left[r] + k) * *(const register *)(right[r] + k); \
            for (int r = 0; r < N; r++) memcpy((float *)lanes[r] + part, &sums[r], sizeof sums[r]);  \
        }                                                                                           \
        for (int r = 0; r < N; r++) {                                                               \
            for (int64_t k = d / WIDTH * WIDTH; k < d; k++)                                         \
                ((float *)lanes[r])[k % 16] += left[r][k] * right[r][k];                            \
            const float4 sum = (lanes[r][0] + lanes[r][2]) + (lanes[r][1] + lanes[r][3]);           \
            products[r] = (sum[0] + sum[2]) + (sum[1] + sum[3]);                                    \
        }                                                                                           \
    } while (0)

#define DOTS(N, left, right, d, products)                                                           \
    do {                                                                                            \
        if (level == AVX512) DOTS_OF(float16, N, left, right, d, products);                         \
        else if (level == AVX2) DOTS_OF(float8, N, left, right, d, products);                       \
        else DOTS_OF(float4, N, left, right, d, products);                                          \
    } while (0)

/* Asks the memory for bytes that will be read soon. */
INLINE void expect(const void *bytes, int64_t n) {
    for (int64_t at = 0; at < n; at += 64) __builtin_prefetch((const char *)bytes + at);
}

/* A table that is read here and there: after a search of the vectors none of it is at hand. Of a large
 * one little may be read. */
INLINE void expect_table(const void *table, int64_t n) { expect(table, least(n, 1 << 18)); }

/* Something with a score; `at` breaks ties. */
typedef struct {
    double score;
    int64_t at;
} scored;

INLINE int is_better(scored a, scored b) { return a.score > b.score || (a.score == b.score && a.at < b.at); }

/* Sorts best first, ties by `at`. Shell's sort is fastest for hundreds. */
static inline void sort_scored(scored *all, int64_t n) {
    int64_t gap = 1;
    while (3 * gap < n) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (int64_t i = gap; i < n; i++) {
            const scored one = all[i];
            int64_t to = i;
            for (; to >= gap && is_better(one, all[to - gap]); to -= gap) all[to] = all[to - gap];
            all[to] = one;
        }
}

/* 1 / (constant + rank) of each score above a bound and below `INVALID`, equal ones sharing the
 * better rank; 0 for others. `work` has n elements. */
#define INVALID 1e37
static inline void reciprocal_ranks(const double *scores, int64_t n, double above, double constant,
                                    scored *work, double *into) {
    int64_t ranked = 0, better = 0;
    for (int64_t i = 0; i < n; i++) {
        into[i] = 0.0;
        if (scores[i] > above && scores[i] < INVALID) work[ranked++] = (scored){scores[i], i};
    }
    sort_scored(work, ranked);
    for (int64_t i = 0; i < ranked; i++) {
        if (i && work[i].score != work[i - 1].score) better = i;
        into[work[i].at] = 1.0 / (constant + 1.0 + (double)better);
    }
}

/* A hash table from numbers ≥ 0 to positions. */
typedef struct {
    int64_t *keys;
    int32_t *positions;
    int64_t mask;
} table;

/* A table for n keys; its `keys` are NULL where memory is short. */
static inline table table_for(int64_t n) {
    table made = {.mask = 15};
    while (made.mask < 3 * n) made.mask = 2 * made.mask + 1;
    made.keys = scratch((made.mask + 1) * sizeof(int64_t));
    made.positions = scratch((made.mask + 1) * sizeof(int32_t));
    if (!made.positions) made.keys = NULL;
    if (made.keys) memset(made.keys, 0xff, (made.mask + 1) * sizeof(int64_t));
    return made;
}

/* Where a key is, or would be. */
INLINE int64_t slot_of(const table *in, int64_t key) {
    int64_t at = (int64_t)((uint64_t)key * 0x9e3779b97f4a7c15u >> 20) & in->mask;
    while (in->keys[at] >= 0 && in->keys[at] != key) at = (at + 1) & in->mask;
    return at;
}

/* The position of a key; one that is new is given `position`. */
INLINE int32_t put(const table *in, int64_t key, int32_t position) {
    const int64_t at = slot_of(in, key);
    if (in->keys[at] < 0) {
        in->keys[at] = key;
        in->positions[at] = position;
    }
    return in->positions[at];
}

/* The position of a key, -1 if absent. */
INLINE int32_t find(const table *in, int64_t key) {
    const int64_t at = slot_of(in, key);
    return in->keys[at] < 0 ? -1 : in->positions[at];
}

#endif
