/* Sparse files: copies that keep holes. Every function returns a count or -errno and keeps no state. */
#ifndef AENV_SPARSE_H
#define AENV_SPARSE_H

#include <stdint.h>

/* Makes `to_fd` (empty) share all blocks of `from_fd`; -EOPNOTSUPP, -EXDEV … where the file system cannot. */
__attribute__((visibility("default"))) int32_t aenv_clone_file(int32_t from_fd, int32_t to_fd);

/*
 * Copies data from `offset` on, holes skipped, until about `budget` bytes were copied. Returns 1 when there is
 * more, from *next on, and 0 at the end of the file. The size of the target is the caller's business.
 */
__attribute__((visibility("default"))) int32_t aenv_copy_sparse(int32_t from_fd, int32_t to_fd, double offset,
                                                                 double budget, double *next);

#endif
