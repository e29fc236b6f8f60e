/* After fork() the child gets errors instead of waiting for threads that are not there; the parent goes on (C3). */
#include "common.h"

#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
    cobweb_ctx *ctx = new_ctx();
    cobweb_disk *d = new_disk(ctx, "vda", "driver=memory,size=1M");
    unsigned char b[512] = { 7 };
    int status = 0;
    pid_t pid;

    CHECK(cobweb_pwrite(d, b, sizeof b, 0, 0) == sizeof b);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        cobweb_disk *x = NULL;
        FAILS(EOWNERDEAD, cobweb_pread(d, b, sizeof b, 0, 0));
        FAILS(EOWNERDEAD, cobweb_disk_new(ctx, "x", &x, error()));
        cobweb_disk_free(d);
        cobweb_ctx_free(ctx);
        /* A context of the child's own works. */
        ctx = new_ctx();
        d = new_disk(ctx, "vda", "driver=memory,size=1M");
        CHECK(cobweb_pwrite(d, b, sizeof b, 0, 0) == sizeof b);
        cobweb_disk_free(d);
        cobweb_ctx_free(ctx);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(cobweb_pread(d, b, sizeof b, 0, 0) == sizeof b && b[0] == 7);
    cobweb_disk_free(d);
    cobweb_ctx_free(ctx);
    return 0;
}
