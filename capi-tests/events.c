/* The event descriptor is readable while events wait; a job's states arrive in order. */
#include "common.h"

#include <poll.h>

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    cobweb_disk *d = new_disk(ctx, "vda", "driver=memory,size=1M");
    cobweb_node *target = NULL;
    cobweb_job *job = NULL;
    cobweb_event ev = { .struct_size = sizeof ev };
    struct pollfd p = { .events = POLLIN };
    uint64_t seen = 0, last = 0;

    p.fd = (int)OK(cobweb_event_fd(ctx));
    CHECK(cobweb_event_next(ctx, &ev) == 0);
    CHECK(poll(&p, 1, 0) == 0);
    OK(cobweb_node_open(ctx, "driver=memory,node-name=t,size=1M", &target, error()));
    OK(cobweb_job_start(ctx, "backup", "device=vda,target=t,sync=full,job-id=j,auto-dismiss=off", &job, error()));
    while (seen != COBWEB_JOB_CONCLUDED) {
        CHECK(poll(&p, 1, 10000) == 1);
        while (cobweb_event_next(ctx, &ev) == 1) {
            CHECK(ev.seq > last);
            last = ev.seq;
            if (ev.type == COBWEB_EV_JOB && strcmp(ev.source, "j") == 0)
                seen = ev.value;
        }
    }
    CHECK(poll(&p, 1, 0) == 0);
    OK(cobweb_job_dismiss(job));
    cobweb_job_unref(job);
    cobweb_node_unref(target);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
