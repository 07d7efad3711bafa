#include "tree.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

#define MAP_BUCKETS 4096u
#define MAX_LINK_HOPS 40
#define MAX_DEPTH 4096
/* Room for one path and the symlink targets met on it. */
#define MAX_WALK_BYTES 65536u

static int out_of_memory(struct tree *tree)
{
	return fail(tree->failure, FAILURE_INTERNAL, ENOMEM, "out of memory");
}

/* Seeded per process, so that an image cannot choose colliding names. */
static size_t hash_name(const struct tree *tree, const char *text, size_t length)
{
	uint64_t hash = tree->hash_seed;

	for (size_t i = 0; i < length; i++) {
		hash ^= (uint8_t)text[i];
		hash *= 0x9fb21c651e98df25ull;
		hash ^= hash >> 32;
	}
	return (size_t)hash;
}

struct name *tree_find(const struct tree *tree, const struct directory *directory, const char *text, size_t length)
{
	struct name *name;

	if (directory->bucket_count == 0)
		return NULL;
	name = directory->buckets[hash_name(tree, text, length) % directory->bucket_count];
	while (name != NULL && (name->length != length || memcmp(name->text, text, length) != 0))
		name = name->bucket_next;
	return name;
}

static int grow(struct tree *tree, struct directory *directory)
{
	size_t count = directory->bucket_count == 0 ? 16 : directory->bucket_count * 4;
	struct name **buckets = calloc(count, sizeof(*buckets));

	if (buckets == NULL)
		return out_of_memory(tree);
	for (struct name *name = directory->first; name != NULL; name = name->next) {
		size_t bucket = hash_name(tree, name->text, name->length) % count;

		name->bucket_next = buckets[bucket];
		buckets[bucket] = name;
	}
	free(directory->buckets);
	directory->buckets = buckets;
	directory->bucket_count = count;
	return 0;
}

static int append_name(struct tree *tree, struct directory *directory, const char *text, size_t length,
		       ext2_ino_t ino, uint8_t type, bool in_layer)
{
	struct name *name;
	size_t bucket;

	if (directory->count >= directory->bucket_count) {
		int rc = grow(tree, directory);

		if (rc < 0)
			return rc;
	}
	name = malloc(sizeof(*name) + length);
	if (name == NULL)
		return out_of_memory(tree);
	*name = (struct name){ .ino = ino, .type = type, .in_layer = in_layer, .length = (uint8_t)length };
	memcpy(name->text, text, length);
	name->previous = directory->last;
	if (directory->last != NULL)
		directory->last->next = name;
	else
		directory->first = name;
	directory->last = name;
	bucket = hash_name(tree, text, length) % directory->bucket_count;
	name->bucket_next = directory->buckets[bucket];
	directory->buckets[bucket] = name;
	directory->count++;
	if (type == EXT2_FT_DIR)
		directory->subdirectories++;
	return 0;
}

static void drop_name(struct tree *tree, struct directory *directory, struct name *name)
{
	struct name **link = &directory->buckets[hash_name(tree, name->text, name->length) % directory->bucket_count];

	while (*link != name)
		link = &(*link)->bucket_next;
	*link = name->bucket_next;
	if (name->previous != NULL)
		name->previous->next = name->next;
	else
		directory->first = name->next;
	if (name->next != NULL)
		name->next->previous = name->previous;
	else
		directory->last = name->previous;
	directory->count--;
	if (name->type == EXT2_FT_DIR)
		directory->subdirectories--;
	directory->dirty = true;
	free(name);
}

static void free_directory(struct directory *directory)
{
	struct name *name = directory->first;

	while (name != NULL) {
		struct name *next = name->next;

		free(name);
		name = next;
	}
	free(directory->buckets);
	free(directory);
}

static struct directory **map_slot(struct tree *tree, ext2_ino_t ino)
{
	struct directory **link = &tree->map[ino % MAP_BUCKETS];

	while (*link != NULL && (*link)->ino != ino)
		link = &(*link)->map_next;
	return link;
}

