"""The bindings over the real library ($COBWEB_LIBRARY)."""
import array
import errno
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import cobweb  # noqa: E402
from cobweb import _abi  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


class Layout(unittest.TestCase):
    def test_structs_are_those_of_the_header(self):
        lines = []
        for s in _abi.STRUCTS:
            name = s.__name__
            lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
            for f, _ in s._fields_:
                lines.append(f'printf("{name}.{f} %zu\\n", offsetof({name}, {f}));')
        program = "#include <cobweb.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
        with tempfile.TemporaryDirectory() as d:
            c = Path(d, "t.c")
            c.write_text(program)
            subprocess.check_call(["cc", "-I", str(ROOT / "include"), "-o", d + "/t", str(c)])
            said = dict(line.rsplit(" ", 1) for line in subprocess.check_output([d + "/t"], text=True).splitlines())
        for s in _abi.STRUCTS:
            self.assertEqual(int(said[s.__name__]), _abi.C.sizeof(s), s.__name__)
            for f, _ in s._fields_:
                self.assertEqual(int(said[f"{s.__name__}.{f}"]), getattr(s, f).offset, f"{s.__name__}.{f}")


class Blocks(unittest.TestCase):
    def setUp(self):
        self.ctx = cobweb.Context()
        self.addCleanup(self.ctx.close)

    def disk(self, name="vda", size=1 << 20):
        d = self.ctx.disk(name, driver="memory", size=size)
        self.addCleanup(d.close)
        return d

    def test_any_buffer_object_is_read_and_written_without_a_copy_of_its_own(self):
        d = self.disk()
        for data in (b"bytes", bytearray(b"bytearray"), memoryview(b"view"), array.array("I", [1, 2, 3])):
            raw = bytes(data)
            self.assertEqual(d.write(7, data), len(raw))
            self.assertEqual(d.read(7, len(raw)), raw)
        into = array.array("B", bytes(4))
        d.write(0, b"abcd")
        d.read_into(0, into)
        self.assertEqual(into.tobytes(), b"abcd")
        with self.assertRaises(BufferError):
            d.read_into(0, b"read-only")

    def test_errors_are_oserrors_with_errno_and_the_engines_text(self):
        with self.assertRaises(OSError) as e:
            self.ctx.open(driver="memory", size=4096, colour="red")
        self.assertEqual(e.exception.errno, errno.EINVAL)
        self.assertIn("colour", str(e.exception))
        with self.assertRaises(cobweb.Error) as e:
            self.disk(size=512).read(512, 1)
        self.assertEqual(e.exception.errno, errno.EIO)
        with self.assertRaises(FileNotFoundError if issubclass(cobweb.Error, FileNotFoundError) else cobweb.Error):
            self.ctx.find("nobody")

    def test_a_queue_works_with_select(self):
        d = self.disk()
        with d.queue(8) as q:
            for i in range(8):
                self.assertTrue(q.write(i * 512, bytes([i]) * 512, user_data=i))
            self.assertFalse(q.write(0, b"x", user_data=9), "the queue is full")
            got = []
            while len(got) < 8:
                readable, _, _ = select.select([q], [], [], 10)
                self.assertTrue(readable, "a completion was lost")
                got += q.reap()
            self.assertEqual(sorted(c.user_data for c in got), list(range(8)))
            self.assertTrue(all(c.check() == 512 for c in got))
            buf = bytearray(512)
            q.read(3 * 512, buf)
            q.reap(minimum=1, timeout=10)[0].check()
            self.assertEqual(bytes(buf), b"\3" * 512)

    def test_block_status_covers_the_range(self):
        d = self.disk(size=3 << 20)
        d.write(1 << 20, b"data")
        extents = d.block_status()
        self.assertEqual(sum(x.length for x in extents), d.size)
        self.assertTrue(any(x.flags & cobweb.BLOCK_STATUS_FLAGS["zero"] for x in extents))

    def test_a_backup_with_progress_equals_the_instant(self):
        d = self.disk(size=4 << 20)
        before = os.urandom(4 << 20)
        d.write(0, before)
        target = self.ctx.open({"driver": "memory", "node-name": "t0", "size": 4 << 20})
        seen = []
        job = self.ctx.backup("vda", "t0", **{"job-id": "b", "ram-cache": {"capacity": 8 << 20}})
        d.write(0, bytes(4 << 20))
        self.assertTrue(job.wait(timeout=60, progress=lambda c, t: seen.append((c, t))))
        self.assertEqual(seen[-1], (4 << 20, 4 << 20))
        self.assertEqual(sorted(c for c, _ in seen), [c for c, _ in seen], "progress never goes back")
        self.assertIsNone(job.report)
        self.assertGreater(self.ctx.stats("vda")["wr_ops"], 0)
        self.assertIn("b", [e.source for e in self.ctx.events()])
        job.dismiss()
        with self.ctx.disk("copy") as copy:
            copy.insert(target)
            self.assertEqual(copy.read(0, 4 << 20), before)
        self.assertNotEqual(d.read(0, 4 << 20), before)

    def test_a_failed_backup_raises_with_its_report(self):
        d = self.disk(size=1 << 20)
        d.write(0, b"x" * (1 << 20))
        self.ctx.open({"driver": "fault", "node-name": "bad", "rules": [{"op": "write", "action": "error", "errno": "ENOSPC"}],
                       "file": {"driver": "memory", "size": 1 << 20}})
        job = self.ctx.backup("vda", "bad")
        with self.assertRaises(cobweb.JobFailed) as e:
            job.wait(timeout=60)
        self.assertEqual(e.exception.errno, errno.ENOSPC)
        self.assertEqual(e.exception.report["side"], "target")
        d.write(0, b"the guest goes on")

    def test_closed_objects_say_so(self):
        d = self.ctx.disk("gone", driver="memory", size=512)
        d.close()
        d.close()
        with self.assertRaises(ValueError):
            d.read(0, 1)


