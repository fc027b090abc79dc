/* Search: BM25 postings, nearest vectors, and the fusion of both.
 *
 * The BM25 scores of a word lie one after the other, as bm25s stores them. A search is one call: it
 * takes tenths of a millisecond, in which a dozen numpy calls would show, and each of those would
 * release and take the interpreter lock, for which concurrent clients wait longer than for the work.
 * A row that does not exist, as in a mapped file that somebody altered, counts as the first. A word of
 * the query below 0 is one that no passage has. */
#include "loops.h"

/* Moves an element of a heap down until none below it is worse. */
static void sink(scored *heap, int64_t at, int64_t size) {
    const scored one = heap[at];
    while (2 * at + 1 < size) {
        int64_t below = 2 * at + 1;
        if (below + 1 < size && is_better(heap[below], heap[below + 1])) below++;
        if (is_better(heap[below], one)) break;
        heap[at] = heap[below];
        at = below;
    }
    heap[at] = one;
}

/* The at most k highest scores above a bound, best first, ties by position; NaN is not above it. */
static int64_t best_first(const float *scores, int64_t n, int64_t k, float above, scored *best) {
    int64_t size = 0;
    int is_heap = 0;
    if (k < 1) return 0;
    for (int64_t at = 0; at < n; at++) {
        if (!(scores[at] > above)) continue;
        const scored one = {scores[at], at};
        if (size < k) {
            best[size++] = one;
            continue;
        }
        if (!is_heap)
            for (int64_t each = size / 2 - 1; each >= 0; each--) sink(best, each, size);
        is_heap = 1;
        if (scores[at] > best[0].score) {
            best[0] = one;
            sink(best, 0, size);
        }
        above = best[0].score;
    }
    sort_scored(best, size);
    return size;
}

/* Scores, a bound, rows: as many of the best as there is room for. */
int64_t best_scores(const argument *a) {
    int64_t *rows = ARRAY(int64_t, 2);
    scratch_begin();
    scored *best = scratch(a[2].length * sizeof *best);
    if (!best) return NO_MEMORY;
    const int64_t n = best_first(CONST_ARRAY(float, 0), a[0].length, a[2].length, a[1].x, best);
    for (int64_t i = 0; i < n; i++) rows[i] = best[i].at;
    return n;
}

/* Adds the scores of the words' postings to `all`; 0 if a word does not exist. */
static int add_postings(const argument *words, const argument *postings, float *all, int64_t n) {
    const float *data = postings[0].data;
    const int32_t *rows = postings[1].data;
    const int64_t *starts = postings[2].data;
    if (postings[1].length < postings[0].length) return 0;
    for (int64_t i = 0; i < words->length; i++) {
        const int64_t word = ((const int64_t *)words->data)[i];
        if (word < 0) continue;
        if (!n || word + 1 >= postings[2].length) return 0;
        if (starts[word] < 0 || starts[word + 1] > postings[0].length) return 0;
        for (int64_t at = starts[word]; at < starts[word + 1]; at++)
            all[(uint64_t)rows[at] < (uint64_t)n ? rows[at] : 0] += data[at];
    }
    return 1;
}

/* Words, postings (scores, rows, starts), every row's score, rows, their scores. */
int64_t search_postings(const argument *a) {
    float *all = ARRAY(float, 4);
    const int64_t n_all = a[4].length, k = least(a[5].length, a[6].length);
    scratch_begin();
    scored *best = scratch(k * sizeof *best);
    if (!best) return NO_MEMORY;
    memset(all, 0, n_all * sizeof *all);
    if (!add_postings(&a[0], &a[1], all, n_all)) return BAD_LENGTHS;
    const int64_t n = best_first(all, n_all, k, 0.0f, best);
    for (int64_t i = 0; i < n; i++) {
        ARRAY(int64_t, 5)[i] = best[i].at;
        ARRAY(double, 6)[i] = best[i].score;
    }
    return n;
}

/* The BM25 scores of one part of an edited index, added to those of its passages: every row's score;
 * the part's number of each word, -1 for none, and its weight; counts, rows and starts of postings;
 * the row of each passage of the part, -1 where it was deleted; BM25's norm of each row. */
