/* The sentence family: integer products of the query's word pieces with those of the candidates and
 * with their sentences. See `ctxguard.retrieval.signals.sentences` for the formulas.
 *
 * States have 16 bits and shares are multiples of 2⁻²⁴, so that every sum is an integer: equal on
 * every processor. Rows have 4 bits a number and end with their step; see `ctxguard.retrieval.nibbles`.
 * Sixteen of the query's pieces lie in one register, of which each lane adds up its own product: a
 * pair of a row's numbers is copied to all lanes. Products are kept in 16 bits. */
#include "signals.h"

#if HAS_AVX
#include <immintrin.h>
#endif

enum { LANES = 16, MOST_GROUPS = 4, BLOCK = 8, SHIFT = 4, STEP_SHIFT = 14, LOW = -8 };
#define ONE (32767.0 * 131072.0 / (1 << (SHIFT + STEP_SHIFT)) * 16777216.0)

/* States by groups of 16: two numbers of each in turn, shape (groups, pairs, 16, 2). */
static void interleave(const int16_t *states, int64_t m, int64_t d, int64_t groups, int16_t *into) {
    const int64_t pairs = (d + 1) / 2;
    memset(into, 0, groups * pairs * LANES * 2 * sizeof *into);
    for (int64_t i = 0; i < m; i++)
        for (int64_t k = 0; k < d; k++)
            into[((i / LANES * pairs + k / 2) * LANES + i % LANES) * 2 + k % 2] = states[i * d + k];
}

/* BLOCK rows: their numbers in 16 bits, `pitch` apart, and their steps. */
typedef struct {
    int16_t *wide;
    int64_t pitch;
    int32_t steps[BLOCK];
} block_rows;

/* A product in 16 bits: rounded, and at most ±32767. */
INLINE int16_t narrowed(uint32_t sum, int32_t step) {
    const int32_t scaled = (int32_t)(sum + (1 << (SHIFT - 1))) >> SHIFT;
    const int32_t all = (int32_t)((uint32_t)scaled * (uint32_t)step + (1 << (STEP_SHIFT - 1))) >> STEP_SHIFT;
    return (int16_t)(all > 32767 ? 32767 : all < -32768 ? -32768 : all);
}

/* The products of BLOCK rows with one or two groups of states; of the last group, lanes from `lanes` on
 * need not be computed. */
typedef void (*block_function)(const int16_t *states, const block_rows *rows, int64_t pairs, int groups,
                               int64_t lanes, int16_t *products, int64_t stride);

/* The highest products of some rows, by lane. */
typedef void (*nearest_function)(const int16_t *products, const int32_t *rows, int64_t n, int64_t stride,
                                 int16_t *nearest);

static void block_plain(const int16_t *states, const block_rows *rows, int64_t pairs, int groups,
                        int64_t lanes, int16_t *products, int64_t stride) {
    (void)lanes;
    for (int g = 0; g < groups; g++)
        for (int r = 0; r < BLOCK; r++) {
            uint32_t sums[LANES] = {0};
            for (int64_t k = 0; k < pairs; k++) {
                const int16_t *two = rows->wide + r * rows->pitch + 2 * k, *group = states + (g * pairs + k) * LANES * 2;
                for (int lane = 0; lane < LANES; lane++)
                    sums[lane] += (uint32_t)(group[2 * lane] * two[0]) + (uint32_t)(group[2 * lane + 1] * two[1]);
            }
            for (int lane = 0; lane < LANES; lane++)
                products[r * stride + g * LANES + lane] = narrowed(sums[lane], rows->steps[r]);
        }
}

static void nearest_plain(const int16_t *products, const int32_t *rows, int64_t n, int64_t stride,
                          int16_t *nearest) {
    for (int64_t i = 0; i < stride; i++) nearest[i] = INT16_MIN;
    for (int64_t at = 0; at < n; at++) {
        const int16_t *one = products + rows[at] * stride;
        for (int64_t i = 0; i < stride; i++) nearest[i] = one[i] > nearest[i] ? one[i] : nearest[i];
    }
}

