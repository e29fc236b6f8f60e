/* Filters go in and out 200 times (or COBWEB_ROUNDS) while another thread keeps eight requests in flight; no request is lost and none fails. */
#include "common.h"

#include <pthread.h>
#include <stdlib.h>

static cobweb_disk *d;
static volatile int stop;
static unsigned long long done;

static void *guest(void *arg)
{
    cobweb_queue *q = NULL;
    static unsigned char buf[8][4096];
    struct iovec iov[8];
    cobweb_cqe c[8];
    uint64_t at = 0;
    int i, n, flying = 0;

    (void)arg;
    OK(cobweb_queue_new(d, 8, &q, NULL));
    for (i = 0; i < 8; i++) {
        cobweb_req r = req_write(buf[i], 4096, (at++ % 256) * 4096, &iov[i]);
        r.user_data = (uint64_t)i;
        CHECK(cobweb_submit(q, &r, 1) == 1);
        flying++;
    }
    while (flying > 0) {
        n = (int)OK(cobweb_reap(q, c, 8, 1, 10LL * 1000000000));
        CHECK(n > 0);
        for (i = 0; i < n; i++) {
            int s = (int)c[i].user_data;
            CHECK(c[i].res == 4096);
            done++;
            flying--;
            if (!stop) {
                cobweb_req r = req_write(buf[s], 4096, (at++ * 37 % 256) * 4096, &iov[s]);
                r.user_data = (uint64_t)s;
                CHECK(cobweb_submit(q, &r, 1) == 1);
                flying++;
            }
        }
    }
    cobweb_queue_free(q);
    return NULL;
}

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    pthread_t t;
    int i, n = rounds(200);

    d = new_disk(ctx, "vda", "driver=memory,size=1M");
    CHECK(pthread_create(&t, NULL, guest, NULL) == 0);
    for (i = 0; i < n; i++) {
        cobweb_node *f = NULL;
        OK(cobweb_disk_filter_add(d, i % 2 ? "driver=throttle" : "driver=copy-before-write,target.driver=memory,target.size=1M", &f,
                                  error()));
        OK(cobweb_disk_filter_del(d, f, error()));
        cobweb_node_unref(f);
    }
    stop = 1;
    CHECK(pthread_join(t, NULL) == 0);
    CHECK(done >= 8);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