struct load {
	struct tree *tree;
	struct directory *directory;
	int rc;
};

static int load_name(ext2_ino_t dir, int entry, struct ext2_dir_entry *dirent, int offset, int blocksize, char *buf,
		     void *private)
{
	struct load *load = private;

	(void)dir, (void)offset, (void)blocksize, (void)buf;
	if (entry != DIRENT_OTHER_FILE || dirent->inode == 0)
		return 0;
	load->rc = append_name(load->tree, load->directory, dirent->name, (size_t)ext2fs_dirent_name_len(dirent),
			       dirent->inode, (uint8_t)ext2fs_dirent_file_type(dirent), false);
	return load->rc < 0 ? DIRENT_ABORT : 0;
}

static int load_directory(struct tree *tree, ext2_ino_t ino, struct directory *parent, bool fresh,
			  struct directory **result)
{
	struct directory **slot = map_slot(tree, ino);
	struct directory *directory = *slot;
	struct load load;
	errcode_t code;

	*result = directory;
	if (directory != NULL)
		return 0;
	directory = calloc(1, sizeof(*directory));
	if (directory == NULL)
		return out_of_memory(tree);
	directory->ino = ino;
	directory->parent = parent == NULL ? directory : parent;
	directory->fresh = fresh;
	directory->dirty = fresh;
	*slot = directory;
	tree->map_count++;
	*result = directory;
	if (fresh)
		return 0;
	load = (struct load){ .tree = tree, .directory = directory };
	code = ext2fs_dir_iterate2(tree->volume->fs, ino, 0, NULL, load_name, &load);
	if (load.rc < 0)
		return load.rc;
	return code ? volume_error(tree->volume, code, "reading directory inode %u", ino) : 0;
}

int tree_open(struct tree *tree, struct volume *volume, struct failure *failure)
{
	*tree = (struct tree){ .volume = volume, .failure = failure };
	if (getrandom(&tree->hash_seed, sizeof(tree->hash_seed), 0) != sizeof(tree->hash_seed))
		return fail(failure, FAILURE_INTERNAL, EIO, "no random numbers");
	tree->map = calloc(MAP_BUCKETS, sizeof(*tree->map));
	if (tree->map == NULL)
		return out_of_memory(tree);
	return load_directory(tree, EXT2_ROOT_INO, NULL, false, &tree->root);
}

void tree_close(struct tree *tree)
{
	for (size_t i = 0; tree->map != NULL && i < MAP_BUCKETS; i++) {
		struct directory *directory = tree->map[i];

		while (directory != NULL) {
			struct directory *next = directory->map_next;

			free_directory(directory);
			directory = next;
		}
	}
	free(tree->map);
	tree->map = NULL;
}

int tree_add(struct tree *tree, struct directory *directory, const char *text, size_t length, ext2_ino_t ino,
	     uint8_t type)
{
	directory->dirty = true;
	return append_name(tree, directory, text, length, ino, type, true);
}

int tree_enter(struct tree *tree, struct directory *parent, const struct name *name, struct directory **result)
{
	return load_directory(tree, name->ino, parent, false, result);
}

static int remove_at(struct tree *tree, struct directory *directory, struct name *name, int depth)
{
	bool is_directory = name->type == EXT2_FT_DIR;
	ext2_ino_t ino = name->ino;
	int rc;

	if (depth > MAX_DEPTH)
		return fail(tree->failure, FAILURE_INPUT, ELOOP, "directories are nested more than %d deep", MAX_DEPTH);
	if (is_directory) {
		struct directory *child, **slot;

		rc = tree_enter(tree, directory, name, &child);
		while (rc >= 0 && child->last != NULL)
			rc = remove_at(tree, child, child->last, depth + 1);
		if (rc < 0)
			return rc;
		slot = map_slot(tree, ino);
		*slot = child->map_next;
		tree->map_count--;
		free_directory(child);
	}
	rc = volume_unlink_inode(tree->volume, ino, is_directory);
	if (rc < 0)
		return rc;
	drop_name(tree, directory, name);
	return 0;
}

