/* An epoll loop on the queue's descriptor, as a hypervisor has it: nothing is lost, and an idle queue is not readable. */
#include "common.h"

#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { DEPTH = 16, LEN = 4096 };

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    char options[256];
    cobweb_disk *d;
    cobweb_queue *q = NULL;
    static unsigned char buf[DEPTH][LEN] __attribute__((aligned(4096)));
    struct iovec iov[DEPTH];
    struct epoll_event ev = { .events = EPOLLIN };
    struct pollfd idle;
    int ep, fd, i, sent = 0, done = 0, spins = 0, total = DEPTH * rounds(1250);

    snprintf(options, sizeof options, "driver=raw,file.driver=file,file.filename=%s,file.cache.direct=on", temp_file(1 << 24));
    d = new_disk(ctx, "vda", options);
    OK(cobweb_queue_new(d, DEPTH, &q, error()));
    fd = (int)OK(cobweb_queue_fd(q));
    ep = (int)OK(epoll_create1(0));
    CHECK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev) == 0);
    for (i = 0; i < DEPTH; i++) {
        cobweb_req r = req_write(buf[i], LEN, (uint64_t)i * LEN, &iov[i]);
        r.user_data = (uint64_t)i;
        CHECK(cobweb_submit(q, &r, 1) == 1);
        sent++;
    }
    while (done < total) {
        cobweb_cqe c[DEPTH];
        int n;
        /* The kernel interrupts a sleeping thread to complete its requests; 10 s without an event is a lost completion. */
        do
            n = epoll_wait(ep, &ev, 1, 10000);
        while (n < 0 && errno == EINTR);
        CHECK(n == 1);
        n = cobweb_reap(q, c, DEPTH, 0, 0);
        OK(n);
        spins += n == 0;
        done += n;
        for (i = 0; i < n; i++) {
            int slot = (int)c[i].user_data;
            cobweb_req r;
            CHECK(c[i].res == LEN);
            if (sent == total)
                continue;
            r = req_write(buf[slot], LEN, (uint64_t)(sent % 4096) * LEN, &iov[slot]);
            r.user_data = (uint64_t)slot;
            CHECK(cobweb_submit(q, &r, 1) == 1);
            sent++;
        }
    }
    CHECK(done == total && sent == total);
    /* The descriptor calms down after a few empty reaps at most. */
    for (i = 0; i < 64; i++) {
        cobweb_cqe c;
        CHECK(cobweb_reap(q, &c, 1, 0, 0) == 0);
    }
    idle.fd = fd;
    idle.events = POLLIN;
    CHECK(poll(&idle, 1, 0) == 0);
    CHECK(spins < total);

    /* Disarmed, the descriptor stays quiet; the completion is there all the same. */
    OK(cobweb_queue_arm(q, 0));
    {
        cobweb_req r = req_read(buf[0], LEN, 0, &iov[0]);
        cobweb_cqe c;
        CHECK(cobweb_submit(q, &r, 1) == 1);
        CHECK(cobweb_reap(q, &c, 1, 1, -1) == 1);
        CHECK(c.res == LEN);
        CHECK(poll(&idle, 1, 0) == 0);
    }
    OK(cobweb_queue_arm(q, 1));
    close(ep);
    cobweb_queue_free(q);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
