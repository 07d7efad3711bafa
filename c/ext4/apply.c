#include "apply.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#define INPUT_BUFFER_BYTES (1u << 20)
/* Longest message part made from a path. */
#define SHOWN_PATH_BYTES 400

struct pending_link {
	struct pending_link *next;
	size_t path_bytes;
	size_t target_bytes;
	struct inode_attributes parents;
	char text[]; /* path, then target */
};

/* The file whose content is coming in. */
struct open_file {
	struct run_list runs;
	size_t run;          /* where the next byte goes */
	uint64_t run_offset; /* in bytes */
	size_t segment_count;
	size_t segment;
	uint64_t segment_left;
	struct op_segment *segments;
};

struct apply {
	struct tree *tree;
	struct volume *volume;
	struct failure *failure;
	struct apply_report *report;
	int fd;
	uint8_t *input;
	size_t input_start, input_end;
	uint8_t *payload; /* of the record at hand, except DATA's */
	size_t payload_capacity;
	struct open_file file;
	struct pending_link *links, **links_end;
};

static int malformed(struct apply *apply, const char *what)
{
	return fail(apply->failure, FAILURE_USAGE, EPROTO, "malformed op stream: %s", what);
}

static int out_of_memory(struct apply *apply)
{
	return fail(apply->failure, FAILURE_INTERNAL, ENOMEM, "out of memory");
}

/* ---- input ------------------------------------------------------------------------------------------- */

static int fill(struct apply *apply)
{
	ssize_t n;

	do
		n = read(apply->fd, apply->input, INPUT_BUFFER_BYTES);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return fail(apply->failure, FAILURE_USAGE, errno, "reading the op stream: %s", strerror(errno));
	if (n == 0)
		return malformed(apply, "it ends before the END record");
	apply->input_start = 0;
	apply->input_end = (size_t)n;
	return 0;
}

static int read_exactly(struct apply *apply, void *target, size_t length)
{
	uint8_t *p = target;

	while (length > 0) {
		size_t part = apply->input_end - apply->input_start;

		if (part == 0) {
			int rc = fill(apply);

			if (rc < 0)
				return rc;
			continue;
		}
		if (part > length)
			part = length;
		memcpy(p, apply->input + apply->input_start, part);
		apply->input_start += part;
		p += part;
		length -= part;
	}
	return 0;
}

static int read_payload(struct apply *apply, size_t length)
{
	if (length > OP_MAX_PAYLOAD_BYTES)
		return malformed(apply, "a record is too long");
	if (length > apply->payload_capacity) {
		uint8_t *payload = realloc(apply->payload, length);

		if (payload == NULL)
			return out_of_memory(apply);
		apply->payload = payload;
		apply->payload_capacity = length;
	}
	return read_exactly(apply, apply->payload, length);
}

/* ---- checks ------------------------------------------------------------------------------------------ */

static int check_path(struct apply *apply, const char *path, size_t length)
{
	size_t start = 0;

	if (length == 0)
		return 0;
	if (memchr(path, '\0', length) != NULL)
		return malformed(apply, "a path holds a zero byte");
	for (size_t i = 0; i <= length; i++) {
		size_t part;

		if (i < length && path[i] != '/')
			continue;
		part = i - start;
		if (part == 0 || (part == 1 && path[start] == '.') ||
		    (part == 2 && path[start] == '.' && path[start + 1] == '.'))
			return malformed(apply, "a path is not in normal form");
		if (part > EXT2_NAME_LEN)
			return fail(apply->failure, FAILURE_INPUT, ENAMETOOLONG,
				    "the name %.*s... is longer than the %d bytes that ext4 allows", 40, path + start,
				    EXT2_NAME_LEN);
		start = i + 1;
	}
	return 0;
}

static int shown(size_t length)
{
	return length > SHOWN_PATH_BYTES ? SHOWN_PATH_BYTES : (int)length;
}

/* ---- file content ------------------------------------------------------------------------------------ */

static void close_file(struct apply *apply)
{
	apply->file.runs.count = 0;
	apply->file.segment_count = 0;
	apply->file.segment = 0;
	apply->file.segment_left = 0;
	apply->file.run = 0;
	apply->file.run_offset = 0;
}

