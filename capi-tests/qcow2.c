/* qcow2 as a hypervisor uses it: an overlay is created, opened with its chain, written, mapped, asked about and checked. */
#include "common.h"

#include <unistd.h>

#define MIB (1024 * 1024)

static char text[16384];

static const char *get(cobweb_node *n, const char *key)
{
    long long len = OK(cobweb_node_get(n, key, text, sizeof text, error()));
    CHECK(len < (long long)sizeof text);
    return text;
}

static int has(const char *json, const char *part)
{
    if (strstr(json, part) != NULL)
        return 1;
    fprintf(stderr, "no %s in %s\n", part, json);
    return 0;
}

int main(void)
{
    static unsigned char block[4096], seen[8192];
    cobweb_ctx *ctx = new_ctx();
    const char *base = temp_file(8 * MIB);
    char image[600], options[2048];
    cobweb_node *node;
    cobweb_disk *disk;
    cobweb_extent x[16];
    cobweb_error e = { .struct_size = sizeof e };
    cobweb_prop p = { .struct_size = sizeof p };
    uint32_t iter = 0;
    unsigned long long at = 0;
    int n, i, found = 0, own = 0;

    while (cobweb_prop_next("create:qcow2", &iter, &p) == 1)
        found += !strcmp(p.name, "cluster-size") || !strcmp(p.name, "backing-file");
    CHECK(found == 2);

    snprintf(image, sizeof image, "%s.qcow2", base);
    unlink(image);
    snprintf(options, sizeof options, "driver=qcow2,filename=%s,backing-file=%s,backing-fmt=raw", image, base);
    OK(cobweb_node_create(ctx, options, error()));
    FAILS(EEXIST, cobweb_node_create(ctx, options, error()));
    FAILS(EINVAL, cobweb_node_create(ctx, "driver=qcow2,filename=/nowhere/x,size=1M,cluster-size=3K", &e));
    CHECK(strstr(e.msg, "cluster") != NULL);
    FAILS(ENOENT, cobweb_node_create(ctx, "driver=qcow2,filename=/nowhere/x,size=1M", error()));

    /* What the image names is opened only if that is allowed. */
    snprintf(options, sizeof options, "driver=qcow2,node-name=top,file.driver=file,file.filename=%s", image);
    CHECK(cobweb_node_open(ctx, options, &node, error()) < 0);
    strcat(options, ",implicit-open=allow");
    OK(cobweb_node_open(ctx, options, &node, error()));
    OK(cobweb_disk_new(ctx, "vda", &disk, error()));
    OK(cobweb_disk_insert(disk, node, error()));

    memset(block, 0x5a, sizeof block);
    CHECK(cobweb_pwrite(disk, block, sizeof block, 4 * MIB, 0) == sizeof block);
    CHECK(cobweb_pread(disk, seen, sizeof seen, 4 * MIB, 0) == sizeof seen);
    for (i = 0; i < (int)sizeof seen; i++)
        CHECK(seen[i] == (i < (int)sizeof block ? 0x5a : 0));
    OK(cobweb_flush(disk));

    /* Sub-clusters: what was written is the top layer's, all the rest is not. */
    while (at < 8 * MIB) {
        n = (int)OK(cobweb_block_status(disk, at, 8 * MIB - at, x, 16));
        CHECK(n > 0);
        for (i = 0; i < n; i++) {
            if ((x[i].flags & COBWEB_EXT_ALLOCATED) && x[i].depth == 0) {
                CHECK(at == 4 * MIB);
                own += (int)x[i].len;
            }
            at += x[i].len;
        }
    }
    CHECK(own == sizeof block);

    get(node, "info");
    CHECK(has(text, "\"cluster-size\":131072") && has(text, "\"extended-l2\":true") && has(text, "\"virtual-size\":8388608"));
    get(node, "statistics");
    CHECK(has(text, "\"clusters-linked\":1") && has(text, "\"cow-reads\":0") && has(text, "\"barriers\":"));
    get(node, "check");
    CHECK(has(text, "\"corruptions\":0") && has(text, "\"check-errors\":0") && has(text, "\"allocated-clusters\":1"));

    cobweb_node_unref(node);
    cobweb_disk_free(disk);
    cobweb_ctx_free(ctx);
    unlink(image);
    return 0;
}
