/* Sizes and offsets that the ABI promises on LP64. */
#include "common.h"

#define SIZE(type, n) CHECK(sizeof(type) == (n))
#define AT(type, field, n) CHECK(offsetof(type, field) == (n))

int main(void)
{
    SIZE(cobweb_error, 256);
    AT(cobweb_error, msg, 16);
    SIZE(cobweb_req, 64);
    AT(cobweb_req, flags, 2);
    AT(cobweb_req, iovcnt, 4);
    AT(cobweb_req, offset, 8);
    AT(cobweb_req, len, 16);
    AT(cobweb_req, iov, 24);
    AT(cobweb_req, user_data, 32);
    AT(cobweb_req, arg, 40);
    AT(cobweb_req, prio, 48);
    AT(cobweb_req, rsv1, 56);
    SIZE(cobweb_cqe, 32);
    AT(cobweb_cqe, res, 8);
    AT(cobweb_cqe, flags, 16);
    AT(cobweb_cqe, code, 20);
    SIZE(cobweb_extent, 16);
    SIZE(cobweb_mapping, 48);
    SIZE(cobweb_limits, 56);
    SIZE(cobweb_prop, 40);
    SIZE(cobweb_event, 128);
    AT(cobweb_event, source, 64);
    SIZE(cobweb_job_info, 48);
    SIZE(cobweb_report, 128);
    AT(cobweb_report, node, 64);
    SIZE(cobweb_range, 32);
    SIZE(cobweb_stats, 184);
    AT(cobweb_stats, time_to_full_ms, 176);
    SIZE(cobweb_hist, 1056);
    AT(cobweb_hist, bucket, 32);
    SIZE(cobweb_log, 24);
    SIZE(cobweb_backend_ops, 40);
    return 0;
}
