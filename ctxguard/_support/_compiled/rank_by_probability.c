/* P(relevant) of a ranking's candidates and their order by it: the features of ctxguard/core/signals.py,
 * the regression of relevance.py and the trees of trees.py in one call. Sums run in numpy's order, so
 * that a feature equals the reference's and falls on the same side of a tree's threshold. */
#include "kernels.h"

#include <math.h>
#include <string.h>

enum { RATIO = 1, PROBABILITY = 2 }; /* kinds of a leg that features put on another scale */
enum { RAW, GAP, Z, LOG_RANK, TOP, N_BLOCKS };
enum { N_NODES = 5, N_MASKS = 64 }; /* MAX_LEAVES - 1 and 2 ** MAX_LEAVES */

static const double INVALID = 1e37, EDGE = 1e-9, RECIPROCAL_RANK_CONSTANT = 60.0;

typedef struct {
    int64_t n, n_legs, n_values, n_features, n_nodes;
    const int64_t *rows, *node_features;
    const double *weights, *bounds, *thresholds, *leaves;
    const uint8_t *masks;
    double offset, intercept;
} plan;

/* numpy's sum of contiguous numbers. */
static double sum(const double *v, int64_t n) {
    if (n > 128) {
        const int64_t half = n / 2 - n / 2 % 8;
        return sum(v, half) + sum(v + half, n - half);
    }
    double total = 0.0;
    int64_t i = 0;
    if (n >= 8) {
        double r[8];
        for (; i < 8; i++) r[i] = v[i];
        for (; i < n - n % 8; i += 8)
            for (int j = 0; j < 8; j++) r[j] += v[i + j];
        total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    }
    for (; i < n; i++) total += v[i];
    return total;
}

/* Positions by value, highest first, of equal ones the earlier first. */
static inline __attribute__((always_inline)) void sort(const double *v, int64_t n, int64_t *order,
                                                       int64_t *other) {
    enum { FEW = 256 };
    if (n <= FEW) { /* compared with every other: faster than moving so few */
        for (int64_t i = 0; i < n; i++) {
            const double own = v[i];
            int64_t before = 0;
            for (int64_t j = 0; j < i; j++) before += v[j] >= own;
            for (int64_t j = i + 1; j < n; j++) before += v[j] > own;
            order[before] = i;
        }
        return;
    }
    int64_t *from = order, *to = other;
    for (int64_t i = 0; i < n; i++) from[i] = i;
    for (int64_t width = 1; width < n; width *= 2) {
        for (int64_t start = 0; start < n; start += 2 * width) {
            const int64_t middle = start + width < n ? start + width : n;
            const int64_t end = middle + width < n ? middle + width : n;
            int64_t left = start, right = middle;
            for (int64_t at = start; at < end; at++)
                to[at] = left < middle && (right >= end || v[from[left]] >= v[from[right]])
                             ? from[left++]
                             : from[right++];
        }
        int64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != order) memcpy(order, from, (size_t)n * sizeof *order);
}

/* The transforms of every value, one block after another; then the two features across legs. */
static inline __attribute__((always_inline)) void transform(const plan *p, double *block,
                                                            const uint8_t *kinds, const uint8_t *ranked,
                                                            int64_t *order, int64_t *other,
                                                            double *logs) {
    const int64_t n = p->n, m = p->n_values;
    double *reciprocal = block + N_BLOCKS * m * n, *matched = reciprocal + n;
    for (int64_t i = 0; i < n; i++) reciprocal[i] = 0.0, matched[i] = 1.0;
    for (int64_t i = 0; i < n; i++) logs[i] = log((double)(i + 1));
    for (int64_t row = 0; row < m; row++) {
        double *v = block + row * n, *gap = v + GAP * m * n, *z = v + Z * m * n;
        double *rank = v + LOG_RANK * m * n, *top = v + TOP * m * n;
        double highest = v[0], lowest = v[0];
        for (int64_t i = 1; i < n; i++) {
            highest = v[i] > highest ? v[i] : highest;
            lowest = v[i] < lowest ? v[i] : lowest;
        }
        const double mean = sum(v, n) / (double)n;
        for (int64_t i = 0; i < n; i++) {
            top[i] = highest;
            gap[i] = v[i] - highest;
            z[i] = v[i] - mean;
            rank[i] = z[i] * z[i]; /* until ranks take its place */
        }
        double spread = sqrt(sum(rank, n) / (double)n);
        /* Rounding alone would spread equal values. */
        if (lowest == highest || spread == 0.0) spread = INFINITY;
        for (int64_t i = 0; i < n; i++) z[i] /= spread;
        if (!ranked[row]) continue;
        sort(v, n, order, other);
        for (int64_t at = 0, first = 0; at < n; at++) {
            if (v[order[at]] != v[order[first]]) first = at; /* equal values share a rank */
            rank[order[at]] = logs[first];
            if (row < p->n_legs)
                reciprocal[order[at]] += 1.0 / (RECIPROCAL_RANK_CONSTANT + (double)(first + 1));
        }
        if (row < p->n_legs && kinds[row] == RATIO)
            for (int64_t i = 0; i < n; i++) matched[i] = v[i] > 0.0 ? matched[i] : 0.0;
    }
}

