/* Carries the records of an op stream out on the tree. */
#ifndef AENV_EXT4_APPLY_H
#define AENV_EXT4_APPLY_H

#include "tree.h"

struct apply_report {
	uint64_t entries;
	uint64_t data_bytes;
	/* Attributes whose name space ext4 does not have: left out, as a container runtime does. */
	uint64_t skipped_xattrs;
};

/* Reads the whole stream from `fd`. An end of input before END is an error: the layer is incomplete. */
int apply_stream(struct tree *tree, int fd, struct apply_report *report, struct failure *failure);

#endif
