#include "lsmt.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define AENV_EXPORT __attribute__((visibility("default")))

enum { ZEROED = 0x8000, BLOCK_SECTORS = 8 };

static const uint64_t invalid_offset = ((uint64_t)1 << 50) - 1;

AENV_EXPORT int32_t aenv_lsmt_decode(const void *mappings, uint32_t count, double data_end, uint32_t layer,
                                     uint32_t refuse_padding, const struct aenv_lsmt_columns *out,
                                     double *state)
{
	const unsigned char *at = mappings;
	const struct aenv_lsmt_columns columns = *out;
	size_t n = (size_t)state[0];
	uint64_t previous_end = (uint64_t)state[1];
	const uint64_t end_of_data = (uint64_t)data_end;
	/* What the last entry is continued by. */
	uint64_t next_offset = UINT64_MAX, next_moffset = 0;
	uint32_t last_tag = 0, last_length = 0;
	if (n > 0) {
		last_tag = columns.tags[n - 1];
		last_length = columns.lengths[n - 1];
		next_offset = (uint64_t)columns.offsets[n - 1] + last_length;
		next_moffset = (uint64_t)columns.moffsets[n - 1] + last_length;
	}
	for (uint32_t i = 0; i < count; i++, at += 16) {
		uint64_t words[2];
		memcpy(words, at, sizeof words);
		uint64_t offset = words[0] & invalid_offset;
		uint32_t length = (uint32_t)(words[0] >> 50);
		if (length == 0 || offset == invalid_offset) {
			if (refuse_padding)
				return -EILSEQ;
			continue;
		}
		uint64_t moffset = words[1] & (((uint64_t)1 << 55) - 1);
		bool zeroed = (words[1] >> 55 & 1) != 0;
		if (offset < previous_end || moffset < BLOCK_SECTORS || moffset + (zeroed ? 0 : length) > end_of_data)
			return -EILSEQ;
		previous_end = offset + length;
		uint32_t tag = layer | (zeroed ? ZEROED : 0);
		if (offset == next_offset && tag == last_tag && (zeroed || moffset == next_moffset)) {
			uint32_t room = AENV_LSMT_MAX_LENGTH - last_length;
			uint32_t joined = length < room ? length : room;
			last_length += joined;
			columns.lengths[n - 1] = (uint16_t)last_length;
			next_offset += joined;
			next_moffset += joined;
			offset += joined;
			length -= joined;
			if (!zeroed)
				moffset += joined;
			if (length == 0)
				continue;
		}
		columns.offsets[n] = (double)offset;
		columns.moffsets[n] = (double)moffset;
		columns.lengths[n] = (uint16_t)length;
		columns.tags[n] = (uint16_t)tag;
		n++;
		last_tag = tag;
		last_length = length;
		next_offset = offset + length;
		next_moffset = moffset + length;
	}
	state[0] = (double)n;
	state[1] = (double)previous_end;
	return 0;
}

AENV_EXPORT double aenv_lsmt_merge(const struct aenv_lsmt_columns *top, const struct aenv_lsmt_columns *bottom,
                                   const struct aenv_lsmt_columns *out, const double *range)
{
	const struct aenv_lsmt_columns upper = *top, lower = *bottom, to = *out;
	size_t t = (size_t)range[0], b = (size_t)range[2], next = (size_t)range[4];
	const size_t top_end = (size_t)range[1], bottom_end = (size_t)range[3];
	/* First sector that is not put out yet. */
	double covered = 0;
	double top_offset = t < top_end ? upper.offsets[t] : INFINITY;
	/* What the last entry put out is continued by. */
	double last_end = -1, last_target = -1;
	uint32_t last_tag = UINT32_MAX, last_length = 0;
	while (t < top_end || b < bottom_end) {
		double offset = top_offset, moffset;
		uint32_t length, tag;
		bool from_top = true;
		if (b < bottom_end) {
			double start = lower.offsets[b];
			double end = start + lower.lengths[b];
			if (end <= covered) {
				b++;
				continue;
			}
			double visible = start > covered ? start : covered;
			if (visible < top_offset) {
				from_top = false;
				offset = visible;
				tag = lower.tags[b];
				moffset = lower.moffsets[b];
				if (tag < ZEROED)
					moffset += offset - start;
				if (end <= top_offset) {
					length = (uint32_t)(end - offset);
					b++;
				} else {
					length = (uint32_t)(top_offset - offset);
					covered = top_offset;
				}
			}
		}
		if (from_top) {
			length = upper.lengths[t];
			moffset = upper.moffsets[t];
			tag = upper.tags[t];
			covered = offset + length;
			t++;
			top_offset = t < top_end ? upper.offsets[t] : INFINITY;
		}
		if (last_end == offset && last_tag == tag && last_length + length <= AENV_LSMT_MAX_LENGTH &&
		    (tag >= ZEROED || last_target == moffset)) {
			last_length += length;
			to.lengths[next - 1] = (uint16_t)last_length;
		} else {
			to.offsets[next] = offset;
			to.lengths[next] = (uint16_t)length;
			to.moffsets[next] = moffset;
			to.tags[next] = (uint16_t)tag;
			next++;
			last_tag = tag;
			last_length = length;
		}
		last_end = offset + length;
		last_target = moffset + length;
	}
	return (double)next;
}