/* Writes at the file's position and moves it; stays within one run per step. */
static int put_bytes(struct apply *apply, const uint8_t *data, size_t length)
{
	struct open_file *file = &apply->file;

	while (length > 0) {
		const struct run *run = &file->runs.items[file->run];
		uint64_t room = run->count * VOLUME_BLOCK_BYTES - file->run_offset;
		size_t part = room < length ? (size_t)room : length;
		int rc = cache_write_data(apply->volume->cache, run->physical * VOLUME_BLOCK_BYTES + file->run_offset, data,
					  part);

		if (rc < 0)
			return rc;
		file->run_offset += part;
		if (file->run_offset == run->count * VOLUME_BLOCK_BYTES) {
			file->run++;
			file->run_offset = 0;
		}
		data += part;
		length -= part;
	}
	return 0;
}

static int finish_segment(struct apply *apply)
{
	static const uint8_t zeros[VOLUME_BLOCK_BYTES];
	struct open_file *file = &apply->file;
	size_t rest = (size_t)(file->segments[file->segment].length % VOLUME_BLOCK_BYTES);
	int rc = rest == 0 ? 0 : put_bytes(apply, zeros, VOLUME_BLOCK_BYTES - rest);

	file->segment++;
	if (file->segment < file->segment_count)
		file->segment_left = file->segments[file->segment].length;
	return rc;
}

static int apply_data(struct apply *apply, size_t length)
{
	struct open_file *file = &apply->file;

	apply->report->data_bytes += length;
	while (length > 0) {
		size_t part = apply->input_end - apply->input_start;
		int rc;

		if (file->segment >= file->segment_count)
			return malformed(apply, "more data than the file has");
		if (part == 0) {
			rc = fill(apply);
			if (rc < 0)
				return rc;
			continue;
		}
		if (part > length)
			part = length;
		if (part > file->segment_left)
			part = (size_t)file->segment_left;
		rc = put_bytes(apply, apply->input + apply->input_start, part);
		if (rc < 0)
			return rc;
		apply->input_start += part;
		length -= part;
		file->segment_left -= part;
		if (file->segment_left == 0) {
			rc = finish_segment(apply);
			if (rc < 0)
				return rc;
		}
	}
	return 0;
}

static int open_segments(struct apply *apply, const struct op_entry *entry, const uint8_t *raw)
{
	struct open_file *file = &apply->file;
	uint64_t end = 0;

	file->segments = realloc(file->segments, (entry->segment_count + 1) * sizeof(*file->segments));
	if (file->segments == NULL)
		return out_of_memory(apply);
	memcpy(file->segments, raw, entry->segment_count * sizeof(*file->segments));
	for (uint32_t i = 0; i < entry->segment_count; i++) {
		const struct op_segment *segment = &file->segments[i];
		int rc;

		if (segment->length == 0 || segment->offset % VOLUME_BLOCK_BYTES != 0 || segment->offset < end ||
		    segment->offset > entry->size || segment->length > entry->size - segment->offset ||
		    (segment->length % VOLUME_BLOCK_BYTES != 0 && segment->offset + segment->length != entry->size))
			return malformed(apply, "bad segments");
		end = segment->offset + segment->length;
		rc = volume_allocate(apply->volume, segment->offset / VOLUME_BLOCK_BYTES,
				     (segment->length + VOLUME_BLOCK_BYTES - 1) / VOLUME_BLOCK_BYTES, &file->runs);
		if (rc < 0)
			return rc;
	}
	file->segment_count = entry->segment_count;
	file->segment_left = entry->segment_count > 0 ? file->segments[0].length : 0;
	return 0;
}

/* ---- attributes -------------------------------------------------------------------------------------- */

