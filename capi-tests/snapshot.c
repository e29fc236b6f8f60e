/* snapshot-access: the read-only view of the instant, while the guest writes on (pull backup). */
#include "common.h"

enum { SIZE = 1 << 20 };

int main(void)
{
    static unsigned char old[SIZE], new[SIZE], got[SIZE];
    cobweb_ctx *ctx = new_ctx();
    cobweb_disk *d = new_disk(ctx, "vda", "driver=memory,size=1M"), *view;
    cobweb_node *temp = NULL, *cbw = NULL;
    cobweb_extent x[4];

    memset(old, 0x11, SIZE);
    memset(new, 0x22, SIZE);
    CHECK(cobweb_pwrite(d, old, SIZE, 0, 0) == SIZE);
    OK(cobweb_node_open(ctx, "driver=memory,node-name=temp,size=1M", &temp, error()));
    OK(cobweb_disk_filter_add(d, "driver=copy-before-write,node-name=cbw0,target=temp", &cbw, error()));
    view = new_disk(ctx, "view", "driver=snapshot-access,file=cbw0");
    CHECK(cobweb_pwrite(d, new, SIZE / 2, 1000, 0) == SIZE / 2);
    CHECK(cobweb_pread(view, got, SIZE, 0, 0) == SIZE);
    CHECK(memcmp(got, old, SIZE) == 0);
    CHECK(cobweb_pread(d, got, SIZE / 2, 1000, 0) == SIZE / 2);
    CHECK(memcmp(got, new, SIZE / 2) == 0);
    FAILS(EACCES, cobweb_pwrite(view, new, 512, 0, 0));
    CHECK(cobweb_block_status(view, 0, SIZE, x, 4) >= 1);
    CHECK(x[0].flags & COBWEB_EXT_ALLOCATED);
    /* What the reader has discarded is released: reads fail, status says so. */
    OK(cobweb_discard(view, 0, 131072));
    FAILS(EACCES, cobweb_pread(view, got, 512, 0, 0));
    CHECK(cobweb_block_status(view, 0, SIZE, x, 4) >= 2);
    CHECK(x[0].flags & COBWEB_EXT_NO_ACCESS);
    CHECK(cobweb_pread(view, got, 512, SIZE - 512, 0) == 512);

    cobweb_disk_free(view);
    OK(cobweb_disk_filter_del(d, cbw, error()));
    cobweb_node_unref(cbw);
    cobweb_node_unref(temp);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
