#include "codec.h"

#include <errno.h>
#include <lz4.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#define AENV_EXPORT __attribute__((visibility("default")))

enum { CHECKSUM_SIZE = 4, BLOCK_SEED = 100007, ZSTD_LEVEL = 3, MAX_BLOCK = 1 << 24 };

struct codec {
	ZSTD_CCtx *compressor;
	ZSTD_DCtx *decompressor;
	void *lz4_state;
};

AENV_EXPORT void aenv_codec_free(void *context)
{
	struct codec *codec = context;
	if (codec == NULL)
		return;
	ZSTD_freeCCtx(codec->compressor);
	ZSTD_freeDCtx(codec->decompressor);
	free(codec->lz4_state);
	free(codec);
}

AENV_EXPORT void *aenv_codec_new(void)
{
	struct codec *codec = calloc(1, sizeof *codec);
	if (codec == NULL)
		return NULL;
	codec->compressor = ZSTD_createCCtx();
	codec->decompressor = ZSTD_createDCtx();
	codec->lz4_state = malloc((size_t)LZ4_sizeofState());
	if (codec->compressor == NULL || codec->decompressor == NULL || codec->lz4_state == NULL) {
		aenv_codec_free(codec);
		return NULL;
	}
	return codec;
}

/* Four bits at a time: the table stays a small constant. */
static uint32_t crc32c_portable(uint32_t crc, const unsigned char *at, size_t length)
{
	static const uint32_t table[16] = {
	    0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
	    0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
	};
	for (size_t i = 0; i < length; i++) {
		crc ^= at[i];
		crc = (crc >> 4) ^ table[crc & 15];
		crc = (crc >> 4) ^ table[crc & 15];
	}
	return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t crc, const unsigned char *at,
                                                               size_t length)
{
	uint64_t register64 = crc;
	for (; length >= 8; at += 8, length -= 8) {
		uint64_t word;
		memcpy(&word, at, 8);
		register64 = _mm_crc32_u64(register64, word);
	}
	crc = (uint32_t)register64;
	for (; length > 0; at++, length--)
		crc = _mm_crc32_u8(crc, *at);
	return crc;
}
#endif

static uint32_t crc32c(uint32_t seed, const unsigned char *at, size_t length)
{
#if defined(__x86_64__)
	if (__builtin_cpu_supports("sse4.2"))
		return crc32c_sse42(seed, at, length);
#endif
	return crc32c_portable(seed, at, length);
}

AENV_EXPORT uint32_t aenv_crc32c_raw(uint32_t seed, const void *buffer, double buffer_offset, double length)
{
	return crc32c(seed, (const unsigned char *)buffer + (size_t)buffer_offset, (size_t)length);
}

#if defined(__x86_64__)
/* One at a time, the instruction waits for its own result: three others fit in. */
__attribute__((target("sse4.2"))) static void lanes_sse42(const unsigned char *at, size_t lane, uint32_t *sums)
{
	uint64_t a = 0, b = 0, c = 0, d = 0;
	for (size_t i = 0; i + 8 <= lane; i += 8) {
		uint64_t words[4];
		memcpy(&words[0], at + i, 8);
		memcpy(&words[1], at + lane + i, 8);
		memcpy(&words[2], at + 2 * lane + i, 8);
		memcpy(&words[3], at + 3 * lane + i, 8);
		a = _mm_crc32_u64(a, words[0]);
		b = _mm_crc32_u64(b, words[1]);
		c = _mm_crc32_u64(c, words[2]);
		d = _mm_crc32_u64(d, words[3]);
	}
	sums[0] = (uint32_t)a;
	sums[1] = (uint32_t)b;
	sums[2] = (uint32_t)c;
	sums[3] = (uint32_t)d;
}
#endif

