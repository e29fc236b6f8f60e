#include "common.h"

#include <unistd.h>

static cobweb_error last = { sizeof(cobweb_error), 0, 0, 0, { 0 } };
static char paths[16][64];
static int npaths;

cobweb_error *error(void)
{
    last.struct_size = sizeof last;
    last.err = 0;
    last.msg[0] = 0;
    return &last;
}

void check(int ok, const char *what, const char *file, int line)
{
    if (ok)
        return;
    fprintf(stderr, "%s:%d: FAILED: %s (last error: %d %s)\n", file, line, what, last.err, last.msg);
    exit(1);
}

long long check_ok(long long value, const char *what, const char *file, int line)
{
    if (value < 0) {
        fprintf(stderr, "%s:%d: %s: %s (%s)\n", file, line, what, strerror((int)-value), last.msg);
        exit(1);
    }
    return value;
}

void check_fails(long long value, int err, const char *what, const char *file, int line)
{
    if (value != -err) {
        fprintf(stderr, "%s:%d: %s gave %lld instead of -%d (%s)\n", file, line, what, value, err, strerror(err));
        exit(1);
    }
}

cobweb_ctx *new_ctx(void)
{
    cobweb_ctx *ctx = NULL;
    OK(cobweb_ctx_new(getenv("COBWEB_TEST_OPTIONS"), NULL, &ctx, error()));
    OK(cobweb_ctx_start(ctx, error()));
    return ctx;
}

cobweb_disk *new_disk(cobweb_ctx *ctx, const char *name, const char *options)
{
    cobweb_node *node = NULL;
    cobweb_disk *disk = NULL;
    OK(cobweb_node_open(ctx, options, &node, error()));
    OK(cobweb_disk_new(ctx, name, &disk, error()));
    OK(cobweb_disk_insert(disk, node, error()));
    cobweb_node_unref(node);
    return disk;
}

static void remove_files(void)
{
    while (npaths > 0)
        unlink(paths[--npaths]);
}

const char *temp_file(unsigned long long size)
{
    char *path = paths[npaths];
    int fd;
    strcpy(path, "./capi-test.XXXXXX");
    fd = mkstemp(path);
    CHECK(fd >= 0);
    CHECK(ftruncate(fd, (off_t)size) == 0);
    close(fd);
    if (npaths++ == 0)
        atexit(remove_files);
    return path;
}

int rounds(int n)
{
    const char *text = getenv("COBWEB_ROUNDS");
    if (text) {
        n = atoi(text);
        CHECK(n > 0);
    }
    return n;
}

cobweb_req req_read(void *buf, size_t len, uint64_t offset, struct iovec *iov)
{
    cobweb_req r;
    memset(&r, 0, sizeof r);
    iov->iov_base = buf;
    iov->iov_len = len;
    r.op = COBWEB_OP_READ;
    r.iovcnt = 1;
    r.iov = iov;
    r.offset = offset;
    r.len = len;
    return r;
}

cobweb_req req_write(const void *buf, size_t len, uint64_t offset, struct iovec *iov)
{
    cobweb_req r = req_read((void *)(uintptr_t)buf, len, offset, iov);
    r.op = COBWEB_OP_WRITE;
    return r;
}

cobweb_cqe one(cobweb_queue *q, cobweb_req r)
{
    cobweb_cqe c;
    CHECK(cobweb_submit(q, &r, 1) == 1);
    CHECK(cobweb_reap(q, &c, 1, 1, -1) == 1);
    CHECK(c.user_data == r.user_data);
    return c;
}
