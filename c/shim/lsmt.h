/*
 * Inner loops of LSMT indexes: what opening an image of a million mappings spends its time in.
 *
 * An index in memory is four columns: offsets and moffsets (in sectors), lengths (sectors) and tags (number of the
 * layer, bit 15 set for explicit zeros). Sorted by offset, without overlap. Offsets and moffsets are uint32_t where
 * everything ends at sector 2^32 (2 TiB) at the latest, else double. A mapping on disk is two 64-bit words,
 * little-endian: offset (50 bits) | length << 50, then moffset (55 bits) | zeroed << 55 | tag << 56.
 * The logic is that of src/storage/overlaybd/lsmt/{layer,flat-index}.ts, which also says what is wrong with an
 * index that is refused here.
 */
#ifndef AENV_LSMT_H
#define AENV_LSMT_H

#include <stdint.h>

/* Longest mapping, in sectors. */
enum { AENV_LSMT_MAX_LENGTH = 16383, AENV_LSMT_MAX_LAYERS = 256 };

struct aenv_lsmt_columns {
	void *offsets;
	void *moffsets;
	uint16_t *lengths;
	uint16_t *tags;
	/* 0: offsets and moffsets are uint32_t, else double. */
	uint64_t wide;
};

/*
 * Lays entries [range[0], range[1]) of `top` over entries [range[2], range[3]) of `bottom` into `out` from entry
 * range[4] on, which needs room for twice the first and once the second, and must be wide if one of them is.
 * Returns where they end.
 */
double aenv_lsmt_merge(const struct aenv_lsmt_columns *top, const struct aenv_lsmt_columns *bottom,
                       const struct aenv_lsmt_columns *out, const double *range);

/*
 * Merges the indexes of `layers` finished layers, bottom to top, straight into `out`, which has room for `capacity`
 * entries (twice the mappings of all are always enough): besides it hardly any memory is touched. Layer i is tagged
 * `first_tag` + i, at most 255. Mappings are fed from `buffers`, `entries` of 16 bytes for each layer one behind the
 * other, which stay the caller's and must stay where they are. NULL: out of memory, or an argument is out of range.
 */
void *aenv_lsmt_merger_open(uint32_t layers, uint32_t first_tag, void *buffers, uint32_t entries,
                            const struct aenv_lsmt_columns *out, double capacity);

/*
 * Takes the next `count` mappings from the layer's buffer, whose content is lost; `last`: there are no more. The
 * layer's data ends at sector `data_end`. -EILSEQ: a mapping is not valid; with `refuse_padding`, or is padding.
 * After an error the merger can only be closed.
 */
int32_t aenv_lsmt_merger_feed(void *merger, uint32_t layer, uint32_t count, double data_end,
                              uint32_t refuse_padding, uint32_t last);

/*
 * Goes on until a layer has to be fed, which is returned, or all is merged: returns the number of layers then.
 * -EOVERFLOW: the columns are too narrow. -ENOSPC: they are full. Either can be mended by a move.
 */
int32_t aenv_lsmt_merger_run(void *merger);

/* Goes on in other columns, which hold what those before did. */
void aenv_lsmt_merger_move(void *merger, const struct aenv_lsmt_columns *out, double capacity);

/* Entries in the columns. */
double aenv_lsmt_merger_count(const void *merger);

void aenv_lsmt_merger_close(void *merger);

#endif
