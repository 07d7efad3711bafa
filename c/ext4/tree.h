/*
 * Directories in memory. A directory is read when a layer first touches it, changed in memory, and written
 * once at the end, packed: cost per operation does not depend on its size, and equal layers give equal bytes.
 *
 * Every name knows whether this layer has put it there ("in layer"): whiteouts and opaque marks concern what
 * lower layers left, wherever in the layer they stand.
 */
#ifndef AENV_EXT4_TREE_H
#define AENV_EXT4_TREE_H

#include "volume.h"

struct name {
	ext2_ino_t ino;
	uint8_t type; /* EXT2_FT_* */
	bool in_layer;
	uint8_t length;
	struct name *bucket_next;
	struct name *previous, *next; /* order in the directory */
	char text[];
};

struct directory {
	ext2_ino_t ino;
	struct directory *parent; /* the root's is the root */
	struct name **buckets;
	size_t bucket_count;
	size_t count;
	size_t subdirectories;
	struct name *first, *last;
	bool dirty;
	bool fresh; /* made by this layer: nothing on disk yet */
	struct directory *map_next;
};

struct tree {
	struct volume *volume;
	struct failure *failure;
	uint64_t hash_seed;
	struct directory **map; /* by inode number */
	size_t map_count;
	struct directory *root;
};

int tree_open(struct tree *tree, struct volume *volume, struct failure *failure);
void tree_close(struct tree *tree);
/* Writes every changed directory. */
int tree_write(struct tree *tree);

struct name *tree_find(const struct tree *tree, const struct directory *directory, const char *text, size_t length);
/* `name` must not exist there; its link count is the caller's business. */
int tree_add(struct tree *tree, struct directory *directory, const char *text, size_t length, ext2_ino_t ino,
	     uint8_t type);
/* Takes the name out and drops its inode's link; directories go with all they hold. */
int tree_remove(struct tree *tree, struct directory *directory, struct name *name);
/* Removes what is not of this layer; a directory that holds names of this layer stays. */
int tree_remove_lower(struct tree *tree, struct directory *directory, struct name *name);
int tree_remove_lower_children(struct tree *tree, struct directory *directory);
int tree_make_directory(struct tree *tree, struct directory *directory, const char *text, size_t length,
			const struct inode_attributes *attributes);
/* The directory a name stands for, loaded. */
int tree_enter(struct tree *tree, struct directory *parent, const struct name *name, struct directory **result);

struct location {
	struct directory *directory;
	const char *leaf; /* points into the path given */
	size_t leaf_length;
};

/*
 * Finds the directory a path's last component is in. Symbolic links on the way are followed inside the root
 * (an absolute target starts at the root, ".." stops at it), as on the merged file system: images whose lower
 * layer has /bin -> usr/bin get `bin/x` of a later layer into usr/bin.
 * With `create` (attributes for what is made) missing directories are made and a non-directory of a lower
 * layer in the way is replaced; every directory passed counts as part of this layer. Without it a missing
 * one gives -ENOENT and no failure message.
 */
int tree_locate(struct tree *tree, const char *path, size_t length, const struct inode_attributes *create,
		struct location *location);

#endif
