"""Block storage for virtual machines.

    import cobweb
    with cobweb.Context() as ctx:
        disk = ctx.disk("vda", driver="raw", file={"driver": "file", "filename": "disk.img"})
        ctx.open(driver="raw", **{"node-name": "t0"}, file={"driver": "file", "filename": "backup.img"})
        job = ctx.backup("vda", "t0", sync="full", **{"ram-cache": {"capacity": 256 << 20}})
        disk.write(0, b"the guest goes on")
        job.wait(progress=print)

Thread rules are those of the C library: a Queue belongs to one thread at a time, everything else may be used from any thread. Errors are
`cobweb.Error`, an OSError with `errno`, the engine's text and its finer `code`.
"""
from ._core import (BLOCK_STATUS_FLAGS, Completion, Context, Disk, Error, Event, Export, Extent, Group, Job, JobFailed, Node,
                    Queue, has, properties, version)

__all__ = ["BLOCK_STATUS_FLAGS", "Completion", "Context", "Disk", "Error", "Event", "Export", "Extent", "Group", "Job", "JobFailed",
           "Node", "Queue", "has", "properties", "version"]
