#include "volume.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* One inode per 16 KiB, as mke2fs does by default: 4 million on a disk of 64 GiB. */
#define BYTES_PER_INODE 16384u
/* 16 block groups share one metadata area, so that file content is contiguous for 2 GiB. */
#define LOG_GROUPS_PER_FLEX 4
/* Time stamps of the file system itself; 0 would make libext2fs ask the clock. */
#define VOLUME_TIME 1
#define EXTENT_MAX_BLOCKS 32768u
#define INLINE_EXTENTS 4u

static uint64_t free_blocks(const struct volume *volume)
{
	return ext2fs_free_blocks_count(volume->fs->super);
}

static int too_small(struct volume *volume, const char *what)
{
	uint64_t mib = ext2fs_blocks_count(volume->fs->super) * VOLUME_BLOCK_BYTES >> 20;

	return fail(volume->failure, FAILURE_FULL, ENOSPC, "the image does not fit on a virtual disk of %" PRIu64 " MiB: no free %s left",
		    mib, what);
}

int volume_error(struct volume *volume, errcode_t code, const char *format, ...)
{
	char what[512];
	va_list args;

	va_start(args, format);
	vsnprintf(what, sizeof(what), format, args);
	va_end(args);
	if (code == EXT2_ET_BLOCK_ALLOC_FAIL)
		return too_small(volume, "blocks");
	if (code == EXT2_ET_INODE_ALLOC_FAIL)
		return too_small(volume, "inodes");
	return fail(volume->failure, FAILURE_INTERNAL, EIO, "%s: %s", what, error_message(code));
}

/* Inodes 1 to 10 are reserved; 2 is the root directory, the others stay empty. */
static int reserve_inodes(struct volume *volume)
{
	ext2_filsys fs = volume->fs;
	errcode_t code;

	ext2fs_inode_alloc_stats2(fs, EXT2_BAD_INO, +1, 0);
	code = ext2fs_update_bb_inode(fs, NULL);
	if (code)
		return volume_error(volume, code, "making the bad blocks inode");
	for (ext2_ino_t ino = EXT2_ROOT_INO + 1; ino < EXT2_FIRST_INODE(fs->super); ino++)
		ext2fs_inode_alloc_stats2(fs, ino, +1, 0);
	return 0;
}

int volume_format(struct volume *volume, struct cache *cache, uint64_t size_bytes, const uint8_t uuid[16],
		  struct failure *failure)
{
	struct ext2_super_block parameters = { 0 };
	struct ext2_super_block *super;
	union inode_buffer root;
	char name[CACHE_IO_NAME_BYTES];
	uint64_t blocks = size_bytes / VOLUME_BLOCK_BYTES;
	uint64_t inodes = size_bytes / BYTES_PER_INODE;
	ext2_filsys fs;
	errcode_t code;
	int rc;

	*volume = (struct volume){ .cache = cache, .failure = failure };
	if (blocks < 2048)
		return fail(failure, FAILURE_USAGE, EINVAL, "a virtual disk of %" PRIu64 " bytes is too small, the least is 8 MiB",
			    size_bytes);
	if (blocks > UINT32_MAX)
		return fail(failure, FAILURE_INPUT, EFBIG, "a virtual disk of %" PRIu64 " bytes is too large, it must be below 16 TiB",
			    size_bytes);
	parameters.s_rev_level = EXT2_DYNAMIC_REV;
	parameters.s_log_block_size = 2;
	parameters.s_log_cluster_size = 2;
	parameters.s_inode_size = 256;
	parameters.s_log_groups_per_flex = LOG_GROUPS_PER_FLEX;
	parameters.s_inodes_count = inodes > UINT32_MAX ? UINT32_MAX : (uint32_t)inodes;
	ext2fs_blocks_count_set(&parameters, blocks);
	ext2fs_r_blocks_count_set(&parameters, 0);
	/*
	 * No journal: a sandbox's disk is always captured together with its memory and is never mounted again
	 * after a crash, so a journal would only double the metadata writes that land in the sandbox's upper.
	 * Checksums make the unused rest of bitmaps and inode tables implicit: mkfs of 64 GiB writes 200 KiB.
	 */
	ext2fs_set_feature_xattr(&parameters);
	ext2fs_set_feature_dir_index(&parameters);
	ext2fs_set_feature_filetype(&parameters);
	ext2fs_set_feature_extents(&parameters);
	ext2fs_set_feature_64bit(&parameters);
	ext2fs_set_feature_flex_bg(&parameters);
	ext2fs_set_feature_sparse_super(&parameters);
	ext2fs_set_feature_large_file(&parameters);
	ext2fs_set_feature_huge_file(&parameters);
	ext2fs_set_feature_dir_nlink(&parameters);
	ext2fs_set_feature_extra_isize(&parameters);
	ext2fs_set_feature_metadata_csum(&parameters);

