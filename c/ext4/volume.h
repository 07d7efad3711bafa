/*
 * The ext4 file system on the device: making and opening it, inodes, blocks. Everything written is a function
 * of the input alone (no clock, no random numbers), so that equal layers on equal chains are equal bytes.
 */
#ifndef AENV_EXT4_VOLUME_H
#define AENV_EXT4_VOLUME_H

#include <ext2fs/ext2fs.h>

#include "cache.h"
#include "opstream.h"

#define VOLUME_BLOCK_BYTES 4096u
/* Hard links a file may have on ext4; a directory with more subdirectories has link count 1 (dir_nlink). */
#define VOLUME_MAX_LINKS 65000u

struct volume {
	ext2_filsys fs;
	struct cache *cache;
	struct failure *failure;
	blk64_t cursor; /* where the search for free blocks goes on: files lie in the order of the layer */
};

struct run {
	blk64_t logical;
	blk64_t physical;
	blk64_t count;
};

struct run_list {
	struct run *items;
	size_t count;
	size_t capacity;
};

/* 256 bytes as on disk: writing all of them clears attributes of an earlier user of the inode. */
union inode_buffer {
	struct ext2_inode_large large;
	struct ext2_inode plain;
	uint8_t bytes[256];
};

struct inode_attributes {
	uint32_t mode; /* with the type bits */
	uint32_t uid;
	uint32_t gid;
	int64_t mtime_seconds;
	uint32_t mtime_nanoseconds;
};

/* Makes a file system over the whole device. `uuid`: 16 bytes. */
int volume_format(struct volume *volume, struct cache *cache, uint64_t size_bytes, const uint8_t uuid[16],
		  struct failure *failure);
int volume_open(struct volume *volume, struct cache *cache, struct failure *failure);
/* Writes superblock, descriptors and bitmaps into the cache and frees everything. */
int volume_finish(struct volume *volume);
/* Frees without writing; safe after volume_finish. */
void volume_discard(struct volume *volume);

/* Turns a libext2fs code into -errno and says what was being done. */
int volume_error(struct volume *volume, errcode_t code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

int volume_read_inode(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode);
int volume_write_inode(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode);
int volume_new_inode(struct volume *volume, bool directory, ext2_ino_t *ino);
/* A fresh inode's content; link count 1, no blocks. */
void volume_init_inode(union inode_buffer *inode, const struct inode_attributes *attributes);
void volume_set_attributes(union inode_buffer *inode, const struct inode_attributes *attributes);
/* Drops one link and, with the last one, content, attributes and the inode itself. */
int volume_unlink_inode(struct volume *volume, ext2_ino_t ino, bool directory);
/* Frees the inode's blocks; `inode` is updated and written. */
int volume_free_blocks(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode);
/* Removes all extended attributes; `inode` is updated, not written. */
int volume_clear_xattrs(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode);
int volume_set_xattr(struct volume *volume, ext2_ino_t ino, const char *name, const void *value, size_t length);

/* Allocates `count` blocks for logical blocks from `logical` on and appends them to the list. */
int volume_allocate(struct volume *volume, blk64_t logical, blk64_t count, struct run_list *runs);
/* Maps the runs into a file without blocks; `inode` is updated and written. */
int volume_map_runs(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode, const struct run_list *runs);
/* Target text of a symlink; `*target` is malloc'd, NUL-terminated. */
int volume_read_symlink(struct volume *volume, ext2_ino_t ino, char **target, size_t *length);

#endif