static bool has_prefix(const char *text, const char *prefix)
{
	return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* The wire form of a POSIX ACL: a version word, then entries of 8 bytes. */
static bool is_acl(const uint8_t *value, size_t length)
{
	uint32_t version;

	if (length < 4 || (length - 4) % 8 != 0)
		return false;
	memcpy(&version, value, sizeof(version));
	return version == 2;
}

static int apply_xattr(struct apply *apply, ext2_ino_t ino, const char *name, const uint8_t *value, size_t length,
		       const char *path, size_t path_length)
{
	bool acl = strcmp(name, "system.posix_acl_access") == 0 || strcmp(name, "system.posix_acl_default") == 0;
	int rc;

	if (acl && !is_acl(value, length))
		return fail(apply->failure, FAILURE_INPUT, EINVAL, "%.*s: %s is not a valid access control list",
			    shown(path_length), path, name);
	if (!acl && !has_prefix(name, "user.") && !has_prefix(name, "security.") && !has_prefix(name, "trusted.")) {
		apply->report->skipped_xattrs++;
		return 0;
	}
	rc = volume_set_xattr(apply->volume, ino, name, value, length);
	if (rc == -E2BIG)
		return fail(apply->failure, FAILURE_INPUT, E2BIG,
			    "%.*s: the extended attributes do not fit in ext4's limit of one block per file (at %s)",
			    shown(path_length), path, name);
	return rc;
}

static int apply_xattrs(struct apply *apply, ext2_ino_t ino, const struct op_entry *entry, const uint8_t *raw,
			size_t left, const char *path)
{
	for (uint32_t i = 0; i < entry->xattr_count; i++) {
		struct op_xattr head;
		char name[256];
		int rc;

		if (left < sizeof(head))
			return malformed(apply, "an attribute is cut short");
		memcpy(&head, raw, sizeof(head));
		raw += sizeof(head);
		left -= sizeof(head);
		if (head.name_bytes > left || head.value_bytes > left - head.name_bytes)
			return malformed(apply, "an attribute is cut short");
		if (head.name_bytes >= sizeof(name))
			return fail(apply->failure, FAILURE_INPUT, ENAMETOOLONG,
				    "%.*s: the name of an extended attribute is longer than 255 bytes", shown(entry->path_bytes), path);
		memcpy(name, raw, head.name_bytes);
		name[head.name_bytes] = '\0';
		rc = apply_xattr(apply, ino, name, raw + head.name_bytes, head.value_bytes, path, entry->path_bytes);
		if (rc < 0)
			return rc;
		raw += head.name_bytes + head.value_bytes;
		left -= head.name_bytes + head.value_bytes;
	}
	return left == 0 ? 0 : malformed(apply, "an entry is longer than its parts");
}

/* ---- entries ----------------------------------------------------------------------------------------- */

struct entry_parts {
	struct op_entry head;
	const char *path;
	const char *link;
	const uint8_t *segments;
	const uint8_t *xattrs;
	size_t xattr_bytes;
};

static uint32_t type_bits(uint8_t type)
{
	switch (type) {
	case OP_TYPE_FILE:
		return LINUX_S_IFREG;
	case OP_TYPE_DIRECTORY:
		return LINUX_S_IFDIR;
	case OP_TYPE_SYMLINK:
		return LINUX_S_IFLNK;
	case OP_TYPE_CHARACTER_DEVICE:
		return LINUX_S_IFCHR;
	case OP_TYPE_BLOCK_DEVICE:
		return LINUX_S_IFBLK;
	case OP_TYPE_FIFO:
		return LINUX_S_IFIFO;
	default:
		return 0;
	}
}

static uint8_t directory_type(uint8_t type)
{
	switch (type) {
	case OP_TYPE_SYMLINK:
		return EXT2_FT_SYMLINK;
	case OP_TYPE_CHARACTER_DEVICE:
		return EXT2_FT_CHRDEV;
	case OP_TYPE_BLOCK_DEVICE:
		return EXT2_FT_BLKDEV;
	case OP_TYPE_FIFO:
		return EXT2_FT_FIFO;
	default:
		return EXT2_FT_REG_FILE;
	}
}

static struct inode_attributes attributes_of(const struct op_entry *entry)
{
	return (struct inode_attributes){
		.mode = type_bits(entry->type) | (entry->mode & 07777),
		.uid = entry->uid,
		.gid = entry->gid,
		.mtime_seconds = entry->mtime_seconds,
		.mtime_nanoseconds = entry->mtime_nanoseconds,
	};
}

/* Parents nobody listed: root's, 0755, as old as the entry that needed them. */
static struct inode_attributes parents_of(const struct op_entry *entry)
{
	return (struct inode_attributes){
		.mode = LINUX_S_IFDIR | 0755,
		.mtime_seconds = entry->mtime_seconds,
		.mtime_nanoseconds = entry->mtime_nanoseconds,
	};
}

static int split_entry(struct apply *apply, size_t length, struct entry_parts *parts)
{
	const uint8_t *p = apply->payload;
	uint64_t segment_bytes;

	if (length < sizeof(parts->head))
		return malformed(apply, "an entry is cut short");
	memcpy(&parts->head, p, sizeof(parts->head));
	p += sizeof(parts->head);
	length -= sizeof(parts->head);
	segment_bytes = (uint64_t)parts->head.segment_count * sizeof(struct op_segment);
	if (parts->head.path_bytes > length || parts->head.link_bytes > length - parts->head.path_bytes ||
	    segment_bytes > length - parts->head.path_bytes - parts->head.link_bytes)
		return malformed(apply, "an entry is cut short");
	if (parts->head.mtime_nanoseconds >= 1000000000u)
		return malformed(apply, "nanoseconds out of range");
	parts->path = (const char *)p;
	parts->link = parts->path + parts->head.path_bytes;
	parts->segments = (const uint8_t *)parts->link + parts->head.link_bytes;
	parts->xattrs = parts->segments + segment_bytes;
	parts->xattr_bytes = length - parts->head.path_bytes - parts->head.link_bytes - (size_t)segment_bytes;
	return check_path(apply, parts->path, parts->head.path_bytes);
}

static int set_symlink(struct apply *apply, ext2_ino_t ino, union inode_buffer *inode, const struct entry_parts *parts)
{
	size_t length = parts->head.link_bytes;
	struct run_list runs = { 0 };
	uint8_t block[VOLUME_BLOCK_BYTES] = { 0 };
	errcode_t code;
	int rc;

	if (length == 0 || length >= VOLUME_BLOCK_BYTES || memchr(parts->link, '\0', length) != NULL)
		return fail(apply->failure, FAILURE_INPUT, EINVAL,
			    "%.*s: the target of a symbolic link must have 1 to %u bytes, this one has %zu",
			    shown(parts->head.path_bytes), parts->path, VOLUME_BLOCK_BYTES - 1, length);
	inode->large.i_size = (uint32_t)length;
	/* Up to 59 bytes live in the inode, in place of the block map. */
	if (length < sizeof(inode->large.i_block)) {
		memcpy(inode->large.i_block, parts->link, length);
		return volume_write_inode(apply->volume, ino, inode);
	}
	rc = volume_allocate(apply->volume, 0, 1, &runs);
	if (rc >= 0)
		rc = volume_map_runs(apply->volume, ino, inode, &runs);
	if (rc >= 0) {
		memcpy(block, parts->link, length);
		code = io_channel_write_blk64(apply->volume->fs->io, runs.items[0].physical, 1, block);
		rc = code ? volume_error(apply->volume, code, "writing a symbolic link") : 0;
	}
	free(runs.items);
	return rc;
}

static void set_device(union inode_buffer *inode, uint32_t major, uint32_t minor)
{
	/* Small numbers in the old 16-bit form, others in the 32-bit form with split minor, as the kernel does. */
	if (major < 256 && minor < 256)
		inode->large.i_block[0] = major << 8 | minor;
	else
		inode->large.i_block[1] = (minor & 0xff) | major << 8 | (minor & ~0xffu) << 12;
}

static int fill_inode(struct apply *apply, ext2_ino_t ino, const struct entry_parts *parts)
{
	struct inode_attributes attributes = attributes_of(&parts->head);
	union inode_buffer inode;
	errcode_t code;
	int rc;

	volume_init_inode(&inode, &attributes);
	switch (parts->head.type) {
	case OP_TYPE_FILE:
		code = ext2fs_inode_size_set(apply->volume->fs, &inode.plain, (ext2_off64_t)parts->head.size);
		if (code)
			return volume_error(apply->volume, code, "setting a size of %" PRIu64, parts->head.size);
		rc = open_segments(apply, &parts->head, parts->segments);
		return rc < 0 ? rc : volume_map_runs(apply->volume, ino, &inode, &apply->file.runs);
	case OP_TYPE_SYMLINK:
		return set_symlink(apply, ino, &inode, parts);
	case OP_TYPE_CHARACTER_DEVICE:
	case OP_TYPE_BLOCK_DEVICE:
		if (parts->head.major > 0xfff || parts->head.minor > 0xfffff)
			return fail(apply->failure, FAILURE_INPUT, EINVAL, "%.*s: device number %u:%u is out of range",
				    shown(parts->head.path_bytes), parts->path, parts->head.major, parts->head.minor);
		set_device(&inode, parts->head.major, parts->head.minor);
		return volume_write_inode(apply->volume, ino, &inode);
	default:
		return volume_write_inode(apply->volume, ino, &inode);
	}
}

/* A listed directory's tar entry is its whole truth: owner, mode, times and attributes. */
static int restate_directory(struct apply *apply, ext2_ino_t ino, const struct entry_parts *parts)
{
	struct inode_attributes attributes = attributes_of(&parts->head);
	union inode_buffer inode;
	int rc = volume_read_inode(apply->volume, ino, &inode);

	if (rc >= 0)
		rc = volume_clear_xattrs(apply->volume, ino, &inode);
	if (rc < 0)
		return rc;
	volume_set_attributes(&inode, &attributes);
	rc = volume_write_inode(apply->volume, ino, &inode);
	return rc < 0 ? rc : apply_xattrs(apply, ino, &parts->head, parts->xattrs, parts->xattr_bytes, parts->path);
}

static int make_directory(struct apply *apply, struct location *where, const struct entry_parts *parts)
{
	struct inode_attributes attributes = attributes_of(&parts->head);
	int rc = tree_make_directory(apply->tree, where->directory, where->leaf, where->leaf_length, &attributes);
	const struct name *name;

	if (rc < 0)
		return rc;
	name = tree_find(apply->tree, where->directory, where->leaf, where->leaf_length);
	return apply_xattrs(apply, name->ino, &parts->head, parts->xattrs, parts->xattr_bytes, parts->path);
}

/* 1 when the target does not exist (yet). */
static int link_file(struct apply *apply, const char *path, size_t path_bytes, const char *target, size_t target_bytes,
		     const struct inode_attributes *parents)
{
	struct location where, to;
	struct name *name, *present;
	union inode_buffer inode;
	ext2_ino_t ino;
	uint8_t type;
	int rc = tree_locate(apply->tree, target, target_bytes, NULL, &to);

	if (rc < 0 && rc != -ENOENT)
		return rc;
	name = rc == -ENOENT ? NULL : tree_find(apply->tree, to.directory, to.leaf, to.leaf_length);
	if (name == NULL)
		return 1;
	if (name->type == EXT2_FT_DIR)
		return fail(apply->failure, FAILURE_INPUT, EPERM, "%.*s is a hard link to the directory %.*s",
			    shown(path_bytes), path, shown(target_bytes), target);
	ino = name->ino;
	type = name->type;
	/* The link first, so that removing what is in the way cannot take the inode along. */
	rc = volume_read_inode(apply->volume, ino, &inode);
	if (rc < 0)
		return rc;
	if (inode.large.i_links_count >= VOLUME_MAX_LINKS)
		return fail(apply->failure, FAILURE_INPUT, EMLINK, "%.*s has more than the %u hard links that ext4 allows",
			    shown(target_bytes), target, VOLUME_MAX_LINKS);
	inode.large.i_links_count++;
	rc = volume_write_inode(apply->volume, ino, &inode);
	if (rc >= 0)
		rc = tree_locate(apply->tree, path, path_bytes, parents, &where);
	if (rc < 0)
		return rc;
	present = tree_find(apply->tree, where.directory, where.leaf, where.leaf_length);
	if (present != NULL && present->ino == ino) {
		present->in_layer = true;
		return volume_unlink_inode(apply->volume, ino, false);
	}
	if (present != NULL)
		rc = tree_remove(apply->tree, where.directory, present);
	return rc < 0 ? rc : tree_add(apply->tree, where.directory, where.leaf, where.leaf_length, ino, type);
}

static int defer_link(struct apply *apply, const struct entry_parts *parts)
{
	size_t path_bytes = parts->head.path_bytes, target_bytes = parts->head.link_bytes;
	struct pending_link *pending = malloc(sizeof(*pending) + path_bytes + target_bytes);

	if (pending == NULL)
		return out_of_memory(apply);
	*pending = (struct pending_link){
		.path_bytes = path_bytes, .target_bytes = target_bytes, .parents = parents_of(&parts->head)
	};
	memcpy(pending->text, parts->path, path_bytes);
	memcpy(pending->text + path_bytes, parts->link, target_bytes);
	*apply->links_end = pending;
	apply->links_end = &pending->next;
	return 0;
}

static int apply_hard_link(struct apply *apply, const struct entry_parts *parts)
{
	struct inode_attributes parents = parents_of(&parts->head);
	int rc = check_path(apply, parts->link, parts->head.link_bytes);

	if (rc >= 0 && (parts->head.link_bytes == 0 || parts->head.path_bytes == 0))
		return malformed(apply, "a hard link without a path or target");
	if (rc >= 0)
		rc = link_file(apply, parts->path, parts->head.path_bytes, parts->link, parts->head.link_bytes, &parents);
	return rc == 1 ? defer_link(apply, parts) : rc;
}

static int apply_entry(struct apply *apply, size_t length)
{
	struct entry_parts parts;
	struct inode_attributes parents;
	struct location where;
	struct name *name;
	ext2_ino_t ino;
	int rc;

	if (apply->file.segment < apply->file.segment_count)
		return malformed(apply, "an entry before the end of a file's data");
	close_file(apply);
	rc = split_entry(apply, length, &parts);
	if (rc < 0)
		return rc;
	apply->report->entries++;
	if (parts.head.type == OP_TYPE_HARD_LINK)
		return apply_hard_link(apply, &parts);
	if (type_bits(parts.head.type) == 0)
		return malformed(apply, "unknown entry type");
	if (parts.head.path_bytes == 0) {
		if (parts.head.type != OP_TYPE_DIRECTORY)
			return fail(apply->failure, FAILURE_INPUT, EINVAL, "the root of the image is not a directory");
		return restate_directory(apply, EXT2_ROOT_INO, &parts);
	}
	parents = parents_of(&parts.head);
	rc = tree_locate(apply->tree, parts.path, parts.head.path_bytes, &parents, &where);
	if (rc < 0)
		return rc;
	name = tree_find(apply->tree, where.directory, where.leaf, where.leaf_length);
	if (name != NULL && name->type == EXT2_FT_DIR && parts.head.type == OP_TYPE_DIRECTORY) {
		name->in_layer = true;
		return restate_directory(apply, name->ino, &parts);
	}
	if (name != NULL) {
		rc = tree_remove(apply->tree, where.directory, name);
		if (rc < 0)
			return rc;
	}
	if (parts.head.type == OP_TYPE_DIRECTORY)
		return make_directory(apply, &where, &parts);
	rc = volume_new_inode(apply->volume, false, &ino);
	if (rc >= 0)
		rc = fill_inode(apply, ino, &parts);
	if (rc >= 0)
		rc = apply_xattrs(apply, ino, &parts.head, parts.xattrs, parts.xattr_bytes, parts.path);
	if (rc >= 0)
		rc = tree_add(apply->tree, where.directory, where.leaf, where.leaf_length, ino,
			      directory_type(parts.head.type));
	return rc;
}

static int apply_whiteout(struct apply *apply, size_t length, bool opaque)
{
	const char *path = (const char *)apply->payload;
	struct location where;
	struct directory *directory;
	struct name *name;
	int rc = check_path(apply, path, length);

	if (rc < 0)
		return rc;
	if (length == 0)
		return opaque ? tree_remove_lower_children(apply->tree, apply->tree->root)
			      : malformed(apply, "a whiteout without a path");
	rc = tree_locate(apply->tree, path, length, NULL, &where);
	/* Nothing there: nothing to hide. */
	if (rc == -ENOENT)
		return 0;
	if (rc < 0)
		return rc;
	name = tree_find(apply->tree, where.directory, where.leaf, where.leaf_length);
	if (name == NULL)
		return 0;
	if (!opaque)
		return tree_remove_lower(apply->tree, where.directory, name);
	if (name->type != EXT2_FT_DIR)
		return 0;
	name->in_layer = true;
	rc = tree_enter(apply->tree, where.directory, name, &directory);
	return rc < 0 ? rc : tree_remove_lower_children(apply->tree, directory);
}

/*
 * Links that stood before their target. One whose name came up again later lost to that entry. Links to links
 * resolve in rounds; a round without progress leaves those whose target is nowhere.
 */
static int apply_pending_links(struct apply *apply)
{
	bool progress = true;

	while (apply->links != NULL && progress) {
		struct pending_link **at = &apply->links;

		progress = false;
		while (*at != NULL) {
			struct pending_link *pending = *at;
			struct location where;
			struct name *name = NULL;
			int rc = tree_locate(apply->tree, pending->text, pending->path_bytes, NULL, &where);

			if (rc < 0 && rc != -ENOENT)
				return rc;
			if (rc >= 0)
				name = tree_find(apply->tree, where.directory, where.leaf, where.leaf_length);
			rc = name != NULL && name->in_layer
				     ? 0
				     : link_file(apply, pending->text, pending->path_bytes, pending->text + pending->path_bytes,
						 pending->target_bytes, &pending->parents);
			if (rc < 0)
				return rc;
			if (rc == 1) {
				at = &pending->next;
				continue;
			}
			progress = true;
			*at = pending->next;
			free(pending);
		}
	}
	if (apply->links != NULL)
		return fail(apply->failure, FAILURE_INPUT, ENOENT,
			    "%.*s is a hard link to %.*s, which is neither in this layer nor in the layers below",
			    shown(apply->links->path_bytes), apply->links->text, shown(apply->links->target_bytes),
			    apply->links->text + apply->links->path_bytes);
	return 0;
}

static int apply_record(struct apply *apply, uint32_t op, size_t length)
{
	int rc;

	if (op == OP_DATA)
		return apply_data(apply, length);
	rc = read_payload(apply, length);
	if (rc < 0)
		return rc;
	switch (op) {
	case OP_ENTRY:
		return apply_entry(apply, length);
	case OP_WHITEOUT:
		return apply_whiteout(apply, length, false);
	case OP_OPAQUE:
		return apply_whiteout(apply, length, true);
	default:
		return malformed(apply, "unknown record");
	}
}

static int apply_records(struct apply *apply)
{
	char magic[OP_STREAM_MAGIC_BYTES];
	int rc = read_exactly(apply, magic, sizeof(magic));

	if (rc >= 0 && memcmp(magic, OP_STREAM_MAGIC, sizeof(magic)) != 0)
		return malformed(apply, "wrong magic");
	while (rc >= 0) {
		uint32_t head[2];

		rc = read_exactly(apply, head, sizeof(head));
		if (rc < 0)
			return rc;
		if (head[0] == OP_END) {
			if (apply->file.segment < apply->file.segment_count)
				return malformed(apply, "the end before the end of a file's data");
			return apply_pending_links(apply);
		}
		rc = apply_record(apply, head[0], head[1]);
	}
	return rc;
}

int apply_stream(struct tree *tree, int fd, struct apply_report *report, struct failure *failure)
{
	struct apply apply = {
		.tree = tree, .volume = tree->volume, .failure = failure, .report = report, .fd = fd, .links_end = NULL
	};
	int rc;

	apply.links_end = &apply.links;
	apply.input = malloc(INPUT_BUFFER_BYTES);
	rc = apply.input == NULL ? out_of_memory(&apply) : apply_records(&apply);
	while (apply.links != NULL) {
		struct pending_link *next = apply.links->next;

		free(apply.links);
		apply.links = next;
	}
	free(apply.file.runs.items);
	free(apply.file.segments);
	free(apply.payload);
	free(apply.input);
	return rc;
}