	cache_io_name(cache, name);
	code = ext2fs_initialize(name, EXT2_FLAG_64BITS, &parameters, &cache_io_manager, &fs);
	if (code)
		return volume_error(volume, code, "initialising the file system");
	volume->fs = fs;
	super = fs->super;
	fs->now = VOLUME_TIME;
	super->s_mkfs_time = super->s_lastcheck = super->s_wtime = VOLUME_TIME;
	super->s_max_mnt_count = -1;
	super->s_checkinterval = 0;
	super->s_errors = EXT2_ERRORS_CONTINUE;
	super->s_min_extra_isize = super->s_want_extra_isize = sizeof(struct ext2_inode_large) - 128;
	super->s_def_hash_version = EXT2_HASH_HALF_MD4;
	super->s_flags = (super->s_flags & ~(__u32)EXT2_FLAGS_SIGNED_HASH) | EXT2_FLAGS_UNSIGNED_HASH;
	super->s_checksum_type = EXT2_CRC32C_CHKSUM;
	super->s_default_mount_opts = EXT2_DEFM_XATTR_USER | EXT2_DEFM_ACL;
	memcpy(super->s_uuid, uuid, 16);
	memcpy(super->s_hash_seed, uuid, 16);
	ext2fs_init_csum_seed(fs);

	code = ext2fs_allocate_tables(fs);
	if (code)
		return volume_error(volume, code, "allocating inode tables");
	rc = reserve_inodes(volume);
	if (rc < 0)
		return rc;
	code = ext2fs_mkdir(fs, EXT2_ROOT_INO, EXT2_ROOT_INO, NULL);
	if (code)
		return volume_error(volume, code, "making the root directory");
	rc = volume_read_inode(volume, EXT2_ROOT_INO, &root);
	if (rc < 0)
		return rc;
	volume_set_attributes(&root, &(struct inode_attributes){ .mode = LINUX_S_IFDIR | 0755 });
	rc = volume_write_inode(volume, EXT2_ROOT_INO, &root);
	if (rc < 0)
		return rc;
	/*
	 * What was never written reads as zeros on the device, so no inode table needs zeroing: without this
	 * mark the guest's kernel would write a gigabyte of zeros in the background.
	 */
	for (dgrp_t group = 0; group < fs->group_desc_count; group++) {
		ext2fs_bg_flags_set(fs, group, EXT2_BG_INODE_ZEROED);
		ext2fs_group_desc_csum_set(fs, group);
	}
	ext2fs_mark_super_dirty(fs);
	ext2fs_mark_bb_dirty(fs);
	ext2fs_mark_ib_dirty(fs);
	return 0;
}