static inline __attribute__((always_inline)) void add_regression(const plan *p, const double *block,
                                                                 double *log_odds) {
    const int64_t n = p->n;
    for (int64_t i = 0; i < n; i++) log_odds[i] = 0.0;
    for (int64_t feature = 0; feature < p->n_features; feature++) {
        const double *v = block + p->rows[feature] * n, weight = p->weights[feature];
        if (p->bounds) {
            const double low = p->bounds[feature], high = p->bounds[p->n_features + feature];
            for (int64_t i = 0; i < n; i++) {
                double near = v[i] < low ? low : v[i];
                near = near > high ? high : near;
                log_odds[i] += weight * near;
            }
        } else {
            for (int64_t i = 0; i < n; i++) log_odds[i] += weight * v[i];
        }
    }
    for (int64_t i = 0; i < n; i++) log_odds[i] += p->offset;
}

static inline __attribute__((always_inline)) void add_trees(const plan *p, const double *block,
                                                            int64_t *ruled_out, double *total) {
    const int64_t n = p->n, n_trees = p->n_nodes / N_NODES;
    for (int64_t i = 0; i < n; i++) total[i] = 0.0;
    for (int64_t tree = 0; tree < n_trees; tree++) {
        for (int64_t i = 0; i < n; i++) ruled_out[i] = 0;
        for (int64_t node = 0; node < N_NODES; node++) {
            const int64_t at = node * n_trees + tree, mask = p->masks[at];
            if (!mask) continue; /* the tree has fewer nodes */
            const double *v = block + p->rows[p->node_features[at]] * n;
            const double threshold = p->thresholds[at];
            for (int64_t i = 0; i < n; i++) ruled_out[i] |= v[i] > threshold ? mask : 0;
        }
        const double *leaf = p->leaves + tree * N_MASKS;
        for (int64_t i = 0; i < n; i++) total[i] += leaf[ruled_out[i]];
    }
    for (int64_t i = 0; i < n; i++) total[i] += p->intercept;
}

static inline __attribute__((always_inline)) int64_t rank(const plan *p, double *block,
                                                          const uint8_t *kinds, const uint8_t *ranked,
                                                          double *logs, double *trees, int64_t *other,
                                                          double least, double *found, int64_t *best) {
    const int64_t n = p->n;
    transform(p, block, kinds, ranked, best, other, logs);
    add_regression(p, block, found);
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(found[i])) return UNDEFINED;
    if (p->n_nodes) {
        add_trees(p, block, other, trees);
        for (int64_t i = 0; i < n; i++) found[i] = 0.5 * (found[i] + trees[i]);
    }
    for (int64_t i = 0; i < n; i++) found[i] = 1.0 / (1.0 + exp(-found[i]));
    sort(found, n, best, other);
    int64_t worthwhile = 0;
    for (int64_t i = 0; i < n; i++) worthwhile += found[i] >= least;
    return worthwhile;
}

#define ARGUMENTS                                                                                   \
    const plan *p, double *block, const uint8_t *kinds, const uint8_t *ranked, double *logs,        \
        double *trees, int64_t *other, double least, double *found, int64_t *best
#define GIVEN p, block, kinds, ranked, logs, trees, other, least, found, best

static int64_t rank_plain(ARGUMENTS) { return rank(GIVEN); }
#if HAS_AVX
FOR_AVX2 static int64_t rank_avx2(ARGUMENTS) { return rank(GIVEN); }
FOR_AVX512 static int64_t rank_avx512(ARGUMENTS) { return rank(GIVEN); }
#endif

