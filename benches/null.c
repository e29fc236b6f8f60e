/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * null [SECONDS [DEPTH]]: requests per second that the C queue API carries to a node that does nothing, with one thread and one queue. Reads of
 * 4 KiB, as `qemu-img bench --image-opts driver=null-co` does them.
 *
 *   make -C benches null && ../target/release/null
 */
#include <cobweb.h>

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LEN = 4096, DEPTH_MAX = 4096 };

static void check(int64_t result, const char *what)
{
    if (result < 0) {
        fprintf(stderr, "%s: %s\n", what, strerror((int)-result));
        exit(1);
    }
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    static cobweb_req req[DEPTH_MAX];
    static cobweb_cqe done[DEPTH_MAX];
    static struct iovec iov[DEPTH_MAX];
    double seconds = argc > 1 ? atof(argv[1]) : 5;
    int depth = argc > 2 ? atoi(argv[2]) : 32;
    cobweb_ctx *ctx = NULL;
    cobweb_node *node = NULL;
    cobweb_disk *disk = NULL;
    cobweb_queue *queue = NULL;
    unsigned long long count = 0, rounds = 0;
    unsigned char *memory;
    double start, end;
    int i, idle;

    if (seconds <= 0 || depth < 1 || depth > DEPTH_MAX) {
        fprintf(stderr, "usage: %s [SECONDS [DEPTH]]\n", argv[0]);
        return 2;
    }
    check(cobweb_ctx_new(NULL, NULL, &ctx, NULL), "cobweb_ctx_new");
    check(cobweb_ctx_start(ctx, NULL), "cobweb_ctx_start");
    check(cobweb_node_open(ctx, "driver=null-co,size=1G", &node, NULL), "cobweb_node_open");
    check(cobweb_disk_new(ctx, "vda", &disk, NULL), "cobweb_disk_new");
    check(cobweb_disk_insert(disk, node, NULL), "cobweb_disk_insert");
    check(cobweb_queue_new(disk, (uint32_t)depth, &queue, NULL), "cobweb_queue_new");
    memory = calloc((size_t)depth, LEN);
    if (!memory)
        return 1;
    for (i = 0; i < depth; i++) {
        iov[i].iov_base = memory + (size_t)i * LEN;
        iov[i].iov_len = LEN;
    }
    /* req[0] to req[idle - 1] are to be submitted next; user_data says which buffer a request has. */
    for (idle = 0; idle < depth; idle++)
        req[idle].user_data = (uint64_t)idle;
    start = now();
    do {
        int reaped;

        for (i = 0; i < idle; i++) {
            req[i].op = COBWEB_OP_READ;
            req[i].iov = &iov[req[i].user_data];
            req[i].iovcnt = 1;
            req[i].offset = (count + (unsigned)i) * LEN % (1u << 30);
            req[i].len = LEN;
        }
        i = cobweb_submit(queue, req, (uint32_t)idle);
        check(i == idle ? 0 : i < 0 ? i : -EAGAIN, "cobweb_submit");
        reaped = cobweb_reap(queue, done, (uint32_t)depth, 1, -1);
        check(reaped, "cobweb_reap");
        for (idle = 0; idle < reaped; idle++) {
            check(done[idle].res, "read");
            req[idle].user_data = done[idle].user_data;
        }
        count += (unsigned)reaped;
        end = ++rounds % 64 ? start : now();
    } while (end - start < seconds);
    printf("%.0f requests/s (depth %d)\n", (double)count / (end - start), depth);
    cobweb_queue_free(queue);
    cobweb_disk_free(disk);
    cobweb_node_unref(node);
    cobweb_ctx_free(ctx);
    free(memory);
    return 0;
}
