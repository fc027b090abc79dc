/* The text family and the cosines of term vectors, in one pass over the candidates' words. */
#include "signals.h"

enum { LEAD = 15, REACH = 3 };

/* How often a stem is in the passage being read, and its number among those found, from 1 on. */
typedef struct {
    uint32_t count, number;
} stem_count;

#define OF_QUERY 0x80000000u

/* A word of the query in a passage. */
typedef struct {
    int32_t word, place, sentence;
} hit;

/* A query's distinct terms with weights > 0, and marks of those found. */
typedef struct {
    const double *weights;
    double total;
    int64_t n;
    uint8_t *found;
} terms;

static int made(terms *of, const double *weights, int64_t n) {
    *of = (terms){weights, 0.0, n, scratch(n + 1)};
    for (int64_t i = 0; i < n; i++) of->total += weights[i];
    if (of->found) memset(of->found, 0, n);
    return of->found != NULL;
}

/* The share of the weight of the found ones; marks are cleared. Added up in their own order: in that in
 * which they are found, rounding would make equal shares differ. */
static double covered(const terms *of) {
    double sum = 0.0;
    for (int64_t i = 0; i < of->n; i++) sum += of->found[i] ? of->weights[i] : 0.0;
    memset(of->found, 0, of->n);
    return of->total > 0.0 ? sum / of->total : 0.0;
}

static double coverage(const terms *of, const hit *from, const hit *to) {
    for (; from < to; from++) of->found[from->word] = 1;
    return covered(of);
}

static double best_sentence(const terms *of, const hit *hits, const hit *end) {
    double best = 0.0;
    for (const hit *first = hits, *next = hits; first < end; first = next) {
        while (next < end && next->sentence == first->sentence) next++;
        const double share = coverage(of, first, next);
        best = share > best ? share : best;
    }
    return best;
}

static double found_pairs(const terms *of, const table *pairs, int64_t n_words, const hit *hits, const hit *end) {
    for (const hit *one = hits; one < end; one++)
        for (const hit *two = one > hits ? one - 1 : one; two < end && two->place <= one->place + REACH; two++) {
            if (two == one || two->place < one->place - 1) continue;
            const int32_t pair = find(pairs, one->word * n_words + two->word);
            if (pair >= 0) of->found[pair] = 1;
        }
    return covered(of);
}

passage_words words_of(const argument *a) {
    return (passage_words){a[0].data, a[2].data, a[1].data,   a[0].length, a[1].length - 1,
                           a[2].length, a[3].n,  a[4].x, a[5].x};
}

/* Components are multiples of 2⁻²⁴. Their products are then added without any rounding, so that no
 * cosine depends on the order of the terms or the candidates; its error is about 1e-7 at most. */
/* From here on a term adds a whole row of products at once. */
enum { DENSE = 8 };

INLINE void add_row(double *restrict sums, const double *restrict row, double part, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) sums[i] += part * row[i];
}

/* Adds the products of each term's parts, ascending by passage, to those of its passages among the
 * first m with all later ones; `row` is zeros. */
INLINE void add_terms_body(const int64_t *first, int64_t n_terms, const int32_t *owners, const double *parts,
                           double *row, double *cosines, int64_t m, int64_t stride, const int level) {
    (void)level;
    for (int64_t term = 0; term < n_terms; term++) {
        const int64_t begin = first[term], end = first[term + 1];
        const int dense = end - begin >= DENSE;
        for (int64_t at = begin; at < end && dense; at++) row[owners[at]] = parts[at];
        for (int64_t at = begin; at < end && owners[at] < m; at++) {
            double *sums = cosines + owners[at] * stride;
            if (dense) add_row(sums, row, parts[at], (owners[at] + 1) & ~7, (owners[end - 1] + 8) & ~7);
            else
                for (int64_t other = at + 1; other < end; other++) sums[owners[other]] += parts[at] * parts[other];
        }
        for (int64_t at = begin; at < end && dense; at++) row[owners[at]] = 0.0;
    }
}
BY_PROCESSOR(add_terms,
             (const int64_t *first, int64_t n_terms, const int32_t *owners, const double *parts, double *row,
              double *cosines, int64_t m, int64_t stride),
             first, n_terms, owners, parts, row, cosines, m, stride)

/* The postings of the passages' terms: `stems` and `parts` up to `ends[i]` are passage i's. Once they
 * are weighed, `stems` are the numbers of those found, of which `distinct` has the stem and `passages`
 * how many passages it is in. */
typedef struct {
    int32_t *stems, *owners, *distinct, *passages;
    double *parts, *sorted, *row;
    int64_t *ends, *first;
    int64_t n_distinct;
} postings;

