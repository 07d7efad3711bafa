// The `copy` program of the agent's executable, see copy.c.
#ifndef AENV_COPY_H
#define AENV_COPY_H

#include <limits.h>
#include <stdbool.h>

// Exit status: 0 everything was copied, 1 failed (told on the connection and standard error), 2 usage.
int copy_main(int argc, char **argv);

#endif
