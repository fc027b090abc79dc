/* All signals of one query's candidates, the pooled ranker's order, and the second pass.
 *
 * Candidates are read in the order of their reciprocal ranks. Each is compared with the first MOST
 * alone, so that time does not grow with the square of their number. The formulas are those of
 * `ctxguard.retrieval.signals`. */
#include "signals.h"

enum { MOST = 200, LIST_SIGNALS = 4, SECOND_SIGNALS = 7, TEXT_SCORES = 14 };

/* eˣ for x from -700 to 700: 2ᵏ · eʳ with |r| ≤ ln 2 / 2, by its Taylor series to r¹². */
INLINE double power(double x) {
    const double rounding = 6755399441055744.0; /* 1.5 · 2⁵²: adding it leaves no fraction */
    const double shifted = x * 1.4426950408889634 + rounding, k = shifted - rounding;
    const double r = x - k * 6.93147180369123816490e-01 - k * 1.90821492927058770002e-10;
    double series = r * (1.0 / 479001600) + 1.0 / 39916800;
    series = (series * r + 1.0 / 3628800) * r + 1.0 / 362880;
    series = (series * r + 1.0 / 40320) * r + 1.0 / 5040;
    series = (series * r + 1.0 / 720) * r + 1.0 / 120;
    series = (series * r + 1.0 / 24) * r + 1.0 / 6;
    series = ((series * r + 0.5) * r + 1.0) * r + 1.0;
    int64_t bits, exponent;
    memcpy(&bits, &series, sizeof bits);
    memcpy(&exponent, &shifted, sizeof exponent);
    bits += exponent << 52;
    memcpy(&series, &bits, sizeof series);
    return series;
}

/* The cosines of the first m vectors with all later ones, and the other way round. */
INLINE void cosines_of_body(const float *const *vectors, int64_t d, int64_t n, int64_t m, int64_t stride,
                            double *cosines, const int level) {
    for (int64_t j = 0; j < m; j += 2) {
        for (int64_t i = j + 1; i < n; i += 4) {
            const float *ones[8], *others[8];
            float products[8];
            for (int r = 0; r < 8; r++) {
                ones[r] = vectors[least(j + r / 4, m - 1)];
                others[r] = vectors[least(i + r % 4, n - 1)];
            }
            DOTS(8, ones, others, d, products);
            for (int r = 0; r < 8; r++) {
                const int64_t from = least(j + r / 4, m - 1), to = least(i + r % 4, n - 1);
                cosines[from * stride + to] = products[r];
                if (to < m) cosines[to * stride + from] = products[r];
            }
        }
    }
    for (int64_t j = 0; j < m; j++) cosines[j * stride + j] = 0.0;
}
BY_PROCESSOR(cosines_of,
             (const float *const *vectors, int64_t d, int64_t n, int64_t m, int64_t stride, double *cosines),
             vectors, d, n, m, stride, cosines)

/* Each one's mean cosine to the k best others, best first in `order`. */
static void mean_of_best(const double *cosines, int64_t stride, const int64_t *order, int64_t n_order, int64_t n,
                         int k, double *means) {
    for (int64_t i = 0; i < n; i++) {
        int taken = 0;
        means[i] = 0.0;
        for (int64_t at = 0; at < n_order && taken < k; at++)
            if (order[at] != i) {
                means[i] += cosines[order[at] * stride + i];
                taken++;
            }
        means[i] = taken ? means[i] / taken : 0.0;
    }
}

/* Each one's highest cosine to one of a better rank; 0 if none is above 0. */
INLINE void highest_to_better_body(const double *restrict cosines, int64_t stride, const double *restrict ranks,
                                   int64_t m, int64_t n, double *restrict highest, const int level) {
    (void)level;
    memset(highest, 0, n * sizeof *highest);
    for (int64_t j = 0; j < m; j++) {
        const double *row = cosines + j * stride, rank = ranks[j];
        for (int64_t i = 0; i < n; i++) {
            const double cosine = rank < ranks[i] ? row[i] : 0.0;
            highest[i] = cosine > highest[i] ? cosine : highest[i];
        }
    }
}
BY_PROCESSOR(highest_to_better,
             (const double *cosines, int64_t stride, const double *ranks, int64_t m, int64_t n, double *highest),
             cosines, stride, ranks, m, n, highest)

