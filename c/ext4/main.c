/*
 * aenv-ext4: applies one image layer, given as an op stream on standard input, to the ext4 file system on an
 * NBD export. A process of its own, so that a hostile image can at worst end this process.
 *
 *   aenv-ext4 --socket PATH --export NAME [--format UUID]
 *
 * --format makes the file system first (over the whole export). On success one JSON line on standard output
 * tells what was done; on failure the reason is on standard error and the exit code says its kind (failure.h).
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "apply.h"

struct arguments {
	const char *socket_path;
	const char *export_name;
	bool format;
	uint8_t uuid[16];
};

static bool parse_uuid(const char *text, uint8_t uuid[16])
{
	size_t digits = 0;

	for (; *text != '\0'; text++) {
		unsigned value;

		if (*text == '-')
			continue;
		if (digits == 32 || sscanf((const char[]){ *text, '\0' }, "%1x", &value) != 1)
			return false;
		uuid[digits / 2] = (uint8_t)(uuid[digits / 2] << 4 | value);
		digits++;
	}
	return digits == 32;
}

static int parse_arguments(int argc, char **argv, struct arguments *arguments, struct failure *failure)
{
	*arguments = (struct arguments){ 0 };
	for (int i = 1; i < argc; i += 2) {
		if (i + 1 == argc)
			return fail(failure, FAILURE_USAGE, EINVAL, "%s needs a value", argv[i]);
		if (strcmp(argv[i], "--socket") == 0)
			arguments->socket_path = argv[i + 1];
		else if (strcmp(argv[i], "--export") == 0)
			arguments->export_name = argv[i + 1];
		else if (strcmp(argv[i], "--format") == 0)
			arguments->format = parse_uuid(argv[i + 1], arguments->uuid);
		else
			return fail(failure, FAILURE_USAGE, EINVAL, "unknown argument %s", argv[i]);
		if (strcmp(argv[i], "--format") == 0 && !arguments->format)
			return fail(failure, FAILURE_USAGE, EINVAL, "%s is not a UUID", argv[i + 1]);
	}
	if (arguments->socket_path == NULL || arguments->export_name == NULL)
		return fail(failure, FAILURE_USAGE, EINVAL, "usage: aenv-ext4 --socket PATH --export NAME [--format UUID] < ops");
	return 0;
}

static int run(const struct arguments *arguments, struct apply_report *report, struct failure *failure)
{
	struct nbd nbd;
	struct cache *cache = NULL;
	struct volume volume = { 0 };
	struct tree tree = { 0 };
	int rc = nbd_open(&nbd, arguments->socket_path, arguments->export_name, failure);

	if (rc >= 0)
		rc = cache_create(&cache, &nbd, failure);
	if (rc >= 0)
		rc = arguments->format ? volume_format(&volume, cache, nbd.size_bytes, arguments->uuid, failure)
				       : volume_open(&volume, cache, failure);
	if (rc >= 0)
		rc = tree_open(&tree, &volume, failure);
	if (rc >= 0)
		rc = apply_stream(&tree, STDIN_FILENO, report, failure);
	if (rc >= 0)
		rc = tree_write(&tree);
	if (rc >= 0)
		rc = volume_finish(&volume);
	if (rc >= 0)
		rc = cache_flush(cache);
	tree_close(&tree);
	volume_discard(&volume);
	cache_destroy(cache);
	nbd_close(&nbd);
	return rc;
}

int main(int argc, char **argv)
{
	struct failure failure = { 0 };
	struct apply_report report = { 0 };
	struct arguments arguments;
	int rc = parse_arguments(argc, argv, &arguments, &failure);

	initialize_ext2_error_table();
	if (rc >= 0)
		rc = run(&arguments, &report, &failure);
	if (rc < 0) {
		if (failure.kind == FAILURE_NONE)
			fail(&failure, FAILURE_INTERNAL, -rc, "failed: %s", strerror(-rc));
		fprintf(stderr, "%s\n", failure.message);
		return (int)failure.kind;
	}
	printf("{\"entries\":%" PRIu64 ",\"dataBytes\":%" PRIu64 ",\"skippedXattrs\":%" PRIu64 "}\n", report.entries,
	       report.data_bytes, report.skipped_xattrs);
	return fflush(stdout) == 0 ? 0 : (int)FAILURE_INTERNAL;
}
