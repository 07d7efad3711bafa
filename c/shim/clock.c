#include "clock.h"

#include <errno.h>
#include <time.h>

#if defined(__x86_64__)
static uint64_t ticks(void) { return __builtin_ia32_rdtsc(); }
#define HAVE_TICKS 1
#elif defined(__aarch64__)
static uint64_t ticks(void) {
  uint64_t value;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
}
#define HAVE_TICKS 1
#endif

int32_t aenv_tick_sample(double *sample) {
#ifdef HAVE_TICKS
  uint64_t narrowest = UINT64_MAX;
  for (int attempt = 0; attempt < 16; attempt++) {
    struct timespec now;
    uint64_t before = ticks();
    if (clock_gettime(CLOCK_MONOTONIC_RAW, &now) != 0) return -errno;
    uint64_t after = ticks();
    if (after - before >= narrowest) continue;
    narrowest = after - before;
    sample[0] = (double)before + (double)narrowest / 2;
    sample[1] = (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
  }
  return 0;
#else
  (void)sample;
  return -ENOSYS;
#endif
}
