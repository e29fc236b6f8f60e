/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * backup TARGET: a live backup with a RAM cache. A guest goes on writing to a disk while the new file TARGET slowly receives that disk as it
 * was when the backup began. At the end the program compares the two.
 *
 *   cc -o backup backup.c $(pkg-config --cflags --libs cobweb)
 */
#include <cobweb.h>

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 64 << 20, BLOCK = 32 << 10 };

/* Of a real disk: "driver=raw,file.driver=file,file.filename=disk.raw,file.cache.direct=on". */
static const char source_options[] = "driver=memory,size=64M";

static cobweb_error err = { sizeof(cobweb_error), 0, 0, 0, { 0 } };

/* Functions return a negative errno when they fail; those that take a cobweb_error put a sentence there. */
static int64_t check(int64_t result, const char *what)
{
    if (result < 0) {
        fprintf(stderr, "%s: %s\n", what, err.msg[0] ? err.msg : strerror((int)-result));
        exit(1);
    }
    return result;
}

static cobweb_node *open_node(cobweb_ctx *ctx, const char *options)
{
    cobweb_node *node = NULL;

    check(cobweb_node_open(ctx, options, &node, &err), options);
    return node;
}

int main(int argc, char **argv)
{
    static unsigned char then[SIZE], got[SIZE], block[BLOCK];
    char options[4352];
    cobweb_ctx *ctx = NULL;
    cobweb_node *source, *target;
    cobweb_disk *disk = NULL, *copy = NULL;
    cobweb_job *job = NULL;
    cobweb_job_info info = { .struct_size = sizeof info };
    unsigned long writes = 0;
    uint64_t at = 0;
    size_t i;
    int result;

    if (argc != 2) {
        fprintf(stderr, "usage: %s TARGET\n", argv[0]);
        return 2;
    }
    check(cobweb_ctx_new(NULL, NULL, &ctx, &err), "context");
    check(cobweb_ctx_start(ctx, &err), "context");

    /* The disk is what a guest's device is attached to; the nodes below it may change while it is in use. */
    source = open_node(ctx, source_options);
    check(cobweb_disk_new(ctx, "vda", &disk, &err), "disk");
    check(cobweb_disk_insert(disk, source, &err), "disk");
    for (i = 0; i < SIZE; i++)
        then[i] = (unsigned char)(i * 2654435761u >> 24);
    check(cobweb_pwrite(disk, then, SIZE, 0, 0), "fill");

    /* A target of the same size that takes 20 MB/s. In option text a comma inside a value is doubled. */
    snprintf(options, sizeof options, "driver=file,filename=%s,size=64M", argv[1]);
    check(cobweb_node_create(ctx, options, &err), argv[1]);
    snprintf(options, sizeof options, "driver=throttle,node-name=slow,limits.bps-write=20000000,file.driver=file,file.filename=%s", argv[1]);
    target = open_node(ctx, options);

    /* The instant. Old data that the guest overwrites is parked in up to 64 MiB of memory. */
    check(cobweb_job_start(ctx, "backup", "job-id=b0,device=vda,target=slow,sync=full,ram-cache.capacity=64M", &job, &err), "backup");

    /* The guest goes on. */
    memset(block, 0xee, sizeof block);
    while ((result = cobweb_job_wait(job, 1000000)) == -ETIMEDOUT) {
        check(cobweb_pwrite(disk, block, BLOCK, at, 0), "guest write");
        at = (at + 101 * (uint64_t)BLOCK) % SIZE;
        if (writes++ % 500 == 0) {
            check(cobweb_job_query(job, &info), "query");
            printf("%5.1f %%\n", 100.0 * (double)info.current / (double)info.total);
        }
    }
    if (result < 0) {
        cobweb_report why = { .struct_size = sizeof why };

        if (cobweb_job_report(job, &why) > 0)
            fprintf(stderr, "%s at %llu of node %s\n", cobweb_code_str(why.code), (unsigned long long)why.offset, why.node);
        check(result, "backup");
    }
    cobweb_job_unref(job);

    check(cobweb_disk_new(ctx, "copy", &copy, &err), "copy");
    check(cobweb_disk_insert(copy, target, &err), "copy");
    check(cobweb_pread(copy, got, SIZE, 0, 0), "compare");
    printf("%lu writes by the guest; the backup %s the instant\n", writes, memcmp(got, then, SIZE) ? "DIFFERS from" : "equals");

    cobweb_disk_free(copy);
    cobweb_disk_free(disk);
    cobweb_node_unref(target);
    cobweb_node_unref(source);
    cobweb_ctx_free(ctx);
    return memcmp(got, then, SIZE) != 0;
}