#if HAS_AVX
FOR_AVX2 static inline __m256i scaled_avx2(__m256i sums, int32_t step) {
    const __m256i scaled = _mm256_mullo_epi32(_mm256_srai_epi32(sums, SHIFT), _mm256_set1_epi32(step));
    return _mm256_srai_epi32(_mm256_add_epi32(scaled, _mm256_set1_epi32(1 << (STEP_SHIFT - 1))), STEP_SHIFT);
}

FOR_AVX2 static void block_avx2(const int16_t *states, const block_rows *rows, int64_t pairs, int groups,
                                int64_t lanes, int16_t *products, int64_t stride) {
    (void)lanes;
    const __m256i half = _mm256_set1_epi32(1 << (SHIFT - 1));
    for (int g = 0; g < groups; g++)
        for (int b = 0; b < BLOCK; b += 4) {
            __m256i low[4], high[4];
            for (int r = 0; r < 4; r++) low[r] = high[r] = half;
            for (int64_t k = 0; k < pairs; k++) {
                const int16_t *group = states + (g * pairs + k) * LANES * 2;
                const __m256i first = _mm256_load_si256((const __m256i *)group);
                const __m256i second = _mm256_load_si256((const __m256i *)(group + LANES));
                for (int r = 0; r < 4; r++) {
                    const __m256i two = _mm256_set1_epi32(*(const int32_t *)(rows->wide + (b + r) * rows->pitch + 2 * k));
                    low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(first, two));
                    high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(second, two));
                }
            }
            for (int r = 0; r < 4; r++) {
                const __m256i both = _mm256_packs_epi32(scaled_avx2(low[r], rows->steps[b + r]),
                                                        scaled_avx2(high[r], rows->steps[b + r]));
                _mm256_storeu_si256((__m256i *)(products + (b + r) * stride + g * LANES),
                                    _mm256_permute4x64_epi64(both, 0xd8));
            }
        }
}

FOR_AVX2 static void nearest_avx2(const int16_t *products, const int32_t *rows, int64_t n, int64_t stride,
                                  int16_t *nearest) {
    for (int64_t lane = 0; lane < stride; lane += LANES) {
        __m256i most = _mm256_set1_epi16(INT16_MIN);
        for (int64_t at = 0; at < n; at++)
            most = _mm256_max_epi16(
                most, _mm256_loadu_si256((const __m256i *)(products + rows[at] * stride + lane)));
        _mm256_storeu_si256((__m256i *)(nearest + lane), most);
    }
}

FOR_AVX512 static inline __m256i scaled_avx512(__m512i sums, int32_t step) {
    const __m512i scaled = _mm512_mullo_epi32(_mm512_srai_epi32(sums, SHIFT), _mm512_set1_epi32(step));
    return _mm512_cvtsepi32_epi16(_mm512_srai_epi32(
        _mm512_add_epi32(scaled, _mm512_set1_epi32(1 << (STEP_SHIFT - 1))), STEP_SHIFT));
}

FOR_AVX512 static inline __attribute__((always_inline)) void block_of(
    const int16_t *states, const block_rows *rows, int64_t pairs, const int whole, const int half,
    int16_t *products, int64_t stride) {
    __m512i sums[2][BLOCK];
    __m256i halves[BLOCK];
    for (int r = 0; r < BLOCK; r++) {
        for (int g = 0; g < whole; g++) sums[g][r] = _mm512_set1_epi32(1 << (SHIFT - 1));
        halves[r] = _mm256_set1_epi32(1 << (SHIFT - 1));
    }
    for (int64_t k = 0; k < pairs; k++) {
        __m512i group[2];
        for (int g = 0; g < whole; g++) group[g] = _mm512_load_si512(states + (g * pairs + k) * LANES * 2);
        const __m256i last = _mm256_load_si256((const __m256i *)(states + (whole * pairs * half + k) * LANES * 2));
        for (int r = 0; r < BLOCK; r++) {
            const __m512i two = _mm512_set1_epi32(*(const int32_t *)(rows->wide + r * rows->pitch + 2 * k));
            for (int g = 0; g < whole; g++) sums[g][r] = _mm512_dpwssd_epi32(sums[g][r], group[g], two);
            if (half) halves[r] = _mm256_dpwssd_epi32(halves[r], last, _mm512_castsi512_si256(two));
        }
    }
    for (int r = 0; r < BLOCK; r++) {
        __m256i *into = (__m256i *)(products + r * stride);
        for (int g = 0; g < whole; g++)
            _mm256_storeu_si256(into + g, scaled_avx512(sums[g][r], rows->steps[r]));
        if (half) _mm256_storeu_si256(into + whole, scaled_avx512(_mm512_zextsi256_si512(halves[r]), rows->steps[r]));
    }
}

