/* The header needs nothing before it and is plain C99. */
#include <cobweb.h>

int main(void)
{
    cobweb_req r = { COBWEB_OP_READ, COBWEB_F_FUA, 0, 0, 0, 0, 0, 0, COBWEB_PRIO_GUEST, 0, 0 };
    return r.op == COBWEB_OP_READ && COBWEB_HAVE_SUBMIT && cobweb_version() != 0 ? 0 : 1;
}
