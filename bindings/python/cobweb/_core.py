"""The objects: contexts, nodes, disks, queues, jobs."""
import ctypes as C
import errno as _errno
import json
import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from . import _abi as A
from ._lib import lib

BLOCK_STATUS_FLAGS = {"allocated": A.EXT_ALLOCATED, "zero": A.EXT_ZERO, "compressed": A.EXT_COMPRESSED, "dirty": A.EXT_DIRTY,
                      "no-access": A.EXT_NO_ACCESS}


class Error(OSError):
    """An error of the engine: errno, text, and `code`, the engine's finer name for it."""

    def __init__(self, err: int, text: str, code: str = "io"):
        super().__init__(err, text)
        self.code = code


class JobFailed(Error):
    """A job ended without success; `report` says what failed first, if anything did."""

    def __init__(self, err: int, text: str, code: str, report: Optional[Dict[str, Any]]):
        super().__init__(err, text, code)
        self.report = report


class Extent(NamedTuple):
    offset: int
    length: int
    flags: int
    depth: int


class Completion(NamedTuple):
    user_data: int
    result: int
    code: str
    more: bool

    def check(self) -> int:
        """The result, or the error as an exception."""
        if self.result < 0:
            raise Error(-self.result, os.strerror(-self.result), self.code)
        return self.result


class Event(NamedTuple):
    type: str
    source: str
    seq: int
    offset: int
    length: int
    value: int
    errno: int
    code: str
    side: str


def version() -> str:
    v = lib.cobweb_version()
    return f"{v >> 16}.{v >> 8 & 0xff}.{v & 0xff}"


def has(feature: str) -> bool:
    """Whether the loaded library has a feature, such as "driver:ram-cache" or "op:map"."""
    return lib.cobweb_has(feature.encode()) == 1


def properties(driver: str) -> List[Dict[str, Any]]:
    """The options of a driver (or of `create:qcow2`): name, type, default, one line about it."""
    out: List[Dict[str, Any]] = []
    at, prop = C.c_uint32(0), A.cobweb_prop()
    prop.struct_size = C.sizeof(prop)
    while _check(lib.cobweb_prop_next(driver.encode(), C.byref(at), C.byref(prop)), f"no driver named '{driver}'"):
        out.append({"name": prop.name.decode(), "type": prop.type.decode(), "default": getattr(prop, "def").decode(),
                    "doc": prop.doc.decode()})
    return out


def _code(number: int) -> str:
    return lib.cobweb_code_str(number).decode()


def _check(result: int, text: str = "") -> int:
    if result < 0:
        raise Error(-result, text or os.strerror(-result))
    return result


def _call(f: Callable, *args: Any) -> int:
    """Calls a function whose last parameter is an error struct."""
    e = A.cobweb_error(struct_size=C.sizeof(A.cobweb_error))
    result = f(*args, C.byref(e))
    if result < 0:
        raise Error(-result, e.msg.decode(errors="replace") or os.strerror(-result), _code(e.code))
    return result


def _make(f: Callable, *args: Any) -> C.c_void_p:
    out = C.c_void_p()
    _call(f, *args, C.byref(out))
    return out


def _text(options: Any, more: Dict[str, Any]) -> bytes:
    """Option text from a string or a dict plus keywords."""
    if isinstance(options, str):
        if more:
            raise TypeError("option text and keywords do not go together")
        return options.encode()
    return json.dumps({**(options or {}), **more}).encode()


def _ns(seconds: Optional[float]) -> int:
    return -1 if seconds is None else int(seconds * 1e9)


def _address(buffer: Any, writable: bool):
    """Address and length of any buffer object, without a copy, and what must be kept alive meanwhile."""
    view = memoryview(buffer)
    if not view.contiguous:
        raise BufferError("the buffer is not contiguous")
    view = view.cast("B")
    if view.nbytes == 0:
        return 0, 0, view
    if view.readonly:
        if writable:
            raise BufferError("the buffer is read-only")
        # ctypes takes only writable buffers; CPython's own call gives the address of a read-only one.
        raw = _PyBuffer()
        _get_buffer(C.py_object(view), C.byref(raw), 0)
        try:
            address = raw.buf
        finally:
            _release_buffer(C.byref(raw))
        return address, view.nbytes, view
    keep = (C.c_char * view.nbytes).from_buffer(view)
    return C.addressof(keep), view.nbytes, (view, keep)


