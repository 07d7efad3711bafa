#ifndef AENV_FUZZ_TARGETS_H
#define AENV_FUZZ_TARGETS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
  const char *name;
  int (*run)(const uint8_t *p, size_t n);
  unsigned share; // of all executions, in percent: the costly ones get few
} fuzz_target;

extern const fuzz_target fuzz_targets[]; // ends with a NULL name

#endif