/* A passage's part of each of its stems, of a vector of unit length, in steps of the grid. */
static void weigh(postings *in, int64_t begin, int64_t end, stem_count *counts, const double *weights,
                  double norm) {
    double squares = 0.0;
    for (int64_t at = begin; at < end; at++) {
        stem_count *one = &counts[in->stems[at]];
        const double count = one->count & ~OF_QUERY;
        one->count &= OF_QUERY;
        in->distinct[in->n_distinct] = in->stems[at];
        in->passages[in->n_distinct] = 0;
        in->n_distinct += one->number == 0;
        one->number = one->number ? one->number : (uint32_t)in->n_distinct;
        in->parts[at] = weights[in->stems[at]] * (count / (count + norm));
        squares += in->parts[at] * in->parts[at];
        in->stems[at] = (int32_t)one->number - 1;
        in->passages[in->stems[at]]++;
    }
    const double scale = squares > 0.0 ? GRID / sqrt(squares) : 0.0;
    const double rounding = 6755399441055744.0; /* 1.5 · 2⁵²: adding it leaves no fraction */
    for (int64_t at = begin; at < end; at++) in->parts[at] = (in->parts[at] * scale + rounding) - rounding;
}

static void multiply(postings *in, int64_t n, stem_count *counts, double *cosines, int64_t m, int64_t stride) {
    int64_t total = 0, n_terms = 0;
    for (int64_t i = 0; i < in->n_distinct; i++) {
        const int32_t passages = in->passages[i];
        counts[in->distinct[i]].number = 0;
        /* A term of one passage alone is in no product. From here on: where its next part goes. */
        in->passages[i] = passages > 1 ? (int32_t)total : -1;
        in->first[n_terms] = total;
        n_terms += passages > 1;
        total += passages > 1 ? passages : 0;
    }
    in->first[n_terms] = total;
    for (int64_t i = 0, at = 0; i < n; i++)
        for (; at < in->ends[i]; at++) {
            int32_t *next = &in->passages[in->stems[at]];
            if (*next < 0) continue;
            in->owners[*next] = (int32_t)i;
            in->sorted[(*next)++] = in->parts[at];
        }
    memset(cosines, 0, m * stride * sizeof *cosines);
    add_terms(in->first, n_terms, in->owners, in->sorted, in->row, cosines, m, stride);
    for (int64_t j = 0; j < m; j++) {
        double *mine = cosines + j * stride;
        mine[j] = 0.0;
        for (int64_t i = j + 1; i < n; i++) {
            mine[i] = mine[i] > GRID * GRID ? 1.0 : mine[i] / (GRID * GRID);
            if (i < m) cosines[i * stride + j] = mine[i];
        }
    }
}

