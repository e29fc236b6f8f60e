/* The header twice in one unit, and in two units of one program. */
#include <cobweb.h>
#include <cobweb.h>

uint32_t other(void);
int main(void) { return other() == cobweb_version() ? 0 : 1; }