class Library(unittest.TestCase):
    def test_version_and_features(self):
        self.assertRegex(cobweb.version(), r"^\d+\.\d+\.\d+$")
        self.assertTrue(cobweb.has("driver:copy-before-write"))
        self.assertFalse(cobweb.has("driver:floppy"))


class Images(unittest.TestCase):
    """qcow2 from Python, beside the real qemu-img."""

    def setUp(self):
        if not shutil.which("qemu-img"):
            self.assertNotIn("CI", os.environ, "qemu-img is missing, and this is CI")
            self.skipTest("qemu-img is missing")
        self.dir = tempfile.TemporaryDirectory()
        self.addCleanup(self.dir.cleanup)
        self.ctx = cobweb.Context()
        self.addCleanup(self.ctx.close)

    def path(self, name):
        return str(Path(self.dir.name, name))

    def qemu(self, *words):
        return json.loads(subprocess.check_output(["qemu-img", words[0], "--output=json", *words[1:]]))

    def test_an_overlay_is_created_written_and_told_about_as_qemu_img_tells(self):
        base, top = self.path("base.raw"), self.path("top.qcow2")
        Path(base).write_bytes(os.urandom(1 << 20) + bytes(3 << 20))
        names = {p["name"] for p in cobweb.properties("create:qcow2")}
        self.assertLessEqual({"filename", "size", "backing-file", "cluster-size", "extended-l2"}, names)
        self.ctx.create(driver="qcow2", filename=top, **{"backing-file": "base.raw", "backing-fmt": "raw"})
        with self.assertRaises(cobweb.Error) as there:
            self.ctx.create(driver="qcow2", filename=top, size=1 << 20)
        self.assertEqual(there.exception.errno, errno.EEXIST)
        with self.assertRaises(cobweb.Error) as bad:
            self.ctx.create(driver="qcow2", filename=self.path("x"), size=1 << 20, **{"refcount-bits": 3})
        self.assertIn("refcount", str(bad.exception))
        self.assertFalse(os.path.exists(self.path("x")))
        node = self.ctx.open(driver="qcow2", file={"driver": "file", "filename": top}, **{"implicit-open": "allow"})
        disk = self.ctx.disk("vda")
        disk.insert(node)
        disk.write(2 << 20, b"z" * 4096)
        disk.flush()
        self.assertEqual(disk.read(2 << 20, 4096), b"z" * 4096)
        info, stats = node.info(), node.statistics()
        self.assertEqual(stats["clusters-linked"], 1)
        self.assertEqual(stats["cow-reads"], 0)
        self.assertEqual(node.check()["corruptions"], 0)
        ours = disk.map()
        self.assertEqual(sum(e["length"] for e in ours), 4 << 20)
        disk.close()
        node.close()
        self.ctx.close()
        theirs = self.qemu("info", top)
        for key in ("virtual-size", "cluster-size", "format", "format-specific", "backing-filename", "backing-filename-format"):
            self.assertEqual(info[key], theirs[key], key)
        check = self.qemu("check", top)
        self.assertEqual(check["check-errors"], 0)
        self.assertNotIn("corruptions", check)
        mine = [(e["start"], e["length"], e["depth"], e["zero"], e["data"]) for e in ours]
        real = [(e["start"], e["length"], e["depth"], e["zero"], e["data"]) for e in self.qemu("map", top)]
        self.assertEqual([e for e in mine if e[2] == 0], [e for e in real if e[2] == 0])


if __name__ == "__main__":
    unittest.main()
