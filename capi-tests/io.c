/* Blocking calls and queue requests see the same bytes; odd offsets, lengths and scattered memory. */
#include "common.h"

static unsigned char pattern(size_t i) { return (unsigned char)(i * 7 + i / 251); }

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    char options[256];
    static unsigned char out[300000], in[300000];
    const unsigned long long sizes[] = { 512, 4608, (1 << 20) + 512, 65536 - 512, 1000 };
    size_t i, s;

    for (i = 0; i < sizeof out; i++)
        out[i] = pattern(i);
    for (s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int direct;
        for (direct = 0; direct < 2; direct++) {
            cobweb_disk *d;
            cobweb_queue *q = NULL;
            size_t size = sizes[s], len = size < sizeof out ? size : sizeof out;
            struct iovec iov[3];
            cobweb_req r;
            cobweb_cqe c;
            cobweb_extent x[8];

            snprintf(options, sizeof options, "driver=raw,file.driver=file,file.filename=%s,file.cache.direct=%s",
                     temp_file(size), direct ? "on" : "off");
            d = new_disk(ctx, NULL, options);
            CHECK(cobweb_pwrite(d, out, len, size - len, 0) == (int64_t)len);
            memset(in, 0xee, sizeof in);
            CHECK(cobweb_pread(d, in, len, size - len, 0) == (int64_t)len);
            CHECK(memcmp(in, out, len) == 0);
            OK(cobweb_flush(d));

            OK(cobweb_queue_new(d, 8, &q, error()));
            /* An unaligned piece in three segments. */
            r = req_read(in, 0, 1, iov);
            iov[0].iov_base = in + 3;
            iov[0].iov_len = 5;
            iov[1].iov_base = in + 1000;
            iov[1].iov_len = 200;
            iov[2].iov_base = in + 5001;
            iov[2].iov_len = 100;
            r.iovcnt = 3;
            r.len = 305;
            r.user_data = 77;
            memset(in, 0, sizeof in);
            c = one(q, r);
            CHECK(c.res == 305 && c.code == 0);
            if (size == len) {
                CHECK(memcmp(in + 3, out + 1, 5) == 0);
                CHECK(memcmp(in + 1000, out + 6, 200) == 0);
                CHECK(memcmp(in + 5001, out + 206, 100) == 0);
            }
            /* FUA and zeroes, through the tail. */
            r = req_write(out, 100, size - 100, iov);
            r.flags = COBWEB_F_FUA;
            CHECK(one(q, r).res == 100);
            OK(cobweb_write_zeroes(d, size - 50, 50, COBWEB_F_MAY_UNMAP));
            CHECK(cobweb_pread(d, in, 100, size - 100, 0) == 100);
            CHECK(memcmp(in, out, 50) == 0);
            for (i = 50; i < 100; i++)
                CHECK(in[i] == 0);
            OK(cobweb_discard(d, 0, size));
            CHECK(cobweb_block_status(d, 0, size, x, 8) >= 1);
            CHECK(x[0].len >= 1 && x[0].len <= size);
            cobweb_queue_free(q);
            cobweb_disk_free(d);
        }
    }
    cobweb_ctx_free(ctx);
    return 0;
}