int volume_open(struct volume *volume, struct cache *cache, struct failure *failure)
{
	char name[CACHE_IO_NAME_BYTES];
	errcode_t code;

	*volume = (struct volume){ .cache = cache, .failure = failure };
	cache_io_name(cache, name);
	code = ext2fs_open2(name, NULL, EXT2_FLAG_RW | EXT2_FLAG_64BITS, 0, VOLUME_BLOCK_BYTES, &cache_io_manager,
			    &volume->fs);
	if (code)
		return volume_error(volume, code, "opening the file system of the layers below");
	volume->fs->now = VOLUME_TIME;
	/* Backups of the superblock hold what never changes; rewriting them would bloat every layer. */
	volume->fs->flags |= EXT2_FLAG_MASTER_SB_ONLY;
	if (volume->fs->super->s_inode_size != 256 || !ext2fs_has_feature_extents(volume->fs->super))
		return fail(failure, FAILURE_INTERNAL, EINVAL, "the file system below was not made by this program");
	code = ext2fs_read_bitmaps(volume->fs);
	if (code)
		return volume_error(volume, code, "reading the allocation bitmaps of the layers below");
	return 0;
}

int volume_finish(struct volume *volume)
{
	errcode_t code = ext2fs_close_free(&volume->fs);

	if (code) {
		volume->fs = NULL;
		return volume_error(volume, code, "writing the file system's summary");
	}
	return 0;
}

void volume_discard(struct volume *volume)
{
	if (volume->fs != NULL)
		ext2fs_free(volume->fs);
	volume->fs = NULL;
}

int volume_read_inode(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode)
{
	errcode_t code = ext2fs_read_inode_full(volume->fs, ino, &inode->plain, sizeof(*inode));

	return code ? volume_error(volume, code, "reading inode %u", ino) : 0;
}

int volume_write_inode(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode)
{
	errcode_t code = ext2fs_write_inode_full(volume->fs, ino, &inode->plain, sizeof(*inode));

	return code ? volume_error(volume, code, "writing inode %u", ino) : 0;
}

int volume_new_inode(struct volume *volume, bool directory, ext2_ino_t *ino)
{
	errcode_t code = ext2fs_new_inode(volume->fs, EXT2_ROOT_INO, directory ? LINUX_S_IFDIR : LINUX_S_IFREG, NULL, ino);

	if (code)
		return volume_error(volume, code, "allocating an inode");
	ext2fs_inode_alloc_stats2(volume->fs, *ino, +1, directory);
	return 0;
}

/*
 * ext4 keeps 34 bits of seconds: the low 32 as a signed number, two more (added to the sign extension) beside
 * 30 bits of nanoseconds. Range 1901-12-13 to 2446-05-10; times outside are clamped.
 */
static void encode_time(int64_t seconds, uint32_t nanoseconds, uint32_t *low, uint32_t *extra)
{
	const int64_t least = -0x80000000ll, most = 0x37fffffffll;

	if (seconds < least || seconds > most) {
		seconds = seconds < least ? least : most;
		nanoseconds = 0;
	}
	*low = (uint32_t)seconds;
	*extra = (uint32_t)(((uint64_t)(seconds - (int32_t)*low) >> 32) & 3) | nanoseconds << 2;
}

void volume_set_attributes(union inode_buffer *inode, const struct inode_attributes *attributes)
{
	struct ext2_inode_large *large = &inode->large;
	uint32_t low, extra;

	large->i_mode = (uint16_t)attributes->mode;
	large->i_uid = (uint16_t)attributes->uid;
	large->osd2.linux2.l_i_uid_high = (uint16_t)(attributes->uid >> 16);
	large->i_gid = (uint16_t)attributes->gid;
	large->osd2.linux2.l_i_gid_high = (uint16_t)(attributes->gid >> 16);
	/* A tar has one time; using it for all four keeps equal input equal. */
	encode_time(attributes->mtime_seconds, attributes->mtime_nanoseconds, &low, &extra);
	large->i_mtime = large->i_atime = large->i_ctime = large->i_crtime = low;
	large->i_mtime_extra = large->i_atime_extra = large->i_ctime_extra = large->i_crtime_extra = extra;
}

void volume_init_inode(union inode_buffer *inode, const struct inode_attributes *attributes)
{
	memset(inode, 0, sizeof(*inode));
	inode->large.i_extra_isize = sizeof(struct ext2_inode_large) - 128;
	inode->large.i_links_count = 1;
	volume_set_attributes(inode, attributes);
}

