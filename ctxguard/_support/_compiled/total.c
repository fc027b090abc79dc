#include "kernels.h"
int64_t total(const argument *a) {
    const double *values = CONST_ARRAY(double, 0);
    if (a[1].length < 1) return BAD_LENGTHS;
    double sum = 0.0;
    for (int64_t i = 0; i < a[0].length; i++) sum += values[i];
    ARRAY(double, 1)[0] = sum;
    return a[0].length;
}
