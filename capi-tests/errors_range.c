/* Ranges past the end, sums that overflow, lengths that do not match. */
#include "common.h"

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    cobweb_disk *d = new_disk(ctx, "vda", "driver=memory,size=4608");
    cobweb_queue *q = NULL;
    unsigned char buf[8192] = { 0 };
    struct iovec iov;
    cobweb_req r;
    cobweb_extent x[2];

    OK(cobweb_queue_new(d, 4, &q, error()));
    FAILS(EINVAL, cobweb_queue_new(d, 0, &q, error()));
    FAILS(EINVAL, cobweb_queue_new(d, 1u << 20, &q, error()));
    CHECK(cobweb_pread(d, buf, 4608, 0, 0) == 4608);
    CHECK(cobweb_pread(d, buf, 0, 4608, 0) == 0);
    FAILS(EIO, cobweb_pread(d, buf, 1, 4608, 0));
    FAILS(EIO, cobweb_pread(d, buf, 4609, 0, 0));
    FAILS(EIO, cobweb_pwrite(d, buf, 2, 4607, 0));
    FAILS(EIO, cobweb_pread(d, buf, 512, UINT64_MAX - 100, 0));
    FAILS(EIO, cobweb_write_zeroes(d, 4096, 513, 0));
    FAILS(EIO, cobweb_write_zeroes(d, UINT64_MAX, UINT64_MAX, 0));
    FAILS(EIO, cobweb_discard(d, INT64_MAX, INT64_MAX));
    FAILS(EIO, cobweb_block_status(d, 0, 4609, x, 2));
    CHECK(cobweb_block_status(d, 4607, 1, x, 2) == 1 && x[0].len == 1);

    r = req_read(buf, 512, 4600, &iov);
    CHECK(one(q, r).res == -EIO);
    r = req_read(buf, 512, UINT64_MAX, &iov);
    CHECK(one(q, r).res == -EIO);
    r = req_read(buf, 512, 0, &iov);
    r.len = 511; /* not the sum of the segments */
    CHECK(one(q, r).res == -EINVAL);
    r = req_read(buf, 512, 0, &iov);
    r.iov = NULL;
    CHECK(one(q, r).res == -EFAULT);
    r = req_read(NULL, 512, 0, &iov);
    CHECK(one(q, r).res == -EFAULT);
    r = req_read(buf, 512, 0, &iov);
    r.iovcnt = 1u << 30;
    CHECK(one(q, r).res == -EINVAL);
    r = req_read(buf, 0, 0, &iov);
    CHECK(one(q, r).res == 0);

    cobweb_queue_free(q);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
