// The header is C++ too, and links.
#include <cobweb.h>

int main()
{
    cobweb_ctx *ctx = nullptr;
    cobweb_error e = {};
    e.struct_size = sizeof e;
    if (cobweb_ctx_new("worker-threads=0", nullptr, &ctx, &e) != 0)
        return 1;
    cobweb_ctx_free(ctx);
    return cobweb_ctx_new("no-such-option=1", nullptr, &ctx, &e) < 0 && e.msg[0] ? 0 : 1;
}
