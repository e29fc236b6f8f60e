/* NULL for every required pointer gives an error, NULL for every free is allowed (C24). */
#include "common.h"

int main(void)
{
    cobweb_ctx *ctx = NULL, *good = new_ctx();
    cobweb_disk *disk = NULL, *d = new_disk(good, "vda", "driver=memory,size=1M");
    cobweb_node *node = NULL;
    cobweb_queue *queue = NULL, *q = NULL;
    cobweb_job *job = NULL;
    cobweb_group *group = NULL;
    cobweb_export *x = NULL;
    cobweb_cqe c;
    cobweb_req r;
    cobweb_extent ext;
    cobweb_event ev = { .struct_size = sizeof ev };
    uint32_t iter = 0;

    OK(cobweb_queue_new(d, 4, &q, NULL));
    FAILS(EFAULT, cobweb_ctx_new(NULL, NULL, NULL, error()));
    FAILS(EFAULT, cobweb_ctx_start(NULL, error()));
    FAILS(EFAULT, cobweb_ctx_run(NULL, 0));
    FAILS(EFAULT, cobweb_ctx_query(NULL, "nodes", NULL, 0));
    FAILS(EFAULT, cobweb_ctx_query(good, NULL, NULL, 0));
    FAILS(EFAULT, cobweb_event_fd(NULL));
    FAILS(EFAULT, cobweb_event_next(NULL, &ev));
    FAILS(EFAULT, cobweb_event_next(good, NULL));
    FAILS(EFAULT, cobweb_has(NULL));
    FAILS(EFAULT, cobweb_node_open(NULL, "driver=memory,size=1", &node, error()));
    FAILS(EFAULT, cobweb_node_open(good, NULL, &node, error()));
    FAILS(EFAULT, cobweb_node_open(good, "driver=memory,size=1", NULL, error()));
    FAILS(EFAULT, cobweb_node_create(good, NULL, error()));
    FAILS(EFAULT, cobweb_node_find(good, NULL, &node));
    FAILS(EFAULT, cobweb_node_find(good, "vda", NULL));
    FAILS(EFAULT, cobweb_node_set(NULL, "a", "b", error()));
    FAILS(EFAULT, cobweb_node_get(NULL, "a", NULL, 0, error()));
    FAILS(EFAULT, cobweb_node_register(good, "be", NULL, NULL, &node, error()));
    FAILS(EFAULT, cobweb_prop_next(NULL, &iter, NULL));
    FAILS(EFAULT, cobweb_prop_next("file", NULL, NULL));
    FAILS(EFAULT, cobweb_disk_new(NULL, "x", &disk, error()));
    FAILS(EFAULT, cobweb_disk_new(good, "x", NULL, error()));
    FAILS(EFAULT, cobweb_disk_insert(NULL, NULL, error()));
    FAILS(EFAULT, cobweb_disk_filter_add(d, NULL, NULL, error()));
    FAILS(EFAULT, cobweb_disk_filter_del(d, NULL, error()));
    FAILS(EFAULT, cobweb_disk_limits(d, NULL));
    FAILS(EFAULT, cobweb_disk_set(d, NULL, "1", error()));
    FAILS(EFAULT, cobweb_queue_new(NULL, 1, &queue, error()));
    FAILS(EFAULT, cobweb_queue_new(d, 1, NULL, error()));
    FAILS(EFAULT, cobweb_queue_fd(NULL));
    FAILS(EFAULT, cobweb_queue_arm(NULL, 1));
    FAILS(EFAULT, cobweb_submit(NULL, &r, 1));
    FAILS(EFAULT, cobweb_submit(q, NULL, 1));
    FAILS(EFAULT, cobweb_reap(NULL, &c, 1, 0, 0));
    FAILS(EFAULT, cobweb_reap(q, NULL, 1, 0, 0));
    FAILS(EFAULT, cobweb_cancel(NULL, 0));
    FAILS(EFAULT, cobweb_pread(d, NULL, 1, 0, 0));
    FAILS(EFAULT, cobweb_pwrite(d, NULL, 1, 0, 0));
    FAILS(EFAULT, cobweb_pread(NULL, &c, 1, 0, 0));
    FAILS(EFAULT, cobweb_write_zeroes(NULL, 0, 1, 0));
    FAILS(EFAULT, cobweb_discard(NULL, 0, 1));
    FAILS(EFAULT, cobweb_flush(NULL));
    FAILS(EFAULT, cobweb_block_status(NULL, 0, 1, &ext, 1));
    FAILS(EFAULT, cobweb_block_status(d, 0, 1, NULL, 1));
    FAILS(EFAULT, cobweb_job_start(good, NULL, "a=b", &job, error()));
    FAILS(EFAULT, cobweb_job_start(good, "backup", NULL, &job, error()));
    FAILS(EFAULT, cobweb_job_find(good, NULL, &job));
    FAILS(EFAULT, cobweb_job_query(NULL, NULL));
    FAILS(EFAULT, cobweb_job_report(NULL, NULL));
    FAILS(EFAULT, cobweb_job_pause(NULL));
    FAILS(EFAULT, cobweb_job_resume(NULL));
    FAILS(EFAULT, cobweb_job_cancel(NULL));
    FAILS(EFAULT, cobweb_job_finalize(NULL, error()));
    FAILS(EFAULT, cobweb_job_dismiss(NULL));
    FAILS(EFAULT, cobweb_job_set_speed(NULL, 1));
    FAILS(EFAULT, cobweb_job_set_priority(NULL, 1));
    FAILS(EFAULT, cobweb_job_wait(NULL, 0));
    FAILS(EFAULT, cobweb_group_new(good, NULL, NULL, error()));
    FAILS(EFAULT, cobweb_group_add(NULL, "backup", "a=b", &job, error()));
    FAILS(EFAULT, cobweb_group_start(NULL, error()));
    FAILS(EFAULT, cobweb_export_start(good, NULL, "a=b", &x, error()));
    FAILS(EFAULT, cobweb_stats_get(good, NULL, NULL));
    FAILS(EFAULT, cobweb_stats_hist(good, "vda", NULL, NULL));

    /* Outputs are written only on success; errors without a place for text are fine. */
    CHECK(!ctx && !node && !disk && !queue && !job && !group && !x);
    FAILS(EFAULT, cobweb_node_open(good, NULL, &node, NULL));

    /* A handle of another kind is told. */
    FAILS(EINVAL, cobweb_queue_fd((cobweb_queue *)d));
    FAILS(EINVAL, cobweb_flush((cobweb_disk *)good));

    cobweb_node_unref(NULL);
    cobweb_disk_free(NULL);
    cobweb_queue_free(NULL);
    cobweb_job_unref(NULL);
    cobweb_group_free(NULL);
    cobweb_export_stop(NULL);
    cobweb_ctx_free(NULL);
    cobweb_io_complete(NULL, 0);

    cobweb_queue_free(q);
    cobweb_disk_free(d);
    cobweb_ctx_free(good);
    return 0;
}