FOR_AVX512 static void block_avx512(const int16_t *states, const block_rows *rows, int64_t pairs, int groups,
                                    int64_t lanes, int16_t *products, int64_t stride) {
    const int half = lanes <= LANES / 2;
    if (groups == 1 && half) block_of(states, rows, pairs, 0, 1, products, stride);
    else if (groups == 1) block_of(states, rows, pairs, 1, 0, products, stride);
    else if (half) block_of(states, rows, pairs, 1, 1, products, stride);
    else block_of(states, rows, pairs, 2, 0, products, stride);
}

FOR_AVX512 static void nearest_avx512(const int16_t *products, const int32_t *rows, int64_t n, int64_t stride,
                                      int16_t *nearest) {
    if (stride == LANES) {
        nearest_avx2(products, rows, n, stride, nearest);
        return;
    }
    /* Behind the last of an odd number of groups the next row's is read, and not used. */
    for (int64_t lane = 0; lane < stride; lane += 2 * LANES) {
        __m512i most = _mm512_set1_epi16(INT16_MIN);
        for (int64_t at = 0; at < n; at++)
            most = _mm512_max_epi16(most, _mm512_loadu_si512(products + rows[at] * stride + lane));
        _mm512_storeu_si512(nearest + lane, most);
    }
}
#endif

INLINE void widen_body(const uint8_t *restrict row, int64_t half, int16_t *restrict into, const int level) {
    (void)level;
    for (int64_t k = 0; k < half; k++) into[k] = (int16_t)((row[k] & 15) + LOW);
    for (int64_t k = 0; k < half; k++) into[half + k] = (int16_t)((row[k] >> 4) + LOW);
}
BY_PROCESSOR(widen, (const uint8_t *row, int64_t half, int16_t *into), row, half, into)

/* The products of all rows with all states, shape (n, stride); BLOCK rows more are there twice over. */
static int multiply(const uint8_t *const *rows, int64_t n, int64_t d, const int16_t *states, int64_t m,
                    int16_t *products) {
    const int64_t groups = (m + LANES - 1) / LANES;
    const int64_t pairs = (d + 1) / 2, pitch = (2 * pairs + 31) / 32 * 32, stride = groups * LANES;
    block_rows wide = {scratch(BLOCK * pitch * sizeof(int16_t)), pitch, {0}};
    if (!wide.wide) return 0;
    block_function block = block_plain;
#if HAS_AVX
    if (processor() == AVX2) block = block_avx2;
    if (processor() == AVX512) block = block_avx512;
#endif
    for (int64_t at = 0; at < n; at += BLOCK) {
        for (int r = 0; r < BLOCK; r++) {
            widen(rows[at + r], pairs, wide.wide + r * pitch);
            wide.steps[r] = rows[at + r][pairs] | rows[at + r][pairs + 1] << 8;
            expect(rows[at + r + BLOCK], pairs + 2);
        }
        for (int64_t g = 0; g < groups; g += 2)
            block(states + g * pairs * LANES * 2, &wide, pairs, (int)least(groups - g, 2),
                  least(m - (groups - 1) * LANES, LANES) + (g + 2 < groups ? LANES : 0), products + at * stride + g * LANES, stride);
    }
    return 1;
}