int tree_remove(struct tree *tree, struct directory *directory, struct name *name)
{
	return remove_at(tree, directory, name, 0);
}

static int remove_lower_at(struct tree *tree, struct directory *directory, struct name *name, int depth);

static int remove_lower_children_at(struct tree *tree, struct directory *directory, int depth)
{
	struct name *name = directory->first;
	int rc = 0;

	while (name != NULL && rc >= 0) {
		struct name *next = name->next;

		rc = remove_lower_at(tree, directory, name, depth);
		name = next;
	}
	return rc;
}

static int remove_lower_at(struct tree *tree, struct directory *directory, struct name *name, int depth)
{
	struct directory *child;
	int rc;

	if (depth > MAX_DEPTH)
		return fail(tree->failure, FAILURE_INPUT, ELOOP, "directories are nested more than %d deep", MAX_DEPTH);
	if (!name->in_layer)
		return remove_at(tree, directory, name, depth);
	if (name->type != EXT2_FT_DIR)
		return 0;
	rc = tree_enter(tree, directory, name, &child);
	return rc < 0 ? rc : remove_lower_children_at(tree, child, depth + 1);
}

int tree_remove_lower(struct tree *tree, struct directory *directory, struct name *name)
{
	return remove_lower_at(tree, directory, name, 0);
}

int tree_remove_lower_children(struct tree *tree, struct directory *directory)
{
	return remove_lower_children_at(tree, directory, 0);
}

int tree_make_directory(struct tree *tree, struct directory *directory, const char *text, size_t length,
			const struct inode_attributes *attributes)
{
	union inode_buffer inode;
	struct directory *child;
	ext2_ino_t ino;
	int rc = volume_new_inode(tree->volume, true, &ino);

	if (rc < 0)
		return rc;
	volume_init_inode(&inode, attributes);
	inode.large.i_flags |= EXT4_EXTENTS_FL;
	rc = volume_map_runs(tree->volume, ino, &inode, &(struct run_list){ 0 });
	if (rc >= 0)
		rc = load_directory(tree, ino, directory, true, &child);
	return rc < 0 ? rc : tree_add(tree, directory, text, length, ino, EXT2_FT_DIR);
}

/* ---- paths ------------------------------------------------------------------------------------------- */

/* Puts `text` before what is left of the walk: a symlink's target replaces the link's name. */
static int splice(struct tree *tree, char *walk, size_t *position, const char *text, size_t length)
{
	if (length + 1 > *position)
		return fail(tree->failure, FAILURE_INPUT, ELOOP, "a path with its symbolic links is longer than %u bytes",
			    MAX_WALK_BYTES);
	walk[--*position] = '/';
	*position -= length;
	memcpy(walk + *position, text, length);
	return 0;
}

static int step_into_missing(struct tree *tree, struct directory *directory, const char *text, size_t length,
			     const struct inode_attributes *create)
{
	if (create == NULL)
		return -ENOENT;
	if (length > EXT2_NAME_LEN)
		return fail(tree->failure, FAILURE_INPUT, ENAMETOOLONG, "the name %.*s... is longer than %d bytes", 40, text,
			    EXT2_NAME_LEN);
	return tree_make_directory(tree, directory, text, length, create);
}

int tree_locate(struct tree *tree, const char *path, size_t length, const struct inode_attributes *create,
		struct location *location)
{
	char walk[MAX_WALK_BYTES];
	size_t position = sizeof(walk);
	size_t parent_length = length;
	struct directory *directory = tree->root;
	int hops = 0;

