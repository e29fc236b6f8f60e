/* A live backup with a RAM cache onto a throttled target, while the guest writes; the result equals the instant. Also a target that fails. */
#include "common.h"

enum { SIZE = 8 << 20, LEN = 32768, BLOCKS = SIZE / LEN };

static unsigned char before[SIZE], after[SIZE], block[LEN];

static void fill_disk(cobweb_disk *d)
{
    int i;
    for (i = 0; i < BLOCKS; i++) {
        memset(block, i % 8 == 7 ? 0 : i + 1, LEN);
        CHECK(cobweb_pwrite(d, block, LEN, (uint64_t)i * LEN, 0) == LEN);
    }
    CHECK(cobweb_pread(d, before, SIZE, 0, 0) == SIZE);
}

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    cobweb_disk *d = new_disk(ctx, "vda", "driver=memory,size=8M"), *t;
    cobweb_node *target = NULL;
    cobweb_job *job = NULL, *same = NULL;
    cobweb_job_info info = { .struct_size = sizeof info };
    cobweb_report report = { .struct_size = sizeof report };
    cobweb_stats stats = { .struct_size = sizeof stats };
    cobweb_hist hist = { .struct_size = sizeof hist };
    int i;

    fill_disk(d);
    OK(cobweb_node_open(ctx, "driver=throttle,node-name=t0,limits.bps-write=40M,file.driver=memory,file.size=8M", &target,
                        error()));
    OK(cobweb_job_start(ctx, "backup",
                        "device=vda,target=t0,sync=full,job-id=b0,auto-dismiss=off,ram-cache.capacity=16M", &job, error()));
    /* The guest overwrites every block meanwhile, backwards. */
    for (i = BLOCKS - 1; i >= 0; i--) {
        memset(block, 0xa0 + i % 16, LEN);
        CHECK(cobweb_pwrite(d, block, LEN, (uint64_t)i * LEN, 0) == LEN);
    }
    OK(cobweb_job_find(ctx, "b0", &same));
    OK(cobweb_job_query(same, &info));
    CHECK(info.total == SIZE);
    OK(cobweb_job_wait(job, 60LL * 1000000000));
    OK(cobweb_job_query(job, &info));
    CHECK(info.state == COBWEB_JOB_CONCLUDED && info.err == 0 && info.current == info.total);
    CHECK(cobweb_job_report(job, &report) == 0);
    OK(cobweb_stats_get(ctx, "vda", &stats));
    CHECK(stats.wr_ops >= BLOCKS);
    OK(cobweb_stats_hist(ctx, "b0", "total", &hist));
    OK(cobweb_job_dismiss(job));
    cobweb_job_unref(same);
    cobweb_job_unref(job);

    OK(cobweb_disk_new(ctx, "t", &t, error()));
    OK(cobweb_disk_insert(t, target, error()));
    CHECK(cobweb_pread(t, after, SIZE, 0, 0) == SIZE);
    CHECK(memcmp(before, after, SIZE) == 0);
    CHECK(cobweb_pread(d, after, SIZE, 0, 0) == SIZE);
    CHECK(memcmp(before, after, SIZE) != 0);
    cobweb_node_unref(target);
    cobweb_disk_free(t);

    /* The target fails: the guest does not notice, the job does, and says where. */
    fill_disk(d);
    OK(cobweb_node_open(ctx, "{\"driver\":\"fault\",\"node-name\":\"bad\",\"rules\":[{\"op\":\"write\",\"action\":\"error\",\"errno\":\"ENOSPC\"}],"
                             "\"file\":{\"driver\":\"memory\",\"size\":8388608}}", &target, error()));
    OK(cobweb_job_start(ctx, "backup", "device=vda,target=bad,sync=full,job-id=b1,auto-dismiss=off", &job, error()));
    for (i = 0; i < BLOCKS; i++)
        CHECK(cobweb_pwrite(d, block, LEN, (uint64_t)i * LEN, 0) == LEN);
    FAILS(ENOSPC, cobweb_job_wait(job, 60LL * 1000000000));
    CHECK(cobweb_job_report(job, &report) == 1);
    CHECK(report.err == -ENOSPC && report.side == COBWEB_SIDE_TARGET && report.op == COBWEB_OP_WRITE);
    OK(cobweb_job_dismiss(job));
    cobweb_job_unref(job);
    cobweb_node_unref(target);

    /* A target that never answers: cancel is bounded, the guest goes on. */
    fill_disk(d);
    memset(block, 0x5a, LEN);
    OK(cobweb_node_open(ctx, "{\"driver\":\"fault\",\"node-name\":\"dead\",\"rules\":[{\"op\":\"write\",\"action\":\"hang\"}],"
                             "\"file\":{\"driver\":\"memory\",\"size\":8388608}}", &target, error()));
    OK(cobweb_job_start(ctx, "backup", "device=vda,target=dead,sync=full,job-id=b2,auto-dismiss=off,ram-cache.capacity=4M",
                        &job, error()));
    CHECK(cobweb_pwrite(d, block, LEN, 0, 0) == LEN);
    FAILS(ETIMEDOUT, cobweb_job_wait(job, 50000000));
    OK(cobweb_job_cancel(job));
    FAILS(ECANCELED, cobweb_job_wait(job, 10LL * 1000000000));
    CHECK(cobweb_pwrite(d, block, LEN, SIZE - LEN, 0) == LEN);
    cobweb_job_unref(job);
    cobweb_node_unref(target);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
