// The `pack` program of the agent's executable, see pack.c.
#ifndef AENV_PACK_H
#define AENV_PACK_H

// Exit status: 0 the tar is whole, 1 failed (told on standard error), 2 usage, 3 there is nothing at the path.
int pack_main(int argc, char **argv);

#endif