	while (parent_length > 0 && path[parent_length - 1] != '/')
		parent_length--;
	location->leaf = path + parent_length;
	location->leaf_length = length - parent_length;
	/* The walk is filled from the end: components still to go, each followed by '/'. */
	if (parent_length > 0) {
		int rc = splice(tree, walk, &position, path, parent_length - 1);

		if (rc < 0)
			return rc;
	}
	while (position < sizeof(walk)) {
		const char *text = walk + position;
		size_t part = (size_t)((char *)memchr(text, '/', sizeof(walk) - position) - text);
		struct name *name;
		int rc;

		position += part + 1;
		if (part == 0 || (part == 1 && text[0] == '.'))
			continue;
		if (part == 2 && text[0] == '.' && text[1] == '.') {
			directory = directory->parent;
			continue;
		}
		name = tree_find(tree, directory, text, part);
		if (name != NULL && name->type == EXT2_FT_SYMLINK) {
			char *target;
			size_t target_length;

			if (++hops > MAX_LINK_HOPS)
				return fail(tree->failure, FAILURE_INPUT, ELOOP,
					    "too many symbolic links in the parents of %.*s", (int)length, path);
			rc = volume_read_symlink(tree->volume, name->ino, &target, &target_length);
			if (rc < 0)
				return rc;
			if (target_length > 0 && target[0] == '/')
				directory = tree->root;
			rc = splice(tree, walk, &position, target, target_length);
			free(target);
			if (rc < 0)
				return rc;
			continue;
		}
		if (name != NULL && name->type != EXT2_FT_DIR) {
			if (create == NULL)
				return -ENOENT;
			if (name->in_layer)
				return fail(tree->failure, FAILURE_INPUT, ENOTDIR,
					    "%.*s lies under a file of the same layer that is not a directory", (int)length, path);
			rc = tree_remove(tree, directory, name);
			if (rc < 0)
				return rc;
			name = NULL;
		}
		if (name == NULL) {
			rc = step_into_missing(tree, directory, text, part, create);
			if (rc < 0)
				return rc;
			name = tree_find(tree, directory, text, part);
		}
		if (create != NULL)
			name->in_layer = true;
		rc = tree_enter(tree, directory, name, &directory);
		if (rc < 0)
			return rc;
	}
	location->directory = directory;
	return 0;
}

/* ---- writing ----------------------------------------------------------------------------------------- */

struct packer {
	uint8_t *blocks;
	size_t block_count;
	size_t usable; /* bytes per block without the checksum tail */
	size_t used;   /* in the last block */
	struct ext2_dir_entry *last;
};

static size_t entry_bytes(size_t name_length)
{
	return (8 + name_length + 3) & ~(size_t)3;
}

static void put_name(struct packer *packer, ext2_ino_t ino, const char *text, size_t length, uint8_t type)
{
	size_t bytes = entry_bytes(length);
	struct ext2_dir_entry *entry;

	if (packer->block_count == 0 || packer->used + bytes > packer->usable) {
		packer->block_count++;
		packer->used = 0;
	} else {
		packer->last->rec_len = (uint16_t)entry_bytes((size_t)ext2fs_dirent_name_len(packer->last));
	}
	entry = (struct ext2_dir_entry *)(packer->blocks + (packer->block_count - 1) * VOLUME_BLOCK_BYTES + packer->used);
	entry->inode = ino;
	entry->rec_len = (uint16_t)(packer->usable - packer->used);
	entry->name_len = (uint16_t)(length | (size_t)type << 8);
	memcpy(entry->name, text, length);
	packer->used += bytes;
	packer->last = entry;
}

/* Blocks the directory needs at most: a block is left when the next name does not fit. */
static size_t count_blocks(const struct directory *directory, size_t usable)
{
	size_t blocks = 1, used = entry_bytes(1) + entry_bytes(2);

	for (const struct name *name = directory->first; name != NULL; name = name->next) {
		size_t bytes = entry_bytes(name->length);

		if (used + bytes > usable) {
			blocks++;
			used = 0;
		}
		used += bytes;
	}
	return blocks;
}

