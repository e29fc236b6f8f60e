#define _GNU_SOURCE
/* Several threads with a queue each on one disk; each reads back what it wrote. */
#include "common.h"

#include <pthread.h>

enum { THREADS = 4, LEN = 8192 };
static cobweb_disk *disk;

static void *body(void *arg)
{
    int me = *(int *)arg, i, n = rounds(2000);
    cobweb_queue *q = NULL;
    void *mem = NULL;
    unsigned char *buf;
    struct iovec iov;

    CHECK(posix_memalign(&mem, 4096, LEN) == 0);
    buf = mem;
    OK(cobweb_queue_new(disk, 4, &q, NULL));
    for (i = 0; i < n; i++) {
        uint64_t at = ((uint64_t)(i % 64) * THREADS + (uint64_t)me) * LEN;
        memset(buf, me * 31 + i, LEN);
        CHECK(one(q, req_write(buf, LEN, at, &iov)).res == LEN);
        memset(buf, 0, LEN);
        CHECK(one(q, req_read(buf, LEN, at, &iov)).res == LEN);
        CHECK(buf[0] == (unsigned char)(me * 31 + i) && buf[LEN - 1] == (unsigned char)(me * 31 + i));
    }
    cobweb_queue_free(q);
    free(buf);
    return NULL;
}

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    char options[256];
    pthread_t t[THREADS];
    int id[THREADS], i;

    snprintf(options, sizeof options, "driver=raw,file.driver=file,file.filename=%s,file.cache.direct=on",
             temp_file((unsigned long long)LEN * THREADS * 64));
    disk = new_disk(ctx, "vda", options);
    for (i = 0; i < THREADS; i++) {
        id[i] = i;
        CHECK(pthread_create(&t[i], NULL, body, &id[i]) == 0);
    }
    for (i = 0; i < THREADS; i++)
        CHECK(pthread_join(t[i], NULL) == 0);
    cobweb_disk_free(disk);
    cobweb_ctx_free(ctx);
    return 0;
}
