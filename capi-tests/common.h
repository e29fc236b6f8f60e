/* What every test needs: a check that says where it failed, and a context with a disk. */
#ifndef COMMON_H
#define COMMON_H

#include <cobweb.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(cond) check((cond) != 0, #cond, __FILE__, __LINE__)
/* Evaluates to the value, which must not be negative. */
#define OK(call) check_ok((long long)(call), #call, __FILE__, __LINE__)
/* The call must fail with this errno. */
#define FAILS(err, call) check_fails((long long)(call), (err), #call, __FILE__, __LINE__)

void check(int ok, const char *what, const char *file, int line);
long long check_ok(long long value, const char *what, const char *file, int line);
void check_fails(long long value, int err, const char *what, const char *file, int line);

/* The text of the last failed call that was given `error()`. */
cobweb_error *error(void);

cobweb_ctx *new_ctx(void);
/* A disk named `name` over a node opened from `options`. */
cobweb_disk *new_disk(cobweb_ctx *ctx, const char *name, const char *options);
/* A temporary file of this size, removed at exit; its path. */
const char *temp_file(unsigned long long size);

/* How often to do what is done `n` times: or COBWEB_ROUNDS times, for runs under valgrind and for long ones. */
int rounds(int n);

/* One request through a queue, waited for. */
cobweb_cqe one(cobweb_queue *q, cobweb_req r);
cobweb_req req_read(void *buf, size_t len, uint64_t offset, struct iovec *iov);
cobweb_req req_write(const void *buf, size_t len, uint64_t offset, struct iovec *iov);

#endif
