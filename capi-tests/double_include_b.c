#include <cobweb.h>

uint32_t other(void);
uint32_t other(void) { return cobweb_version(); }
