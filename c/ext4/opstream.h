/*
 * The op stream on aenv-ext4's standard input: what one image layer does to the file system below it.
 * Written by src/image/opstream.ts; little-endian throughout.
 *
 *   stream  := OP_STREAM_MAGIC record* END
 *   record  := u32 op, u32 payload length, payload
 *
 * Paths are bytes without a leading, trailing or doubled '/', without '.' and '..' components; the empty path
 * is the root directory. An end of input before END leaves the layer unfinished and is an error.
 */
#ifndef AENV_EXT4_OPSTREAM_H
#define AENV_EXT4_OPSTREAM_H

#include <stdint.h>

#define OP_STREAM_MAGIC "AENVOPS1"
#define OP_STREAM_MAGIC_BYTES 8
#define OP_MAX_PAYLOAD_BYTES (16u << 20)

enum op {
	OP_ENTRY = 1,    /* struct op_entry and its variable parts */
	OP_DATA = 2,     /* the next bytes of the segments of the last ENTRY, which is a file */
	OP_WHITEOUT = 3, /* path: what lower layers have there disappears */
	OP_OPAQUE = 4,   /* path of a directory: what lower layers have in it disappears */
	OP_END = 5,
	OP_TARGET = 6,   /* struct op_target: only in streams of COPY steps (c/envd/copy.c), first record there */
};

enum op_type {
	OP_TYPE_FILE = 'f',
	OP_TYPE_DIRECTORY = 'd',
	OP_TYPE_SYMLINK = 'l',
	OP_TYPE_HARD_LINK = 'h',
	OP_TYPE_CHARACTER_DEVICE = 'c',
	OP_TYPE_BLOCK_DEVICE = 'b',
	OP_TYPE_FIFO = 'p',
};

/* Followed by path, link target (symlink: its text; hard link: a path), segments, extended attributes. */
struct op_entry {
	uint8_t type;
	uint8_t reserved[3];
	uint32_t mode; /* permission bits, 07777 */
	uint32_t uid;
	uint32_t gid;
	int64_t mtime_seconds;
	uint32_t mtime_nanoseconds;
	uint32_t major;
	uint32_t minor;
	uint32_t segment_count; /* files: parts that hold data; the rest are holes */
	uint64_t size;
	uint32_t path_bytes;
	uint32_t link_bytes;
	uint32_t xattr_count;
	uint32_t reserved2;
} __attribute__((packed));

/* Ascending, not overlapping; offset a multiple of 4096, and so is length unless it ends the file. */
struct op_segment {
	uint64_t offset;
	uint64_t length;
} __attribute__((packed));

/* Followed by name and value. */
struct op_xattr {
	uint32_t name_bytes;
	uint32_t value_bytes;
} __attribute__((packed));

enum op_target_flags {
	OP_TARGET_SOURCE_DIRECTORY = 1,  /* what is in the source goes into the target; else it is one file */
	OP_TARGET_MUST_BE_DIRECTORY = 2, /* the target was written with a trailing slash */
	OP_TARGET_EXISTED = 4,           /* set by the reader */
};

/* Followed by the target's path below the root and the file's name in it when it is a directory. */
struct op_target {
	uint32_t flags;
	uint32_t uid; /* of directories that have to be made */
	uint32_t gid;
	uint32_t path_bytes;
	uint32_t name_bytes;
} __attribute__((packed));

#endif