int volume_free_blocks(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode)
{
	errcode_t code;

	if (!ext2fs_inode_has_valid_blocks2(volume->fs, &inode->plain))
		return 0;
	code = ext2fs_punch(volume->fs, ino, &inode->plain, NULL, 0, ~0ull);
	if (code)
		return volume_error(volume, code, "freeing the blocks of inode %u", ino);
	/* punch wrote the first 128 bytes only into the buffer it was given: same memory, nothing to merge. */
	return 0;
}

int volume_clear_xattrs(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode)
{
	errcode_t code = ext2fs_free_ext_attr(volume->fs, ino, &inode->large);

	if (code)
		return volume_error(volume, code, "freeing the attributes of inode %u", ino);
	memset(inode->bytes + 128 + inode->large.i_extra_isize, 0, sizeof(*inode) - 128 - inode->large.i_extra_isize);
	return 0;
}

int volume_unlink_inode(struct volume *volume, ext2_ino_t ino, bool directory)
{
	union inode_buffer inode;
	int rc = volume_read_inode(volume, ino, &inode);

	if (rc < 0)
		return rc;
	if (!directory && inode.large.i_links_count > 1) {
		inode.large.i_links_count--;
		return volume_write_inode(volume, ino, &inode);
	}
	rc = volume_free_blocks(volume, ino, &inode);
	if (rc >= 0)
		rc = volume_clear_xattrs(volume, ino, &inode);
	if (rc < 0)
		return rc;
	memset(&inode, 0, sizeof(inode));
	rc = volume_write_inode(volume, ino, &inode);
	if (rc < 0)
		return rc;
	ext2fs_inode_alloc_stats2(volume->fs, ino, -1, directory);
	return 0;
}

int volume_set_xattr(struct volume *volume, ext2_ino_t ino, const char *name, const void *value, size_t length)
{
	struct ext2_xattr_handle *handle;
	errcode_t code = ext2fs_xattrs_open(volume->fs, ino, &handle);

	if (code)
		return volume_error(volume, code, "attributes of inode %u", ino);
	code = ext2fs_xattrs_read(handle);
	if (!code)
		code = ext2fs_xattr_set(handle, name, value, length);
	(void)ext2fs_xattrs_close(&handle);
	if (code == EXT2_ET_EA_NO_SPACE)
		return -E2BIG;
	return code ? volume_error(volume, code, "setting attribute %s", name) : 0;
}

static int append_run(struct volume *volume, struct run_list *runs, struct run run)
{
	if (runs->count == runs->capacity) {
		size_t capacity = runs->capacity == 0 ? 4 : runs->capacity * 2;
		struct run *items = realloc(runs->items, capacity * sizeof(*items));

		if (items == NULL)
			return fail(volume->failure, FAILURE_INTERNAL, ENOMEM, "out of memory");
		runs->items = items;
		runs->capacity = capacity;
	}
	runs->items[runs->count++] = run;
	return 0;
}

int volume_allocate(struct volume *volume, blk64_t logical, blk64_t count, struct run_list *runs)
{
	if (count > free_blocks(volume))
		return too_small(volume, "blocks");
	while (count > 0) {
		blk64_t want = count < EXTENT_MAX_BLOCKS ? count : EXTENT_MAX_BLOCKS;
		blk64_t physical, got;
		errcode_t code = ext2fs_new_range(volume->fs, 0, volume->cursor, want, NULL, &physical, &got);
		int rc;

		if (code)
			return volume_error(volume, code, "allocating blocks");
		if (got > want)
			got = want;
		ext2fs_block_alloc_stats_range(volume->fs, physical, (blk_t)got, +1);
		rc = append_run(volume, runs, (struct run){ .logical = logical, .physical = physical, .count = got });
		if (rc < 0)
			return rc;
		volume->cursor = physical + got;
		logical += got;
		count -= got;
	}
	return 0;
}

