/* Numbers outside of every enumeration, reserved fields that are not zero, struct sizes of other versions (C9, C24). */
#include "common.h"

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    cobweb_disk *d = new_disk(ctx, "vda", "driver=memory,size=64k");
    cobweb_queue *q = NULL;
    unsigned char buf[512] = { 0 };
    struct iovec iov;
    cobweb_req r;
    int i;

    OK(cobweb_queue_new(d, 4, &q, error()));
    for (i = 9; i < 70000; i = i < 64 ? i + 1 : i * 2) {
        r = req_read(buf, sizeof buf, 0, &iov);
        r.op = (uint16_t)i;
        if (r.op <= COBWEB_OP_OPEN)
            continue;
        CHECK(one(q, r).res == -ENOTSUP);
    }
    for (i = 0; i < 16; i++) {
        r = req_read(buf, sizeof buf, 0, &iov);
        r.flags = (uint16_t)(1u << i);
        CHECK(one(q, r).res == ((1 << i) == COBWEB_F_REGISTERED || (1 << i) == COBWEB_F_COPY_IOV ? 512 : -EINVAL));
    }
    r = req_read(buf, sizeof buf, 0, &iov);
    r.prio = 17;
    CHECK(one(q, r).res == -EINVAL);
    r = req_read(buf, sizeof buf, 0, &iov);
    r.rsv0 = 1;
    CHECK(one(q, r).res == -EINVAL);
    r = req_read(buf, sizeof buf, 0, &iov);
    r.rsv1 = 1;
    CHECK(one(q, r).res == -EINVAL);
    FAILS(EINVAL, cobweb_write_zeroes(d, 0, 1, 1u << 20));
    FAILS(EINVAL, cobweb_pread(d, buf, 1, 0, COBWEB_F_MAY_UNMAP));
    CHECK(strcmp(cobweb_code_str(123456), "unknown") == 0);
    FAILS(EINVAL, cobweb_disk_set(d, "no-such", "1", error()));
    CHECK(strstr(error()->msg, "") != NULL);

    /* Unknown keys and drivers name the key. */
    {
        cobweb_node *n = NULL;
        cobweb_error *e = error();
        FAILS(EINVAL, cobweb_node_open(ctx, "driver=memory,size=1M,colour=red", &n, e));
        CHECK(strstr(e->msg, "colour") != NULL);
        e = error();
        FAILS(ENOENT, cobweb_node_open(ctx, "driver=floppy", &n, e));
        CHECK(strstr(e->msg, "floppy") != NULL);
        FAILS(EINVAL, cobweb_node_open(ctx, "size=1M", &n, error()));
        FAILS(EINVAL, cobweb_node_open(ctx, "{\"driver\":", &n, error()));
    }

    /* Sized structs: smaller, larger, larger with something in the tail. */
    {
        struct {
            cobweb_limits l;
            unsigned char tail[32];
        } big;
        struct {
            cobweb_backend_ops o;
            unsigned char tail[32];
        } ops;
        cobweb_limits l;
        cobweb_node *n = NULL;

        memset(&l, 0x55, sizeof l);
        l.struct_size = offsetof(cobweb_limits, max_zeroes);
        OK(cobweb_disk_limits(d, &l));
        CHECK(l.size == 65536 && l.max_zeroes == 0x5555555555555555ull);
        memset(&big, 0x55, sizeof big);
        big.l.struct_size = sizeof big;
        OK(cobweb_disk_limits(d, &big.l));
        CHECK(big.l.size == 65536 && big.tail[0] == 0 && big.tail[31] == 0);
        l.struct_size = 3;
        FAILS(EINVAL, cobweb_disk_limits(d, &l));
        l.struct_size = 1u << 30;
        FAILS(EINVAL, cobweb_disk_limits(d, &l));
        memset(&ops, 0, sizeof ops);
        ops.o.struct_size = sizeof ops;
        ops.tail[7] = 1;
        FAILS(E2BIG, cobweb_node_register(ctx, "be", &ops.o, NULL, &n, error()));
        ops.tail[7] = 0; /* now only submit is missing */
        FAILS(EINVAL, cobweb_node_register(ctx, "be", &ops.o, NULL, &n, error()));
    }
    cobweb_queue_free(q);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
