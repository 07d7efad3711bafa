/* How an error travels: functions return -errno, and the first one that knows more says it here. */
#ifndef AENV_EXT4_FAILURE_H
#define AENV_EXT4_FAILURE_H

/* Exit codes of aenv-ext4; src/image/ext4-helper.ts turns them into the service's errors. */
enum failure_kind {
	FAILURE_NONE = 0,
	FAILURE_INPUT = 1,     /* the layer asks for something that cannot be carried out */
	FAILURE_USAGE = 2,     /* wrong arguments, or a malformed op stream */
	FAILURE_FULL = 3,      /* the virtual disk or its inode table is too small for the image */
	FAILURE_DEVICE = 4,    /* the block device failed or went away */
	FAILURE_DISK_FULL = 5, /* the block device has no room left on the host */
	FAILURE_INTERNAL = 6,  /* the file system below is damaged, memory ran out, a bug */
};

struct failure {
	enum failure_kind kind;
	char message[1024];
};

/* Records the first failure and returns -errno `err` (positive errno given). Later ones are kept out:
 * they are consequences. */
int fail(struct failure *failure, enum failure_kind kind, int err, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

#endif