static int write_blocks(struct tree *tree, struct directory *directory, struct packer *packer)
{
	struct volume *volume = tree->volume;
	struct run_list runs = { 0 };
	union inode_buffer inode;
	size_t present;
	errcode_t code = 0;
	int rc = volume_read_inode(volume, directory->ino, &inode);

	if (rc < 0)
		return rc;
	present = directory->fresh ? 0 : (size_t)(EXT2_I_SIZE(&inode.large) / VOLUME_BLOCK_BYTES);
	inode.large.i_links_count =
		directory->subdirectories + 2 > VOLUME_MAX_LINKS ? 1 : (uint16_t)(directory->subdirectories + 2);
	inode.large.i_flags &= ~(uint32_t)EXT2_INDEX_FL;
	if (present != packer->block_count) {
		rc = volume_free_blocks(volume, directory->ino, &inode);
		if (rc >= 0)
			rc = volume_allocate(volume, 0, packer->block_count, &runs);
		if (rc >= 0) {
			code = ext2fs_inode_size_set(volume->fs, &inode.plain,
						     (ext2_off64_t)(packer->block_count * VOLUME_BLOCK_BYTES));
			rc = code ? volume_error(volume, code, "size of directory inode %u", directory->ino)
				  : volume_map_runs(volume, directory->ino, &inode, &runs);
		}
		free(runs.items);
	} else {
		rc = volume_write_inode(volume, directory->ino, &inode);
	}
	for (size_t i = 0; i < packer->block_count && rc >= 0; i++) {
		blk64_t physical = 0;

		code = ext2fs_bmap2(volume->fs, directory->ino, &inode.plain, NULL, 0, i, NULL, &physical);
		if (!code)
			code = ext2fs_write_dir_block4(volume->fs, physical, packer->blocks + i * VOLUME_BLOCK_BYTES, 0,
						       directory->ino);
		if (code)
			rc = volume_error(volume, code, "writing directory inode %u", directory->ino);
	}
	return rc;
}

static int write_directory(struct tree *tree, struct directory *directory)
{
	bool checksums = ext2fs_has_feature_metadata_csum(tree->volume->fs->super);
	struct packer packer = { .usable = VOLUME_BLOCK_BYTES };
	size_t blocks;
	int rc;

	if (checksums)
		packer.usable -= sizeof(struct ext2_dir_entry_tail);
	blocks = count_blocks(directory, packer.usable);
	packer.blocks = calloc(blocks, VOLUME_BLOCK_BYTES);
	if (packer.blocks == NULL)
		return out_of_memory(tree);
	put_name(&packer, directory->ino, ".", 1, EXT2_FT_DIR);
	put_name(&packer, directory->parent->ino, "..", 2, EXT2_FT_DIR);
	for (struct name *name = directory->first; name != NULL; name = name->next)
		put_name(&packer, name->ino, name->text, name->length, name->type);
	for (size_t i = 0; checksums && i < packer.block_count; i++)
		ext2fs_initialize_dirent_tail(tree->volume->fs, EXT2_DIRENT_TAIL(packer.blocks + i * VOLUME_BLOCK_BYTES,
										VOLUME_BLOCK_BYTES));
	rc = write_blocks(tree, directory, &packer);
	free(packer.blocks);
	if (rc >= 0) {
		directory->dirty = false;
		directory->fresh = false;
	}
	return rc;
}

static int compare_directories(const void *left, const void *right)
{
	const struct directory *a = *(struct directory *const *)left, *b = *(struct directory *const *)right;

	return a->ino < b->ino ? -1 : a->ino > b->ino;
}

int tree_write(struct tree *tree)
{
	struct directory **dirty = malloc((tree->map_count + 1) * sizeof(*dirty));
	size_t count = 0;
	int rc = 0;

	if (dirty == NULL)
		return out_of_memory(tree);
	for (size_t i = 0; i < MAP_BUCKETS; i++)
		for (struct directory *directory = tree->map[i]; directory != NULL; directory = directory->map_next)
			if (directory->dirty)
				dirty[count++] = directory;
	/* By inode number: the order of blocks must not depend on the hash. */
	qsort(dirty, count, sizeof(*dirty), compare_directories);
	for (size_t i = 0; i < count && rc >= 0; i++)
		rc = write_directory(tree, dirty[i]);
	free(dirty);
	return rc;
}
