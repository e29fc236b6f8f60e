/* Counters count what was done; histograms have the buckets of the header. */
#include "common.h"

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    cobweb_disk *d = new_disk(ctx, "vda", "driver=memory,size=1M");
    cobweb_stats s = { .struct_size = sizeof s };
    cobweb_node *cbw = NULL;
    cobweb_hist h = { .struct_size = sizeof h };
    static unsigned char b[65536];
    char text[4096];
    uint64_t sum = 0;
    int i;

    memset(b, 1, sizeof b);
    CHECK(cobweb_pwrite(d, b, 4096, 0, 0) == 4096);
    CHECK(cobweb_pread(d, b, 512, 0, 0) == 512);
    FAILS(EIO, cobweb_pread(d, b, 512, 1 << 20, 0));
    OK(cobweb_flush(d));
    OK(cobweb_stats_get(ctx, "vda", &s));
    CHECK(s.wr_ops == 1 && s.wr_bytes == 4096 && s.rd_ops == 1 && s.rd_bytes == 512 && s.flush_ops == 1 && s.failed == 1);
    CHECK(s.in_flight == 0);
    FAILS(ENOENT, cobweb_stats_get(ctx, "nobody", &s));
    FAILS(ENOENT, cobweb_stats_hist(ctx, "vda", "no-such", &h));

    OK(cobweb_disk_filter_add(d, "driver=copy-before-write,node-name=c,target.driver=memory,target.size=1M", &cbw, error()));
    for (i = 0; i < 16; i++)
        CHECK(cobweb_pwrite(d, b, 4096, (uint64_t)i * 65536, 0) == 4096);
    OK(cobweb_stats_get(ctx, "c", &s));
    CHECK(s.cbw_guest_bytes == 16 * 4096 && s.cbw_copied_bytes == 16 * 65536);
    OK(cobweb_stats_hist(ctx, "c", "total", &h));
    CHECK(h.count >= 16 && h.sum_ns > 0);
    for (i = 0; i < 128; i++)
        sum += h.bucket[i];
    CHECK(sum == h.count);
    CHECK(cobweb_ctx_query(ctx, "stats:c", text, sizeof text) > 0);
    CHECK(strstr(text, "\"cbw-copied-bytes\":1048576") != NULL);
    CHECK(cobweb_ctx_query(ctx, "nodes", NULL, 0) > 0);
    OK(cobweb_disk_filter_del(d, cbw, error()));
    cobweb_node_unref(cbw);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
