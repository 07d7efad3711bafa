#include "lsmt.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define AENV_EXPORT __attribute__((visibility("default")))

enum { ZEROED = 0x8000, BLOCK_SECTORS = 8 };

static const uint64_t invalid_offset = ((uint64_t)1 << 50) - 1;
static const uint64_t moffset_mask = ((uint64_t)1 << 55) - 1;
static const uint64_t zeroed_bit = (uint64_t)1 << 55;
static const uint64_t narrow_end = (uint64_t)1 << 32;

/* ---- two indexes in columns --------------------------------------------------------------------------- */

static inline double load(const void *column, size_t at, bool wide)
{
	return wide ? ((const double *)column)[at] : (double)((const uint32_t *)column)[at];
}

static inline void store(void *column, size_t at, bool wide, double value)
{
	if (wide)
		((double *)column)[at] = value;
	else
		((uint32_t *)column)[at] = (uint32_t)value;
}

static inline __attribute__((always_inline)) double merge(const struct aenv_lsmt_columns upper,
                                                          const struct aenv_lsmt_columns lower,
                                                          const struct aenv_lsmt_columns to, bool upper_wide,
                                                          bool lower_wide, bool wide, const double *range)
{
	size_t t = (size_t)range[0], b = (size_t)range[2], next = (size_t)range[4];
	const size_t top_end = (size_t)range[1], bottom_end = (size_t)range[3];
	/* First sector that is not put out yet. */
	double covered = 0;
	double top_offset = t < top_end ? load(upper.offsets, t, upper_wide) : INFINITY;
	/* What the last entry put out is continued by. */
	double last_end = -1, last_target = -1;
	uint32_t last_tag = UINT32_MAX, last_length = 0;
	while (t < top_end || b < bottom_end) {
		double offset = top_offset, moffset;
		uint32_t length, tag;
		bool from_top = true;
		if (b < bottom_end) {
			double start = load(lower.offsets, b, lower_wide);
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
				moffset = load(lower.moffsets, b, lower_wide);
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
			moffset = load(upper.moffsets, t, upper_wide);
			tag = upper.tags[t];
			covered = offset + length;
			t++;
			top_offset = t < top_end ? load(upper.offsets, t, upper_wide) : INFINITY;
		}
		if (last_end == offset && last_tag == tag && last_length + length <= AENV_LSMT_MAX_LENGTH &&
		    (tag >= ZEROED || last_target == moffset)) {
			last_length += length;
			to.lengths[next - 1] = (uint16_t)last_length;
		} else {
			store(to.offsets, next, wide, offset);
			to.lengths[next] = (uint16_t)length;
			store(to.moffsets, next, wide, moffset);
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

AENV_EXPORT double aenv_lsmt_merge(const struct aenv_lsmt_columns *top, const struct aenv_lsmt_columns *bottom,
                                   const struct aenv_lsmt_columns *out, const double *range)
{
	if (!out->wide)
		return merge(*top, *bottom, *out, false, false, false, range);
	return merge(*top, *bottom, *out, top->wide != 0, bottom->wide != 0, true, range);
}

/* ---- many indexes from files -------------------------------------------------------------------------- */

/*
 * A tree of merges of two, each of which asks those below it for entries when it has none: all of them are at work on
 * a few kilobytes each, and what comes out at the top is in its place at once. The tag of an entry in here is the
 * layer's.
 */
struct entry {
	uint64_t range, target;
};

enum { NODE_ENTRIES = 128 };

struct node {
	/* What was not taken yet. */
	struct entry *at, *end;
	/* Nothing comes behind it. */
	bool ended;
	/* A layer, or a merge of two nodes. */
	bool leaf;
	uint32_t layer;
	struct node *top, *bottom;
	/* First sector that is not put out yet; of a layer, where the last mapping ended. */
	uint64_t covered;
	struct entry *entries;
};

struct merger {
	uint32_t layers, tag, room;
	/* The layer to be fed. */
	uint32_t wanted;
	struct aenv_lsmt_columns out;
	size_t count, capacity;
	/* What the last entry put out is continued by. */
	uint64_t last_end, last_target;
	uint32_t last_tag, last_length;
	struct node *root;
	/* Layers first; a binary tree over n leaves has n - 1 inner nodes. */
	struct node nodes[2 * AENV_LSMT_MAX_LAYERS];
	struct entry entries[];
};

static inline uint64_t start_of(const struct entry *entry)
{
	return entry->range & invalid_offset;
}

static inline uint64_t end_of(const struct entry *entry)
{
	return (entry->range & invalid_offset) + (entry->range >> 50);
}

AENV_EXPORT void *aenv_lsmt_merger_open(uint32_t layers, uint32_t first_tag, void *buffers, uint32_t entries,
                                        const struct aenv_lsmt_columns *out, double capacity)
{
	if (layers == 0 || layers > AENV_LSMT_MAX_LAYERS || first_tag > AENV_LSMT_MAX_LAYERS - layers || !(capacity >= 0))
		return NULL;
	struct merger *merger = calloc(1, sizeof *merger + (layers - 1) * NODE_ENTRIES * sizeof(struct entry));
	if (merger == NULL)
		return NULL;
	merger->layers = layers;
	merger->tag = first_tag;
	merger->room = entries;
	merger->out = *out;
	merger->capacity = (size_t)capacity;
	merger->last_end = UINT64_MAX;
	struct node *level[AENV_LSMT_MAX_LAYERS];
	for (uint32_t i = 0; i < layers; i++) {
		struct node *node = &merger->nodes[i];
		node->leaf = true;
		node->layer = i;
		node->entries = node->at = node->end = (struct entry *)buffers + (size_t)i * entries;
		level[i] = node;
	}
	uint32_t used = layers;
	struct entry *room = merger->entries;
	for (uint32_t width = layers; width > 1; width = (width + 1) / 2) {
		for (uint32_t i = 0; i < width; i += 2) {
			if (i + 1 == width) {
				level[i / 2] = level[i];
				break;
			}
			struct node *node = &merger->nodes[used++];
			node->bottom = level[i];
			node->top = level[i + 1];
			node->entries = node->at = node->end = room;
			room += NODE_ENTRIES;
			level[i / 2] = node;
		}
	}
	merger->root = level[0];
	return merger;
}

AENV_EXPORT void aenv_lsmt_merger_close(void *handle)
{
	free(handle);
}

AENV_EXPORT void aenv_lsmt_merger_move(void *handle, const struct aenv_lsmt_columns *out, double capacity)
{
	struct merger *merger = handle;
	merger->out = *out;
	merger->capacity = (size_t)capacity;
}

AENV_EXPORT double aenv_lsmt_merger_count(const void *handle)
{
	const struct merger *merger = handle;
	return (double)merger->count;
}

AENV_EXPORT int32_t aenv_lsmt_merger_feed(void *handle, uint32_t layer, uint32_t count, double data_end,
                                          uint32_t refuse_padding, uint32_t last)
{
	struct merger *merger = handle;
	if (layer >= merger->layers || count > merger->room)
		return -EINVAL;
	struct node *node = &merger->nodes[layer];
	if (node->at != node->end || node->ended)
		return -EINVAL;
	const uint64_t end_of_data = (uint64_t)data_end;
	const uint64_t tag = (uint64_t)(merger->tag + layer) << 56;
	uint64_t previous_end = node->covered;
	const struct entry *in = node->entries;
	/* Never ahead of `in`: an entry comes of one mapping at least. */
	struct entry *out = node->entries;
	/* What the last entry is continued by. */
	uint64_t next_offset = UINT64_MAX, next_target = 0;
	uint32_t last_length = 0;
	for (uint32_t i = 0; i < count; i++, in++) {
		uint64_t offset = in->range & invalid_offset;
		uint32_t length = (uint32_t)(in->range >> 50);
		if (length == 0 || offset == invalid_offset) {
			if (refuse_padding)
				return -EILSEQ;
			continue;
		}
		uint64_t moffset = in->target & moffset_mask;
		uint64_t zeroed = in->target & zeroed_bit;
		if (offset < previous_end || moffset < BLOCK_SECTORS || moffset + (zeroed ? 0 : length) > end_of_data)
			return -EILSEQ;
		/* What is cut off and joined later stays below the offset that is none. */
		if (offset + length > invalid_offset)
			return -EILSEQ;
		previous_end = offset + length;
		uint64_t target = moffset | zeroed | tag;
		/* `next_target` carries tag and kind, too; zeros go on with zeros, whatever they point to. */
		if (offset == next_offset && (zeroed ? (next_target & zeroed_bit) != 0 : target == next_target)) {
			uint32_t room = AENV_LSMT_MAX_LENGTH - last_length;
			uint32_t joined = length < room ? length : room;
			last_length += joined;
			out[-1].range = (out[-1].range & invalid_offset) | (uint64_t)last_length << 50;
			next_offset += joined;
			offset += joined;
			length -= joined;
			if (!zeroed) {
				next_target += joined;
				target += joined;
			}
			if (length == 0)
				continue;
		}
		out->range = offset | (uint64_t)length << 50;
		out->target = target;
		out++;
		last_length = length;
		next_offset = offset + length;
		next_target = zeroed ? target : target + length;
	}
	node->covered = previous_end;
	node->at = node->entries;
	node->end = out;
	node->ended = last != 0;
	return 0;
}

/* Has nothing to give, but may get something. */
static inline bool is_empty(const struct node *node)
{
	return node->at == node->end && !node->ended;
}

/* Gets entries for a node that is empty. False: a layer has to be fed first. */
static bool fill(struct merger *merger, struct node *node)
{
	if (node->leaf) {
		merger->wanted = node->layer;
		return false;
	}
	struct node *top = node->top, *bottom = node->bottom;
	struct entry *out = node->entries, *const full = out + NODE_ENTRIES;
	uint64_t covered = node->covered;
	while (out < full) {
		if ((is_empty(top) && !fill(merger, top)) || (is_empty(bottom) && !fill(merger, bottom)))
			break;
		const struct entry *t = top->at, *b = bottom->at;
		const struct entry *const t_end = top->end, *const b_end = bottom->end;
		const bool top_last = top->ended, bottom_last = bottom->ended;
		if (t == t_end && b == b_end) {
			node->ended = true;
			break;
		}
		uint64_t top_start = t < t_end ? start_of(t) : UINT64_MAX;
		while (out < full) {
			if (b < b_end) {
				uint64_t start = start_of(b), end = end_of(b);
				if (end <= covered) {
					if (++b == b_end && !bottom_last)
						break;
					continue;
				}
				uint64_t visible = start > covered ? start : covered;
				if (visible < top_start) {
					uint64_t stop = end <= top_start ? end : top_start;
					uint64_t skipped = (b->target & zeroed_bit) != 0 ? 0 : visible - start;
					out->range = visible | (stop - visible) << 50;
					out->target = b->target + skipped;
					out++;
					if (end > top_start)
						covered = top_start;
					else if (++b == b_end && !bottom_last)
						break;
					continue;
				}
			} else if (t == t_end) {
				break;
			}
			covered = end_of(t);
			*out++ = *t++;
			if (t < t_end) {
				top_start = start_of(t);
			} else {
				top_start = UINT64_MAX;
				if (!top_last)
					break;
			}
		}
		top->at += t - top->at;
		bottom->at += b - bottom->at;
	}
	node->covered = covered;
	node->at = node->entries;
	node->end = out;
	return out > node->entries || node->ended;
}

/* Moves what the root has into the columns, joining neighbours. */
static inline __attribute__((always_inline)) int32_t put_out(struct merger *merger, bool wide)
{
	const struct aenv_lsmt_columns to = merger->out;
	struct node *root = merger->root;
	size_t next = merger->count;
	uint64_t last_end = merger->last_end, last_target = merger->last_target;
	uint32_t last_tag = merger->last_tag, last_length = merger->last_length;
	int32_t result = 0;
	const struct entry *entry = root->at;
	for (; entry < root->end; entry++) {
		uint64_t offset = start_of(entry), moffset = entry->target & moffset_mask;
		uint32_t length = (uint32_t)(entry->range >> 50);
		bool zeroed = (entry->target & zeroed_bit) != 0;
		uint32_t tag = (uint32_t)(entry->target >> 56) | (zeroed ? ZEROED : 0);
		if (!wide && (offset + length > narrow_end || moffset + length > narrow_end)) {
			result = -EOVERFLOW;
			break;
		}
		if (last_end == offset && last_tag == tag && last_length + length <= AENV_LSMT_MAX_LENGTH &&
		    (zeroed || last_target == moffset)) {
			last_length += length;
			to.lengths[next - 1] = (uint16_t)last_length;
		} else {
			if (next == merger->capacity) {
				result = -ENOSPC;
				break;
			}
			if (wide) {
				((double *)to.offsets)[next] = (double)offset;
				((double *)to.moffsets)[next] = (double)moffset;
			} else {
				((uint32_t *)to.offsets)[next] = (uint32_t)offset;
				((uint32_t *)to.moffsets)[next] = (uint32_t)moffset;
			}
			to.lengths[next] = (uint16_t)length;
			to.tags[next] = (uint16_t)tag;
			next++;
			last_tag = tag;
			last_length = length;
		}
		last_end = offset + length;
		last_target = moffset + length;
	}
	root->at += entry - root->at;
	merger->count = next;
	merger->last_end = last_end;
	merger->last_target = last_target;
	merger->last_tag = last_tag;
	merger->last_length = last_length;
	return result;
}

AENV_EXPORT int32_t aenv_lsmt_merger_run(void *handle)
{
	struct merger *merger = handle;
	struct node *root = merger->root;
	for (;;) {
		int32_t result = merger->out.wide ? put_out(merger, true) : put_out(merger, false);
		if (result < 0)
			return result;
		if (root->ended)
			return (int32_t)merger->layers;
		if (!fill(merger, root))
			return (int32_t)merger->wanted;
	}
}
