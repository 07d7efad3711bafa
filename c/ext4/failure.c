#include "failure.h"

#include <stdarg.h>
#include <stdio.h>

int fail(struct failure *failure, enum failure_kind kind, int err, const char *format, ...)
{
	if (failure->kind == FAILURE_NONE) {
		va_list args;

		failure->kind = kind;
		va_start(args, format);
		vsnprintf(failure->message, sizeof(failure->message), format, args);
		va_end(args);
	}
	return -err;
}
