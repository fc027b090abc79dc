/* The families of signals, one file each, as `signals.c` puts them together. */
#ifndef CTXGUARD_SIGNALS_H
#define CTXGUARD_SIGNALS_H

#include "loops.h"

enum { TEXT_SIGNALS = 7, SENTENCE_SIGNALS = 3 };

/* Shares and components are multiples of its reciprocal, 2⁻²⁴. */
#define GRID 16777216.0

/* The words of passages, from 6 arguments: words (a sentence's first as its complement), the start of
 * each row's, each word's stem, how many stems there are, BM25's norm of no word and of each word. */
typedef struct {
    const int32_t *words, *stem_of;
    const int64_t *starts;
    int64_t n_words, n_rows, n_known, n_stems;
    double norm, norm_of_word;
} passage_words;

passage_words words_of(const argument *a);

/* Computes the text signals of some rows, shape (TEXT_SIGNALS, n), and with the weights of stems also
 * those of the first m rows' term vectors with all, shape (m, stride), 0 with itself.
 * `query` are 6 arguments: words, weights, order, stems, their weights, their counts. */
int64_t read_words(const passage_words *in, const int64_t *rows, int64_t n, const argument *query,
                   const double *stem_weights, double *signals, double *cosines, int64_t m, int64_t stride);

/* Computes the sentence signals of some rows, shape (SENTENCE_SIGNALS, n), NaN without a sentence, from
 * 8 arguments: states, shares, table, vectors, lengths, pieces as u2 or as i4, starts. */
int64_t read_sentences(const argument *a, const int64_t *rows, int64_t n, double *signals);

#endif