/* The signals of one row: its pieces (positions in the products), its sentences' lengths, and the
 * products of its sentences. */
INLINE void row_signals_body(nearest_function nearest_of, const int16_t *products, const int32_t *pieces,
                             int64_t n_pieces, const uint8_t *lengths, int64_t n_sentences,
                             const int16_t *to_sentences, const int32_t *shares, int64_t stride, int64_t *found,
                             const int level) {
    int16_t nearest[MOST_GROUPS * LANES];
    int32_t best[MOST_GROUPS * LANES];
    int64_t at = 0;
    (void)level;
    found[0] = found[2] = INT64_MIN;
    for (int64_t i = 0; i < stride; i++) best[i] = INT32_MIN;
    for (int64_t s = 0; s < n_sentences; s++) {
        const int64_t size = least(lengths[s], n_pieces - at);
        const int16_t *to_sentence = to_sentences + s * stride;
        nearest_of(products, pieces + at, size, stride, nearest);
        at += size;
        int64_t of_pieces = 0, of_sentence = 0;
        for (int64_t i = 0; i < stride; i++) {
            const int32_t both = nearest[i] + to_sentence[i];
            best[i] = both > best[i] ? both : best[i];
            of_pieces += (int64_t)shares[i] * nearest[i];
            of_sentence += (int64_t)shares[i] * to_sentence[i];
        }
        const int64_t match = of_pieces + 2 * of_sentence;
        found[0] = match > found[0] ? match : found[0];
        found[2] = of_sentence > found[2] ? of_sentence : found[2];
    }
    found[1] = 0;
    for (int64_t i = 0; i < stride; i++) found[1] += (int64_t)shares[i] * best[i];
}
BY_PROCESSOR(row_signals,
             (nearest_function nearest_of, const int16_t *products, const int32_t *pieces, int64_t n_pieces,
              const uint8_t *lengths, int64_t n_sentences, const int16_t *to_sentences, const int32_t *shares,
              int64_t stride, int64_t *found),
             nearest_of, products, pieces, n_pieces, lengths, n_sentences, to_sentences, shares, stride, found)

/* Gives each distinct piece a position; returns how many there are. Without branches: which pieces are
 * new is hard to foresee. */
INLINE int32_t number_pieces(const uint16_t *narrow, const int32_t *wide, int64_t n, uint32_t n_known,
                             int32_t *position_of, int32_t *distinct, int32_t n_distinct, int32_t *positions) {
    for (int64_t at = 0; at < n; at++) {
        uint32_t piece = wide ? (uint32_t)wide[at] : narrow[at];
        piece = piece < n_known ? piece : 0;
        int32_t position = position_of[piece];
        distinct[n_distinct] = (int32_t)piece;
        n_distinct += position == 0;
        position = position ? position : n_distinct;
        position_of[piece] = position;
        positions[at] = position - 1;
    }
    return n_distinct;
}