/* The 1-based rank of each score, equal ones sharing the better; after all others for one that is not
 * above a bound, or no number. Returns how many are. */
static int64_t ranks_of(const double *scores, int64_t n, double above, scored *work, double *ranks) {
    int64_t known = 0, better = 0;
    for (int64_t i = 0; i < n; i++)
        if (scores[i] > above && scores[i] < INVALID) work[known++] = (scored){scores[i], i};
    for (int64_t i = 0; i < n; i++) ranks[i] = (double)known + 1.0;
    sort_scored(work, known);
    for (int64_t i = 0; i < known; i++) {
        if (i && work[i].score != work[i - 1].score) better = i;
        ranks[work[i].at] = (double)better + 1.0;
    }
    return known;
}

/* Adds weight · z-score, clipped to ±4; 0 if all are equal, or for one that is unknown. */
static void add_z(const double *values, int64_t n, double weight, double *scores) {
    double total = 0.0, squares = 0.0, lowest = INFINITY, highest = -INFINITY;
    int64_t known = 0;
    for (int64_t i = 0; i < n; i++)
        if (!isnan(values[i])) {
            known++;
            total += values[i];
            lowest = values[i] < lowest ? values[i] : lowest;
            highest = values[i] > highest ? values[i] : highest;
        }
    /* Rounding alone would spread equal values. */
    if (!(highest > lowest)) return;
    const double mean = total / (double)known;
    for (int64_t i = 0; i < n; i++)
        if (!isnan(values[i])) squares += (values[i] - mean) * (values[i] - mean);
    const double spread = sqrt(squares / (double)known);
    for (int64_t i = 0; i < n; i++) {
        const double z = (values[i] - mean) / spread;
        if (!isnan(z)) scores[i] += weight * (z < -4.0 ? -4.0 : z > 4.0 ? 4.0 : z);
    }
}

/* Rows with both legs' scores, best first by their fusion; the cosines of the first m vectors and of
 * their term vectors with all, shape (m, stride); `work` has room for 9 rows. */
typedef struct {
    int64_t n, m, stride;
    double *fused, *lexical_ranks, *dense_ranks, *vectors, *terms, *work;
    scored *sorted;
    int64_t *order;
} pool;

static void list_signals(const pool *in, double *signals) {
    const int64_t n = in->n, m = in->m, stride = in->stride;
    for (int64_t i = 0; i < m; i++) in->order[i] = i;
    for (int64_t i = 0; i < n; i++) in->work[i] = (double)i;
    highest_to_better(in->vectors, stride, in->work, m, n, signals);
    mean_of_best(in->vectors, stride, in->order, m, n, 3, signals + n);
    mean_of_best(in->vectors, stride, in->order, m, n, 10, signals + 2 * n);
    mean_of_best(in->terms, stride, in->order, m, n, 3, signals + 3 * n);
}

/* `values` are the dense score, ln(1 + lexical) and the fusion, then 7 + 4 + 3 signals. */
static void ranker_scores(const pool *in, double *const *values, int64_t n_values, const double *weights,
                          double *scores) {
    const int64_t n = in->n;
    const double *ranks[] = {in->dense_ranks, in->lexical_ranks, in->work};
    memset(scores, 0, n * sizeof *scores);
    for (int64_t at = 0; at < n_values; at++) add_z(values[at], n, weights[at], scores);
    if (n_values > TEXT_SCORES) ranks_of(values[TEXT_SCORES], n, -INVALID, in->sorted, in->work);
    for (int64_t which = 0; which < (n_values > TEXT_SCORES ? 3 : 2); which++)
        for (int64_t i = 0; i < n; i++) scores[i] += weights[n_values + which] * (0.5 * log(ranks[which][i]));
}

/* Sums over the columns: weight · L and the weights of others, and the scores smoothed by S and by L
 * with the sums of their weights. A candidate's cosine with itself is 0. */
