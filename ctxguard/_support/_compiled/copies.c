/* Tells for nearly every list of texts that none copies another. */
#include "kernels.h"

#include <string.h>

enum { LETTERS = 16 };

static int is_space(uint8_t c) { return c == ' ' || (c >= 9 && c <= 13) || (c >= 28 && c <= 31); }

static uint64_t hashed(const uint64_t key[2]) {
    uint64_t h = (key[0] ^ (key[1] << 29 | key[1] >> 35)) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 32;
}

/* Arguments: the ends of n texts, ASCII with a zero between two, and n. Returns 1 if each has more than
 * 16 letters, white space not counted, and the last 16 are no other's in any case; else 0. */
int64_t ends_differ(const argument *a) {
    const uint8_t *text = CONST_ARRAY(uint8_t, 0);
    const int64_t n = a[1].n;
    int64_t at = a[0].length, size = 4;
    if (n < 0 || n > at + 1) return 0;
    while (size < 2 * n) size *= 2;
    scratch_begin();
    uint64_t(*seen)[2] = scratch((size_t)size * sizeof *seen);
    if (!seen) return NO_MEMORY;
    memset(seen, 0, (size_t)size * sizeof *seen);
    for (int64_t i = 0; i < n; i++) {
        uint8_t last[LETTERS];
        int letters = 0;
        for (; at > 0 && text[at - 1]; at--) {
            const uint8_t c = text[at - 1];
            if (is_space(c)) continue;
            if (letters < LETTERS) last[letters] = c >= 'A' && c <= 'Z' ? c + 32 : c;
            letters++;
        }
        /* The zero before it, or the beginning of the first. */
        if (letters <= LETTERS || (at == 0) != (i == n - 1)) return 0;
        at -= at > 0;
        uint64_t key[2];
        memcpy(key, last, sizeof key); /* no letter is a zero, so no key is an empty place */
        uint64_t place = hashed(key) & (uint64_t)(size - 1);
        for (; seen[place][0]; place = (place + 1) & (uint64_t)(size - 1))
            if (seen[place][0] == key[0] && seen[place][1] == key[1]) return 0;
        seen[place][0] = key[0];
        seen[place][1] = key[1];
    }
    return 1;
}