int64_t add_scores(const argument *a) {
    float *all = ARRAY(float, 0);
    const int64_t *words = CONST_ARRAY(int64_t, 1), *starts = CONST_ARRAY(int64_t, 5);
    const uint16_t *counts = CONST_ARRAY(uint16_t, 3);
    const int32_t *rows = CONST_ARRAY(int32_t, 4);
    const int64_t *new_rows = CONST_ARRAY(int64_t, 6), n_stored = a[6].length;
    const double *norms = CONST_ARRAY(double, 7);
    if (a[2].length < a[1].length || a[4].length < a[3].length || a[7].length < a[0].length) return BAD_LENGTHS;
    for (int64_t i = 0; i < a[1].length; i++) {
        if (words[i] < 0) continue;
        if (words[i] + 1 >= a[5].length || starts[words[i] + 1] > a[3].length || !n_stored) return BAD_LENGTHS;
        const double weight = CONST_ARRAY(double, 2)[i];
        for (int64_t at = starts[words[i]]; at < starts[words[i] + 1]; at++) {
            const int64_t row = new_rows[(uint64_t)rows[at] < (uint64_t)n_stored ? rows[at] : 0];
            if (row >= 0 && row < a[0].length)
                all[row] += (float)(weight * (counts[at] / (counts[at] + norms[row])));
        }
    }
    return 0;
}

/* The inner products of a vector with some rows of vectors; with all of them if `rows` is NULL. */
INLINE void row_products_body(const float *vectors, int64_t d, const float *vector, const int64_t *rows,
                              int64_t n, float *products, const int level) {
    const float *ones[4] = {vector, vector, vector, vector}, *others[4];
    int64_t at = 0;
    for (; at + 4 <= n; at += 4) {
        for (int r = 0; r < 4; r++) {
            others[r] = vectors + d * (rows ? rows[at + r] : at + r);
            if (at + 8 <= n) expect(vectors + d * (rows ? rows[at + r + 4] : at + r + 4), d * sizeof(float));
        }
        DOTS(4, ones, others, d, (products + at));
    }
    for (; at < n; at++) {
        others[0] = vectors + d * (rows ? rows[at] : at);
        DOTS(1, ones, others, d, (products + at));
    }
}
BY_PROCESSOR(row_products,
             (const float *vectors, int64_t d, const float *vector, const int64_t *rows, int64_t n,
              float *products),
             vectors, d, vector, rows, n, products)

/* A vector, the same at unit length; UNDEFINED without a direction. */
INLINE void length_of_body(const float *vector, int64_t d, float *length, const int level) {
    const float *one[] = {vector};
    DOTS(1, one, one, d, length);
    *length = (float)sqrt(*length);
}
BY_PROCESSOR(length_of, (const float *vector, int64_t d, float *length), vector, d, length)

int64_t unit_vector(const argument *a) {
    const float *vector = CONST_ARRAY(float, 0);
    float length;
    if (a[1].length < a[0].length) return BAD_LENGTHS;
    length_of(vector, a[0].length, &length);
    if (!(length > 0.0f && length < INFINITY)) return UNDEFINED;
    for (int64_t i = 0; i < a[0].length; i++) ARRAY(float, 1)[i] = vector[i] / length;
    return 0;
}

static void sort_rows(int64_t *rows, int64_t n) {
    int64_t gap = 1;
    while (3 * gap < n) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (int64_t i = gap; i < n; i++) {
            const int64_t one = rows[i];
            int64_t to = i;
            for (; to >= gap && rows[to - gap] > one; to -= gap) rows[to] = rows[to - gap];
            rows[to] = one;
        }
}

/* The k nearest of some rows (of all if they are NULL), into `best` with rows as `at`. */
static int64_t find_nearest(const argument *vectors, const float *vector, const argument *some, int64_t k,
                            scored *best) {
    const int64_t n_all = vectors->length / vectors->width, d = vectors->width;
    const int64_t n = some->data ? some->length : n_all;
    float *products = scratch(n * sizeof *products);
    int64_t *rows = some->data ? scratch(n * sizeof *rows) : NULL;
    if (!products || (some->data && !rows)) return NO_MEMORY;
    if (rows) {
        memcpy(rows, some->data, n * sizeof *rows);
        sort_rows(rows, n);
        if (n && (rows[0] < 0 || rows[n - 1] >= n_all)) return BAD_LENGTHS;
    }
    row_products(vectors->data, d, vector, rows, n, products);
    const int64_t found = best_first(products, n, k, -INFINITY, best);
    if (rows)
        for (int64_t i = 0; i < found; i++) best[i].at = rows[best[i].at];
    return found;
}