int64_t read_words(const passage_words *in, const int64_t *rows, int64_t n, const argument *query,
                   const double *stem_weights, double *signals, double *cosines, int64_t m, int64_t stride) {
    int64_t n_all = 0, longest = 0;
    for (int64_t i = 0; i < n; i++) {
        if (rows[i] < 0 || rows[i] >= in->n_rows) return BAD_LENGTHS;
        const int64_t begin = in->starts[rows[i]], size = in->starts[rows[i] + 1] - begin;
        if (begin < 0 || size < 0 || begin + size > in->n_words) return BAD_LENGTHS;
        n_all += size;
        longest = size > longest ? size : longest;
    }
    const int64_t *of_words = NULL, *order = NULL, *of_stems = NULL;
    int64_t n_words = 0, n_order = 0, n_stems = 0;
    if (query) {
        of_words = query[0].data, order = query[2].data, of_stems = query[3].data;
        n_words = query[0].length, n_order = query[2].length, n_stems = query[3].length;
        if (query[1].length < n_words || query[4].length < n_stems || query[5].length < n_stems) return BAD_LENGTHS;
        for (int64_t i = 0; i < n_order; i++)
            if (order[i] < 0 || order[i] >= n_words) return BAD_LENGTHS;
        for (int64_t i = 0; i < n_stems; i++)
            if (of_stems[i] >= in->n_stems) return BAD_LENGTHS;
    }
    if (n_all && (!in->n_known || !in->n_stems)) return BAD_LENGTHS;
    const int64_t n_postings = stem_weights ? n_all : longest;
    terms words, stems, pairs;
    double *pair_weights = scratch((n_order + 1) * sizeof *pair_weights);
    const table word_at = table_for(n_words), pair_at = table_for(n_order);
    hit *hits = scratch((longest + 1) * sizeof *hits);
    uint32_t *stem_at = scratch(longest * sizeof *stem_at);
    postings all = {.stems = scratch((n_postings + 1) * sizeof(int32_t))};
    if (stem_weights) {
        all.owners = scratch(n_all * sizeof(int32_t));
        all.distinct = scratch((n_all + 1) * sizeof(int32_t));
        all.passages = scratch((n_all + 1) * sizeof(int32_t));
        all.parts = scratch(n_all * sizeof(double));
        all.sorted = scratch(n_all * sizeof(double));
        all.ends = scratch(n * sizeof(int64_t));
        all.first = scratch((n_all + 1) * sizeof(int64_t));
        all.row = scratch(stride * sizeof(double));
        if (!all.owners || !all.distinct || !all.passages || !all.parts || !all.sorted || !all.ends || !all.first || !all.row)
            return NO_MEMORY;
        memset(all.row, 0, stride * sizeof(double));
    }
    if (!pair_weights || !word_at.keys || !pair_at.keys || !hits || !stem_at || !all.stems) return NO_MEMORY;
    int32_t n_pairs = 0;
    for (int64_t i = 0; i + 1 < n_order; i++) {
        const double *weights = query[1].data;
        if (put(&pair_at, order[i] * n_words + order[i + 1], n_pairs) == n_pairs)
            pair_weights[n_pairs++] = weights[order[i]] + weights[order[i + 1]];
    }
    if (!made(&words, query ? query[1].data : NULL, n_words) || !made(&pairs, pair_weights, n_pairs) ||
        !made(&stems, query ? query[4].data : NULL, n_stems))
        return NO_MEMORY;
    for (int64_t i = 0; i < n_words; i++)
        if (of_words[i] >= 0) put(&word_at, of_words[i], (int32_t)i);
    stem_count *counts = zeros(COUNTS, in->n_stems * sizeof *counts);
    if (!counts) return NO_MEMORY;
    for (int64_t i = 0; i < n_stems; i++)
        if (of_stems[i] >= 0) counts[of_stems[i]].count = OF_QUERY;
    expect_table(in->stem_of, in->n_known * sizeof *in->stem_of);
    expect_table(counts, in->n_stems * sizeof *counts);
    if (stem_weights) expect_table(stem_weights, in->n_stems * sizeof *stem_weights);
    int64_t at_posting = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t begin = in->starts[rows[i]], size = in->starts[rows[i] + 1] - begin;
        int32_t *distinct = all.stems + at_posting, sentence = 0;
        if (i + 2 < n) {
            const int64_t *later = in->starts + rows[i + 2];
            expect(in->words + later[0], (later[1] - later[0]) * sizeof *in->words);
        }
        int64_t n_distinct = 0, n_stem_hits = 0, n_hits = 0, n_lead = 0;
        for (int64_t place = 0; place < size; place++) {
            int32_t word = in->words[begin + place];
            word = word < 0 ? ~word : word;
            const uint32_t stem = (uint32_t)in->stem_of[word < in->n_known ? word : 0];
            stem_at[place] = stem < in->n_stems ? stem : 0;
            __builtin_prefetch(&counts[stem_at[place]]);
        }
        for (int64_t place = 0; place < size; place++) {
            const int32_t word = in->words[begin + place];
            const uint32_t stem = stem_at[place], count = counts[stem].count;
            sentence += word < 0;
            distinct[n_distinct] = (int32_t)stem;
            n_distinct += (count & ~OF_QUERY) == 0;
            counts[stem].count = count + 1;
            hits[n_stem_hits] = (hit){word < 0 ? ~word : word, (int32_t)place, sentence};
            n_stem_hits += count >> 31;
        }
        for (int64_t each = 0; each < n_stem_hits; each++) {
            const int32_t position = find(&word_at, hits[each].word);
            if (position < 0) continue;
            hits[n_hits] = (hit){position, hits[each].place, hits[each].sentence};
            n_lead += hits[n_hits++].place < LEAD;
        }
        const double norm = in->norm + in->norm_of_word * (double)size;
        if (query) {
            const double *of_query = query[5].data;
            double bm25 = 0.0;
            for (int64_t s = 0; s < n_stems; s++) {
                const double found = of_stems[s] < 0 ? 0.0 : counts[of_stems[s]].count & ~OF_QUERY;
                stems.found[s] = found > 0.0;
                if (found > 0.0) bm25 += stems.weights[s] * of_query[s] * (found / (found + norm));
            }
            signals[0 * n + i] = log1p(bm25);
            signals[1 * n + i] = covered(&stems);
            signals[2 * n + i] = coverage(&words, hits, hits + n_hits);
            signals[3 * n + i] = best_sentence(&words, hits, hits + n_hits);
            signals[4 * n + i] = coverage(&words, hits, hits + n_lead);
            signals[5 * n + i] = log1p((double)size);
            signals[6 * n + i] = found_pairs(&pairs, &pair_at, n_words, hits, hits + n_hits);
        }
        if (stem_weights) {
            weigh(&all, at_posting, at_posting + n_distinct, counts, stem_weights, norm);
            all.ends[i] = at_posting += n_distinct;
        } else
            for (int64_t d = 0; d < n_distinct; d++) counts[distinct[d]].count &= OF_QUERY;
    }
    for (int64_t i = 0; i < n_stems; i++)
        if (of_stems[i] >= 0) counts[of_stems[i]].count = 0;
    if (stem_weights) multiply(&all, n, counts, cosines, m, stride);
    return 0;
}