INLINE void sums_of_body(const double *restrict vectors, const double *restrict terms, int64_t m, int64_t n,
                         int64_t stride, const double *restrict weights, const double *restrict scores,
                         double *restrict sums, const int level) {
    double *restrict support = sums, *restrict weight = sums + n, *restrict by_vectors = sums + 2 * n;
    double *restrict of_vectors = sums + 3 * n, *restrict by_terms = sums + 4 * n, *restrict of_terms = sums + 5 * n;
    double *restrict near = sums + 6 * n;
    (void)level;
    memset(sums, 0, 6 * n * sizeof *sums);
    for (int64_t j = 0; j < m; j++) {
        const double *restrict s = vectors + j * stride, *restrict l = terms + j * stride;
        const double w = weights[j], score = scores[j], kept = weight[j];
        INDEPENDENT for (int64_t i = 0; i < n; i++) near[i] = power((s[i] - 1.0) / 0.1);
        INDEPENDENT for (int64_t i = 0; i < n; i++) {
            by_vectors[i] += near[i] * score;
            of_vectors[i] += near[i];
            weight[i] += w;
        }
        INDEPENDENT for (int64_t i = 0; i < n; i++) {
            const double like = l[i] * l[i] + 1e-6;
            support[i] += w * l[i];
            by_terms[i] += like * score;
            of_terms[i] += like;
        }
        weight[j] = kept;
    }
}
BY_PROCESSOR(sums_of,
             (const double *vectors, const double *terms, int64_t m, int64_t n, int64_t stride,
              const double *weights, const double *scores, double *sums),
             vectors, terms, m, n, stride, weights, scores, sums)

static void second_pass(const pool *in, const double *scores, double *signals) {
    const int64_t n = in->n, m = in->m, stride = in->stride;
    double *ranks = in->work, *weights = ranks + n, *sums = weights + n;
    int64_t n_order = 0;
    for (int64_t i = 0; i < n; i++) in->sorted[i] = (scored){scores[i], i};
    sort_scored(in->sorted, n);
    for (int64_t i = 0; i < n; i++) {
        ranks[in->sorted[i].at] = (double)i;
        if (in->sorted[i].at < m) in->order[n_order++] = in->sorted[i].at;
    }
    for (int64_t i = 0; i < m; i++) weights[i] = exp(scores[i] - in->sorted[0].score);
    sums_of(in->vectors, in->terms, m, n, stride, weights, scores, sums);
    mean_of_best(in->terms, stride, in->order, n_order, n, 3, signals);
    mean_of_best(in->vectors, stride, in->order, n_order, n, 3, signals + 2 * n);
    highest_to_better(in->vectors, stride, ranks, m, n, signals + 5 * n);
    highest_to_better(in->terms, stride, ranks, m, n, signals + 6 * n);
    for (int64_t i = 0; i < n; i++) {
        /* Among the columns its own cosine, 0, counts already. */
        const double near = i < m ? 0.0 : exp(-10.0), like = i < m ? 0.0 : 1e-6;
        /* If one score is higher by hundreds, the others weigh nothing. */
        signals[n + i] = sums[n + i] > 0.0 ? sums[i] / sums[n + i] : 0.0;
        signals[3 * n + i] = (sums[2 * n + i] + near * scores[i]) / (sums[3 * n + i] + near);
        signals[4 * n + i] = (sums[4 * n + i] + like * scores[i]) / (sums[5 * n + i] + like);
    }
}

/* Rows (ties of the final order go by them); where to read each, None for the rows themselves; lexical
 * and dense scores; 6 of words, 6 of the query, stem weights; vectors; 8 of sentences or None; the
 * ranker's weights; then the rows in the final order and, in that order, the lexical and dense scores and
 * every signal: the text family, sentences if there are any, lists, the ranker's score, the second
 * pass. */
