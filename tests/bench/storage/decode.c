/*
 * The least that reading compressed blocks can cost: decodes the blocks of a ZFile that lies in memory, in a
 * random order, with the functions of the shim. Arguments: the ZFile, a file with one (u64 offset, u32 stored,
 * u32 length) per block, algorithm, checksums (0 or 1), blocks to decode. Prints wall and processor nanoseconds
 * per block.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void *aenv_codec_new(void);
int32_t aenv_zfile_decode(void *context, uint32_t algorithm, uint32_t verify, const void *source,
                          double source_offset, uint32_t stored, void *target, double target_offset,
                          uint32_t length);

struct block {
	uint64_t offset;
	uint32_t stored;
	uint32_t length;
};

static void *load(const char *path, size_t *size)
{
	FILE *file = fopen(path, "rb");
	if (file == NULL || fseek(file, 0, SEEK_END) != 0)
		return NULL;
	*size = (size_t)ftell(file);
	rewind(file);
	void *bytes = malloc(*size);
	if (bytes == NULL || fread(bytes, 1, *size, file) != *size)
		return NULL;
	fclose(file);
	return bytes;
}

static double now(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(int argc, char **argv)
{
	size_t size, table_size;
	if (argc != 6)
		return 2;
	char *bytes = load(argv[1], &size);
	struct block *blocks = load(argv[2], &table_size);
	void *codec = aenv_codec_new();
	char *target = malloc(1 << 17);
	if (bytes == NULL || blocks == NULL || codec == NULL || target == NULL)
		return 1;
	uint32_t algorithm = (uint32_t)atoi(argv[3]), verify = (uint32_t)atoi(argv[4]);
	size_t count = table_size / sizeof *blocks, total = (size_t)atol(argv[5]);
	uint64_t state = 88172645463325252u;
	double wall = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
	for (size_t i = 0; i < total; i++) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		const struct block *block = &blocks[state % count];
		if (aenv_zfile_decode(codec, algorithm, verify, bytes, (double)block->offset, block->stored, target, 0,
		                      block->length) < 0)
			return 1;
	}
	wall = now(CLOCK_MONOTONIC) - wall;
	cpu = now(CLOCK_PROCESS_CPUTIME_ID) - cpu;
	printf("%f %f\n", wall / (double)total, cpu / (double)total);
	return 0;
}