/* Four extents fit in the inode itself, which is what nearly every file needs. */
static void map_inline(union inode_buffer *inode, const struct run_list *runs)
{
	struct {
		struct ext3_extent_header header;
		struct ext3_extent extents[INLINE_EXTENTS];
	} map = { .header = {
			  .eh_magic = EXT3_EXT_MAGIC,
			  .eh_entries = (uint16_t)runs->count,
			  .eh_max = INLINE_EXTENTS,
		  } };

	for (size_t i = 0; i < runs->count; i++) {
		map.extents[i].ee_block = (uint32_t)runs->items[i].logical;
		map.extents[i].ee_len = (uint16_t)runs->items[i].count;
		map.extents[i].ee_start = (uint32_t)runs->items[i].physical;
		map.extents[i].ee_start_hi = (uint16_t)(runs->items[i].physical >> 32);
	}
	memcpy(inode->large.i_block, &map, sizeof(map));
}

int volume_map_runs(struct volume *volume, ext2_ino_t ino, union inode_buffer *inode, const struct run_list *runs)
{
	ext2_extent_handle_t handle;
	blk64_t total = 0;
	errcode_t code;
	int rc;

	for (size_t i = 0; i < runs->count; i++)
		total += runs->items[i].count;
	inode->large.i_flags |= EXT4_EXTENTS_FL;
	code = ext2fs_iblk_add_blocks(volume->fs, &inode->plain, total);
	if (code)
		return volume_error(volume, code, "inode %u", ino);
	if (runs->count <= INLINE_EXTENTS) {
		map_inline(inode, runs);
		return volume_write_inode(volume, ino, inode);
	}
	map_inline(inode, &(struct run_list){ 0 });
	rc = volume_write_inode(volume, ino, inode);
	if (rc < 0)
		return rc;
	code = ext2fs_extent_open2(volume->fs, ino, &inode->plain, &handle);
	if (code)
		return volume_error(volume, code, "extents of inode %u", ino);
	for (size_t i = 0; i < runs->count && !code; i++) {
		struct ext2fs_extent extent = {
			.e_pblk = runs->items[i].physical,
			.e_lblk = runs->items[i].logical,
			.e_len = (uint32_t)runs->items[i].count,
		};

		code = ext2fs_extent_insert(handle, EXT2_EXTENT_INSERT_AFTER, &extent);
	}
	if (!code)
		code = ext2fs_extent_fix_parents(handle);
	ext2fs_extent_free(handle);
	if (code)
		return volume_error(volume, code, "extents of inode %u", ino);
	return volume_write_inode(volume, ino, inode);
}

int volume_read_symlink(struct volume *volume, ext2_ino_t ino, char **target, size_t *length)
{
	union inode_buffer inode;
	char block[VOLUME_BLOCK_BYTES];
	const char *text;
	int rc = volume_read_inode(volume, ino, &inode);

	if (rc < 0)
		return rc;
	*length = inode.large.i_size;
	if (*length >= VOLUME_BLOCK_BYTES)
		return fail(volume->failure, FAILURE_INTERNAL, EIO, "symlink inode %u has a size of %zu bytes", ino, *length);
	if (ext2fs_is_fast_symlink(&inode.plain)) {
		text = (const char *)inode.large.i_block;
	} else {
		blk64_t physical = 0;
		errcode_t code = ext2fs_bmap2(volume->fs, ino, &inode.plain, NULL, 0, 0, NULL, &physical);

		if (!code && physical != 0)
			code = io_channel_read_blk64(volume->fs->io, physical, 1, block);
		if (code || physical == 0)
			return volume_error(volume, code ? code : EXT2_ET_SHORT_READ, "reading symlink inode %u", ino);
		text = block;
	}
	*target = malloc(*length + 1);
	if (*target == NULL)
		return fail(volume->failure, FAILURE_INTERNAL, ENOMEM, "out of memory");
	memcpy(*target, text, *length);
	(*target)[*length] = '\0';
	return 0;
}