AENV_EXPORT void aenv_crc32c_lanes(const void *buffer, double buffer_offset, double length, uint32_t *sums)
{
	const unsigned char *at = (const unsigned char *)buffer + (size_t)buffer_offset;
	size_t size = (size_t)length;
	size_t lane = size / 32 * 8;
#if defined(__x86_64__)
	if (__builtin_cpu_supports("sse4.2")) {
		lanes_sse42(at, lane, sums);
		sums[3] = crc32c_sse42(sums[3], at + 4 * lane, size - 4 * lane);
		return;
	}
#endif
	for (int i = 0; i < 4; i++)
		sums[i] = crc32c_portable(0, at + (size_t)i * lane, i < 3 ? lane : size - 3 * lane);
}

AENV_EXPORT uint32_t aenv_crc32c_raw_portable(uint32_t seed, const void *buffer, double buffer_offset,
                                              double length)
{
	return crc32c_portable(seed, (const unsigned char *)buffer + (size_t)buffer_offset, (size_t)length);
}

AENV_EXPORT int32_t aenv_zfile_bound(uint32_t algorithm, uint32_t length)
{
	if (length > MAX_BLOCK)
		return -EINVAL;
	if (algorithm == AENV_CODEC_LZ4)
		return LZ4_compressBound((int)length) + CHECKSUM_SIZE;
	if (algorithm == AENV_CODEC_ZSTD)
		return (int32_t)ZSTD_compressBound(length) + CHECKSUM_SIZE;
	return -EINVAL;
}

AENV_EXPORT int32_t aenv_zfile_encode(void *context, uint32_t algorithm, uint32_t verify, const void *source,
                                      double source_offset, uint32_t length, void *target,
                                      double target_offset, uint32_t capacity)
{
	struct codec *codec = context;
	const char *from = (const char *)source + (size_t)source_offset;
	char *to = (char *)target + (size_t)target_offset;
	uint32_t trailing = verify ? CHECKSUM_SIZE : 0;
	if (length > MAX_BLOCK || capacity > INT32_MAX)
		return -EINVAL;
	if (capacity <= trailing)
		return -ENOBUFS;
	uint32_t stored;
	if (algorithm == AENV_CODEC_LZ4) {
		int n = LZ4_compress_fast_extState(codec->lz4_state, from, to, (int)length,
		                                   (int)(capacity - trailing), 1);
		if (n <= 0)
			return -ENOBUFS;
		stored = (uint32_t)n;
	} else if (algorithm == AENV_CODEC_ZSTD) {
		size_t n = ZSTD_compressCCtx(codec->compressor, to, capacity - trailing, from, length, ZSTD_LEVEL);
		if (ZSTD_isError(n))
			return -ENOBUFS;
		stored = (uint32_t)n;
	} else {
		return -EINVAL;
	}
	if (verify) {
		uint32_t sum = crc32c(BLOCK_SEED, (const unsigned char *)to, stored);
		memcpy(to + stored, &sum, CHECKSUM_SIZE);
	}
	return (int32_t)(stored + trailing);
}

AENV_EXPORT int32_t aenv_zfile_decode(void *context, uint32_t algorithm, uint32_t verify, const void *source,
                                      double source_offset, uint32_t stored, void *target,
                                      double target_offset, uint32_t length)
{
	struct codec *codec = context;
	const char *from = (const char *)source + (size_t)source_offset;
	char *to = (char *)target + (size_t)target_offset;
	uint32_t trailing = verify ? CHECKSUM_SIZE : 0;
	if (stored <= trailing || stored > MAX_BLOCK || length > MAX_BLOCK)
		return -EINVAL;
	stored -= trailing;
	if (verify) {
		uint32_t expected;
		memcpy(&expected, from + stored, CHECKSUM_SIZE);
		if (crc32c(BLOCK_SEED, (const unsigned char *)from, stored) != expected)
			return -EBADMSG;
	}
	if (algorithm == AENV_CODEC_LZ4) {
		int n = LZ4_decompress_safe(from, to, (int)stored, (int)length);
		if (n < 0 || (uint32_t)n != length)
			return -EILSEQ;
	} else if (algorithm == AENV_CODEC_ZSTD) {
		size_t n = ZSTD_decompressDCtx(codec->decompressor, to, length, from, stored);
		if (ZSTD_isError(n) || n != length)
			return -EILSEQ;
	} else {
		return -EINVAL;
	}
	return (int32_t)length;
}
