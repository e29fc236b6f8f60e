/* A host backend that completes from another thread: the embedding program carries out the requests of a node. */
#include "common.h"

#include <pthread.h>

enum { SIZE = 1 << 20, RING = 256 };

struct be {
    unsigned char data[SIZE];
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct { cobweb_req r; struct iovec iov[16]; cobweb_io *io; } ring[RING];
    unsigned head, tail;
    int stop, released, flushes;
};

static int be_submit(void *p, const cobweb_req *r, cobweb_io *io)
{
    struct be *b = p;
    unsigned i;
    pthread_mutex_lock(&b->lock);
    CHECK(b->head - b->tail < RING && r->iovcnt <= 16);
    i = b->head++ % RING;
    b->ring[i].r = *r;
    if (r->iovcnt)
        memcpy(b->ring[i].iov, r->iov, r->iovcnt * sizeof *r->iov);
    b->ring[i].io = io;
    pthread_cond_signal(&b->more);
    pthread_mutex_unlock(&b->lock);
    return 0;
}

static int be_limits(void *p, cobweb_limits *out)
{
    (void)p;
    out->size = SIZE;
    out->request_align = 1;
    out->memory_align = 1;
    return 0;
}

static void be_release(void *p) { ((struct be *)p)->released++; }

static void *be_thread(void *p)
{
    struct be *b = p;
    pthread_mutex_lock(&b->lock);
    while (!b->stop || b->tail != b->head) {
        unsigned i;
        uint64_t at, n;
        cobweb_req r;
        if (b->tail == b->head) {
            pthread_cond_wait(&b->more, &b->lock);
            continue;
        }
        i = b->tail % RING;
        r = b->ring[i].r;
        at = r.offset;
        for (n = 0; n < r.iovcnt; n++) {
            struct iovec *v = &b->ring[i].iov[n];
            if (r.op == COBWEB_OP_READ)
                memcpy(v->iov_base, b->data + at, v->iov_len);
            else if (r.op == COBWEB_OP_WRITE)
                memcpy(b->data + at, v->iov_base, v->iov_len);
            at += v->iov_len;
        }
        b->flushes += r.op == COBWEB_OP_FLUSH;
        b->tail++;
        pthread_mutex_unlock(&b->lock);
        cobweb_io_complete(b->ring[i].io, r.op <= COBWEB_OP_WRITE || r.op == COBWEB_OP_FLUSH ? (int64_t)r.len : -ENOTSUP);
        pthread_mutex_lock(&b->lock);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

int main(void)
{
    static struct be b;
    cobweb_ctx *ctx = new_ctx();
    cobweb_backend_ops ops;
    cobweb_node *n = NULL;
    cobweb_disk *d = NULL;
    cobweb_queue *q = NULL;
    pthread_t t;
    static unsigned char buf[32][4096], got[4096];
    struct iovec iov[32];
    cobweb_cqe c[32];
    int i, done = 0;

    pthread_mutex_init(&b.lock, NULL);
    pthread_cond_init(&b.more, NULL);
    memset(&ops, 0, sizeof ops);
    ops.struct_size = sizeof ops;
    ops.concurrency = COBWEB_CONC_PARALLEL;
    ops.submit = be_submit;
    ops.limits = be_limits;
    ops.release = be_release;
    CHECK(pthread_create(&t, NULL, be_thread, &b) == 0);
    OK(cobweb_node_register(ctx, "be0", &ops, &b, &n, error()));
    FAILS(EBUSY, cobweb_node_register(ctx, "be0", &ops, &b, &n, error()));
    OK(cobweb_disk_new(ctx, "vda", &d, error()));
    OK(cobweb_disk_insert(d, n, error()));
    cobweb_node_unref(n);
    OK(cobweb_queue_new(d, 32, &q, error()));
    for (i = 0; i < 32; i++) {
        cobweb_req r = req_write(buf[i], 4096, (uint64_t)i * 4096, &iov[i]);
        memset(buf[i], i + 1, 4096);
        CHECK(cobweb_submit(q, &r, 1) == 1);
    }
    while (done < 32) {
        int n2 = (int)OK(cobweb_reap(q, c, 32, 1, 10LL * 1000000000));
        CHECK(n2 > 0);
        for (i = 0; i < n2; i++)
            CHECK(c[i].res == 4096);
        done += n2;
    }
    for (i = 0; i < 32; i++) {
        CHECK(b.data[i * 4096 + 5] == i + 1);
        CHECK(cobweb_pread(d, got, 4096, (uint64_t)i * 4096, 0) == 4096);
        CHECK(memcmp(got, buf[i], 4096) == 0);
    }
    /* Zeroes are not supported by this backend: they are written instead. */
    OK(cobweb_write_zeroes(d, 100, 5000, 0));
    CHECK(b.data[99] == 1 && b.data[100] == 0 && b.data[5099] == 0 && b.data[5100] == 2);
    OK(cobweb_flush(d));
    CHECK(b.flushes == 1);
    cobweb_queue_free(q);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    CHECK(b.released == 1);
    pthread_mutex_lock(&b.lock);
    b.stop = 1;
    pthread_cond_signal(&b.more);
    pthread_mutex_unlock(&b.lock);
    CHECK(pthread_join(t, NULL) == 0);
    return 0;
}