/* Vectors, a vector, rows to compare or None, rows, cosines. */
int64_t nearest(const argument *a) {
    const int64_t k = least(a[3].length, a[4].length);
    if (a[0].width != a[1].length || !a[0].width) return BAD_LENGTHS;
    scratch_begin();
    scored *best = scratch(k * sizeof *best);
    if (!best) return NO_MEMORY;
    const int64_t n = find_nearest(&a[0], CONST_ARRAY(float, 1), &a[2], k, best);
    for (int64_t i = 0; i < n; i++) {
        ARRAY(int64_t, 3)[i] = best[i].at;
        ARRAY(double, 4)[i] = best[i].score;
    }
    return n;
}

/* (score - minimum) / (highest - minimum); 0 for garbage and lower scores. */
static void unit_interval(const double *scores, int64_t n, double minimum, double *into) {
    double span = 0.0;
    for (int64_t i = 0; i < n; i++) {
        into[i] = scores[i] > minimum && scores[i] < INVALID ? scores[i] - minimum : 0.0;
        if (into[i] > span) span = into[i];
    }
    for (int64_t i = 0; i < n && span > 0.0; i++) into[i] /= span;
}

/* Scores the rows of either leg in both, and fuses as `ctxguard.core.fusion.fuse` does. `fusion` is
 * whether it is convex, the dense leg's weight, the constant of reciprocal rank; then come the rows
 * and, by row, the fused scores, the lexical ones and the cosines, shape (3, k). */
static int64_t fuse_rows(int64_t *rows, int64_t n_given, const float *all, const argument *vectors,
                         const float *vector, const argument *fusion) {
    const int64_t k = least(fusion[3].length, fusion[4].length / 3);
    int64_t n = 0;
    sort_rows(rows, n_given);
    for (int64_t i = 0; i < n_given; i++)
        if (!n || rows[i] != rows[n - 1]) rows[n++] = rows[i];
    double *values = scratch(4 * n * sizeof *values);
    float *products = scratch(n * sizeof *products);
    scored *order = scratch(n * sizeof *order);
    if (!values || !products || !order) return NO_MEMORY;
    double *scores = values, *cosines = values + n, *by_words = values + 2 * n, *by_vector = values + 3 * n;
    row_products(vectors->data, vectors->width, vector, rows, n, products);
    for (int64_t i = 0; i < n; i++) {
        scores[i] = all[rows[i]];
        cosines[i] = products[i];
    }
    double weight = 1.0, other = 1.0;
    if (fusion[0].n) {
        weight = fusion[1].x;
        other = 1.0 - weight;
        unit_interval(scores, n, 0.0, by_words);
        unit_interval(cosines, n, -1.0, by_vector);
    } else {
        reciprocal_ranks(scores, n, 0.0, (double)fusion[2].n, order, by_words);
        reciprocal_ranks(cosines, n, -INVALID, (double)fusion[2].n, order, by_vector);
    }
    for (int64_t i = 0; i < n; i++) order[i] = (scored){weight * by_vector[i] + other * by_words[i], i};
    sort_scored(order, n);
    double *into = fusion[4].data;
    const int64_t found = least(k, n);
    for (int64_t i = 0; i < found; i++) {
        const int64_t at = order[i].at;
        ((int64_t *)fusion[3].data)[i] = rows[at];
        into[i] = order[i].score;
        into[k + i] = scores[at];
        into[2 * k + i] = cosines[at];
    }
    return found;
}

