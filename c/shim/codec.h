/*
 * Block codecs and checksum of the ZFile format.
 *
 * Buffers are given as base pointer plus byte offset. A context belongs to one thread at a time. Functions
 * return a byte count or 0 on success and -errno on failure, except where a comment says otherwise.
 */
#ifndef AENV_CODEC_H
#define AENV_CODEC_H

#include <stdint.h>

/* The algorithm numbers of the ZFile header. */
enum { AENV_CODEC_LZ4 = 1, AENV_CODEC_ZSTD = 2 };

/* Reusable zstd and lz4 state; NULL when there is no memory. */
void *aenv_codec_new(void);
void aenv_codec_free(void *context);

/* The raw CRC-32C register after the bytes (reflected polynomial 0x82f63b78, no inversion before or after).
 * Returns the checksum itself. */
uint32_t aenv_crc32c_raw(uint32_t seed, const void *buffer, double buffer_offset, double length);

/* The same without SSE4.2: what other processors run, and what tests compare with. */
uint32_t aenv_crc32c_raw_portable(uint32_t seed, const void *buffer, double buffer_offset, double length);

/* Four checksums from seed 0, of four parts of the bytes: faster than one after the other. The first three are each
 * length / 32 * 8 bytes, the last is the rest. */
void aenv_crc32c_lanes(const void *buffer, double buffer_offset, double length, uint32_t *sums);

/* Upper bound of aenv_zfile_encode's result for a block of length bytes. */
int32_t aenv_zfile_bound(uint32_t algorithm, uint32_t length);

/* Compresses one block into target + target_offset and, with verify != 0, appends its 4-byte checksum (seed
 * 100007, over the compressed bytes). zstd: one frame, level 3; lz4: bare block. Returns the stored length;
 * -EINVAL for an unknown algorithm, -ENOBUFS when capacity is too small. */
int32_t aenv_zfile_encode(void *context, uint32_t algorithm, uint32_t verify, const void *source,
                          double source_offset, uint32_t length, void *target, double target_offset,
                          uint32_t capacity);

/* Inverse: stored bytes (checksum included) to exactly length bytes. -EBADMSG: wrong checksum; -EILSEQ: does
 * not decompress, or to another length; -EINVAL: unknown algorithm or stored too short. Writes nothing
 * outside [target_offset, target_offset + length). */
int32_t aenv_zfile_decode(void *context, uint32_t algorithm, uint32_t verify, const void *source,
                          double source_offset, uint32_t stored, void *target, double target_offset,
                          uint32_t length);

#endif