int64_t ranked_signals(const argument *a) {
    const int64_t n = a[0].length, d = a[17].width, *rows = CONST_ARRAY(int64_t, 0);
    const int has_sentences = a[18].data != NULL;
    const int64_t n_sentence = has_sentences ? SENTENCE_SIGNALS : 0, n_values = TEXT_SCORES + n_sentence;
    const int64_t n_signals = TEXT_SIGNALS + n_sentence + LIST_SIGNALS + 1 + SECOND_SIGNALS;
    const int64_t *places = a[1].data ? CONST_ARRAY(int64_t, 1) : rows;
    pool in = {.n = n, .m = least(n, MOST)};
    in.stride = (n + 7) / 8 * 8;
    if (a[2].length < n || a[3].length < n || (a[1].data && a[1].length < n) || !d || n >= 1 << 20) return BAD_LENGTHS;
    if (a[26].length != n_values + 2 + has_sentences || a[27].length < n || a[28].length < (n_signals + 2) * n)
        return BAD_LENGTHS;
    const passage_words words = words_of(&a[4]);
    if (a[16].length < words.n_stems) return BAD_LENGTHS;
    scratch_begin();
    double *values = scratch((n_signals + 7) * n * sizeof *values);
    int64_t *at = scratch(3 * n * sizeof *at), *given = at + n;
    const float **vectors = scratch(n * sizeof *vectors);
    in.order = given + n;
    in.sorted = scratch(n * sizeof *in.sorted);
    in.work = scratch(9 * n * sizeof *in.work);
    in.vectors = scratch(in.m * in.stride * sizeof(double));
    in.terms = scratch(in.m * in.stride * sizeof(double));
    if (!values || !at || !vectors || !in.sorted || !in.work || !in.vectors || !in.terms) return NO_MEMORY;
    double *lexical = values, *dense = lexical + n, *text = dense + n, *sentences = text + TEXT_SIGNALS * n;
    double *lists = sentences + n_sentence * n, *scores = lists + LIST_SIGNALS * n, *second = scores + n;
    double *logs = second + SECOND_SIGNALS * n;
    in.fused = logs + n, in.lexical_ranks = in.fused + n, in.dense_ranks = in.lexical_ranks + n;
    double *by_rank = in.dense_ranks + n;
    /* From here on in the order of the reciprocal ranks, ties by position. */
    const int64_t in_lexical = ranks_of(CONST_ARRAY(double, 2), n, 0.0, in.sorted, in.lexical_ranks);
    const int64_t in_dense = ranks_of(CONST_ARRAY(double, 3), n, -INVALID, in.sorted, in.dense_ranks);
    for (int64_t i = 0; i < n; i++) {
        const double one = in.lexical_ranks[i] <= in_lexical ? 1.0 / (60.0 + in.lexical_ranks[i]) : 0.0;
        in.sorted[i] = (scored){one + (in.dense_ranks[i] <= in_dense ? 1.0 / (60.0 + in.dense_ranks[i]) : 0.0), i};
    }
    sort_scored(in.sorted, n);
    for (int64_t i = 0; i < n; i++) {
        given[i] = in.sorted[i].at;
        in.fused[i] = in.sorted[i].score;
        at[i] = places[given[i]];
        lexical[i] = CONST_ARRAY(double, 2)[given[i]];
        dense[i] = CONST_ARRAY(double, 3)[given[i]];
        logs[i] = log1p(lexical[i] > 0.0 ? lexical[i] : 0.0);
        if (at[i] < 0 || at[i] >= a[17].length / d) return BAD_LENGTHS;
        vectors[i] = CONST_ARRAY(float, 17) + at[i] * d;
    }
    memcpy(by_rank, in.lexical_ranks, n * sizeof *by_rank);
    for (int64_t i = 0; i < n; i++) in.lexical_ranks[i] = by_rank[given[i]];
    memcpy(by_rank, in.dense_ranks, n * sizeof *by_rank);
    for (int64_t i = 0; i < n; i++) in.dense_ranks[i] = by_rank[given[i]];
    int64_t failed = read_words(&words, at, n, &a[10], CONST_ARRAY(double, 16), text, in.terms, in.m, in.stride);
    if (!failed && has_sentences) failed = read_sentences(&a[18], at, n, sentences);
    if (failed) return failed;
    cosines_of(vectors, d, n, in.m, in.stride, in.vectors);
    list_signals(&in, lists);
    double *inputs[TEXT_SCORES + SENTENCE_SIGNALS] = {dense, logs, in.fused};
    for (int i = 0; i < TEXT_SIGNALS; i++) inputs[3 + i] = text + i * n;
    for (int i = 0; i < LIST_SIGNALS; i++) inputs[3 + TEXT_SIGNALS + i] = lists + i * n;
    for (int i = 0; i < n_sentence; i++) inputs[TEXT_SCORES + i] = sentences + i * n;
    ranker_scores(&in, inputs, n_values, CONST_ARRAY(double, 26), scores);
    second_pass(&in, scores, second);
    /* Ties by row; the position, below 2²⁰, rides along. */
    for (int64_t i = 0; i < n; i++) in.sorted[i] = (scored){scores[i], rows[given[i]] << 20 | i};
    sort_scored(in.sorted, n);
    for (int64_t i = 0; i < n; i++) {
        const int64_t from = in.sorted[i].at & ((1 << 20) - 1);
        ARRAY(int64_t, 27)[i] = rows[given[from]];
        for (int64_t which = 0; which < n_signals + 2; which++)
            ARRAY(double, 28)[which * n + i] = values[which * n + from];
    }
    return 0;
}

