/* Objects in the order of their lives, and in another one. */
#include "common.h"

int main(void)
{
    cobweb_ctx *a = new_ctx(), *b = new_ctx(); /* two contexts at once (C2) */
    cobweb_disk *da = new_disk(a, "vda", "driver=memory,size=1M");
    cobweb_disk *db = new_disk(b, "vda", "driver=memory,size=2M");
    cobweb_limits l = { .struct_size = sizeof l };
    cobweb_node *n = NULL;
    char text[64];

    OK(cobweb_disk_limits(da, &l));
    CHECK(l.size == 1 << 20);
    OK(cobweb_disk_limits(db, &l));
    CHECK(l.size == 2 << 20);

    /* A node outlives its handle while a disk uses it, and is found by name. */
    OK(cobweb_node_open(a, "driver=memory,size=64k,node-name=m0", &n, error()));
    OK(cobweb_disk_insert(da, n, error()));
    cobweb_node_unref(n);
    OK(cobweb_node_find(a, "m0", &n));
    CHECK(cobweb_node_get(n, "size", text, sizeof text, error()) == 5);
    CHECK(strcmp(text, "65536") == 0);
    cobweb_node_unref(n);
    OK(cobweb_disk_limits(da, &l));
    CHECK(l.size == 65536);

    /* Eject. */
    OK(cobweb_disk_insert(da, NULL, error()));
    FAILS(ENOMEDIUM, cobweb_disk_limits(da, &l));
    FAILS(ENOMEDIUM, cobweb_pread(da, text, 1, 0, 0));

    cobweb_disk_free(db);
    cobweb_ctx_free(b);
    cobweb_disk_free(da);
    cobweb_ctx_free(a);
    return 0;
}