static double additive(double score, int kind) {
    if (kind == RATIO) return log1p(score > 0.0 ? score : 0.0);
    if (kind != PROBABILITY) return score;
    const double clipped = score < EDGE ? EDGE : score > 1.0 - EDGE ? 1.0 - EDGE : score;
    return log(clipped / (1.0 - clipped));
}

static int fits(const plan *p, const argument *a) {
    const int64_t n_rows = N_BLOCKS * p->n_values + 2, n_nodes = p->n_nodes;
    if (p->n < 1 || a[14].length != p->n || p->n_legs > p->n_values || a[1].length != p->n_features ||
        (p->bounds && a[3].length != 2 * p->n_features) || n_nodes % N_NODES ||
        a[5].length != n_nodes || a[6].length != n_nodes ||
        a[7].length != n_nodes / N_NODES * N_MASKS)
        return 0;
    for (int64_t i = 0; i < p->n_features; i++)
        if (p->rows[i] < 0 || p->rows[i] >= n_rows) return 0;
    for (int64_t i = 0; i < n_nodes; i++)
        if (p->node_features[i] < 0 || p->node_features[i] >= p->n_features || p->masks[i] >= N_MASKS)
            return 0;
    return 1;
}

/* 0 rows, 1 weights, 2 offset, 3 bounds, 4 nodes' features, 5 thresholds, 6 masks, 7 leaves,
 * 8 intercept, 9 kinds of the legs, 10 legs and signals, 11 positions, 12 least P, 13 P (written),
 * 14 positions by P (written). Returns the number of candidates with at least the least P; undefined
 * if a value is no number. */
int64_t rank_by_probability(const argument *a) {
    const argument *columns = a[10].arguments;
    const int64_t *positions = CONST_ARRAY(int64_t, 11);
    const uint8_t *kinds = CONST_ARRAY(uint8_t, 9);
    const plan p = {
        .n = a[13].length,
        .n_legs = a[9].length,
        .n_values = a[10].length,
        .n_features = a[0].length,
        .n_nodes = a[4].length,
        .rows = a[0].data,
        .weights = a[1].data,
        .offset = a[2].x,
        .bounds = a[3].data,
        .node_features = a[4].data,
        .thresholds = a[5].data,
        .masks = a[6].data,
        .leaves = a[7].data,
        .intercept = a[8].x,
    };
    if (!fits(&p, a) || (positions && a[11].length != p.n)) return BAD_LENGTHS;
    const size_t n = (size_t)p.n;
    scratch_begin();
    double *block = scratch(((size_t)N_BLOCKS * (size_t)p.n_values + 2) * n * sizeof(double));
    double *logs = scratch(n * sizeof *logs), *trees = scratch(n * sizeof *trees);
    int64_t *other = scratch(n * sizeof *other);
    uint8_t *ranked = scratch((size_t)p.n_values + 1);
    if (!block || !logs || !trees || !other || !ranked) return NO_MEMORY;
    for (int64_t row = 0; row < p.n_values; row++) {
        ranked[row] = row < p.n_legs;
        const double *column = columns[row].data;
        const int64_t length = columns[row].length;
        if (positions ? 0 : length != p.n) return BAD_LENGTHS;
        for (int64_t i = 0; i < p.n; i++) {
            const int64_t at = positions ? positions[i] : i;
            if (at < 0 || at >= length) return BAD_LENGTHS;
            if (!(fabs(column[at]) < INVALID)) return UNDEFINED;
            block[row * p.n + i] = row < p.n_legs ? additive(column[at], kinds[row]) : column[at];
        }
    }
    for (int64_t i = 0; i < p.n_features; i++) {
        const int64_t value = p.rows[i] - LOG_RANK * p.n_values;
        if (value >= 0 && value < p.n_values) ranked[value] = 1;
    }
    double *found = ARRAY(double, 13), least = a[12].x;
    int64_t *best = ARRAY(int64_t, 14);
#if HAS_AVX
    if (processor() == AVX512)
        return rank_avx512(&p, block, kinds, ranked, logs, trees, other, least, found, best);
    if (processor() == AVX2)
        return rank_avx2(&p, block, kinds, ranked, logs, trees, other, least, found, best);
#endif
    return rank_plain(&p, block, kinds, ranked, logs, trees, other, least, found, best);
}