class _PyBuffer(C.Structure):
    _fields_ = [("buf", C.c_void_p), ("obj", C.py_object), ("len", C.c_ssize_t), ("itemsize", C.c_ssize_t), ("readonly", C.c_int),
                ("ndim", C.c_int), ("format", C.c_char_p), ("shape", C.c_void_p), ("strides", C.c_void_p), ("suboffsets", C.c_void_p),
                ("internal", C.c_void_p)]


_get_buffer = C.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes, _get_buffer.restype = [C.py_object, C.POINTER(_PyBuffer), C.c_int], C.c_int
_release_buffer = C.pythonapi.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = [C.POINTER(_PyBuffer)], None


class _Handle:
    """A handle with a `close` that may be called twice, and a context manager."""
    _free: Callable

    def __init__(self, raw: C.c_void_p):
        self._raw: Optional[C.c_void_p] = raw

    def _h(self) -> C.c_void_p:
        if self._raw is None:
            raise ValueError(f"{type(self).__name__} is closed")
        return self._raw

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            type(self)._free(raw)

    def __enter__(self):
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class Node(_Handle):
    """A counted use of a node."""
    _free = staticmethod(lib.cobweb_node_unref)

    def get(self, key: str) -> str:
        size = 65536
        while True:
            buf = C.create_string_buffer(size)
            need = _call(lib.cobweb_node_get, self._h(), key.encode(), buf, size)
            if need < size:
                return buf.value.decode()
            size = need + 1

    def info(self) -> Dict[str, Any]:
        """The format of an image, with the keys of `qemu-img info --output=json` (driver qcow2)."""
        return json.loads(self.get("info"))

    def check(self) -> Dict[str, Any]:
        """Whether an image is consistent, with the keys of `qemu-img check --output=json` (driver qcow2). Walks all of it."""
        return json.loads(self.get("check"))

    def statistics(self) -> Dict[str, int]:
        """What an open image has done: cache, allocations, copy-on-write, barriers (driver qcow2)."""
        return json.loads(self.get("statistics"))

    def set(self, key: str, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        _call(lib.cobweb_node_set, self._h(), key.encode(), text.encode())

    @property
    def name(self) -> str:
        return self.get("node-name")


class Queue(_Handle):
    """Requests of one thread on one disk. Buffers are kept alive until their completion has been reaped."""
    _free = staticmethod(lib.cobweb_queue_free)

    def __init__(self, raw: C.c_void_p, depth: int):
        super().__init__(raw)
        self._depth = depth
        self._kept: Dict[int, List[Any]] = {}
        self._cqes = (A.cobweb_cqe * depth)()

    def fileno(self) -> int:
        """The eventfd: readable when `reap` has something to do (for select, selectors, asyncio)."""
        return _check(lib.cobweb_queue_fd(self._h()))

    def read(self, offset: int, buffer: Any, user_data: int = 0) -> bool:
        """Submits a read into any writable buffer; False if the queue is full."""
        return self._io(A.OP_READ, offset, buffer, user_data, 0)

    def write(self, offset: int, buffer: Any, user_data: int = 0, fua: bool = False) -> bool:
        """Submits a write from any buffer, which must not change until the completion; False if the queue is full."""
        return self._io(A.OP_WRITE, offset, buffer, user_data, A.F_FUA if fua else 0)

    def write_zeroes(self, offset: int, length: int, user_data: int = 0, flags: int = 0) -> bool:
        return self._submit(A.cobweb_req(op=A.OP_WRITE_ZEROES, flags=flags, offset=offset, len=length, user_data=user_data), None)

    def discard(self, offset: int, length: int, user_data: int = 0) -> bool:
        return self._submit(A.cobweb_req(op=A.OP_DISCARD, offset=offset, len=length, user_data=user_data), None)

    def flush(self, user_data: int = 0) -> bool:
        return self._submit(A.cobweb_req(op=A.OP_FLUSH, user_data=user_data), None)

    def cancel(self, user_data: int) -> int:
        return _check(lib.cobweb_cancel(self._h(), user_data))

    def reap(self, minimum: int = 0, timeout: Optional[float] = None) -> List[Completion]:
        """Completions; waits until `minimum` of the outstanding ones are there or `timeout` seconds have passed."""
        n = _check(lib.cobweb_reap(self._h(), self._cqes, self._depth, min(minimum, self._depth), _ns(timeout)))
        out = []
        for c in self._cqes[:n]:
            kept = self._kept.get(c.user_data)
            if kept:
                kept.pop()
                if not kept:
                    del self._kept[c.user_data]
            out.append(Completion(c.user_data, c.res, _code(c.code), bool(c.flags & A.CQE_MORE)))
        return out

    def close(self) -> None:
        super().close()
        self._kept.clear()

    def _io(self, op: int, offset: int, buffer: Any, user_data: int, flags: int) -> bool:
        address, length, keep = _address(buffer, op == A.OP_READ)
        iov = A.iovec(address, length)
        r = A.cobweb_req(op=op, flags=flags, iovcnt=1, offset=offset, len=length, iov=C.pointer(iov), user_data=user_data)
        return self._submit(r, (iov, keep, buffer))

    def _submit(self, r: A.cobweb_req, keep: Any) -> bool:
        # Several requests may share a user_data: what they need is freed only when all of them have completed, since completions cannot tell them apart.
        if _check(lib.cobweb_submit(self._h(), C.byref(r), 1)) == 0:
            return False
        kept = self._kept.setdefault(r.user_data, [])
        kept.insert(0, keep) if len(kept) == 0 else kept.insert(0, (keep, kept[0]))
        return True


class Disk(_Handle):
    """What a guest device is attached to."""
    _free = staticmethod(lib.cobweb_disk_free)

    def insert(self, node: Optional[Node]) -> None:
        _call(lib.cobweb_disk_insert, self._h(), node._h() if node else None)

    def filter_add(self, options: Any = None, **more: Any) -> Node:
        """Opens a filter and puts it above the root while requests run."""
        return Node(_make(lib.cobweb_disk_filter_add, self._h(), _text(options, more)))

    def filter_del(self, node: Node) -> None:
        _call(lib.cobweb_disk_filter_del, self._h(), node._h())

    def queue(self, depth: int = 64) -> Queue:
        return Queue(_make(lib.cobweb_queue_new, self._h(), depth), depth)

    @property
    def limits(self) -> A.cobweb_limits:
        out = A.cobweb_limits(struct_size=C.sizeof(A.cobweb_limits))
        _check(lib.cobweb_disk_limits(self._h(), C.byref(out)))
        return out

    @property
    def size(self) -> int:
        return self.limits.size

    def set(self, key: str, value: Any) -> None:
        _call(lib.cobweb_disk_set, self._h(), key.encode(), str(value).encode())

    def read(self, offset: int, length: int) -> bytes:
        buf = bytearray(length)
        self.read_into(offset, buf)
        return bytes(buf)

    def read_into(self, offset: int, buffer: Any) -> int:
        address, length, _keep = _address(buffer, True)
        return _check(lib.cobweb_pread(self._h(), address or None, length, offset, 0), f"read of {length} bytes at {offset} failed")

    def write(self, offset: int, buffer: Any, fua: bool = False) -> int:
        address, length, _keep = _address(buffer, False)
        flags = A.F_FUA if fua else 0
        return _check(lib.cobweb_pwrite(self._h(), address or None, length, offset, flags),
                      f"write of {length} bytes at {offset} failed")

    def write_zeroes(self, offset: int, length: int, flags: int = 0) -> None:
        _check(lib.cobweb_write_zeroes(self._h(), offset, length, flags))

    def discard(self, offset: int, length: int) -> None:
        _check(lib.cobweb_discard(self._h(), offset, length))

    def flush(self) -> None:
        _check(lib.cobweb_flush(self._h()))

    def block_status(self, offset: int = 0, length: Optional[int] = None) -> List[Extent]:
        length = self.size - offset if length is None else length
        out: List[Extent] = []
        array = (A.cobweb_extent * 64)()
        end = offset + length
        while offset < end:
            n = _check(lib.cobweb_block_status(self._h(), offset, end - offset, array, len(array)))
            if n == 0:
                break
            for x in array[:n]:
                out.append(Extent(offset, x.len, x.flags, x.depth))
                offset += x.len
        return out


    def map(self) -> List[Dict[str, Any]]:
        """The whole disk, neighbours of the same kind as one, with the keys of `qemu-img map --output=json` that a disk knows."""
        out: List[Dict[str, Any]] = []
        for x in self.block_status():
            zero, there = bool(x.flags & A.EXT_ZERO), bool(x.flags & A.EXT_ALLOCATED)
            kind = {"depth": x.depth, "present": there or zero, "zero": zero, "data": there and not zero,
                    "compressed": bool(x.flags & A.EXT_COMPRESSED)}
            if out and all(out[-1][k] == v for k, v in kind.items()):
                out[-1]["length"] += x.length
            else:
                out.append({"start": x.offset, "length": x.length, **kind})
        return out


class Job(_Handle):
    """A job. Closing the object does not stop it."""
    _free = staticmethod(lib.cobweb_job_unref)

    @property
    def info(self) -> Dict[str, Any]:
        i = A.cobweb_job_info(struct_size=C.sizeof(A.cobweb_job_info))
        _check(lib.cobweb_job_query(self._h(), C.byref(i)))
        return {"status": A.JOB_STATES[i.state], "current": i.current, "total": i.total, "speed": i.speed, "paused": bool(i.paused),
                "errno": -i.err, "code": _code(i.code)}

    @property
    def report(self) -> Optional[Dict[str, Any]]:
        """The first error, or None."""
        r = A.cobweb_report(struct_size=C.sizeof(A.cobweb_report))
        if _check(lib.cobweb_job_report(self._h(), C.byref(r))) == 0:
            return None
        return {"errno": -r.err, "code": _code(r.code), "side": A.SIDES[r.side], "action": A.ACTIONS[r.action], "op": r.op,
                "offset": r.offset, "len": r.len, "node": r.node.decode(), "count": r.count}

    @property
    def lost(self) -> List[Dict[str, Any]]:
        it, out, r = C.c_uint64(0), [], A.cobweb_range()
        while _check(lib.cobweb_job_lost_next(self._h(), C.byref(it), C.byref(r))) == 1:
            out.append({"offset": r.offset, "len": r.len, "errno": -r.err, "code": _code(r.code)})
        return out

    def pause(self) -> None:
        _check(lib.cobweb_job_pause(self._h()))

    def resume(self) -> None:
        _check(lib.cobweb_job_resume(self._h()))

    def cancel(self) -> None:
        _check(lib.cobweb_job_cancel(self._h()))

    def dismiss(self) -> None:
        _check(lib.cobweb_job_dismiss(self._h()))

    def finalize(self) -> None:
        _call(lib.cobweb_job_finalize, self._h())

    def set_speed(self, bytes_per_s: int) -> None:
        _check(lib.cobweb_job_set_speed(self._h(), bytes_per_s))

    def wait(self, timeout: Optional[float] = None, progress: Optional[Callable[[int, int], Any]] = None,
             interval: float = 0.1) -> bool:
        """Waits for the end: True, or False when `timeout` seconds have passed. Raises JobFailed if the job failed or was cancelled. `progress` is called
        with (current, total) every `interval` seconds."""
        left = timeout
        while True:
            step = interval if progress else left
            if left is not None and step is not None:
                step = min(step, left)
            result = lib.cobweb_job_wait(self._h(), _ns(step))
            if progress:
                info = self.info
                progress(info["current"], info["total"])
            if result == 0:
                return True
            if result != -_errno.ETIMEDOUT:
                report = self.report
                info = self.info
                raise JobFailed(-result, f"the job failed: {os.strerror(-result)}", info["code"], report)
            if left is not None:
                left -= step or 0
                if left <= 0:
                    return False


class Group(_Handle):
    """Jobs that start at one point in time."""
    _free = staticmethod(lib.cobweb_group_free)

    def add(self, kind: str, options: Any = None, **more: Any) -> Job:
        return Job(_make(lib.cobweb_group_add, self._h(), kind.encode(), _text(options, more)))

    def start(self) -> None:
        _call(lib.cobweb_group_start, self._h())


class Export(_Handle):
    """A running server."""
    _free = staticmethod(lib.cobweb_export_stop)


class Context(_Handle):
    """Threads, RAM budget, names of nodes, disks and jobs. Starts its threads at once unless `start=False`."""
    _free = staticmethod(lib.cobweb_ctx_free)

    def __init__(self, options: Any = None, start: bool = True, **more: Any):
        super().__init__(_make(lib.cobweb_ctx_new, _text(options, more), None))
        if start:
            self.start()

    def start(self) -> None:
        _call(lib.cobweb_ctx_start, self._h())

    def open(self, options: Any = None, **more: Any) -> Node:
        """Opens a node from option text, a dict or keywords; `driver` is required, nothing is probed."""
        return Node(_make(lib.cobweb_node_open, self._h(), _text(options, more)))

    def create(self, options: Any = None, **more: Any) -> None:
        """Creates an image: `driver` file, raw or qcow2, `filename`, `size` and the rest of `cobweb.properties("create:qcow2")`."""
        _call(lib.cobweb_node_create, self._h(), _text(options, more))

    def find(self, name: str) -> Node:
        out = C.c_void_p()
        _check(lib.cobweb_node_find(self._h(), name.encode(), C.byref(out)), f"no node named '{name}'")
        return Node(out)

    def disk(self, name: str = "", options: Any = None, **more: Any) -> Disk:
        """A disk, over a node opened from the options if there are any."""
        disk = Disk(_make(lib.cobweb_disk_new, self._h(), name.encode()))
        if options or more:
            try:
                with self.open(options, **more) as node:
                    disk.insert(node)
            except BaseException:
                disk.close()
                raise
        return disk

    def job(self, kind: str, options: Any = None, **more: Any) -> Job:
        return Job(_make(lib.cobweb_job_start, self._h(), kind.encode(), _text(options, more)))

    def backup(self, device: str, target: str, **options: Any) -> Job:
        """Starts a backup that stays listed until it is dismissed; options as in `docs/backup.md`."""
        options.setdefault("sync", "full")
        options.setdefault("auto-dismiss", False)
        return self.job("backup", {"device": device, "target": target, **options})

    def find_job(self, job_id: str) -> Job:
        out = C.c_void_p()
        _check(lib.cobweb_job_find(self._h(), job_id.encode(), C.byref(out)), f"no job '{job_id}'")
        return Job(out)

    def group(self, **options: Any) -> Group:
        return Group(_make(lib.cobweb_group_new, self._h(), _text(None, options)))

    def export(self, kind: str, options: Any = None, **more: Any) -> Export:
        return Export(_make(lib.cobweb_export_start, self._h(), kind.encode(), _text(options, more)))

    def query(self, what: str) -> Any:
        """JSON answers: "nodes", "disks", "jobs", "stats:NAME"."""
        need = _check(lib.cobweb_ctx_query(self._h(), what.encode(), None, 0), f"cannot query '{what}'")
        while True:
            buf = C.create_string_buffer(need + 1)
            n = _check(lib.cobweb_ctx_query(self._h(), what.encode(), buf, need + 1))
            if n <= need:
                return json.loads(buf.value.decode())
            need = n

    def stats(self, name: str) -> Dict[str, int]:
        s = A.cobweb_stats(struct_size=C.sizeof(A.cobweb_stats))
        _check(lib.cobweb_stats_get(self._h(), name.encode(), C.byref(s)), f"no statistics for '{name}'")
        return {f: getattr(s, f) for f, _ in s._fields_[2:]}

    def fileno(self) -> int:
        """Readable while events wait."""
        return _check(lib.cobweb_event_fd(self._h()))

    def events(self) -> List[Event]:
        """The events that wait."""
        out: List[Event] = []
        e = A.cobweb_event(struct_size=C.sizeof(A.cobweb_event))
        while _check(lib.cobweb_event_next(self._h(), C.byref(e))) == 1:
            out.append(Event(A.EVENT_TYPES[e.type], e.source.decode(), e.seq, e.offset, e.len, e.value, e.err, _code(e.code),
                             A.SIDES[e.side]))
        return out
