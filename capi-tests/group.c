/* Two disks at one instant: a guest writes the same number to both, first to a, then to b; in the backups b is never ahead of a. */
#include "common.h"

#include <pthread.h>

static cobweb_disk *da, *db;
static volatile int stop;

static void *writer(void *arg)
{
    uint64_t n = 0;
    (void)arg;
    while (!stop) {
        n++;
        CHECK(cobweb_pwrite(da, &n, sizeof n, 0, 0) == sizeof n);
        CHECK(cobweb_pwrite(db, &n, sizeof n, 0, 0) == sizeof n);
    }
    return NULL;
}

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    cobweb_node *ta = NULL, *tb = NULL;
    cobweb_disk *ra, *rb;
    pthread_t t;
    int round;

    da = new_disk(ctx, "vda", "driver=memory,size=1M");
    db = new_disk(ctx, "vdb", "driver=memory,size=1M");
    CHECK(pthread_create(&t, NULL, writer, NULL) == 0);
    for (round = 0; round < 20; round++) {
        cobweb_group *g = NULL;
        cobweb_job *a = NULL, *b = NULL;
        uint64_t x = 0, y = 0;

        OK(cobweb_node_open(ctx, "driver=memory,size=1M", &ta, error()));
        OK(cobweb_node_open(ctx, "driver=memory,size=1M", &tb, error()));
        OK(cobweb_group_new(ctx, "completion-mode=grouped", &g, error()));
        {
            char options[256], name[64];
            CHECK(cobweb_node_get(ta, "node-name", name, sizeof name, error()) > 0);
            snprintf(options, sizeof options, "device=vda,target=%s,sync=full,job-id=a%d,auto-dismiss=off", name, round);
            OK(cobweb_group_add(g, "backup", options, &a, error()));
            CHECK(cobweb_node_get(tb, "node-name", name, sizeof name, error()) > 0);
            snprintf(options, sizeof options, "device=vdb,target=%s,sync=full,job-id=b%d,auto-dismiss=off", name, round);
            OK(cobweb_group_add(g, "backup", options, &b, error()));
        }
        OK(cobweb_group_start(g, error()));
        cobweb_group_free(g);
        OK(cobweb_job_wait(a, 60LL * 1000000000));
        OK(cobweb_job_wait(b, 60LL * 1000000000));
        cobweb_job_unref(a);
        cobweb_job_unref(b);
        OK(cobweb_disk_new(ctx, NULL, &ra, error()));
        OK(cobweb_disk_new(ctx, NULL, &rb, error()));
        OK(cobweb_disk_insert(ra, ta, error()));
        OK(cobweb_disk_insert(rb, tb, error()));
        CHECK(cobweb_pread(ra, &x, sizeof x, 0, 0) == sizeof x);
        CHECK(cobweb_pread(rb, &y, sizeof y, 0, 0) == sizeof y);
        CHECK(x == y || x == y + 1);
        cobweb_disk_free(ra);
        cobweb_disk_free(rb);
        cobweb_node_unref(ta);
        cobweb_node_unref(tb);
    }
    stop = 1;
    CHECK(pthread_join(t, NULL) == 0);
    cobweb_disk_free(da);
    cobweb_disk_free(db);
    cobweb_ctx_free(ctx);
    return 0;
}
