/* Every listed option is known to cobweb_has, and the library answers for what it does not have. */
#include "common.h"

int main(void)
{
    const char *drivers[] = { "file", "memory", "null-co", "raw", "throttle", "fault", "copy-before-write", "ram-cache",
                              "snapshot-access", "qcow2" };
    size_t i;

    CHECK(cobweb_version() == (COBWEB_VERSION_MAJOR << 16 | COBWEB_VERSION_MINOR << 8 | COBWEB_VERSION_PATCH));
    for (i = 0; i < sizeof drivers / sizeof *drivers; i++) {
        cobweb_prop p = { .struct_size = sizeof p };
        char text[256];
        uint32_t iter = 0;
        int n = 0;
        snprintf(text, sizeof text, "driver:%s", drivers[i]);
        CHECK(cobweb_has(text) == 1);
        while (cobweb_prop_next(drivers[i], &iter, &p) == 1) {
            CHECK(p.name[0] && p.type[0] && p.doc[0] && p.states);
            snprintf(text, sizeof text, "prop:%s:%s", drivers[i], p.name);
            CHECK(cobweb_has(text) == 1);
            n++;
        }
        CHECK(n >= 1);
    }
    CHECK(cobweb_has("driver:floppy") == 0);
    CHECK(cobweb_has("op:read") == 1 && cobweb_has("op:levitate") == 0);
    CHECK(cobweb_has("") == 0 && cobweb_has("prop:file") == 0);
    {
        uint32_t iter = 0;
        cobweb_prop p = { .struct_size = sizeof p };
        FAILS(ENOENT, cobweb_prop_next("floppy", &iter, &p));
    }
    return 0;
}
