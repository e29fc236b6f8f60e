#!/usr/bin/env python3
"""The rows of the qcow2 table that imgbench.py does not have: overlays of 0 to 5 layers, an L2 cache smaller than the working set, qcow2 against raw.
Both tools in turn, medians; a rate counts the whole process (open, requests, final flush, close).

usage: benches/qcow2_rows.py [--rounds 5] [--cobweb target/release/cobweb] [--dir DIR]        needs qemu-img
"""
import argparse, os, shutil, statistics, subprocess, tempfile, time

ap = argparse.ArgumentParser()
ap.add_argument("--rounds", type=int, default=5)
ap.add_argument("--cobweb", default="target/release/cobweb")
ap.add_argument("--dir", default=".")
a = ap.parse_args()
cobweb = os.path.abspath(a.cobweb)
tmp = tempfile.mkdtemp(prefix="qcow2_rows.", dir=a.dir)
os.chdir(tmp)
STEP = 528384


def sh(line):
    subprocess.check_call(line, shell=True, stdout=subprocess.DEVNULL)


def rate(tool, n, rest):
    begin = time.monotonic()
    subprocess.run(f"{tool} bench -c {n} -t none -i io_uring {rest}", shell=True, check=True, capture_output=True)
    return n / (time.monotonic() - begin)


def chain(layers, options):
    name, fmt = "base.raw", "raw"
    for n in range(layers):
        sh(f"qemu-img create -q -f qcow2 {options} -b {name} -F {fmt} l{n}.q 1G")
        name, fmt = f"l{n}.q", "qcow2"
    return f"-f {fmt} {name}"


def row(name, cells):
    medians = {k: statistics.median(v) for k, v in cells.items()}
    print(f"{name:34}" + "".join(f"  {k} {v:8.0f}/s" for k, v in medians.items()), flush=True)


try:
    sh("dd if=/dev/urandom of=base.raw bs=1M count=1024 status=none")
    tools = [("qemu", "qemu-img", ""), ("cobweb", cobweb, ""), ("cobweb, sub-clusters", cobweb, "-o extended_l2=on,cluster_size=128k")]
    for size, n in ((4096, 2000), (65536, 1000)):
        for layers in range(6):
            cells = {}
            for _ in range(a.rounds):
                for name, tool, options in tools:
                    image = chain(layers, options)
                    cells.setdefault(name, []).append(rate(tool, n, f"-w -d 8 -s {size} -S {STEP} {image}"))
            row(f"{size >> 10} KiB writes, {layers} layers", cells)
    sh("qemu-img create -q -f qcow2 -o preallocation=metadata sparse.q 64G")
    image = "--image-opts driver=qcow2,l2-cache-size=1M,file.driver=file,file.filename=sparse.q,file.cache.direct=on,file.aio=io_uring"
    cells = {}
    for _ in range(a.rounds):
        for name, tool, _ in tools[:2]:
            cells.setdefault(name, []).append(rate(tool, 20000, f"-d 32 -s 4096 -S 1073807360 {image}"))
    row("64 GiB, L2 cache of 1 MiB, d32", cells)
    sh("qemu-img convert -f raw -O qcow2 -W base.raw full.q")
    for depth, n in ((1, 4000), (8, 16000), (32, 16000)):
        for what, flag in (("reads", ""), ("overwrites", "-w")):
            cells = {}
            for _ in range(a.rounds):
                for name, image in (("raw", "-f raw base.raw"), ("qcow2", "-f qcow2 full.q")):
                    cells.setdefault(name, []).append(rate(cobweb, n, f"{flag} -d {depth} -s 4096 -S {STEP} {image}"))
            row(f"4 KiB {what}, depth {depth}", cells)
finally:
    shutil.rmtree(tmp, ignore_errors=True)
