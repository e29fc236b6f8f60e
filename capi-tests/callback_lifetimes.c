/* No callback after the object it belongs to is gone; release exactly once; blocking calls inside a callback are refused (C25). */
#include "common.h"

static cobweb_disk *other;
static int released, submits, logs, freed;

static int be_submit(void *p, const cobweb_req *r, cobweb_io *io)
{
    unsigned char b[512];
    CHECK(p == &released && !freed && released == 0);
    submits++;
    /* A call that may block: refused here, since it would deadlock. */
    FAILS(EDEADLK, cobweb_pread(other, b, sizeof b, 0, 0));
    cobweb_io_complete(io, (int64_t)r->len);
    return 0;
}

static int be_limits(void *p, cobweb_limits *out)
{
    (void)p;
    out->size = 65536;
    return 0;
}

static void be_release(void *p)
{
    CHECK(p == &released && !freed);
    released++;
}

static void on_log(void *arg, int level, const char *target, const char *msg)
{
    CHECK(arg == &logs && !freed && target && msg && level >= 0);
    logs++;
}

int main(void)
{
    cobweb_log log = { sizeof log, 3, on_log, &logs };
    cobweb_ctx *ctx = NULL;
    cobweb_backend_ops ops;
    cobweb_node *n = NULL;
    cobweb_disk *d = NULL;
    unsigned char b[4096] = { 0 };

    OK(cobweb_ctx_new(NULL, &log, &ctx, error()));
    OK(cobweb_ctx_start(ctx, error()));
    other = new_disk(ctx, "other", "driver=memory,size=64k");
    memset(&ops, 0, sizeof ops);
    ops.struct_size = sizeof ops;
    ops.submit = be_submit;
    ops.limits = be_limits;
    ops.release = be_release;
    OK(cobweb_node_register(ctx, "be", &ops, &released, &n, error()));
    OK(cobweb_disk_new(ctx, "d", &d, error()));
    OK(cobweb_disk_insert(d, n, error()));
    CHECK(cobweb_pwrite(d, b, sizeof b, 0, 0) == sizeof b);
    CHECK(submits >= 1);
    OK(cobweb_disk_insert(d, NULL, error()));
    CHECK(released == 0); /* the handle still counts */
    cobweb_node_unref(n);
    cobweb_disk_free(d);
    cobweb_disk_free(other);
    cobweb_ctx_free(ctx);
    CHECK(released == 1);
    freed = 1;
    return 0;
}
