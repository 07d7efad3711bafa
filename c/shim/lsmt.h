/*
 * Inner loops of LSMT indexes: what opening an image of a million mappings spends its time in.
 *
 * An index in memory is four columns: offsets and moffsets (double, in sectors), lengths (sectors) and tags (number
 * of the layer, bit 15 set for explicit zeros). Sorted by offset, without overlap. A mapping on disk is two 64-bit
 * words, little-endian: offset (50 bits) | length << 50, then moffset (55 bits) | zeroed << 55 | tag << 56.
 * The logic is that of src/storage/overlaybd/lsmt/{layer,flat-index}.ts, which also says what is wrong with an
 * index that is refused here.
 */
#ifndef AENV_LSMT_H
#define AENV_LSMT_H

#include <stdint.h>

/* Longest mapping, in sectors. */
enum { AENV_LSMT_MAX_LENGTH = 16383 };

struct aenv_lsmt_columns {
	double *offsets;
	double *moffsets;
	uint16_t *lengths;
	uint16_t *tags;
};

/*
 * Checks `count` mappings of a finished layer whose data ends at sector `data_end` and appends them, tagged `layer`,
 * to `out` from entry state[0] on, joining neighbours; at most `count` entries are added. state[1] is the sector the
 * mapping before ends at. Both are moved on. -EILSEQ: a mapping is not valid; with `refuse_padding`, or is padding.
 */
int32_t aenv_lsmt_decode(const void *mappings, uint32_t count, double data_end, uint32_t layer,
                         uint32_t refuse_padding, const struct aenv_lsmt_columns *out, double *state);

/*
 * Lays entries [range[0], range[1]) of `top` over entries [range[2], range[3]) of `bottom` into `out` from entry
 * range[4] on, which needs room for twice the first and once the second. Returns where they end.
 */
double aenv_lsmt_merge(const struct aenv_lsmt_columns *top, const struct aenv_lsmt_columns *bottom,
                       const struct aenv_lsmt_columns *out, const double *range);

#endif
