/* What the files that prepare requests for a ring share; see ring.h. */
#ifndef AENV_RING_PRIVATE_H
#define AENV_RING_PRIVATE_H

#include <liburing.h>

struct ring {
	struct io_uring uring;
	int event_fd;
};

#endif
