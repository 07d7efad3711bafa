/* The processor's own counter, which an emulated guest sees as its time stamp counter. */
#ifndef AENV_CLOCK_H
#define AENV_CLOCK_H

#include <stdint.h>

/*
 * Reads counter and clock (CLOCK_MONOTONIC_RAW, nanoseconds) as close to each other as it can get.
 * sample[0]: ticks, sample[1]: nanoseconds. Returns 0 or -errno (-ENOSYS: no such counter).
 */
__attribute__((visibility("default"))) int32_t aenv_tick_sample(double *sample);

#endif
