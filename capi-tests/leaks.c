/* Contexts that come and go leave no thread and no descriptor behind, whether their handles go before them or after. */
#include "common.h"

#include <dirent.h>
#include <sched.h>

static int count(const char *dir)
{
    DIR *d = opendir(dir);
    int n = 0;
    CHECK(d != NULL);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* Threads of this process, once there are at most `n`: one that was joined may be listed for a moment more. */
static int threads(int n)
{
    int i;
    for (i = 0; i < 1000000 && count("/proc/self/task") > n; i++)
        sched_yield();
    return count("/proc/self/task");
}

static void once(const char *path, int i)
{
    static unsigned char b[4096];
    char text[128];
    cobweb_ctx *ctx = new_ctx();
    cobweb_disk *d;
    cobweb_queue *q = NULL;
    struct iovec iov;
    cobweb_job *job = NULL;
    cobweb_node *t = NULL;

    snprintf(text, sizeof text, "driver=file,filename=%s", path);
    d = new_disk(ctx, "vda", text);
    OK(cobweb_node_open(ctx, "driver=memory,node-name=t,size=1M", &t, error()));
    OK(cobweb_queue_new(d, 8, &q, error()));
    CHECK(cobweb_queue_fd(q) >= 0);
    CHECK(one(q, req_write(b, sizeof b, (uint64_t)(i % 256) * 4096, &iov)).res == (int64_t)sizeof b);
    OK(cobweb_job_start(ctx, "backup", "job-id=j,device=vda,target=t,sync=none", &job, error()));
    CHECK(cobweb_pwrite(d, b, sizeof b, 0, 0) == (int64_t)sizeof b);
    cobweb_queue_free(q);
    if (i % 2) {
        cobweb_ctx_free(ctx); /* with a job that runs, and before the handles */
        cobweb_job_unref(job);
        cobweb_node_unref(t);
        cobweb_disk_free(d);
    } else {
        cobweb_job_unref(job);
        cobweb_node_unref(t);
        cobweb_disk_free(d);
        cobweb_ctx_free(ctx);
    }
}

int main(void)
{
    const char *path = temp_file(1 << 20);
    int i, fds, n = rounds(200);

    for (i = 0; i < 4; i++)
        once(path, i);
    CHECK(threads(3) == 3); /* ".", ".." and this one */
    fds = count("/proc/self/fd");
    for (i = 0; i < n; i++)
        once(path, i);
    CHECK(threads(3) == 3);
    CHECK(count("/proc/self/fd") == fds);
    return 0;
}
