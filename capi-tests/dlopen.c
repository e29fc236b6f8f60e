/* The shared library is loaded in a thread, used and closed, twice: no crash, and it stays mapped (-z nodelete, as documented). */
#include <cobweb.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static const char *path;

#define SYM(name) ((__typeof__(&name))(uintptr_t)dlsym(lib, #name))

static void *body(void *arg)
{
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    cobweb_ctx *ctx = NULL;
    (void)arg;
    if (!lib) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    if (SYM(cobweb_ctx_new)("worker-threads=1", NULL, &ctx, NULL) != 0 || SYM(cobweb_ctx_start)(ctx, NULL) != 0)
        exit(2);
    SYM(cobweb_ctx_free)(ctx);
    if (dlclose(lib) != 0)
        exit(3);
    return NULL;
}

int main(int argc, char **argv)
{
    int i;
    if (argc != 2)
        return 4;
    path = argv[1];
    for (i = 0; i < 2; i++) {
        pthread_t t;
        if (pthread_create(&t, NULL, body, NULL) != 0 || pthread_join(t, NULL) != 0)
            return 5;
    }
    return 0;
}