/* Rows, 6 of words, 6 of the query, signals, shape (7, n). */
int64_t text_signals(const argument *a) {
    const passage_words words = words_of(&a[1]);
    if (a[13].length < TEXT_SIGNALS * a[0].length) return BAD_LENGTHS;
    scratch_begin();
    return read_words(&words, a[0].data, a[0].length, &a[7], NULL, ARRAY(double, 13), NULL, 0, 0);
}

/* Rows, 6 of words, stem weights, cosines, shape (n, n); 1 on the diagonal, but 0 without words. */
int64_t term_cosines(const argument *a) {
    const passage_words words = words_of(&a[1]);
    const int64_t n = a[0].length, stride = (n + 7) / 8 * 8;
    if (a[7].length < words.n_stems || a[8].length < n * n) return BAD_LENGTHS;
    scratch_begin();
    double *cosines = scratch(n * stride * sizeof *cosines);
    if (!cosines) return NO_MEMORY;
    const int64_t failed = read_words(&words, a[0].data, n, NULL, CONST_ARRAY(double, 7), NULL, cosines, n, stride);
    for (int64_t i = 0; i < n && !failed; i++)
        memcpy(ARRAY(double, 8) + i * n, cosines + i * stride, n * sizeof *cosines);
    for (int64_t i = 0; i < n && !failed; i++) {
        const int64_t row = CONST_ARRAY(int64_t, 0)[i];
        ARRAY(double, 8)[i * n + i] = words.starts[row + 1] > words.starts[row];
    }
    return failed;
}

/* A query's pieces: states, weights ≥ 0, the states in 16 bits, the weights as shares of 2²⁴. */
int64_t weighted_pieces(const argument *a) {
    const int64_t m = a[1].length;
    const float rounding = 12582912.0f; /* 1.5 · 2²³: adding it leaves no fraction */
    double total = 0.0;
    if (a[2].length < a[0].length || a[3].length < m) return BAD_LENGTHS;
    for (int64_t i = 0; i < a[0].length; i++) {
        const float state = CONST_ARRAY(float, 0)[i], kept = state > 1.0f ? 1.0f : state >= -1.0f ? state : -1.0f;
        ARRAY(int16_t, 2)[i] = (int16_t)(int32_t)((kept * 32767.0f + rounding) - rounding);
    }
    for (int64_t i = 0; i < m; i++) total += CONST_ARRAY(double, 1)[i];
    for (int64_t i = 0; i < m; i++)
        ARRAY(int32_t, 3)[i] = (int32_t)rint(CONST_ARRAY(double, 1)[i] * (GRID / (total > 0.0 ? total : 1.0)));
    return 0;
}

/* Rows, 8 of sentences, signals, shape (3, n). */
int64_t sentence_signals(const argument *a) {
    if (a[9].length < SENTENCE_SIGNALS * a[0].length) return BAD_LENGTHS;
    scratch_begin();
    return read_sentences(&a[1], a[0].data, a[0].length, ARRAY(double, 9));
}