/* Lexical rows, every row's score, dense rows, vectors, a vector, fusion. */
int64_t fuse_candidates(const argument *a) {
    const int64_t n_rows = least(a[1].length, a[3].width ? a[3].length / a[3].width : 0);
    const int64_t n = a[0].length + a[2].length;
    if (a[3].width != a[4].length) return BAD_LENGTHS;
    scratch_begin();
    int64_t *rows = scratch(n * sizeof *rows);
    if (!rows) return NO_MEMORY;
    if (a[0].length) memcpy(rows, a[0].data, a[0].length * sizeof *rows);
    if (a[2].length) memcpy(rows + a[0].length, a[2].data, a[2].length * sizeof *rows);
    for (int64_t i = 0; i < n; i++)
        if (rows[i] < 0 || rows[i] >= n_rows) return BAD_LENGTHS;
    return fuse_rows(rows, n, CONST_ARRAY(float, 1), &a[3], CONST_ARRAY(float, 4), &a[5]);
}

/* Both legs and their fusion: words, postings, vectors, a vector, rows to compare or None, fusion. */
int64_t search_both(const argument *a) {
    const int64_t d = a[4].width, k = least(a[10].length, a[11].length / 3);
    if (!d || d != a[5].length) return BAD_LENGTHS;
    const int64_t n_all = a[4].length / d;
    scratch_begin();
    float *all = scratch(n_all * sizeof *all);
    scored *best = scratch(k * sizeof *best);
    int64_t *rows = scratch(2 * k * sizeof *rows);
    if (!all || !best || !rows) return NO_MEMORY;
    memset(all, 0, n_all * sizeof *all);
    if (!add_postings(&a[0], &a[1], all, n_all)) return BAD_LENGTHS;
    const int64_t lexical = best_first(all, n_all, k, 0.0f, best);
    for (int64_t i = 0; i < lexical; i++) rows[i] = best[i].at;
    const int64_t dense = find_nearest(&a[4], CONST_ARRAY(float, 5), &a[6], k, best);
    if (dense < 0) return dense;
    for (int64_t i = 0; i < dense; i++) rows[lexical + i] = best[i].at;
    return fuse_rows(rows, lexical + dense, all, &a[4], CONST_ARRAY(float, 5), &a[7]);
}

/* How many of some rows have each number: numbers of all rows (one of two types; perhaps complements),
 * the start of each row's, the rows, the number counted for each, counts. */
int64_t rows_with(const argument *a) {
    const int32_t *wide = CONST_ARRAY(int32_t, 0), *counted_as = CONST_ARRAY(int32_t, 4);
    const uint16_t *narrow = CONST_ARRAY(uint16_t, 1);
    const int64_t *starts = CONST_ARRAY(int64_t, 2), *rows = CONST_ARRAY(int64_t, 3);
    const int64_t n_known = a[4].length, n_counts = a[5].length, n_all = wide ? a[0].length : a[1].length;
    scratch_begin();
    int64_t *counts = ARRAY(int64_t, 5), *last = scratch(n_counts * sizeof *last);
    if (!last) return NO_MEMORY;
    memset(counts, 0, n_counts * sizeof *counts);
    memset(last, 0xff, n_counts * sizeof *last);
    for (int64_t i = 0; i < a[3].length; i++) {
        if (rows[i] < 0 || rows[i] + 1 >= a[2].length) return BAD_LENGTHS;
        const int64_t end = starts[rows[i] + 1];
        if (starts[rows[i]] < 0 || end > n_all || (end > starts[rows[i]] && !(n_known && n_counts)))
            return BAD_LENGTHS;
        for (int64_t at = starts[rows[i]]; at < end; at++) {
            int64_t number = wide ? wide[at] : narrow[at];
            number = number < 0 ? ~number : number;
            number = counted_as[number < n_known ? number : 0];
            if (number < 0 || number >= n_counts) number = 0;
            counts[number] += last[number] != i;
            last[number] = i;
        }
    }
    return 0;
}

/* Numbers ≥ 0 from 0 in order of first appearance: numbers, the new one of each. Returns how many. */
int64_t renumbered(const argument *a) {
    const int64_t *numbers = CONST_ARRAY(int64_t, 0);
    int32_t n = 0;
    if (a[1].length < a[0].length) return BAD_LENGTHS;
    scratch_begin();
    const table known = table_for(a[0].length);
    if (!known.keys) return NO_MEMORY;
    for (int64_t i = 0; i < a[0].length; i++) {
        if (numbers[i] < 0) return BAD_LENGTHS;
        const int32_t position = put(&known, numbers[i], n);
        n += position == n;
        ARRAY(int32_t, 1)[i] = position;
    }
    return n;
}
