/* A cancelled request completes exactly once; one that hangs is let go, and a queue with such a request can be freed. */
#include "common.h"

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    cobweb_disk *d = new_disk(ctx, "vda", "{\"driver\":\"fault\",\"rules\":[{\"op\":\"write\",\"action\":\"hang\"}],"
                                          "\"file\":{\"driver\":\"memory\",\"size\":1048576}}");
    cobweb_queue *q = NULL;
    unsigned char buf[512] = { 1 };
    struct iovec iov;
    cobweb_req r = req_write(buf, sizeof buf, 0, &iov);
    cobweb_cqe c;

    OK(cobweb_queue_new(d, 4, &q, error()));
    r.user_data = 5;
    CHECK(cobweb_submit(q, &r, 1) == 1);
    CHECK(cobweb_reap(q, &c, 1, 1, 20000000) == 0); /* it really hangs */
    CHECK(cobweb_cancel(q, 4) == 0);                /* nobody of that name */
    CHECK(cobweb_cancel(q, 5) == 1);
    CHECK(cobweb_reap(q, &c, 1, 1, -1) == 1);
    CHECK(c.user_data == 5 && c.res == -ECANCELED);
    CHECK(strcmp(cobweb_code_str(c.code), "cancelled") == 0);
    CHECK(cobweb_reap(q, &c, 1, 1, 0) == 0);

    CHECK(cobweb_submit(q, &r, 1) == 1);
    CHECK(cobweb_reap(q, &c, 1, 1, 20000000) == 0);
    cobweb_queue_free(q);

    /* A blocking call with a limit. */
    OK(cobweb_disk_set(d, "sync-timeout", "0.05", error()));
    FAILS(ECANCELED, cobweb_pwrite(d, buf, sizeof buf, 0, 0));
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
