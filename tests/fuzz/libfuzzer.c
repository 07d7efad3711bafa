// libFuzzer's entry point for one target, named at compile time: -DTARGET='"json"'.
#include <stdlib.h>
#include <string.h>

#include "targets.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
  for (const fuzz_target *t = fuzz_targets; t->name; t++)
    if (!strcmp(t->name, TARGET)) return t->run(p, n);
  abort();
}