int64_t read_sentences(const argument *a, const int64_t *rows, int64_t n, double *signals) {
    const int64_t m = a[1].length, d = a[0].width, row = (d + 1) / 2 + 2, n_known = a[2].length / row;
    const int64_t groups = (m + LANES - 1) / LANES, stride = groups * LANES;
    const uint8_t *known = a[2].data, *vectors = a[3].data;
    const uint8_t *lengths = a[4].data;
    const uint16_t *narrow = a[5].data;
    const int32_t *wide = a[6].data;
    const int64_t *starts = a[7].data; /* of sentences and of pieces, shape (n_rows + 1, 2) */
    const int64_t n_all_pieces = wide ? a[6].length : a[5].length;
    if (!m) {
        for (int64_t i = 0; i < SENTENCE_SIGNALS * n; i++) signals[i] = NAN;
        return 0;
    }
    if (!n_known || groups > MOST_GROUPS || a[0].length != m * d || a[2].width != row || a[3].width != row || a[7].width != 2)
        return BAD_LENGTHS;
    if (a[3].length != a[4].length * row) return BAD_LENGTHS;
    int64_t n_pieces = 0, n_sentences = 0;
    for (int64_t i = 0; i < n; i++) {
        if (rows[i] < 0 || rows[i] + 1 >= a[7].length / 2) return BAD_LENGTHS;
        const int64_t *here = starts + 2 * rows[i];
        if (here[0] < 0 || here[1] < 0 || here[2] < here[0] || here[3] < here[1]) return BAD_LENGTHS;
        if (here[2] > a[4].length || here[3] > n_all_pieces) return BAD_LENGTHS;
        n_sentences += here[2] - here[0];
        n_pieces += here[3] - here[1];
    }
    const int64_t most = least(n_pieces, n_known) + n_sentences + 2 * BLOCK;
    const int64_t pairs = (d + 1) / 2;
    int16_t *states = scratch(groups * pairs * LANES * 2 * sizeof *states);
    int32_t shares[MOST_GROUPS * LANES] = {0};
    const uint8_t **read = scratch(most * sizeof *read);
    int32_t *positions = scratch((n_pieces + 1) * sizeof *positions);
    int16_t *products = scratch((most * stride + LANES) * sizeof *products);
    int32_t *distinct = scratch((least(n_pieces, n_known) + 1) * sizeof *distinct);
    int32_t *position_of = zeros(POSITIONS, n_known * sizeof *position_of);
    if (!states || !read || !positions || !products || !distinct || !position_of) return NO_MEMORY;
    interleave(a[0].data, m, d, groups, states);
    memcpy(shares, a[1].data, m * sizeof *shares);
    /* A piece is multiplied once, however many candidates have it. */
    int32_t n_read = 0;
    expect_table(position_of, n_known * sizeof *position_of);
    for (int64_t i = 0, to = 0; i < n; i++) {
        const int64_t begin = starts[2 * rows[i] + 1], size = starts[2 * rows[i] + 3] - begin;
        if (i + 2 < n) {
            const int64_t *later = starts + 2 * rows[i + 2] + 1;
            if (wide) expect(wide + later[0], (later[2] - later[0]) * sizeof *wide);
            else expect(narrow + later[0], (later[2] - later[0]) * sizeof *narrow);
        }
        n_read = wide ? number_pieces(NULL, wide + begin, size, (uint32_t)n_known, position_of, distinct, n_read,
                                      positions + to)
                      : number_pieces(narrow + begin, NULL, size, (uint32_t)n_known, position_of, distinct, n_read,
                                      positions + to);
        to += size;
    }
    for (int32_t i = 0; i < n_read; i++) {
        position_of[distinct[i]] = 0;
        read[i] = known + distinct[i] * row;
    }
    int64_t total = n_read;
    for (int64_t i = 0; i < n; i++)
        for (int64_t s = starts[2 * rows[i]]; s < starts[2 * rows[i] + 2]; s++) read[total++] = vectors + s * row;
    for (int64_t i = 0; i < 2 * BLOCK; i++) read[total + i] = known;
    if (!multiply(read, total, d, states, m, products)) return NO_MEMORY;
    nearest_function nearest_of = nearest_plain;
#if HAS_AVX
    if (processor() == AVX2) nearest_of = nearest_avx2;
    if (processor() == AVX512) nearest_of = nearest_avx512;
#endif
    const int16_t *to_sentences = products + n_read * stride;
    const int32_t *pieces = positions;
    for (int64_t i = 0; i < n; i++) {
        const int64_t *here = starts + 2 * rows[i];
        const int64_t of_row = here[2] - here[0];
        int64_t found[SENTENCE_SIGNALS];
        row_signals(nearest_of, products, pieces, here[3] - here[1], lengths + here[0], of_row, to_sentences,
                    shares, stride, found);
        for (int which = 0; which < SENTENCE_SIGNALS; which++)
            signals[which * n + i] = of_row ? (double)found[which] / ONE : NAN;
        pieces += here[3] - here[1];
        to_sentences += of_row * stride;
    }
    return 0;
}
